use super::*;

fn args(words: &[&str]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

fn settings(words: &[&str]) -> Settings {
    match Settings::from_args(&args(words)) {
        Ok(Invocation::Run(settings)) => *settings,
        other => panic!("{words:?}: {other:?}"),
    }
}

fn refused(words: &[&str]) -> String {
    let error = Settings::from_args(&args(words)).expect_err("refused");
    error.to_string()
}

#[test]
fn the_defaults_are_those_of_the_command_that_is_replaced() {
    let settings = settings(&[]);
    let open = |port| Address {
        host: "0.0.0.0".into(),
        port,
    };
    assert_eq!(settings.rpc, open(50051));
    assert_eq!(settings.http, open(9003));
    assert_eq!(settings.metadata, None);
    assert_eq!(settings.state.tenancy, Tenancy::Shared);
    assert_eq!(settings.state.lease, Duration::from_secs(10));
    assert_eq!(settings.state.max_soft_pin_ttl, Duration::from_hours(24));
}

#[test]
fn a_flag_is_given_in_every_way_there_is() {
    for words in [
        &["--rpc_port=7"][..],
        &["-rpc_port=7"],
        &["--rpc_port", "7"],
        &["-rpc_port", "7"],
        &["--port=7"],
        &["--port=8", "--rpc_port=7"],
        &["--rpc_port=8", "--rpc_port=7"],
    ] {
        assert_eq!(settings(words).rpc.port, 7, "{words:?}");
    }
    for (words, on) in [
        (&["--enable_http_metadata_server"][..], true),
        (&["--enable_http_metadata_server=true"], true),
        (&["--enable_http_metadata_server=0"], false),
        (&["--noenable_http_metadata_server"], false),
    ] {
        assert_eq!(settings(words).metadata.is_some(), on, "{words:?}");
    }
}

#[test]
fn values_arrive_where_they_belong() {
    let settings = settings(&[
        "--default_kv_lease_ttl=200",
        "--default_kv_soft_pin_ttl=5s",
        "--max_kv_soft_pin_ttl=1h",
        "--client_ttl=3",
        "--put_start_discard_timeout_sec=4",
        "--put_start_release_timeout_sec=5",
        "--eviction_ratio=0.1",
        "--eviction_high_watermark_ratio=0.5",
        "--allow_evict_soft_pinned_objects=false",
        "--allocation_strategy=free_ratio_first",
        "--metrics_host=::1",
        "--metrics_port=1",
    ]);
    let state = settings.state;
    assert_eq!(state.lease, Duration::from_millis(200));
    assert_eq!(state.soft_pin_ttl, Duration::from_secs(5));
    assert_eq!(state.max_soft_pin_ttl, Duration::from_hours(1));
    assert_eq!(state.client_ttl, Duration::from_secs(3));
    assert_eq!(state.discard_after, Duration::from_secs(4));
    assert_eq!(state.release_after, Duration::from_secs(5));
    assert_eq!((state.eviction_ratio, state.high_watermark), (0.1, 0.5));
    assert!(!state.evict_soft_pinned);
    assert_eq!(state.strategy, Strategy::Roomiest);
    assert_eq!(
        (settings.http.host.as_str(), settings.http.port),
        ("::1", 1)
    );
}

#[test]
fn what_can_not_be_carried_out_is_refused_with_the_flag_and_what_to_do() {
    for (words, told) in [
        (&["--no_such_flag=1"][..], &["no_such_flag", "--help"][..]),
        (&["--rpc_prt=1"], &["did you mean --rpc_port"]),
        (&["--norpc_port"], &["norpc_port"]),
        (&["extra"], &["\"extra\"", "--flag=value"]),
        (&["--rpc_port"], &["--rpc_port needs a value"]),
        (&["--rpc_port=70000"], &["rpc_port", "70000", "65535"]),
        (&["--rpc_port=x"], &["rpc_port", "\"x\""]),
        (&["--client_ttl=-1"], &["client_ttl", "-1"]),
        (&["--client_ttl=0"], &["client_ttl", "\"0\"", "over zero"]),
        (&["--default_kv_lease_ttl=0"], &["default_kv_lease_ttl"]),
        (&["--default_kv_lease_ttl=soon"], &["soon", "200ms"]),
        (&["--eviction_ratio=nan"], &["eviction_ratio"]),
        (&["--eviction_ratio=2"], &["eviction_ratio", "at most 1"]),
        (
            &["--put_start_release_timeout_sec=1"],
            &["put_start_release_timeout_sec", "discard"],
        ),
        (&["--enable_ha=true"], &["enable_ha", "leave it off"]),
        (&["--enable_offload"], &["enable_offload", "memory only"]),
        (
            &["--allocation_strategy=cxl"],
            &["allocation_strategy", "random"],
        ),
        (
            &["--allocation_strategy=best"],
            &["best", "free_ratio_first"],
        ),
        (&["--enable_multi_tenants"], &["tenant_quota_connector_uri"]),
        (&["--config_path=/no/such/file"], &["/no/such/file"]),
    ] {
        let text = refused(words);
        for part in told {
            assert!(text.contains(part), "{words:?}: {text}");
        }
    }
}

#[test]
fn help_names_every_flag() {
    let Ok(Invocation::Help(text)) = Settings::from_args(&args(&["--help"])) else {
        panic!("no help");
    };
    for flag in FLAGS {
        assert!(
            text.contains(&format!("--{}\n", flag.name)),
            "{}",
            flag.name
        );
    }
}

fn file(name: &str, text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    std::fs::write(&path, text).expect("written");
    let path = path.to_str().expect("plain").to_owned();
    (folder, path)
}

#[test]
fn a_file_of_flags_stands_behind_the_command_line() {
    for text in [
        "rpc_port: 7\nclient_ttl: 3\nenable_http_metadata_server: true\neviction_ratio: 0.25\n",
        "{\"rpc_port\": 7, \"client_ttl\": \"3\", \"enable_http_metadata_server\": true, \"eviction_ratio\": 0.25}",
    ] {
        let (_folder, path) = file("master.yaml", text);
        let settings = settings(&["--rpc_port=9", &format!("--config_path={path}")]);
        assert_eq!(settings.rpc.port, 9);
        assert_eq!(settings.state.client_ttl, Duration::from_secs(3));
        assert!((settings.state.eviction_ratio - 0.25).abs() < 1e-9);
        assert!(settings.metadata.is_some());
    }
    for (text, told) in [
        ("rpc_prt: 7\n", "did you mean --rpc_port"),
        ("rpc_port: [1]\n", "master.yaml"),
        ("rpc_port: 7: 8\n", "master.yaml"),
        ("rpc_port: -7\n", "rpc_port"),
    ] {
        let (_folder, path) = file("master.yaml", text);
        let error = refused(&[&format!("--config_path={path}")]);
        assert!(error.contains(told), "{text}: {error}");
    }
}

#[test]
fn tenants_come_from_a_file_that_must_make_sense() {
    let strict = |text: &str| {
        let (folder, path) = file("tenants.yaml", text);
        let words = [
            "--enable_multi_tenants=true".to_owned(),
            format!("--tenant_quota_connector_uri=file://{path}"),
        ];
        let read = Settings::from_args(&words);
        drop(folder);
        read
    };
    let text = "version: 1\ntenants:\n  - name: t1\n    quota: 4MB\n  - name: t2\n    quota: 100\n";
    let Ok(Invocation::Run(settings)) = strict(text) else {
        panic!("refused");
    };
    let Tenancy::Strict(quotas) = settings.state.tenancy else {
        panic!("not strict");
    };
    let quotas: Vec<_> = quotas.iter().map(|(t, q)| (t.as_str(), *q)).collect();
    assert_eq!(quotas, [("t1", 4 << 20), ("t2", 100)]);
    for (text, told) in [
        ("", "tenants.yaml"),
        ("version: 2\n", "version"),
        ("tenants: []\n", "version"),
        ("version: 1\ntenants:\n  - name: t1\n", "quota"),
        (
            "version: 1\ntenants:\n  - name: ''\n    quota: 1\n",
            "tenant",
        ),
        (
            "version: 1\ntenants:\n  - name: t\n    quota: lots\n",
            "lots",
        ),
        ("version: 1\ntenants:\n  - name: t\n    quota: -1\n", "-1"),
        (
            "version: 1\ntenants:\n  - {name: t, quota: 1}\n  - {name: t, quota: 2}\n",
            "twice",
        ),
        ("version: 1\nextra: 1\n", "extra"),
        ("- just\n- a list\n", "tenants.yaml"),
    ] {
        let error = strict(text).expect_err(text).to_string();
        assert!(error.contains(told), "{text}: {error}");
    }
}
