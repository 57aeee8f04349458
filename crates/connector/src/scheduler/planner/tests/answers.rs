//! What the store answers, and that no more is counted or loaded than that.

use super::*;

/// A step of one request with 4 blocks of its table; the error, if it is refused.
fn refused(bench: &mut Bench, hashes: &[BlockHash], computed: u64, scheduled: u64) -> String {
    let request = "r".into();
    let scheduled = ScheduledRequest {
        request: &request,
        table: &[0, 1, 2, 3, 4, 5],
        hashes,
        prompt: 17,
        computed,
        scheduled,
    };
    let plan = StepPlan {
        requests: &[scheduled],
        preempted: &[],
    };
    let refused = bench.planner.plan(&plan).expect_err("refused");
    refused.to_string()
}

/// Tokens of a load that does not come would be counted as cached.
#[test]
fn a_step_that_does_not_fit_the_answer_is_refused_by_name() {
    let mut bench = bench(|_| {});
    assert_eq!(bench.hit("r", 17, 4, 4), 12);
    bench.allocate("r", 12);
    let hashes = bench.hashes.clone();
    let short = refused(&mut bench, &hashes[..3], 16, 1);
    assert!(
        short.contains("hashes of 3") && short.contains("\"r\""),
        "{short}"
    );
    let mut other = hashes[..4].to_vec();
    other[2] = BlockHash::new(&[99]);
    let other = refused(&mut bench, &other, 16, 1);
    assert!(other.contains("block 2") && other.contains("63"), "{other}");
    for computed in [12, 17, 20] {
        let error = refused(&mut bench, &hashes[..5], computed, 1);
        assert!(error.contains(&format!("computed {computed}")), "{error}");
    }
    // Nothing of that was planned.
    let step = bench.step(&[("r", &[0, 1, 2, 3, 4], 17, 16, 1)], &[]);
    assert_eq!((step.step, &step.requests[0].load), (1, &bench.span(1, 4)));
}

#[test]
fn a_block_is_missed_once_in_a_request_and_not_if_the_engine_has_it() {
    let mut bench = bench(|config| config.decline_slow_loads = true);
    bench.slow_loads(4);
    let ask = |bench: &mut Bench, tokens, computed, blocks, now| {
        let request = "r".into();
        let view = RequestView {
            request: &request,
            tokens,
            hashes: &bench.hashes[..to_usize(tokens / 4)],
            computed,
        };
        let (_, question) = bench.planner.matched(&view, S(now));
        let question = question.expect("asked");
        bench.planner.answered(question, found(blocks), S(now));
        // It can't know that the store is slow: the load is declined.
        let (matched, _) = bench.planner.matched(&view, S(now));
        assert_eq!(matched, Matched::Tokens(0));
        let stats = bench.counters.snapshot();
        [
            MissReason::NeverStored,
            MissReason::Evicted,
            MissReason::DoesNotPay,
        ]
        .map(|reason| stats.missed(reason))
    };
    // The engine has 2 blocks of 8, the store one.
    assert_eq!(ask(&mut bench, 33, 8, 1, 0), [6, 0, 0]);
    // It waits for room, and asks again: the store has more by now, then less.
    assert_eq!(ask(&mut bench, 33, 8, 5, 10), [6, 0, 0]);
    assert_eq!(ask(&mut bench, 33, 8, 0, 20), [6, 0, 0]);
    // The engine has lost one, and the store had it: it does not pay.
    assert_eq!(ask(&mut bench, 33, 4, 4, 30), [6, 0, 1]);
    // After a preemption it has become longer by two blocks.
    bench.step(&[], &["r"]);
    assert_eq!(ask(&mut bench, 41, 0, 3, 40), [6, 2, 2]);
}

#[test]
fn what_a_look_up_verified_before_it_failed_is_loaded() {
    let mut bench = bench(|_| {});
    let (_, question) = bench.matched("r", 17, 0);
    let part = Found {
        missing: None,
        failure: Some(MissReason::TimeOut),
        ..found(3)
    };
    bench.planner.answered(question.expect("asked"), part, S(0));
    assert_eq!(bench.matched("r", 17, 0).0, Matched::Tokens(12));
    bench.allocate("r", 12);
    let step = bench.step(&[("r", &[0, 1, 2, 3, 4], 17, 12, 5)], &[]);
    assert_eq!(step.requests[0].load, bench.span(0, 3));
    let stats = bench.counters.snapshot();
    assert_eq!(
        (stats.hit_blocks, stats.missed(MissReason::TimeOut)),
        (3, 1)
    );
}
