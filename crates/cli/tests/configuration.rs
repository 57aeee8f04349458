//! Effective settings with their origins, and what is refused before anything starts.

mod common;

use common::{Scene, finish, layercake, run};

#[test]
fn the_effective_configuration_names_each_values_origin() {
    let scene = Scene::with_trace("");
    let file = scene.file("layercake.toml");
    std::fs::write(
        &file,
        "[master]\nlease = \"7s\"\nclient_ttl = \"8s\"\nhttp = \"127.0.0.1:0\"\n",
    )
    .expect("written");
    let mut command = layercake("config show master --json --client-ttl 9s");
    command
        .env("LAYERCAKE_CONFIG", &file)
        .env("LAYERCAKE_MASTER_HTTP", "127.0.0.1:1")
        .env("LAYERCAKE_TOKEN", "a secret of some length");
    let said = finish(command).ok();
    let shown = said.json();
    let of = |name: &str| {
        let entry = &shown[name];
        (
            entry["value"].as_str().expect("shown").to_owned(),
            entry["origin"].as_str().expect("shown").to_owned(),
        )
    };
    assert_eq!(
        of("master.lease"),
        ("7s".into(), format!("file {}", file.display()))
    );
    assert_eq!(
        of("master.http"),
        (
            "127.0.0.1:1".into(),
            "environment LAYERCAKE_MASTER_HTTP".into()
        )
    );
    assert_eq!(
        of("master.client_ttl"),
        ("9s".into(), "flag --client-ttl".into())
    );
    assert_eq!(of("master.discard_after").1, "default");
    assert_eq!(
        of("token"),
        (
            "set, not shown".into(),
            "environment LAYERCAKE_TOKEN".into()
        )
    );
    assert!(
        !said.out.contains("some length"),
        "the token is never shown"
    );

    let table = run("config show node --capacity 2GiB").ok().out;
    let line = table
        .lines()
        .find(|line| line.starts_with("node.capacity"))
        .expect("a line");
    assert!(
        line.contains("2GiB") && line.contains("flag --capacity"),
        "{line}"
    );
}

#[test]
fn unknown_settings_are_refused_by_name_with_the_nearest_known_one() {
    let scene = Scene::with_trace("");
    let file = scene.file("layercake.toml");
    std::fs::write(&file, "[master]\nleese = \"5s\"\n").expect("written");
    let text = run(&format!("--config {} master", file.display())).refused();
    assert!(
        text.contains("master.leese") && text.contains("`master.lease`"),
        "{text}"
    );

    let mut command = layercake("node");
    command.env("LAYERCAKE_NODE_CAPACTY", "1GiB");
    let text = finish(command).refused();
    assert!(
        text.contains("LAYERCAKE_NODE_CAPACTY") && text.contains("LAYERCAKE_NODE_CAPACITY"),
        "{text}"
    );

    let text = run("master --leese 5s").refused();
    assert!(
        text.contains("--leese") && text.contains("--lease"),
        "{text}"
    );

    let text = run("--config /nowhere/layercake.toml master").refused();
    assert!(text.contains("/nowhere/layercake.toml"), "{text}");
}

#[test]
fn values_that_make_no_sense_are_refused_with_what_is_accepted() {
    for (args, words) in [
        ("master --lease 5", ["lease", "30min"]),
        ("master --high-watermark 1.5", ["high_watermark", "1.5"]),
        ("master --listen localhost", ["listen", "IP:PORT"]),
        ("node --capacity 12", ["capacity", "90MiB"]),
        ("node --capacity 1KiB", ["capacity", "4KiB"]),
        ("node --transports rdma", ["transports", "rdma"]),
        ("master --log loud=quiet=1", ["log", "loud=quiet=1"]),
    ] {
        let text = run(args).refused();
        for word in words {
            assert!(text.contains(word), "{args}: {text}");
        }
    }
}

#[test]
fn contradictions_are_refused() {
    let scene = Scene::with_trace("");
    let file = scene.file("token");
    std::fs::write(&file, "another secret of some length\n").expect("written");
    for args in [
        format!(
            "master --listen 127.0.0.1:0 --token-file {}",
            file.display()
        ),
        "master --listen 127.0.0.1:0 --insecure".to_owned(),
    ] {
        let mut command = layercake(&args);
        command.env("LAYERCAKE_TOKEN", "a secret of some length");
        let text = finish(command).refused();
        assert!(
            text.contains("LAYERCAKE_TOKEN") && !text.contains("some length"),
            "{text}"
        );
    }

    let trace = scene.file("t.jsonl");
    std::fs::write(
        &trace,
        r#"{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}"#,
    )
    .expect("written");
    let trace = trace.display();
    let layers = "--layers 2 --entry-bytes 64";
    for (args, words) in [
        ("--layers 2".into(), ["--layers", "--entry-bytes"]),
        ("--entry-bytes 64".into(), ["--layers", "--entry-bytes"]),
        (
            format!("{layers} --layer-entries 0:64"),
            ["--layer-entries", "contradicts"],
        ),
        ("--layer-entries 0:64;2:64".into(), ["layer 1", "missing"]),
        (
            format!("{layers} --master 127.0.0.1:1 --nodes 2"),
            ["--nodes", "--master"],
        ),
        (
            format!("{layers} --master 127.0.0.1:1 --capacity 1GiB"),
            ["--capacity", "--master"],
        ),
        (
            format!("{layers} --kill-node-after 2"),
            ["--kill-node-after", "1 requests"],
        ),
        (format!("{layers} --speed=-1"), ["--speed", "-1"]),
        (
            format!("{layers} --capacity 8KiB --nodes 3"),
            ["capacity", "block"],
        ),
    ] {
        let text = run(&format!("replay {trace} {args}")).refused();
        for word in words {
            assert!(text.contains(word), "{args}: {text}");
        }
    }
}
