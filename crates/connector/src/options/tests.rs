use serde_json::json;

use super::*;

fn read(value: &Value) -> Result<Options, ConnectorError> {
    Options::from_json(value.as_object().expect("a map"))
}

fn refusal(value: &Value) -> String {
    read(value).expect_err("refused").to_string()
}

#[test]
fn an_empty_map_gives_the_defaults() {
    assert_eq!(read(&json!({})).expect("defaults"), Options::default());
}

#[test]
fn every_option_is_read() {
    let options = read(&json!({
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "fail",
        "use_layerwise": true,
        "layerwise_prefetch_layers": 2,
        "layerwise_max_transfer_blocks": 8,
        "layerwise_max_transfer_bytes": 4096,
        "save_decode_cache": true,
        "preferred_segment": "node-1/0",
        "prefer_alloc_in_same_node": true,
        "local_fanout": "on",
        "per_layer_readiness": true,
        "session_window_blocks": 100,
        "lookup_window_blocks": 32,
        "decline_slow_loads": false,
        "sharing_group": "chat",
        "audit_log": 1,
        "audit_log_path": "audit.jsonl",
        "lookup_timeout_ms": 50,
        "layer_timeout_ms": 7000,
        "save_stall_ms": 40,
    }))
    .expect("all are accepted");
    let n = |value| NonZeroUsize::new(value).expect("above 0");
    assert_eq!(
        options,
        Options {
            role: Role::Producer,
            failure_policy: FailurePolicy::Fail,
            layerwise: true,
            prefetch_layers: PrefetchLayers::Fixed(n(2)),
            max_transfer_blocks: n(8),
            max_transfer_bytes: NonZeroU64::new(4096).expect("above 0"),
            save_decode_cache: true,
            preferred_segment: Some("node-1/0".to_owned()),
            prefer_same_node: true,
            local_fanout: LocalFanout::On,
            per_layer_readiness: true,
            session_window_blocks: n(100),
            lookup_window_blocks: n(32),
            decline_slow_loads: false,
            sharing_group: Some("chat".to_owned()),
            audit_log: Some("audit.jsonl".into()),
            lookup_timeout: Duration::from_millis(50),
            layer_timeout: Duration::from_secs(7),
            save_stall: Duration::from_millis(40),
        }
    );
    let replicate = options.replicate();
    assert_eq!(replicate.preferred_segments, ["node-1/0"]);
    assert!(replicate.prefer_same_node);
}

#[test]
fn an_unknown_name_is_refused_with_the_names_there_are() {
    let text = refusal(&json!({"layerwise_prefetch_layer": 2}));
    assert!(text.contains("\"layerwise_prefetch_layer\""), "{text}");
    assert!(text.contains("layerwise_prefetch_layers"), "{text}");
}

#[test]
fn bad_values_are_refused_by_name() {
    for (name, value) in [
        ("kv_role", json!("both")),
        ("kv_role", json!(1)),
        ("kv_load_failure_policy", json!("retry")),
        ("use_layerwise", json!(1)),
        ("use_layerwise", json!("true")),
        ("layerwise_prefetch_layers", json!(0)),
        ("layerwise_prefetch_layers", json!(true)),
        ("layerwise_prefetch_layers", json!("2")),
        ("layerwise_prefetch_layers", json!(1_000_000)),
        ("layerwise_max_transfer_blocks", json!(0)),
        ("layerwise_max_transfer_blocks", json!(-1)),
        ("layerwise_max_transfer_bytes", json!(1.5)),
        ("preferred_segment", json!("")),
        ("prefer_alloc_in_same_node", json!(null)),
        ("local_fanout", json!(true)),
        ("session_window_blocks", json!(u64::MAX)),
        ("audit_log", json!(true)),
        ("audit_log", json!(2)),
        ("audit_log", json!("1")),
        ("lookup_timeout_ms", json!(0)),
    ] {
        let text = refusal(&json!({ name: value.clone() }));
        assert!(text.contains(name), "{text}");
        assert!(text.contains(&value.to_string()), "{text}");
    }
}

#[test]
fn contradictions_name_both_options() {
    for (map, first, second) in [
        (
            json!({"use_layerwise": false, "layerwise_prefetch_layers": 2}),
            "use_layerwise",
            "layerwise_prefetch_layers",
        ),
        (
            json!({"use_layerwise": false, "local_fanout": "on"}),
            "use_layerwise",
            "local_fanout",
        ),
        (
            json!({"use_layerwise": false, "session_window_blocks": 2}),
            "use_layerwise",
            "session_window_blocks",
        ),
        (
            json!({"kv_role": "kv_consumer", "save_decode_cache": true}),
            "kv_role",
            "save_decode_cache",
        ),
        (
            json!({"kv_role": "kv_consumer", "preferred_segment": "a"}),
            "kv_role",
            "preferred_segment",
        ),
        (
            json!({"kv_role": "kv_consumer", "prefer_alloc_in_same_node": true}),
            "kv_role",
            "prefer_alloc_in_same_node",
        ),
        (json!({"audit_log": 1}), "audit_log", "audit_log_path"),
        (
            json!({"audit_log_path": "x"}),
            "audit_log",
            "audit_log_path",
        ),
    ] {
        let text = refusal(&map);
        assert!(text.contains(first) && text.contains(second), "{text}");
    }
}

#[test]
fn reading_layers_of_incomplete_objects_is_refused_by_name() {
    let whole = json!({"per_layer_readiness": true, "use_layerwise": false});
    assert!(refusal(&whole).contains("per_layer_readiness"));
    assert!(refusal(&json!({"per_layer_readiness": 1})).contains("per_layer_readiness"));
}
