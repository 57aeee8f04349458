use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

fn table(blocks: &[BlockId]) -> TableUpdate {
    TableUpdate {
        begins: true,
        replace: true,
        blocks: blocks.to_vec(),
    }
}

fn tracker(requests: &[(&RequestId, &[BlockId])]) -> Tracker<u8> {
    let mut tracker = Tracker::default();
    for (request, blocks) in requests {
        assert_eq!(tracker.begin(request, 0, &table(blocks)), Begun::Continues);
    }
    tracker
}

#[test]
fn committed_blocks_come_back_into_the_blocks_a_request_has_now() {
    let r = RequestId::from("r");
    let mut tracker = tracker(&[(&r, &[10, 11])]);
    assert_eq!(tracker.want_put(&r, 0, &7), Some(10));
    assert_eq!(tracker.committed(&r, 0), None, "not before it is committed");
    assert!(tracker.may_commit(&7));
    assert!(tracker.settle(&7, PutOutcome::Committed));
    assert!(!tracker.settle(&7, PutOutcome::Committed));
    assert_eq!(
        tracker.want_put(&r, 0, &7),
        None,
        "a stored object is not put again"
    );
    assert_eq!(
        tracker.begin(&r, 1, &table(&[20, 21, 22])),
        Begun::StartsOver
    );
    assert_eq!(tracker.committed(&r, 0), Some(&7), "a retry keeps that");
    assert_eq!(tracker.block(&r, 0), Some(20));
    assert_eq!(tracker.begin(&r, 0, &table(&[9])), Begun::Stale);
    assert_eq!(tracker.block(&r, 0), Some(20));
    // What did not come back is saved again.
    tracker.cancel_users_of(&BTreeSet::from([21]), [&r]);
    assert_eq!(tracker.committed(&r, 0), Some(&7));
    tracker.cancel_users_of(&BTreeSet::from([20]), [&r]);
    assert_eq!(tracker.committed(&r, 0), None);
    tracker.begin(&r, 2, &table(&[20, 21]));
    assert_eq!(tracker.want_put(&r, 0, &7), Some(20));
    tracker.settle(&7, PutOutcome::Elsewhere);
    tracker.preempt(&r);
    assert_eq!(tracker.committed(&r, 0), None);
}

// contract: connector-18
#[test]
fn what_a_put_is_written_from_is_withdrawn_with_it_and_with_nobody_else_s() {
    let (r1, r2) = (RequestId::from("r1"), RequestId::from("r2"));
    let mut tracker = tracker(&[(&r1, &[0, 1]), (&r2, &[5])]);
    for (request, index, key) in [(&r1, 0, 7), (&r1, 1, 8), (&r2, 0, 9)] {
        assert!(tracker.want_put(request, index, &key).is_some());
    }
    let [first, second, other] = [7, 8, 9].map(|key| tracker.source(&key).expect("it is open"));
    tracker.finish(&r1);
    assert!(!first.is_withdrawn(), "its saves go on");
    tracker.preempt(&r1);
    assert!(first.is_withdrawn() && second.is_withdrawn() && !other.is_withdrawn());
    tracker.begin(&r2, 1, &table(&[6]));
    assert!(other.is_withdrawn());
    tracker.settle(&9, PutOutcome::Lost);
    assert_eq!(tracker.want_put(&r2, 0, &9), Some(6));
    let next = tracker.source(&9).expect("it is open");
    assert!(!next.is_withdrawn(), "another attempt's blocks");
    assert!(tracker.source(&1).is_none());
}

// contract: connector-17
#[test]
fn what_is_computed_beside_a_load_waits_for_all_ranks() {
    let (r1, r2) = (RequestId::from("r1"), RequestId::from("r2"));
    let mut tracker = tracker(&[(&r1, &[0, 1]), (&r2, &[5])]);
    tracker.doubt(&r1, 4);
    assert!(tracker.want_put(&r1, 1, &7).is_some());
    assert!(tracker.want_put(&r2, 0, &8).is_some());
    assert!(tracker.must_wait(&7) && !tracker.may_publish(&7) && !tracker.may_commit(&7));
    assert!(tracker.may_write(&7), "its bytes may be read meanwhile");
    assert!(!tracker.must_wait(&8) && tracker.may_publish(&8) && tracker.may_commit(&8));
    tracker.confirm(3);
    assert!(tracker.must_wait(&7));
    tracker.confirm(4);
    assert!(!tracker.must_wait(&7) && tracker.may_commit(&7));
    // What turns out to be void waits no longer, and is not committed.
    tracker.doubt(&r1, 5);
    assert!(tracker.want_put(&r1, 0, &9).is_some());
    assert!(tracker.must_wait(&9));
    tracker.cancel(&r1);
    tracker.confirm(5);
    assert!(!tracker.must_wait(&9) && !tracker.may_publish(&9) && !tracker.may_commit(&9));
}

#[test]
fn a_table_that_is_not_known_can_not_be_added_to() {
    let (r1, r2) = (RequestId::from("r1"), RequestId::from("r2"));
    let mut tracker = tracker(&[(&r1, &[0]), (&r2, &[5])]);
    let more = TableUpdate {
        begins: false,
        replace: false,
        blocks: vec![1],
    };
    assert_eq!(tracker.begin(&r1, 0, &more), Begun::Continues);
    assert_eq!(tracker.block(&r1, 1), Some(1));
    assert!(tracker.want_put(&r1, 1, &7).is_some());
    assert_eq!(tracker.forget_all(), [r1.clone(), r2]);
    assert!(!tracker.may_write(&7));
    assert_eq!(tracker.begin(&r1, 0, &more), Begun::Unknown);
    assert_eq!(tracker.block(&r1, 0), None);
    tracker.settle(&7, PutOutcome::Lost);
    assert!(tracker.is_empty());
}

#[test]
fn a_block_is_saved_by_one_request_and_known_to_all_that_have_it() {
    let (r1, r2) = (RequestId::from("r1"), RequestId::from("r2"));
    let mut tracker = tracker(&[(&r1, &[0]), (&r2, &[5])]);
    assert_eq!(tracker.want_put(&r1, 0, &7), Some(0));
    assert_eq!(tracker.want_put(&r2, 0, &7), None);
    assert_eq!((tracker.unsettled(&r1), tracker.unsettled(&r2)), (1, 0));
    tracker.settle(&7, PutOutcome::Elsewhere);
    assert_eq!(tracker.committed(&r2, 0), Some(&7));
}

#[test]
fn an_epoch_lasts_as_long_as_there_is_something_to_save() {
    let r = RequestId::from("r");
    let mut tracker = tracker(&[(&r, &[0])]);
    tracker.note_epoch(&"unknown".into(), Epoch(1));
    assert_eq!(tracker.epoch(&r), Epoch::UNSET);
    tracker.note_epoch(&r, Epoch(4));
    tracker.note_epoch(&r, Epoch(5));
    assert!(tracker.want_put(&r, 0, &7).is_some());
    tracker.finish(&r);
    assert_eq!(
        tracker.epoch(&r),
        Epoch(4),
        "the first stays, beyond the request's end"
    );
    tracker.settle(&7, PutOutcome::Committed);
    assert_eq!(tracker.epoch(&r), Epoch::UNSET);
    assert!(tracker.is_empty());
}

// DEV-13: a save that is queued when its request is preempted never commits.
#[test]
fn dev_13_a_preempted_save_is_not_committed_and_holds_its_blocks_until_it_is_settled() {
    let (r1, r2) = (RequestId::from("r1"), RequestId::from("r2"));
    let mut tracker = tracker(&[(&r1, &[0, 1, 2]), (&r2, &[3])]);
    for (index, key) in [(0, 1), (1, 2), (2, 3)] {
        assert!(tracker.want_put(&r1, index, &key).is_some());
    }
    assert!(tracker.want_put(&r2, 0, &9).is_some());
    assert!(
        tracker.may_commit(&1),
        "this one has been read to its last byte"
    );
    tracker.preempt(&r1);
    assert!(!tracker.may_write(&2) && !tracker.may_commit(&3));
    assert!(tracker.may_write(&9), "others don't notice");
    assert_eq!(tracker.unsettled(&r1), 3);
    for (key, outcome) in [
        (1, PutOutcome::Committed),
        (2, PutOutcome::Lost),
        (3, PutOutcome::Lost),
    ] {
        tracker.settle(&key, outcome);
    }
    assert_eq!(tracker.unsettled(&r1), 0);
}

#[test]
fn void_blocks_stop_the_saves_of_all_who_use_them_until_they_start_over() {
    let (r1, r2, r3) = (
        RequestId::from("r1"),
        RequestId::from("r2"),
        RequestId::from("r3"),
    );
    let mut tracker = tracker(&[(&r1, &[0, 1]), (&r2, &[0, 4]), (&r3, &[5])]);
    assert!(tracker.want_put(&r1, 1, &1).is_some());
    assert!(tracker.want_put(&r2, 1, &2).is_some());
    assert!(tracker.want_put(&r3, 0, &3).is_some());
    tracker.cancel_users_of(&BTreeSet::from([0]), [&r1, &r2, &r3]);
    assert!(!tracker.may_commit(&1) && !tracker.may_commit(&2) && tracker.may_commit(&3));
    tracker.settle(&1, PutOutcome::Lost);
    assert_eq!(tracker.want_put(&r1, 1, &1), None, "still void");
    tracker.begin(&r1, 1, &table(&[0, 1]));
    assert_eq!(tracker.want_put(&r1, 1, &1), Some(1));
}

#[derive(Clone, Debug)]
enum Step {
    Begin(u8, u32, Vec<BlockId>),
    WantPut(u8, u32, u8),
    MayCommit(u8),
    Settle(u8, PutOutcome),
    Cancel(u8),
    Preempt(u8),
    Finish(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let request = || 0_u8..3;
    let key = || 0_u8..5;
    prop_oneof![
        4 => (request(), 0_u32..3, proptest::collection::vec(0_u64..9, 0..4))
            .prop_map(|(r, a, t)| Step::Begin(r, a, t)),
        6 => (request(), 0_u32..4, key()).prop_map(|(r, i, k)| Step::WantPut(r, i, k)),
        3 => key().prop_map(Step::MayCommit),
        3 => (key(), prop_oneof![
            Just(PutOutcome::Committed),
            Just(PutOutcome::Elsewhere),
            Just(PutOutcome::Lost),
        ]).prop_map(|(k, o)| Step::Settle(k, o)),
        1 => request().prop_map(Step::Cancel),
        1 => request().prop_map(Step::Preempt),
        1 => request().prop_map(Step::Finish),
    ]
}

/// The plainest description: lists that are searched.
#[derive(Default)]
struct Model {
    /// Key, owner, whether it was cancelled before its commit began.
    puts: Vec<(u8, u8, bool, bool)>,
    known: HashSet<u8>,
}

impl Model {
    fn cancel(&mut self, request: u8) {
        for (_, owner, cancelled, committing) in &mut self.puts {
            *cancelled |= *owner == request && !*committing;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(crate::SEQUENCES))]

    #[test]
    fn no_session_leaks_ends_twice_or_commits_what_was_cancelled(
        steps in proptest::collection::vec(step(), 0..50),
    ) {
        let ids: Vec<RequestId> = ["r0", "r1", "r2"].map(RequestId::from).to_vec();
        let id = |request: u8| &ids[usize::from(request)];
        let mut tracker = Tracker::<u8>::default();
        let mut model = Model::default();
        let mut attempts = HashMap::<u8, u32>::new();
        for step in steps {
            match step {
                Step::Begin(r, attempt, blocks) => {
                    let before = attempts.get(&r).copied();
                    let begun = tracker.begin(id(r), attempt, &table(&blocks));
                    let stale = before.is_some_and(|before| before > attempt);
                    prop_assert_eq!(begun == Begun::Stale, stale);
                    if begun == Begun::StartsOver {
                        model.cancel(r);
                    }
                    if !stale {
                        attempts.insert(r, attempt);
                        model.known.insert(r);
                    }
                }
                Step::WantPut(r, index, key) => {
                    if tracker.want_put(id(r), index, &key).is_some() {
                        prop_assert!(model.puts.iter().all(|put| put.0 != key), "one put for a key");
                        model.puts.push((key, r, false, false));
                    }
                }
                Step::MayCommit(key) => {
                    let put = model.puts.iter_mut().find(|put| put.0 == key);
                    let expected = put.as_ref().is_some_and(|put| !put.2 && !put.3);
                    prop_assert_eq!(tracker.may_commit(&key), expected);
                    if let Some(put) = put {
                        put.3 |= expected;
                    }
                }
                Step::Settle(key, outcome) => {
                    let known = model.puts.iter().any(|put| put.0 == key);
                    prop_assert_eq!(tracker.settle(&key, outcome), known, "settled once");
                    model.puts.retain(|put| put.0 != key);
                }
                Step::Cancel(r) => {
                    tracker.cancel(id(r));
                    model.cancel(r);
                }
                Step::Preempt(r) => {
                    model.cancel(r);
                    tracker.preempt(id(r));
                    attempts.remove(&r);
                    model.known.remove(&r);
                }
                Step::Finish(r) => {
                    tracker.finish(id(r));
                    attempts.remove(&r);
                    model.known.remove(&r);
                }
            }
            for (key, _, cancelled, committing) in &model.puts {
                prop_assert_eq!(tracker.may_write(key), !cancelled && !committing);
            }
            for r in 0..3 {
                let mine = model.puts.iter().filter(|put| put.1 == r).count();
                prop_assert_eq!(tracker.unsettled(id(r)), mine);
            }
            prop_assert_eq!(tracker.open_puts(), model.puts.len());
        }
        for request in &ids {
            tracker.finish(request);
        }
        for (key, ..) in &model.puts {
            prop_assert!(tracker.settle(key, PutOutcome::Lost));
        }
        prop_assert!(tracker.is_empty());
    }
}

#[test]
fn what_was_saved_for_an_earlier_request_of_a_name_is_not_a_later_ones() {
    let (q, a) = (RequestId::from("q"), RequestId::from("a"));
    let mut tracker = tracker(&[(&q, &[10]), (&a, &[20])]);
    assert_eq!(tracker.want_put(&q, 0, &1), Some(10));
    assert_eq!(tracker.want_put(&a, 0, &1), None, "it follows");
    assert!(tracker.is_saved(&a) && tracker.unsettled(&a) == 0);
    // It ends, and another one of its name begins.
    tracker.finish(&a);
    tracker.begin(&a, 0, &table(&[30]));
    assert!(tracker.is_saved(&q) && !tracker.is_saved(&a));
    tracker.settle(&1, PutOutcome::Committed);
    assert_eq!(tracker.committed(&q, 0), Some(&1));
    assert_eq!(tracker.committed(&a, 0), None);
    assert!(!tracker.is_saved(&q));
}

// contract: connector-22
#[test]
fn who_missed_a_step_commits_nothing_that_it_knew_and_goes_on_from_no_middle() {
    let (r, q) = (RequestId::from("r"), RequestId::from("q"));
    let mut tracker = tracker(&[(&r, &[1]), (&q, &[2])]);
    assert_eq!(tracker.want_put(&r, 0, &1), Some(1));
    assert_eq!(tracker.want_put(&q, 0, &2), Some(2));
    // One of them has ended, and is still saved.
    tracker.finish(&r);
    assert_eq!(tracker.forget_all(), [q.clone(), r]);
    assert!(!tracker.may_commit(&1) && !tracker.may_commit(&2));
    let middle = TableUpdate {
        begins: false,
        ..table(&[2, 3])
    };
    assert_eq!(tracker.begin(&q, 0, &middle), Begun::Unknown);
    assert_eq!(tracker.begin(&q, 1, &table(&[2])), Begun::Continues);
    assert_eq!(tracker.begin(&q, 2, &middle), Begun::Unknown);
    assert_eq!(tracker.block(&q, 0), Some(2), "nothing came of it");
}
