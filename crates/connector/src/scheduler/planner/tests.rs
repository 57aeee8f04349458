use layercake_protocol::ids::Epoch;

use super::*;
use crate::contract::{Absorbed, BlockId, TableUpdate, WorkerResults};

mod absorb;

mod answers;

const S: fn(u64) -> Duration = Duration::from_secs;

struct Bench {
    planner: Planner,
    hashes: Vec<BlockHash>,
    counters: Arc<Counters>,
}

fn bench(change: impl FnOnce(&mut PlannerConfig)) -> Bench {
    let mut config = PlannerConfig {
        block_size: NonZeroU64::new(4).expect("above 0"),
        ranks: 2,
        object_len: 100,
        role: Role::Both,
        policy: FailurePolicy::Recompute,
        save_decode_cache: false,
        restore: false,
        decline_slow_loads: false,
        limits: Limits {
            lookup: S(1),
            answer: S(5),
            drain: S(60),
        },
    };
    change(&mut config);
    let counters = Arc::new(Counters::default());
    Bench {
        planner: Planner::new(config, Arc::clone(&counters)),
        hashes: (0..64_u8).map(|n| BlockHash::new(&[n])).collect(),
        counters,
    }
}

impl Bench {
    fn matched(&mut self, id: &str, tokens: u64, computed: u64) -> (Matched, Option<Question>) {
        let request = id.into();
        let view = RequestView {
            request: &request,
            tokens,
            hashes: &self.hashes[..to_usize(tokens / 4)],
            computed,
        };
        self.planner.matched(&view, S(0))
    }

    /// Looks up until it is known that the store has `blocks` blocks.
    fn hit(&mut self, id: &str, tokens: u64, computed: u64, blocks: usize) -> u64 {
        let (progress, question) = self.matched(id, tokens, computed);
        assert_eq!(progress, Matched::NotKnownYet);
        let question = question.expect("asked");
        self.planner.answered(question, found(blocks), S(0));
        match self.matched(id, tokens, computed) {
            (Matched::Tokens(tokens), None) => tokens,
            other => panic!("{other:?}"),
        }
    }

    fn allocate(&mut self, id: &str, external: u64) {
        self.planner
            .allocated(&id.into(), external)
            .expect("offered");
    }

    fn step(
        &mut self,
        requests: &[(&str, &[BlockId], u64, u64, u64)],
        preempted: &[&str],
    ) -> StepMetadata {
        let ids: Vec<RequestId> = requests.iter().map(|r| r.0.into()).collect();
        let scheduled: Vec<_> = ids
            .iter()
            .zip(requests)
            .map(
                |(request, &(_, table, prompt, computed, scheduled))| ScheduledRequest {
                    request,
                    table,
                    hashes: &self.hashes[..to_usize((computed + scheduled) / 4)],
                    prompt,
                    computed,
                    scheduled,
                },
            )
            .collect();
        let preempted: Vec<RequestId> = preempted.iter().map(|id| (*id).into()).collect();
        let plan = StepPlan {
            requests: &scheduled,
            preempted: &preempted,
        };
        self.planner.plan(&plan).expect("a plan")
    }

    fn span(&self, first: usize, end: usize) -> Option<Span> {
        span(&self.hashes, first, end)
    }

    /// Both ranks report a step, the first of them failed loads.
    fn invalid(&mut self, step: u64, blocks: &[BlockId]) -> Absorbed {
        let absorbed = self.absorb(&[report(0, step, blocks), report(1, step, &[])]);
        assert_eq!(absorbed.confirmed, step);
        absorbed
    }

    fn absorb(&mut self, results: &[WorkerResults]) -> Absorbed {
        self.planner.absorb(results, S(0))
    }
}

fn report(rank: u32, step: u64, invalid: &[BlockId]) -> WorkerResults {
    WorkerResults {
        rank,
        step,
        invalid_blocks: invalid.to_vec(),
        ..WorkerResults::default()
    }
}

/// Nothing comes of it but that a step is confirmed.
fn confirms(step: u64) -> Absorbed {
    Absorbed {
        confirmed: step,
        ..Absorbed::default()
    }
}

fn found(blocks: usize) -> Found {
    Found {
        blocks,
        missing: Some(KeyState::Absent),
        failure: None,
        epoch: Epoch(9),
        keys_queried: 10,
    }
}

// contract: connector-6
#[test]
fn at_least_one_token_is_left_to_compute() {
    for (tokens, computed, blocks, expected) in [
        (17, 0, 4, 16),
        (16, 0, 4, 15),
        (16, 0, 3, 12),
        (17, 8, 4, 8),
        (17, 12, 3, 0),
        (18, 8, 1, 0),
    ] {
        let mut bench = bench(|_| {});
        assert_eq!(
            bench.hit("r", tokens, computed, blocks),
            expected,
            "{tokens} {computed} {blocks}"
        );
    }
    let mut bench = bench(|_| {});
    assert_eq!(bench.matched("all-local", 17, 16).0, Matched::Tokens(0));
    assert_eq!(bench.matched("short", 3, 0).0, Matched::Tokens(0));
    assert_eq!(bench.counters.snapshot().lookups, 0, "nothing worth asking");
}

// contract: connector-8
#[test]
fn chunks_load_once_and_save_every_new_whole_block_once() {
    let mut bench = bench(|_| {});
    assert_eq!(bench.hit("r", 30, 0, 2), 8);
    bench.allocate("r", 8);
    // 8 tokens come from the store, 7 are computed: block 2 is not whole yet... then it is.
    let first = bench.step(&[("r", &[5, 6, 7, 8], 30, 8, 3)], &[]);
    let request = &first.requests[0];
    assert_eq!(
        (request.load.clone(), request.save.clone()),
        (bench.span(0, 2), None)
    );
    assert_eq!(
        request.table,
        TableUpdate {
            begins: true,
            replace: true,
            blocks: vec![5, 6, 7, 8]
        }
    );
    assert_eq!(request.epoch(), Epoch(9));
    let second = bench.step(&[("r", &[5, 6, 7, 8, 9, 1], 30, 11, 10)], &[]);
    let request = &second.requests[0];
    assert_eq!(
        (request.load.clone(), request.save.clone()),
        (None, bench.span(2, 5))
    );
    assert_eq!(
        request.table,
        TableUpdate {
            begins: false,
            replace: false,
            blocks: vec![9, 1]
        }
    );
    // The rest of the prompt, then generated tokens: those are not saved.
    let third = bench.step(&[("r", &[5, 6, 7, 8, 9, 1, 2, 3], 30, 21, 9)], &[]);
    assert_eq!(third.requests[0].save, bench.span(5, 7));
    let decode = bench.step(&[("r", &[5, 6, 7, 8, 9, 1, 2, 3], 30, 30, 2)], &[]);
    assert_eq!(decode.requests[0].save, None);
    assert_eq!((first.step, decode.step), (1, 4));
}

#[test]
fn generated_blocks_are_saved_where_that_is_asked_for() {
    let mut bench = bench(|config| config.save_decode_cache = true);
    bench.step(&[("r", &[0, 1], 6, 0, 6)], &[]);
    let decode = bench.step(&[("r", &[0, 1], 6, 6, 2)], &[]);
    assert_eq!(decode.requests[0].save, bench.span(1, 2));
}

#[test]
fn roles_are_kept() {
    let mut consumer = bench(|config| config.role = Role::Consumer);
    let step = consumer.step(&[("r", &[0, 1, 2], 12, 0, 12)], &[]);
    assert_eq!(step.requests[0].save, None);
    assert_eq!(
        consumer.planner.finished(&"r".into(), S(0)),
        FreeBlocks::Now
    );
    let mut producer = bench(|config| config.role = Role::Producer);
    assert_eq!(producer.matched("r", 13, 0).0, Matched::Tokens(0));
    assert_eq!(producer.counters.snapshot().lookups, 0);
}

// contract: connector-9
#[test]
fn a_preempted_request_starts_over() {
    let mut bench = bench(|_| {});
    bench.step(&[("r", &[0, 1, 2], 20, 0, 10)], &[]);
    let empty = bench.step(&[], &["r", "unknown"]);
    assert_eq!(empty.preempted, ["r".into()]);
    assert_eq!(
        bench.invalid(1, &[0]),
        confirms(1),
        "those blocks are others' now"
    );
    assert_eq!(bench.hit("r", 20, 0, 2), 8);
    bench.allocate("r", 8);
    let resumed = bench.step(&[("r", &[8, 7, 6, 5, 4], 20, 8, 12)], &[]);
    let request = &resumed.requests[0];
    assert_eq!(request.attempt, 1);
    assert_eq!(
        request.table,
        TableUpdate {
            begins: true,
            replace: true,
            blocks: vec![8, 7, 6, 5, 4]
        }
    );
    assert_eq!(
        (request.load.clone(), request.save.clone()),
        (bench.span(0, 2), bench.span(2, 5))
    );
}

#[test]
fn a_request_that_ends_behind_its_preemption_is_fenced() {
    let mut bench = bench(|_| {});
    bench.step(&[("r", &[0, 1, 2], 20, 0, 10)], &[]);
    let freed = bench.planner.finished(&"r".into(), S(0));
    assert_eq!(freed, FreeBlocks::Delayed);
    let step = bench.step(&[], &["r"]);
    assert_eq!(
        (step.preempted, step.finished),
        (vec!["r".into()], vec!["r".into()])
    );
}

#[test]
fn errors_and_late_answers_are_misses() {
    let mut bench = bench(|_| {});
    let (_, question) = bench.matched("r", 17, 0);
    let question = question.expect("asked");
    bench
        .planner
        .answered(question.clone(), Found::failed(MissReason::Master), S(0));
    assert_eq!(bench.matched("r", 17, 0).0, Matched::Tokens(0));
    bench.planner.answered(question, found(4), S(0));
    assert_eq!(bench.matched("r", 17, 0).0, Matched::Tokens(0));
    let stats = bench.counters.snapshot();
    assert_eq!(stats.late_answers, 1);
    assert_eq!(stats.missed(MissReason::Master), 4);
}

#[test]
fn misses_have_reasons() {
    let mut bench = bench(|_| {});
    assert_eq!(bench.hit("a", 17, 0, 4), 16);
    assert_eq!(bench.hit("b", 21, 0, 2), 8);
    let (_, question) = bench.matched("c", 25, 0);
    let reserved = Found {
        missing: Some(KeyState::Reserved),
        ..found(5)
    };
    bench
        .planner
        .answered(question.expect("asked"), reserved, S(0));
    let stats = bench.counters.snapshot();
    assert_eq!(
        stats.missed(MissReason::Evicted),
        3,
        "blocks 2 to 4 of b were there for a"
    );
    assert_eq!(stats.missed(MissReason::InProgress), 1);
    assert_eq!(stats.missed(MissReason::NeverStored), 0);
    assert_eq!(stats.hit_blocks, 4 + 2 + 5);
}

impl Bench {
    /// Eight steps of `scheduled` tokens, in which loads were slow and computing was fast.
    fn slow_loads(&mut self, scheduled: u64) {
        for _ in 0..8 {
            let metadata = self.step(&[("x", &[0], 4, 0, scheduled)], &[]);
            let slow = WorkerResults {
                step: metadata.step,
                loaded_bytes: 100,
                load_micros: 1_000_000,
                compute_micros: 10,
                ..WorkerResults::default()
            };
            self.planner.absorb(&[slow], S(0));
        }
    }
}

// contract: connector-12
#[test]
fn a_load_that_does_not_pay_is_declined_and_counted() {
    let mut bench = bench(|config| config.decline_slow_loads = true);
    bench.slow_loads(1);
    assert_eq!(
        bench.hit("first", 17, 0, 4),
        16,
        "answers tell nothing of prompts"
    );
    bench.slow_loads(4);
    assert_eq!(bench.hit("r", 17, 0, 4), 0);
    assert_eq!(bench.counters.snapshot().missed(MissReason::DoesNotPay), 4);
    // However often it asks while it waits for room, it is judged once.
    for _ in 0..100 {
        assert_eq!(bench.matched("r", 17, 0).0, Matched::Tokens(0));
    }
    assert_eq!(bench.counters.snapshot().missed(MissReason::DoesNotPay), 4);
    // One in sixteen is taken, so that a store that has become fast is noticed.
    let taken = (0..16).filter(|n| bench.hit(&format!("r{n}"), 17, 0, 4) > 0);
    assert_eq!(taken.count(), 1);
}

// contract: connector-5
#[test]
fn an_answer_does_not_reach_a_later_request_of_the_same_name() {
    let mut bench = bench(|_| {});
    let (_, old) = bench.matched("r", 17, 0);
    assert_eq!(bench.planner.finished(&"r".into(), S(0)), FreeBlocks::Now);
    let (_, new) = bench.matched("r", 17, 0);
    let answer = |question: Option<Question>| question.expect("asked");
    bench.planner.answered(answer(old), found(4), S(0));
    assert_eq!(bench.matched("r", 17, 0).0, Matched::NotKnownYet);
    assert_eq!(bench.counters.snapshot().late_answers, 1);
    bench.planner.answered(answer(new), found(1), S(0));
    assert_eq!(bench.matched("r", 17, 0).0, Matched::Tokens(4));
}

#[test]
fn what_breaks_the_contract_is_refused() {
    let mut bench = bench(|_| {});
    assert!(matches!(
        bench.planner.allocated(&"r".into(), 0),
        Err(ConnectorError::UnknownRequest { .. })
    ));
    assert_eq!(bench.hit("r", 17, 0, 2), 8);
    assert!(bench.planner.allocated(&"r".into(), 9).is_err());
    let request: RequestId = "r".into();
    let scheduled = ScheduledRequest {
        request: &request,
        table: &[0],
        hashes: &[],
        prompt: 17,
        computed: 0,
        scheduled: 17,
    };
    let plan = StepPlan {
        requests: &[scheduled],
        preempted: &[],
    };
    let error = bench.planner.plan(&plan).expect_err("too few blocks");
    assert!(
        error.to_string().contains("1 blocks for 17 tokens"),
        "{error}"
    );
    assert_eq!(bench.step(&[("r", &[0, 1, 2], 12, 0, 12)], &[]).step, 1);
    let other_blocks = ScheduledRequest {
        table: &[0, 9, 2, 3],
        computed: 12,
        scheduled: 1,
        ..scheduled
    };
    let plan = StepPlan {
        requests: &[other_blocks],
        preempted: &[],
    };
    let error = bench.planner.plan(&plan).expect_err("it has lost one");
    assert!(
        error.to_string().contains("has not kept the 3 blocks"),
        "{error}"
    );
    assert_eq!(bench.planner.finished(&request, S(0)), FreeBlocks::Delayed);
    let again = ScheduledRequest {
        table: &[0, 1, 2],
        prompt: 12,
        scheduled: 12,
        ..scheduled
    };
    let plan = StepPlan {
        requests: &[again],
        preempted: &[],
    };
    assert!(matches!(
        bench.planner.plan(&plan),
        Err(ConnectorError::OutOfOrder { .. })
    ));
}

// contract: connector-22
#[test]
fn without_retained_blocks_a_chunk_waits_for_the_reports_of_the_one_before() {
    let mut bench = bench(|config| {
        config.restore = true;
        config.role = Role::Producer;
    });
    bench.step(&[("r", &[0, 1], 16, 0, 8)], &[]);
    let (request, hashes) = ("r".into(), bench.hashes[..3].to_vec());
    let next = ScheduledRequest {
        request: &request,
        table: &[4, 5, 6],
        hashes: &hashes,
        prompt: 16,
        computed: 8,
        scheduled: 4,
    };
    let plan = StepPlan {
        requests: &[next],
        preempted: &[],
    };
    let error = bench.planner.plan(&plan).expect_err("too early");
    assert!(error.to_string().contains("part of step 1"), "{error}");
    bench.invalid(1, &[]);
    let step = bench.planner.plan(&plan).expect("into other blocks");
    assert_eq!((step.step, step.requests[0].restore), (2, 2));
    // One that has lost its blocks waits for nobody.
    let over = bench.step(&[("r", &[7, 8], 16, 0, 8)], &["r"]);
    assert_eq!((over.step, over.requests[0].restore), (3, 0));
}
