//! Nothing goes wrong: all ways of cutting work up, in all combinations that matter.

use layercake_engine::run::{Engine, EngineConfig, Progress};
use serde_json::{Value, json};

use crate::cluster::{Cluster, PATIENCE, config};
use crate::rig::{asks, loaded, on_store, reference, run, same, text};

const POOL: u64 = 32 << 20;

/// One engine computes and saves, another loads; both equal an engine without a store.
fn cold_then_warm(config: &EngineConfig, options: &Value) {
    let cluster = Cluster::start(POOL);
    let (asks, what) = (asks(), options.to_string());
    let expected = reference(config, &asks);
    let cold = on_store(config, &cluster.link(options), &asks);
    same(&cold, &expected, &format!("cold, {what}"));
    let warm = on_store(config, &cluster.link(options), &asks);
    same(&warm, &expected, &format!("warm, {what}"));
    // Whole blocks of each prompt, and one token less where that is all.
    let size = config.block_size as usize;
    let all: usize = asks
        .iter()
        .map(|(_, prompt, _)| (prompt.len() / size * size).min(prompt.len() - 1))
        .sum();
    let here: usize = warm.iter().map(|one| one.local_tokens).sum();
    assert_eq!(
        loaded(&warm) + here,
        all,
        "every saved block is found, {what}"
    );
    assert!(loaded(&warm) > 0, "{what}");
    let stored = distinct_blocks(&asks, size) * u64::from(config.ranks);
    let status = cluster.monitor.status();
    assert_eq!(
        status.objects, stored,
        "one object a block and rank, {what}"
    );
}

fn distinct_blocks(asks: &[(String, Vec<u32>, usize)], size: usize) -> u64 {
    let prefixes = asks.iter().flat_map(|(_, prompt, _)| {
        (1..=prompt.len() / size).map(|blocks| prompt[..blocks * size].to_vec())
    });
    prefixes.collect::<std::collections::HashSet<_>>().len() as u64
}

#[test]
fn loaded_is_computed() {
    cold_then_warm(&config(), &json!({}));
}

#[test]
fn chunks_that_do_not_divide_blocks() {
    for step_tokens in [3, 7, 33] {
        cold_then_warm(
            &EngineConfig {
                step_tokens,
                ..config()
            },
            &json!({}),
        );
    }
}

#[test]
fn ranks_store_and_load_their_own() {
    for ranks in [2, 4] {
        cold_then_warm(&EngineConfig { ranks, ..config() }, &json!({}));
    }
}

// DEV-06: layers of unequal number and length of entries, through small pieces, calls and windows.
#[test]
fn dev_06_uneven_layers_in_small_pieces() {
    let options = json!({
        "layerwise_max_transfer_bytes": 100,
        "layerwise_max_transfer_blocks": 2,
        "session_window_blocks": 3,
        "layerwise_prefetch_layers": 1,
        "lookup_window_blocks": 2,
    });
    cold_then_warm(
        &EngineConfig {
            block_size: 5,
            ..config()
        },
        &options,
    );
}

#[test]
fn whole_objects_and_forced_copies_are_the_same() {
    cold_then_warm(&config(), &json!({"use_layerwise": false}));
    let apart = EngineConfig {
        prefix_caching: false,
        ..config()
    };
    cold_then_warm(&apart, &json!({"local_fanout": "on"}));
    cold_then_warm(&apart, &json!({"local_fanout": "off"}));
}

#[test]
fn both_modes_read_each_other() {
    let cluster = Cluster::start(POOL);
    let expected = reference(&config(), &asks());
    let whole = json!({"use_layerwise": false});
    same(
        &on_store(&config(), &cluster.link(&whole), &asks()),
        &expected,
        "whole",
    );
    let layers = on_store(&config(), &cluster.link(&json!({})), &asks());
    same(&layers, &expected, "layers of whole objects");
    assert!(loaded(&layers) > 0);
}

#[test]
fn preempted_requests_come_to_the_same_end_cold_and_warm() {
    let cluster = Cluster::start(POOL);
    let expected = reference(&config(), &asks());
    for prefix_caching in [false, true] {
        let tight = EngineConfig {
            blocks: 18,
            step_tokens: 17,
            prefix_caching,
            ..config()
        };
        for what in ["cold", "warm"] {
            let all = on_store(&tight, &cluster.link(&json!({})), &asks());
            same(&all, &expected, what);
        }
    }
}

// DEV-13: requests lose their blocks at every step while their saves are under way, and others get them.
#[test]
fn dev_13_preemption_at_any_step_stores_nothing_wrong() {
    let cluster = Cluster::start(POOL);
    let expected = reference(&config(), &asks());
    let small = EngineConfig {
        blocks: 40,
        step_tokens: 9,
        prefix_caching: false,
        ..config()
    };
    let mut engine = Engine::with_store(&small, &cluster.link(&json!({}))).expect("good");
    crate::rig::submit(&mut engine, &asks());
    let mut preempted = 0;
    while preempted < 12 {
        match engine.step().expect("no rank is lost") {
            Progress::Computed => {}
            Progress::Waited => continue,
            Progress::Idle => panic!("prompts take more than 12 steps"),
        }
        let mut turn = asks();
        turn.rotate_left(preempted % 7);
        let mut ids = turn.iter().map(|(id, ..)| id.as_str().into());
        preempted += usize::from(ids.any(|id| engine.preempt(&id)));
    }
    let all = crate::rig::sorted(engine.run().expect("no rank is lost"));
    same(&all, &expected, "preempted");
    assert!(all.iter().map(|one| one.preemptions).sum::<u32>() >= 12);
    engine.close(PATIENCE).expect("everything ends");
    let warm = on_store(&config(), &cluster.link(&json!({})), &asks());
    same(&warm, &expected, "what was stored meanwhile");
    assert!(loaded(&warm) > 0);
}

// DEV-05: requests that read the same objects end at different times.
#[test]
fn dev_05_the_first_reader_s_end_takes_nothing_from_the_second() {
    let cluster = Cluster::start(POOL);
    let (shared, mine, yours) = (text(1, 24), text(2, 12), text(3, 41));
    let asks = vec![
        ("a".to_owned(), [&shared[..], &mine].concat(), 1),
        ("b".to_owned(), [&shared[..], &yours].concat(), 8),
    ];
    let expected = reference(&config(), &asks);
    same(
        &on_store(&config(), &cluster.link(&json!({})), &asks),
        &expected,
        "cold",
    );
    // One block a call and one layer ahead: the second reads on when the first has ended.
    let slow = json!({"layerwise_max_transfer_blocks": 1, "layerwise_prefetch_layers": 1,
        "session_window_blocks": 1});
    let chunked = EngineConfig {
        step_tokens: 8,
        prefix_caching: false,
        ..config()
    };
    let mut engine = Engine::with_store(&chunked, &cluster.link(&slow)).expect("good");
    let warm = run(&mut engine, &asks);
    same(&warm, &expected, "warm");
    assert_eq!(loaded(&warm), 36 - 1 + 64);
    // Given up in the middle of its step's successors: only its own reads end.
    let again: Vec<_> = asks
        .iter()
        .map(|(id, p, n)| (format!("{id}2"), p.clone(), *n))
        .collect();
    crate::rig::submit(&mut engine, &again);
    while engine.step().expect("no rank is lost") != Progress::Computed {}
    engine.abort(&"a2".into());
    let all = crate::rig::sorted(engine.run().expect("no rank is lost"));
    assert_eq!(all[1].logits, expected[1].logits);
    engine.close(PATIENCE).expect("everything ends");
}

#[test]
fn conversations_go_on_from_generated_blocks() {
    let cluster = Cluster::start(POOL);
    let options = json!({"save_decode_cache": true});
    let first = vec![("turn".to_owned(), text(1, 18), 15)];
    let said = on_store(&config(), &cluster.link(&options), &first);
    let prompt = [&first[0].1[..], &said[0].tokens, &text(2, 5)].concat();
    let second = vec![("next".to_owned(), prompt, 6)];
    let expected = reference(&config(), &second);
    let warm = on_store(&config(), &cluster.link(&options), &second);
    same(&warm, &expected, "the next turn");
    // The last token that was generated was never computed upon.
    assert_eq!(loaded(&warm), 32);
}

#[test]
fn a_pool_that_evicts_all_the_time_costs_hits_and_nothing_else() {
    // Room for some of the blocks only.
    let cluster = Cluster::start(96 << 10);
    let expected = reference(&config(), &asks());
    for round in 0..4 {
        let all = on_store(&config(), &cluster.link(&json!({})), &asks());
        same(&all, &expected, &format!("round {round}"));
    }
    let status = cluster.monitor.status();
    assert!(
        status.evicted_objects + status.refused_puts > 0,
        "{status:?}"
    );
}

#[test]
fn roles_save_or_load_only() {
    let cluster = Cluster::start(POOL);
    let expected = reference(&config(), &asks());
    let producer = json!({"kv_role": "kv_producer"});
    let consumer = json!({"kv_role": "kv_consumer"});
    let none = on_store(&config(), &cluster.link(&consumer), &asks());
    same(&none, &expected, "nothing is stored");
    assert_eq!((loaded(&none), cluster.monitor.status().objects), (0, 0));
    for _ in 0..2 {
        let saved = on_store(&config(), &cluster.link(&producer), &asks());
        same(&saved, &expected, "producer");
        assert_eq!(loaded(&saved), 0);
    }
    let read = on_store(&config(), &cluster.link(&consumer), &asks());
    same(&read, &expected, "consumer");
    assert!(loaded(&read) > 0);
}
