use proptest::prelude::*;

use super::*;

const S: fn(u64) -> Duration = Duration::from_secs;

/// A machine, and the numbers of its questions.
struct Asking(RequestMachine, Questions);

impl Asking {
    fn look_up(&mut self, tokens: u64, hashes: usize, now: Duration) -> Progress {
        self.0.look_up(tokens, hashes, now, &mut self.1)
    }
}

impl std::ops::Deref for Asking {
    type Target = RequestMachine;

    fn deref(&self) -> &RequestMachine {
        &self.0
    }
}

impl std::ops::DerefMut for Asking {
    fn deref_mut(&mut self) -> &mut RequestMachine {
        &mut self.0
    }
}

fn machine() -> Asking {
    let machine = RequestMachine::new(Limits {
        lookup: S(1),
        answer: S(5),
        drain: S(60),
    });
    Asking(machine, Questions::default())
}

fn hit(blocks: usize) -> Hit {
    Hit {
        blocks,
        epoch: Epoch(3),
    }
}

// contract: connector-5
#[test]
fn an_answer_belongs_to_its_question() {
    let mut request = machine();
    let Progress::Ask(first) = request.look_up(100, 6, S(0)) else {
        panic!("the first question is asked");
    };
    assert_eq!(request.look_up(100, 6, S(0)), Progress::Wait);
    // More tokens are known: another question.
    let Progress::Ask(second) = request.look_up(120, 7, S(0)) else {
        panic!("another question is asked");
    };
    assert!(!request.answer(first, hit(6), S(0)));
    assert_eq!(request.look_up(120, 7, S(0)), Progress::Wait);
    assert!(request.answer(second, hit(7), S(0)));
    assert!(!request.answer(second, hit(1), S(0)), "answered once");
    assert_eq!(request.look_up(120, 7, S(0)), Progress::Known(hit(7)));
    // A preemption makes the answer void, even one to the same words.
    assert!(request.preempt());
    assert!(matches!(request.look_up(120, 7, S(0)), Progress::Ask(_)));
    assert!(!request.answer(second, hit(7), S(0)));
}

#[test]
fn a_late_look_up_is_a_miss_and_an_old_answer_is_asked_again() {
    let mut request = machine();
    let Progress::Ask(question) = request.look_up(100, 6, S(0)) else {
        panic!("asked");
    };
    assert_eq!(request.look_up(100, 6, S(1)), Progress::TooLate);
    assert!(!request.answer(question, hit(6), S(1)));
    assert_eq!(request.look_up(100, 6, S(1)), Progress::TooLate);
    let Progress::Ask(question) = request.look_up(100, 6, S(6)) else {
        panic!("asked again");
    };
    assert!(request.answer(question, hit(2), S(8)));
    assert_eq!(request.look_up(100, 6, S(10)), Progress::Known(hit(2)));
    // What it says is protected from the question on, however late it came.
    assert!(matches!(request.look_up(100, 6, S(11)), Progress::Ask(_)));
}

#[test]
fn an_answer_that_is_too_old_when_it_comes_is_a_miss_and_not_asked_for_ever() {
    let mut request = machine();
    let Progress::Ask(question) = request.look_up(100, 6, S(0)) else {
        panic!("asked");
    };
    assert!(!request.answer(question, hit(6), S(5)));
    assert_eq!(request.look_up(100, 6, S(9)), Progress::TooLate);
    assert!(!request.allocate(16, 0), "nothing may be loaded");
    assert!(request.allocate(0, 0));
}

#[test]
fn nothing_is_loaded_that_was_not_matched() {
    let mut request = machine();
    assert!(!request.allocate(16, 16), "nothing was asked");
    assert!(request.allocate(0, 0));
    let mut request = machine();
    let Progress::Ask(question) = request.look_up(100, 6, S(0)) else {
        panic!("asked");
    };
    assert!(!request.allocate(16, 0), "not answered");
    request.answer(question, hit(1), S(0));
    assert!(!request.allocate(32, 16), "more than matched");
    assert!(request.allocate(16, 16));
    assert_eq!(request.allocated(), Some(16));
}

#[test]
fn a_failed_load_is_told_once_and_not_tried_again() {
    let mut request = machine();
    request.schedule();
    assert_eq!(
        request.load_failed(FailurePolicy::Recompute),
        Verdict::Recompute
    );
    assert_eq!(request.attempt(), 1);
    assert_eq!(request.look_up(10, 1, S(0)), Progress::Never);
    assert_eq!(request.load_failed(FailurePolicy::Fail), Verdict::Fail);
    assert_eq!(request.load_failed(FailurePolicy::Fail), Verdict::Nothing);
    assert_eq!(request.finish(0, S(0)), Some(true));
    assert_eq!(request.end(), Some(End::Failed));
}

#[derive(Clone, Debug)]
enum Step {
    LookUp(u64),
    Answer(u64),
    Allocate(u64),
    Schedule,
    Preempt,
    LoadFailed(bool),
    Finish(u32),
    Drained(u32),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0_u64..3).prop_map(Step::LookUp),
        (0_u64..6).prop_map(Step::Answer),
        (0_u64..3).prop_map(Step::Allocate),
        Just(Step::Schedule),
        Just(Step::Preempt),
        any::<bool>().prop_map(Step::LoadFailed),
        (0_u32..3).prop_map(Step::Finish),
        (0_u32..4).prop_map(Step::Drained),
        (0_u64..40).prop_map(Step::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(crate::SEQUENCES))]

    // contract: connector-7
    #[test]
    fn every_request_ends_exactly_once(steps in proptest::collection::vec(step(), 0..60)) {
        let mut request = machine();
        let mut now = S(0);
        let mut ends = 0;
        let mut finished = false;
        for step in steps {
            let before = request.end();
            match step {
                Step::LookUp(tokens) => {
                    let progress = request.look_up(tokens, 1, now);
                    prop_assert!(!finished || progress == Progress::Never);
                }
                Step::Answer(question) => {
                    request.answer(QuestionId(question), hit(1), now);
                }
                Step::Allocate(external) => {
                    request.allocate(external, 1);
                }
                Step::Schedule => prop_assert_eq!(request.schedule(), !finished),
                Step::Preempt => prop_assert_eq!(request.preempt(), !finished),
                Step::LoadFailed(fail) => {
                    let policy = if fail { FailurePolicy::Fail } else { FailurePolicy::Recompute };
                    let verdict = request.load_failed(policy);
                    prop_assert!(!finished || verdict == Verdict::Nothing);
                }
                Step::Finish(saves) => {
                    let ended = request.finish(saves, now);
                    prop_assert_eq!(ended.is_none(), finished);
                    ends += u32::from(ended == Some(true));
                    finished = true;
                }
                Step::Drained(rank) => ends += u32::from(request.drained(rank).is_some()),
                Step::Pass(seconds) => {
                    now += S(seconds);
                    ends += u32::from(request.expire(now).is_some());
                }
            }
            prop_assert!(before.is_none() || request.end() == before, "an end stays");
        }
        // Whatever happened: the engine's end and some patience are enough.
        ends += u32::from(request.finish(2, now) == Some(true));
        ends += u32::from(request.expire(now + S(60)).is_some());
        prop_assert_eq!(ends, 1);
        prop_assert!(request.end().is_some());
    }
}
