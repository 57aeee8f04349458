//! Layering, origins and refusals.

use super::programs::{Common, MasterSettings, NodeSettings};
use super::*;

fn sources(file: &str, environment: &[(&str, &str)]) -> Result<Sources> {
    Sources::new(
        Some((PathBuf::from("layercake.toml"), file.to_owned())),
        environment
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect(),
    )
}

fn resolve(file: &str, environment: &[(&str, &str)], flags: &[(&str, &str)]) -> Result<Resolved> {
    let flags: Vec<_> = flags
        .iter()
        .map(|(name, value)| {
            let setting = MasterSettings::TABLE
                .iter()
                .find(|setting| setting.name == *name)
                .expect("a setting of the master");
            (setting, (*value).to_owned())
        })
        .collect();
    sources(file, environment)?.resolve(&[Common::TABLE, MasterSettings::TABLE], &flags)
}

fn refusal(file: &str, environment: &[(&str, &str)]) -> String {
    let error = resolve(file, environment, &[]).expect_err("must be refused");
    let text = format!("{error:#}");
    assert!(!text.contains('\n'), "one line: {text}");
    text
}

#[test]
fn later_layers_win_and_every_value_knows_its_origin() {
    let resolved = resolve(
        "insecure = true\n[master]\nlease = \"1s\"\nclient_ttl = \"2s\"\ndiscard_after = \"3s\"\n",
        &[
            ("LAYERCAKE_MASTER_CLIENT_TTL", "20s"),
            ("LAYERCAKE_MASTER_DISCARD_AFTER", "30s"),
        ],
        &[("discard_after", "300s")],
    )
    .expect("all known");
    let file = Origin::File("layercake.toml".into());
    let origin = |name| resolved.origin("master", name).expect("known").clone();
    assert_eq!(origin("lease"), file);
    assert_eq!(resolved.origin("", "insecure").expect("known"), &file);
    assert_eq!(
        origin("client_ttl"),
        Origin::Environment("LAYERCAKE_MASTER_CLIENT_TTL".into())
    );
    assert_eq!(
        origin("discard_after"),
        Origin::Flag("discard-after".into())
    );
    assert_eq!(origin("listen"), Origin::Default);
    let settings = MasterSettings::take(&resolved).expect("valid");
    assert_eq!(settings.lease.as_secs(), 1);
    assert_eq!(settings.client_ttl.as_secs(), 20);
    assert_eq!(settings.discard_after.as_secs(), 300);
    assert!(Common::take(&resolved).expect("valid").insecure);
}

#[test]
fn numbers_and_truths_may_be_written_as_such() {
    let resolved = resolve(
        "[master]\nhigh_watermark = 0.5\neviction_ratio = 1\nevict_soft_pinned = false\n",
        &[],
        &[],
    )
    .expect("scalars");
    let settings = MasterSettings::take(&resolved).expect("valid");
    assert!((settings.high_watermark.0 - 0.5).abs() < f64::EPSILON);
    assert!(!settings.evict_soft_pinned);
}

#[test]
fn an_unknown_setting_is_named_with_the_nearest_known_one() {
    for (file, name, near) in [
        ("[master]\nleese = \"5s\"", "master.leese", "`master.lease`"),
        ("insecurr = true", "insecurr", "`insecure`"),
        ("lease = \"5s\"", "`lease`", "`master.lease`"),
        ("[node]\nlease = \"5s\"", "node.lease", "`master.lease`"),
        ("[mastre]\nlease = \"5s\"", "[mastre]", "`master`"),
    ] {
        let text = refusal(file, &[]);
        assert!(text.contains(name) && text.contains(near), "{text}");
    }
    let text = refusal("", &[("LAYERCAKE_MASTER_LEESE", "5s")]);
    assert!(
        text.contains("LAYERCAKE_MASTER_LEESE") && text.contains("`LAYERCAKE_MASTER_LEASE`"),
        "{text}"
    );
    let text = refusal("[master]\nquark = 1", &[]);
    assert!(text.contains("quark") && !text.contains("mean"), "{text}");
}

#[test]
fn a_bad_value_is_named_with_its_setting_and_origin() {
    let text = refusal("[master]\nlease = 5", &[]);
    assert!(
        text.contains("master.lease") && text.contains("layercake.toml"),
        "{text}"
    );
    let text = refusal("", &[("LAYERCAKE_MASTER_HIGH_WATERMARK", "1.5")]);
    assert!(
        text.contains("LAYERCAKE_MASTER_HIGH_WATERMARK") && text.contains("1.5"),
        "{text}"
    );
    let text = refusal("[master]\nlease = [1]", &[]);
    assert!(text.contains("master.lease"), "{text}");
    let text = refusal("master = 1", &[]);
    assert!(text.contains("[master]"), "{text}");
}

#[test]
fn a_file_that_is_not_toml_is_refused_with_its_line() {
    let text = refusal("[master]\nlease = = 2\n", &[]);
    assert!(text.contains("layercake.toml: line 2"), "{text}");
}

#[test]
fn a_secret_is_not_taken_from_the_file() {
    let text = refusal("token = \"a secret of some length\"", &[]);
    assert!(
        text.contains("token_file") && !text.contains("some length"),
        "{text}"
    );
}

#[test]
fn one_file_serves_all_programs() {
    let both = "[master]\nlease = \"1s\"\n[node]\ncapacity = \"2GiB\"\n";
    let node = sources(both, &[("LAYERCAKE_MASTER_LEASE", "2s")])
        .and_then(|sources| sources.resolve(&[NodeSettings::TABLE], &[]))
        .expect("the master's settings don't disturb");
    let settings = NodeSettings::take(&node).expect("valid");
    assert_eq!(settings.capacity, ByteSize(2 << 30));
}

#[test]
fn every_default_reads_as_its_own_type_and_no_name_is_taken_twice() {
    let mut names = std::collections::BTreeSet::new();
    for setting in programs::all() {
        let shown = (setting.check)(setting.default).expect("a default is valid");
        assert_eq!(
            shown,
            setting.default,
            "{} is shown as it stands",
            setting.path()
        );
        assert!(
            names.insert(setting.path()),
            "{} stands twice",
            setting.path()
        );
    }
}

#[test]
fn a_file_may_be_in_json() {
    let read = |text: &str| {
        Sources::new(
            Some((PathBuf::from("layercake.json"), text.to_owned())),
            BTreeMap::new(),
        )
    };
    let sources = read(r#"{"insecure": true, "master": {"lease": "3s"}}"#).expect("well-formed");
    let resolved = sources
        .resolve(&[Common::TABLE, MasterSettings::TABLE], &[])
        .expect("known settings");
    let lease: std::time::Duration = resolved.value("master", "lease").expect("a setting");
    assert_eq!(lease, std::time::Duration::from_secs(3));

    let text = format!("{:#}", read("{\"master\": ").expect_err("cut off"));
    assert!(
        text.contains("layercake.json") && text.contains("line 1"),
        "{text}"
    );
    let unknown = read(r#"{"master": {"leese": "3s"}}"#).expect("well-formed");
    let error = unknown
        .resolve(&[MasterSettings::TABLE], &[])
        .expect_err("unknown");
    let text = format!("{error:#}");
    assert!(text.contains("leese") && text.contains("lease"), "{text}");
}
