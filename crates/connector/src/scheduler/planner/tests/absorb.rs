//! Results of the workers.

use super::*;

#[test]
fn blocks_are_freed_when_every_rank_has_reported_and_once() {
    let mut bench = bench(|_| {});
    bench.step(&[("r", &[0, 1, 2], 12, 0, 12)], &[]);
    assert_eq!(
        bench.planner.finished(&"r".into(), S(0)),
        FreeBlocks::Delayed
    );
    assert_eq!(
        bench.planner.finished(&"r".into(), S(0)),
        FreeBlocks::Delayed
    );
    assert_eq!(bench.step(&[], &[]).finished, ["r".into()]);
    assert_eq!(bench.step(&[], &[]).finished, []);
    let done = |rank| WorkerResults {
        rank,
        step: 2,
        finished: vec!["r".into()],
        ..WorkerResults::default()
    };
    assert_eq!(bench.planner.absorb(&[done(0), done(0)], S(1)).free, []);
    assert_eq!(bench.planner.absorb(&[done(1)], S(1)).free, ["r".into()]);
    assert_eq!(bench.planner.absorb(&[done(0), done(1)], S(1)).free, []);
    assert!(bench.planner.is_empty());
}

#[test]
fn a_worker_that_never_reports_holds_blocks_up_to_a_limit() {
    let mut bench = bench(|_| {});
    bench.step(&[("r", &[0], 4, 0, 4)], &[]);
    assert_eq!(
        bench.planner.finished(&"r".into(), S(0)),
        FreeBlocks::Delayed
    );
    assert_eq!(bench.planner.absorb(&[], S(59)).free, []);
    // Then its saves are given up, before the next step writes to its blocks.
    assert_eq!(bench.planner.absorb(&[], S(60)).free, ["r".into()]);
    assert_eq!(bench.counters.snapshot().overdue_requests, 1);
    assert_eq!(bench.step(&[], &[]).preempted, ["r".into()]);
    assert_eq!(bench.step(&[], &[]).preempted, []);
    assert!(bench.planner.is_empty());
}

// contract: connector-10
#[test]
fn a_void_block_cuts_back_everybody_who_uses_it_and_nobody_else() {
    let mut bench = bench(|_| {});
    assert_eq!(bench.hit("a", 17, 0, 4), 16);
    bench.allocate("a", 16);
    bench.step(
        &[
            ("a", &[0, 1, 2, 3, 4], 17, 16, 1),
            // Shares blocks 0 to 2 through the engine's own prefix cache.
            ("b", &[0, 1, 2, 9], 15, 12, 3),
            ("c", &[5, 6], 8, 0, 8),
            // Has block 2 in its table, beyond what it has computed.
            ("d", &[7, 2], 4, 0, 4),
        ],
        &[],
    );
    let absorbed = bench.invalid(1, &[2, 3]);
    assert_eq!(absorbed.recompute, [("a".into(), 8), ("b".into(), 8)]);
    assert_eq!(absorbed.failed, []);
    // A second rank's report of the same step changes nothing.
    assert_eq!(bench.invalid(1, &[2]), Absorbed::default());
    // The next attempt saves from where it is void, and loads nothing.
    let again = bench.step(&[("a", &[0, 1, 2, 3, 4], 17, 8, 9)], &[]);
    let request = &again.requests[0];
    assert_eq!((request.attempt, request.load.clone()), (1, None));
    assert_eq!(request.save, bench.span(2, 4));
    assert!(request.table.replace);
    // What is said of the old step does not concern the new attempt.
    assert_eq!(bench.invalid(1, &[0, 4]), Absorbed::default());
}

// contract: connector-17
#[test]
fn workers_are_told_what_is_void_when_all_ranks_have_reported() {
    let mut bench = bench(|config| config.policy = FailurePolicy::Fail);
    bench.hit("a", 17, 0, 4);
    bench.allocate("a", 16);
    let (a, b) = (
        ("a", &[0, 1, 2, 3, 4][..], 17, 16, 1),
        ("b", &[7][..], 4, 0, 4),
    );
    bench.step(&[a, b], &[]);
    bench.invalid(1, &[2]);
    let second = bench.step(&[], &[]);
    assert_eq!(second.void, ["a".into()]);
    assert_eq!(second.confirmed, 0, "one rank has not reported");
    let of = |rank, step| WorkerResults {
        rank,
        step,
        ..WorkerResults::default()
    };
    bench.planner.absorb(&[of(1, 1)], S(0));
    let third = bench.step(&[], &[]);
    assert_eq!((third.void.len(), third.confirmed), (0, 1), "told once");
    // A rank that left the second step in the middle: nobody knows what failed in it.
    bench.planner.absorb(&[of(0, 2), of(0, 3), of(1, 3)], S(0));
    let fourth = bench.step(&[], &[]);
    assert_eq!(fourth.void, ["a".into(), "b".into()]);
    assert_eq!(fourth.confirmed, 3);
}

#[test]
fn under_the_policy_fail_a_request_fails_once() {
    let mut bench = bench(|config| config.policy = FailurePolicy::Fail);
    bench.step(&[("a", &[0, 1], 8, 4, 4)], &[]);
    assert_eq!(bench.invalid(1, &[1]).failed, [("a".into(), 4)]);
    assert_eq!(bench.invalid(1, &[1]).failed, []);
    assert_eq!(
        bench.planner.finished(&"a".into(), S(0)),
        FreeBlocks::Delayed
    );
}

// contract: connector-22
#[test]
fn what_a_step_was_to_load_is_void_when_a_rank_never_reports_it() {
    let mut bench = bench(|_| {});
    assert_eq!(bench.hit("a", 17, 0, 4), 16);
    bench.allocate("a", 16);
    let report = |rank, step| WorkerResults {
        rank,
        step,
        ..WorkerResults::default()
    };
    // "c" loads nothing.
    let table: &[BlockId] = &[0, 1, 2, 3, 4];
    bench.step(&[("a", table, 17, 16, 1), ("c", &[5, 6], 8, 0, 8)], &[]);
    let absorbed = bench.planner.absorb(&[report(0, 1)], S(0));
    assert_eq!(absorbed, Absorbed::default(), "the other may be behind");
    bench.step(&[("a", table, 17, 17, 1)], &[]);
    let absorbed = bench.planner.absorb(&[report(0, 2), report(1, 2)], S(0));
    assert_eq!(absorbed.recompute, [("a".into(), 0)]);
    assert_eq!(
        bench.planner.absorb(&[report(1, 1)], S(0)),
        Absorbed::default()
    );
    assert_eq!(bench.step(&[], &[]).void, ["a".into(), "c".into()]);
}
