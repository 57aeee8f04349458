//! What becomes of an engine whose ranks are lost. From outside, nothing loses one.

use layercake_transport::EngineConfig as TransportConfig;

use super::*;

const PATIENCE: Duration = Duration::from_mins(1);

/// An engine of two ranks with a request under way, and the engine of its memory.
fn engine() -> (Engine, Transport) {
    let config = EngineConfig {
        ranks: 2,
        block_size: 4,
        blocks: 16,
        ..EngineConfig::new(ModelConfig::tiny(5))
    };
    let transport = Transport::start(TransportConfig::default()).expect("loopback");
    let mut engine = Engine::local(&config, &transport).expect("a good configuration");
    engine.submit("r", vec![1, 2, 3], 8).expect("it fits");
    assert_eq!(engine.step().expect("computes"), Progress::Computed);
    (engine, transport)
}

fn lost(result: Result<impl Sized, EngineError>) -> u32 {
    match result.map(drop) {
        Err(EngineError::RankLost { rank }) => rank,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_step_that_fails_ends_all_requests_and_every_later_call_says_why() {
    let (mut engine, _transport) = engine();
    engine.ranks[1].lose();
    assert_eq!(lost(engine.step()), 1);
    let ended = engine.take_finished();
    assert!(ended.len() == 1 && ended[0].failed, "{ended:?}");
    assert_eq!(engine.idle_blocks(), 16);
    for _ in 0..2 {
        match engine.step() {
            Err(EngineError::Ended { reason }) => assert_eq!(reason, "rank 1 is lost"),
            other => panic!("{other:?}"),
        }
    }
    let ended = engine.run().map(drop);
    assert!(matches!(ended, Err(EngineError::Ended { .. })), "{ended:?}");
}

#[test]
fn a_close_that_fails_closes_every_rank_and_tells_the_first_failure() {
    // Both are lost.
    let (mut engine, _transport) = engine();
    engine.ranks.iter_mut().for_each(Rank::lose);
    assert_eq!(lost(engine.close(PATIENCE)), 0);

    // One is: what the other one has of the cache goes with it.
    let (mut engine, transport) = self::engine();
    let all = transport.stats().regions;
    engine.ranks[0].lose();
    let left = transport.stats().regions;
    assert!(0 < left && left < all, "{left} of {all}");
    assert_eq!(lost(engine.close(PATIENCE)), 0);
    assert_eq!(transport.stats().regions, 0);

    let (engine, transport) = self::engine();
    engine.close(PATIENCE).expect("nothing is wrong");
    assert_eq!(transport.stats().regions, 0);
}
