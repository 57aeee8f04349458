//! Without a store: results depend on the tokens and the weights, and on nothing else.

use layercake_engine::model::{LayerKind, ModelConfig};
use layercake_engine::run::{Completion, Engine, EngineConfig};
use layercake_transport::{Engine as Transport, EngineConfig as TransportConfig};

fn transport() -> Transport {
    Transport::start(TransportConfig::default()).expect("loopback")
}

/// Prompts of which some begin alike.
fn prompts() -> Vec<Vec<u32>> {
    let long: Vec<u32> = (0..45).map(|n| n * 7 % 96).collect();
    vec![
        long.clone(),
        long[..30].to_vec(),
        [&long[..24], &[3, 1, 4, 1, 5, 9, 2, 6]].concat(),
        vec![11],
        (0..33).map(|n| n * 5 % 96).collect(),
    ]
}

fn config() -> EngineConfig {
    EngineConfig {
        block_size: 4,
        blocks: 80,
        step_tokens: 1000,
        ..EngineConfig::new(ModelConfig::tiny(3))
    }
}

fn run(config: &EngineConfig) -> (Vec<Completion>, usize) {
    let mut engine = Engine::local(config, &transport()).expect("a good configuration");
    for (prompt, n) in prompts().into_iter().zip(0..) {
        engine
            .submit(format!("r{n}").as_str(), prompt, 9)
            .expect("it fits");
    }
    let mut all = engine.run().expect("nothing is in the way");
    all.sort_by(|a, b| a.id.cmp(&b.id));
    assert!(all.iter().all(|one| !one.failed && one.tokens.len() == 9));
    (all, engine.idle_blocks())
}

fn same(one: &[Completion], other: &[Completion], what: &str) {
    assert_eq!(one.len(), other.len());
    for (one, other) in one.iter().zip(other) {
        assert_eq!(one.tokens, other.tokens, "{what}: tokens of {}", one.id);
        assert_eq!(one.logits, other.logits, "{what}: logits of {}", one.id);
    }
}

#[test]
fn chunks_batches_blocks_and_ranks_change_no_bit() {
    let (reference, idle) = run(&config());
    assert_eq!(idle, 80, "all blocks come back");
    assert_ne!(reference[0].tokens, reference[4].tokens);
    for step_tokens in [1, 3, 7, 16] {
        let chunked = EngineConfig {
            step_tokens,
            ..config()
        };
        same(&run(&chunked).0, &reference, "chunks");
    }
    for ranks in [2, 4] {
        let parallel = EngineConfig { ranks, ..config() };
        same(&run(&parallel).0, &reference, "ranks");
    }
    let alone = EngineConfig {
        sequences: 1,
        ..config()
    };
    same(&run(&alone).0, &reference, "one at a time");
    let other = EngineConfig {
        block_size: 5,
        ..config()
    };
    same(&run(&other).0, &reference, "another block size");
    let apart = EngineConfig {
        prefix_caching: false,
        ..config()
    };
    same(&run(&apart).0, &reference, "no sharing");
}

#[test]
fn preempted_requests_come_to_the_same_end() {
    let (reference, _) = run(&config());
    for prefix_caching in [false, true] {
        let tight = EngineConfig {
            blocks: 16,
            step_tokens: 20,
            prefix_caching,
            ..config()
        };
        let (preempted, idle) = run(&tight);
        same(&preempted, &reference, "preemption");
        assert_eq!(idle, 16);
        assert!(preempted.iter().any(|one| one.preemptions > 0));
    }
}

#[test]
fn shared_prefixes_are_found() {
    let mut engine = Engine::local(&config(), &transport()).expect("good");
    engine.submit("a", prompts()[0].clone(), 2).expect("fits");
    let first = engine.run().expect("runs").remove(0);
    engine.submit("b", prompts()[0].clone(), 2).expect("fits");
    let second = engine.run().expect("runs").remove(0);
    assert_eq!((first.local_tokens, second.local_tokens), (0, 44));
    assert_eq!(first.logits, second.logits);
}

#[test]
fn every_part_of_the_model_matters() {
    let (reference, _) = run(&config());
    let changed = |change: fn(&mut ModelConfig)| {
        let mut config = config();
        change(&mut config.model);
        run(&config).0[0].logits.clone()
    };
    let kinds: [fn(&mut ModelConfig); 5] = [
        |m| m.seed = 4,
        |m| m.layers[0] = LayerKind::Quantised,
        |m| m.layers[1] = LayerKind::Latent(8),
        |m| m.kv_heads = 2,
        |m| m.draft_layer = false,
    ];
    for change in kinds {
        assert_ne!(changed(change), reference[0].logits);
    }
}

#[test]
fn what_can_t_be_served_is_refused_by_name() {
    let mut engine = Engine::local(&config(), &transport()).expect("good");
    let long = engine
        .submit("long", vec![1; 320], 1)
        .expect_err("too long");
    assert!(long.to_string().contains("321 tokens") && long.to_string().contains("320"));
    engine.submit("a", vec![1], 1).expect("fits");
    let again = engine.submit("a", vec![1], 1).expect_err("in use");
    assert!(again.to_string().contains("in use"));
    assert!(engine.submit("b", vec![], 1).is_err());
    assert!(engine.submit("b", vec![1], 0).is_err());
    assert!(engine.submit("b", vec![96], 1).is_err());
    let none = EngineConfig {
        blocks: 0,
        ..config()
    };
    let refused = Engine::local(&none, &transport()).expect_err("no blocks");
    assert!(refused.to_string().contains("blocks = 0"));
    assert!(engine.abort(&"a".into()) && !engine.abort(&"a".into()));
    assert!(engine.take_finished()[0].failed);
}
