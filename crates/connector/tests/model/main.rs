//! The connector's decisions together, against a model of the store and of an engine.
//!
//! Sequences of steps are drawn from a seed: new requests, chunks, late and failed look-ups, preemption,
//! the end of requests, ranges that fail, commits that fail or whose answer is lost, objects that vanish
//! under their readers, results that are told twice. Ranks compute together: what one computes from a
//! block that is void on another is void. Whatever the order: no object is readable whose
//! bytes are not those of its key; no block counts as computed that holds anything else; those are cut back that computed from
//! void blocks, and no others; no step waits for what only a later one tells; every request
//! ends once; and in the end nothing is open, reserved or allocated.

mod engine;
mod rank;
mod world;

use engine::{Engine, Setup};
use layercake_connector::options::FailurePolicy;
use world::Draw;

const SEQUENCES: u64 = 10_000;
const STEPS: usize = 40;

fn run(seed: u64) {
    let mut draw = Draw::new(seed);
    let policy = if draw.one_in(4) {
        FailurePolicy::Fail
    } else {
        FailurePolicy::Recompute
    };
    let mut engine = Engine::new(Setup {
        policy,
        restore: draw.one_in(4),
        apart: draw.one_in(2),
        ranks: [1, 2, 4][draw.index(3)],
    });
    for _ in 0..STEPS {
        match draw.below(10) {
            0 | 1 => engine.arrive(&mut draw),
            2 => engine.preempt(&mut draw),
            3 => engine.finish_one(&mut draw),
            4 => engine.world.evict(&mut draw),
            5 => engine.progress(&mut draw),
            6 => engine.answer_late(&mut draw),
            _ => engine.step(&mut draw),
        }
        engine.check();
    }
    engine.wind_up(&mut draw);
}

// contract: connector-20
#[test]
fn no_sequence_leaks_serves_what_is_void_or_leaves_a_request_without_an_end() {
    for seed in 0..SEQUENCES {
        let result = std::panic::catch_unwind(|| run(seed));
        assert!(result.is_ok(), "sequence {seed}");
    }
}

fn seen(restore: bool, apart: bool) -> world::Seen {
    let mut draw = Draw::new(1);
    let mut engine = Engine::new(Setup {
        policy: FailurePolicy::Recompute,
        restore,
        apart,
        ranks: 2,
    });
    for _ in 0..20_000 {
        match draw.below(8) {
            0 | 1 => engine.arrive(&mut draw),
            2 if draw.one_in(3) => engine.preempt(&mut draw),
            3 => engine.finish_one(&mut draw),
            4 if draw.one_in(8) => engine.world.evict(&mut draw),
            5 => engine.progress(&mut draw),
            6 => engine.answer_late(&mut draw),
            _ => engine.step(&mut draw),
        }
    }
    engine.wind_up(&mut draw);
    engine.seen()
}

#[test]
fn the_sequences_reach_what_they_are_about() {
    let seen = seen(false, false);
    let reached = |what: &str, count: u64| assert!(count > 20, "{what}: {count}");
    reached("hits", seen.hits);
    reached("loads that failed", seen.failed_loads);
    reached("requests cut back", seen.cut_back);
    reached("late answers", seen.late_answers);
    reached("commits", seen.commits);
    reached("commits whose answer was lost", seen.lost_answers);
    reached("saves cancelled", seen.cancelled);
    reached("saves by somebody else", seen.elsewhere);
    reached("delayed frees", seen.delayed);
    assert!(seen.overdue > 5, "overdue: {}", seen.overdue);
    reached("saves that waited for other ranks", seen.waited);
    reached("layers that were published", seen.published);
    reached("requests that were computed", seen.completed);
}

#[test]
fn the_sequences_reach_ranks_that_report_apart() {
    for restore in [false, true] {
        let seen = seen(restore, true);
        let cut = (seen.cut_back, seen.cut_ahead);
        assert!(cut.0 > 20 && (cut.1 > 20 || restore), "{cut:?}");
        assert!(seen.left > 20 && seen.completed > 20, "{seen:?}");
        assert!(seen.published > 20 || restore, "{}", seen.published);
    }
}

#[test]
fn the_sequences_reach_engines_that_keep_no_blocks() {
    let seen = seen(true, false);
    assert!(seen.restored > 20 && seen.completed > 20, "{seen:?}");
    assert!(seen.cut_back > 20, "{}", seen.cut_back);
}
