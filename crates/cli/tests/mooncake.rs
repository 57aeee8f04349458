//! Configuration of Mooncake: what is taken from it, and what the doctor says of the rest.

mod common;

use std::path::PathBuf;

use common::{Scene, finish, layercake};

/// A file with such a configuration.
fn written(scene: &Scene, text: &str) -> PathBuf {
    let file = scene.file("mooncake.json");
    std::fs::write(&file, text).expect("written");
    file
}

#[test]
fn the_doctor_judges_file_variables_and_flags_and_fails_if_something_is_refused() {
    let scene = Scene::with_trace("");
    let good = written(
        &scene,
        r#"{"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "device_name": "",
            "global_segment_size": "4GB", "local_buffer_size": "1GB", "master_server_address": "127.0.0.1:50051"}"#,
    );
    let doctor = format!("doctor --mooncake-config {} --json", good.display());
    let mut command = layercake(&doctor);
    command
        .args(["--", "--rpc_port=50051", "--enable_offload=false"])
        .env("MC_TE_METRIC", "1");
    let said = finish(command).ok();
    let shown = said.json();
    let settings = shown["settings"].as_array().expect("a list");
    assert_eq!(settings.len(), 7 + 1 + 2);
    for setting in settings {
        assert!(setting["value"].is_string() && setting["verdict"] != "refused");
        assert!(
            setting["meaning"]
                .as_str()
                .is_some_and(|text| !text.is_empty())
        );
    }

    let mut command = layercake(&format!("doctor --mooncake-config {}", good.display()));
    command.args(["--", "--enable_ha=true"]);
    let text = finish(command).refused();
    assert!(text.contains("1 setting is refused"), "{text}");

    let all = finish(layercake("doctor --all")).ok().out;
    for name in ["ssd_offload_path", "MC_GID_INDEX", "enable_kv_events"] {
        assert!(all.contains(name), "{name}");
    }
}

#[test]
fn a_file_that_can_not_be_judged_is_named() {
    let scene = Scene::with_trace("");
    for (text, told) in [("[1]", "no JSON object"), ("{", "no JSON")] {
        let file = written(&scene, text);
        let doctor = format!("doctor --mooncake-config {}", file.display());
        let said = finish(layercake(&doctor)).refused();
        assert!(
            said.contains(told) && said.contains("mooncake.json"),
            "{said}"
        );
    }
    let said = finish(layercake("doctor --mooncake-config /nowhere.json")).refused();
    assert!(said.contains("/nowhere.json"), "{said}");
    let said = finish(layercake("doctor")).refused();
    assert!(said.contains("--mooncake-config"), "{said}");
}

#[test]
fn a_node_takes_its_settings_from_the_configuration_behind_its_own() {
    let scene = Scene::with_trace("");
    let file = written(
        &scene,
        r#"{"local_hostname": "127.0.0.1", "global_segment_size": "64MB", "master_server_address": "127.0.0.1:1"}"#,
    );
    let mut command = layercake("config show node --json --capacity 2GiB");
    command.env("MOONCAKE_CONFIG_PATH", &file);
    let shown = finish(command).ok().json();
    assert_eq!(shown["node.master"]["value"], "127.0.0.1:1");
    assert_eq!(shown["node.listen"]["value"], "127.0.0.1:0");
    assert_eq!(shown["node.capacity"]["value"], "2GiB");
    let origin = shown["node.master"]["origin"].as_str().expect("shown");
    assert!(origin.contains("mooncake.json"), "{origin}");

    for (text, told) in [
        (r#"{"global_segment_size": "much"}"#, "much"),
        (
            r#"{"protocol": "rdma", "master_server_address": "127.0.0.1:1"}"#,
            "MC_FORCE_TCP",
        ),
    ] {
        let file = written(&scene, text);
        let mut command = layercake("node");
        command.env("MOONCAKE_CONFIG_PATH", &file);
        let said = finish(command).refused();
        assert!(
            said.contains(told) && said.contains("mooncake.json"),
            "{said}"
        );
    }
}
