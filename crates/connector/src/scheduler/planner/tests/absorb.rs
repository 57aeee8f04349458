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
    assert_eq!(bench.invalid(1, &[0, 2]), confirms(1), "told before");
    // The next attempt saves from where it is void, and loads nothing.
    let again = bench.step(&[("a", &[0, 1, 2, 3, 4], 17, 8, 9)], &[]);
    let request = &again.requests[0];
    assert_eq!((request.attempt, request.load.clone()), (1, None));
    assert_eq!(request.save, bench.span(2, 4));
    assert!(request.table.begins && request.table.replace);
}

// contract: connector-10
#[test]
fn ranks_that_report_apart_cut_back_once_to_what_is_good_on_all() {
    for policy in [FailurePolicy::Recompute, FailurePolicy::Fail] {
        let mut bench = bench(|config| config.policy = policy);
        assert_eq!(bench.hit("a", 17, 0, 4), 16);
        bench.allocate("a", 16);
        let table: &[BlockId] = &[0, 1, 2, 3, 4];
        bench.step(&[("a", table, 17, 16, 1)], &[]);
        assert_eq!(bench.absorb(&[report(0, 1, &[3])]), confirms(0));
        // Steps go on meanwhile.
        let second = bench.step(&[("a", table, 17, 17, 1)], &[]);
        assert_eq!((second.void.len(), second.confirmed), (0, 0));
        let absorbed = bench.absorb(&[report(1, 1, &[1])]);
        let good = vec![("a".into(), 4)];
        let (cut, failed) = match policy {
            FailurePolicy::Recompute => (good, vec![]),
            FailurePolicy::Fail => (vec![], good),
        };
        let cut_back = Absorbed {
            recompute: cut,
            failed,
            ..confirms(1)
        };
        assert_eq!(absorbed, cut_back);
        let third = bench.step(&[], &[]);
        assert_eq!((third.void, third.confirmed), (vec!["a".into()], 1));
    }
}

// contract: connector-10
#[test]
fn what_is_void_by_a_later_step_cuts_back_whoever_waits_for_its_next_attempt() {
    let mut bench = bench(|_| {});
    assert_eq!(bench.hit("a", 17, 0, 4), 16);
    bench.allocate("a", 16);
    let table: &[BlockId] = &[0, 1, 2, 3, 4];
    bench.step(&[("a", table, 17, 16, 1)], &[]);
    bench.step(&[("a", table, 17, 17, 1)], &[]);
    let cut = |blocks: u64, step| Absorbed {
        recompute: vec![("a".into(), blocks * 4)],
        ..confirms(step)
    };
    assert_eq!(bench.invalid(1, &[2]), cut(2, 1));
    // A rank says so, whatever it was to load.
    assert_eq!(bench.invalid(2, &[1, 3]), cut(1, 2));
    let again = bench.step(&[("a", table, 17, 4, 4)], &[]);
    assert_eq!(again.void, ["a".into()]);
    assert_eq!(again.requests[0].attempt, 2);
}

#[test]
fn a_block_that_was_written_again_since_is_not_void() {
    let mut bench = bench(|_| {});
    assert_eq!(bench.hit("a", 17, 0, 4), 16);
    bench.allocate("a", 16);
    bench.step(&[("a", &[0, 1, 2, 3, 4], 17, 16, 1)], &[]);
    // It loses its blocks, and another one computes into two of them.
    bench.step(&[("b", &[1, 2], 8, 0, 8)], &["a"]);
    assert_eq!(bench.invalid(1, &[1, 2]), confirms(1));
    // Nor is one void by results of nobody.
    let nobody = [report(2, 2, &[1]), report(0, 9, &[1])];
    assert_eq!(bench.absorb(&nobody), confirms(1));
    assert_eq!(bench.invalid(2, &[]), confirms(2));
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
    bench.absorb(&[report(0, 1, &[2])]);
    let second = bench.step(&[], &[]);
    assert_eq!((second.void.len(), second.confirmed), (0, 0));
    bench.absorb(&[report(1, 1, &[])]);
    let third = bench.step(&[], &[]);
    assert_eq!((third.void, third.confirmed), (vec!["a".into()], 1));
    // A rank that left the second step in the middle: nobody knows what failed in it.
    bench.absorb(&[report(0, 2, &[]), report(0, 3, &[]), report(1, 3, &[])]);
    let fourth = bench.step(&[], &[]);
    assert_eq!(fourth.void, ["a".into(), "b".into()]);
    assert_eq!(fourth.confirmed, 3);
    assert_eq!(bench.step(&[], &[]).void, [], "told once");
}

#[test]
fn under_the_policy_fail_a_request_fails_once() {
    let mut bench = bench(|config| config.policy = FailurePolicy::Fail);
    bench.step(&[("a", &[0, 1], 8, 4, 4)], &[]);
    assert_eq!(bench.invalid(1, &[1]).failed, [("a".into(), 4)]);
    bench.step(&[("a", &[0, 1], 8, 4, 4)], &[]);
    assert_eq!(bench.invalid(2, &[1]).failed, []);
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
    // "c" loads nothing.
    let table: &[BlockId] = &[0, 1, 2, 3, 4];
    bench.step(&[("a", table, 17, 16, 1), ("c", &[5, 6], 8, 0, 8)], &[]);
    let absorbed = bench.absorb(&[report(0, 1, &[3])]);
    assert_eq!(absorbed, confirms(0), "the other may be behind");
    bench.step(&[("a", table, 17, 17, 1)], &[]);
    let absorbed = bench.absorb(&[report(0, 2, &[]), report(1, 2, &[])]);
    assert_eq!(absorbed.recompute, [("a".into(), 0)]);
    assert_eq!(bench.absorb(&[report(1, 1, &[])]), confirms(2));
    assert_eq!(bench.step(&[], &[]).void, ["a".into(), "c".into()]);
}

// contract: connector-22
#[test]
fn a_gap_from_before_its_attempt_costs_a_request_nothing() {
    let mut bench = bench(|_| {});
    assert_eq!(bench.hit("a", 17, 0, 4), 16);
    bench.allocate("a", 16);
    let table: &[BlockId] = &[0, 1, 2, 3, 4];
    bench.step(&[("a", table, 20, 16, 1)], &[]);
    bench.step(&[("a", table, 20, 17, 1)], &[]);
    assert_eq!(bench.invalid(1, &[2]).recompute, [("a".into(), 8)]);
    let third = bench.step(&[("a", table, 20, 8, 4)], &[]);
    assert_eq!(third.void, ["a".into()]);
    bench.absorb(&[report(0, 2, &[]), report(0, 3, &[]), report(1, 3, &[])]);
    assert_eq!(bench.step(&[], &[]).void, []);
}

// contract: connector-9
#[test]
fn a_report_of_an_earlier_request_of_its_name_frees_no_blocks() {
    let mut bench = bench(|_| {});
    bench.step(&[("r", &[0], 4, 0, 2)], &[]);
    assert_eq!(bench.planner.finished(&"r".into(), S(0)), FreeBlocks::Now);
    assert_eq!(bench.step(&[], &[]).finished, ["r".into()]);
    // The name comes again before that step is reported, and has saves.
    bench.step(&[("r", &[1], 4, 0, 4)], &[]);
    let ended = |bench: &mut Bench, step| {
        let done = |rank| WorkerResults {
            finished: vec!["r".into()],
            ..report(rank, step, &[])
        };
        bench.absorb(&[done(0), done(1)]).free
    };
    let freed = bench.planner.finished(&"r".into(), S(0));
    assert_eq!(freed, FreeBlocks::Delayed);
    assert_eq!(ended(&mut bench, 2), []);
    assert_eq!(bench.step(&[], &[]).finished, ["r".into()]);
    assert_eq!(ended(&mut bench, 3), []);
    assert_eq!(ended(&mut bench, 4), ["r".into()]);
}
