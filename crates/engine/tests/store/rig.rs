//! Prompts, and engines that run them.

use layercake_engine::run::{Completion, Engine, EngineConfig, StoreLink};
use layercake_transport::{Engine as Transport, EngineConfig as TransportConfig};

use crate::cluster::PATIENCE;

/// A request: id, prompt, tokens wanted.
pub(crate) type Ask = (String, Vec<u32>, usize);

/// Text of its own for each number.
pub(crate) fn text(number: u32, len: usize) -> Vec<u32> {
    let mut state = u64::from(number) * 0x9e37_79b9 + 1;
    let mut next = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        u32::try_from((state >> 33) % 96).expect("small")
    };
    (0..len).map(|_| next()).collect()
}

/// Conversations that share beginnings; lengths on, before and behind the ends of blocks.
pub(crate) fn asks() -> Vec<Ask> {
    let system = text(0, 22);
    let lens = [26_usize, 7, 18, 1, 30];
    let asks = lens.iter().zip(1..).map(|(len, number)| {
        let prompt = [&system[..], &text(number, *len)].concat();
        (format!("r{number}"), prompt, 6)
    });
    let mut asks: Vec<Ask> = asks.collect();
    asks.push(("short".to_owned(), text(9, 2), 6));
    asks.push(("blocks".to_owned(), system[..20].to_vec(), 6));
    asks
}

pub(crate) fn submit(engine: &mut Engine, asks: &[Ask]) {
    for (id, prompt, wanted) in asks {
        engine
            .submit(id.as_str(), prompt.clone(), *wanted)
            .expect("it fits");
    }
}

pub(crate) fn sorted(mut all: Vec<Completion>) -> Vec<Completion> {
    all.sort_by(|a, b| a.id.cmp(&b.id));
    all
}

pub(crate) fn run(engine: &mut Engine, asks: &[Ask]) -> Vec<Completion> {
    submit(engine, asks);
    sorted(engine.run().expect("no rank is lost"))
}

/// What an engine without a store computes.
pub(crate) fn reference(config: &EngineConfig, asks: &[Ask]) -> Vec<Completion> {
    let transport = Transport::start(TransportConfig::default()).expect("loopback");
    let plain = EngineConfig {
        blocks: 1000,
        step_tokens: 1000,
        ..config.clone()
    };
    let mut engine = Engine::local(&plain, &transport).expect("a good configuration");
    run(&mut engine, asks)
}

/// A new engine on the store runs these requests to their end; nothing is left over.
pub(crate) fn on_store(config: &EngineConfig, link: &StoreLink, asks: &[Ask]) -> Vec<Completion> {
    let mut engine = Engine::with_store(config, link).expect("a good configuration");
    let all = run(&mut engine, asks);
    assert_eq!(engine.open(), 0);
    assert_eq!(
        engine.idle_blocks() as u64,
        config.blocks,
        "blocks come back"
    );
    engine.close(PATIENCE).expect("everything ends");
    all
}

#[track_caller]
pub(crate) fn same(found: &[Completion], reference: &[Completion], what: &str) {
    assert_eq!(found.len(), reference.len(), "{what}");
    for (found, reference) in found.iter().zip(reference) {
        assert!(!found.failed, "{what}: {} failed", found.id);
        assert_eq!(found.id, reference.id, "{what}");
        assert_eq!(
            found.tokens, reference.tokens,
            "{what}: tokens of {}",
            found.id
        );
        assert_eq!(
            found.logits, reference.logits,
            "{what}: logits of {}",
            found.id
        );
    }
}

/// Tokens that came from the store.
pub(crate) fn loaded(all: &[Completion]) -> usize {
    all.iter().map(|one| one.loaded_tokens).sum()
}
