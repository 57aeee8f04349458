use std::collections::BTreeSet;

use super::*;

fn file(text: &str) -> Vec<Finding> {
    keys::judge(serde_json::from_str(text).expect("an object"))
}

fn verdict_of<'a>(findings: &'a [Finding], name: &str) -> &'a Verdict {
    let found = findings.iter().find(|finding| finding.name == name);
    &found.expect("every setting gets a verdict").verdict
}

#[test]
fn every_key_of_a_file_gets_a_verdict_and_unknown_ones_a_hint() {
    let findings = file(
        r#"{"local_hostname": "h", "metadata_server": "P2PHANDSHAKE", "global_segment_size": "4GB", "local_buffer_size": 1,
            "protocol": "rdma", "device_name": "mlx5_0", "master_server_address": "m:50051", "mode": "embedded",
            "enable_offload": true, "enable_ssd_offload": false, "master_sever_address": "x", "tenant_id": null}"#,
    );
    assert_eq!(findings.len(), 12);
    for (name, verdict) in [
        ("local_hostname", "used"),
        ("global_segment_size", "used"),
        ("local_buffer_size", "no effect"),
        ("protocol", "refused"),
        ("device_name", "no effect"),
        ("enable_offload", "refused"),
        ("enable_ssd_offload", "no effect"),
        ("master_server_address", "used"),
        ("tenant_id", "used"),
        ("master_sever_address", "refused"),
    ] {
        assert_eq!(verdict_of(&findings, name).name(), verdict, "{name}");
    }
    let unknown = verdict_of(&findings, "master_sever_address").text();
    assert!(unknown.contains("master_server_address"), "{unknown}");
}

#[test]
fn values_that_make_no_sense_are_refused_with_what_is_accepted() {
    let findings = file(
        r#"{"metadata_server": "etcd://x", "global_segment_size": "much", "master_server_address": "etcd://a;b",
            "mode": "other", "protocol": {"a": 1}, "local_hostname": "", "enable_offload": "perhaps"}"#,
    );
    for finding in &findings {
        let Verdict::Refused(text) = &finding.verdict else {
            panic!("{finding:?}");
        };
        assert!(!text.is_empty());
    }
    assert_eq!(findings.len(), 7);
}

#[test]
fn variables_get_verdicts_and_secrets_are_not_shown() {
    let set = [
        ("MC_GID_INDEX", "3", "no effect"),
        ("MC_LOG_LEVEL", "INFO", "replaced"),
        ("MC_FORCE_TCP", "1", "used"),
        ("MC_INTRA_NVLINK", "1", "refused"),
        ("MC_INTRA_NVLINK_", "1", "refused"),
        ("MOONCAKE_MASTER", "h:1", "used"),
        ("MOONCAKE_AWS_SECRET_ACCESS_KEY", "hush", "no effect"),
        ("MOONCAKE_NEW_THING", "1", "refused"),
    ];
    let environment = set.map(|(name, value, _)| (name.to_owned(), value.to_owned()));
    let findings = variables::judge(&environment.into());
    for (name, _, verdict) in set {
        assert_eq!(verdict_of(&findings, name).name(), verdict, "{name}");
    }
    assert!(!format!("{findings:?}").contains("hush"));
}

#[test]
fn flags_get_verdicts_alone_and_together() {
    let words = |text: &str| {
        text.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let findings = flags(&words(
        "--rpc_port=1 --enable_ha --enable_offload=false --logtostderr --eviction_ratio=0.1",
    ));
    for (name, verdict) in [
        ("rpc_port", "used"),
        ("enable_ha", "refused"),
        ("enable_offload", "no effect"),
        ("logtostderr", "no effect"),
        ("eviction_ratio", "used"),
    ] {
        assert_eq!(verdict_of(&findings, name).name(), verdict, "{name}");
    }
    assert_eq!(findings.len(), 5);
    for text in ["--no_such=1", "--put_start_release_timeout_sec=1", "stray"] {
        let findings = flags(&words(text));
        assert!(
            findings
                .iter()
                .any(|f| matches!(f.verdict, Verdict::Refused(_))),
            "{text}"
        );
    }
    assert_eq!(flags(&[]), []);
}

#[test]
fn what_is_known_is_known_once_and_listed_in_full() {
    let all = unset(&[]);
    let names: BTreeSet<_> = all
        .iter()
        .map(|f| (f.place.to_string(), f.name.clone()))
        .collect();
    assert_eq!(names.len(), all.len(), "a name stands in two tables");
    assert!(all.len() > 200, "{}", all.len());
    assert!(all.iter().all(|finding| !finding.verdict.text().is_empty()));
}
