//! Who waits for whom, and what ends a wait.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use proptest::prelude::*;

use super::*;

const LONG: Duration = Duration::from_mins(10);

fn key(number: usize) -> ObjectKey {
    ObjectKey::new(&format!("key-{number}")).expect("it is short")
}

fn keys(numbers: &[usize]) -> Vec<ObjectKey> {
    numbers.iter().map(|number| key(*number)).collect()
}

fn take<'a>(turns: &'a Turns, numbers: &[usize]) -> Turn<'a> {
    let Ok(turn) = turns.take(keys(numbers).iter(), || Ok::<(), Infallible>(()));
    turn
}

#[test]
fn who_came_later_waits_though_its_key_is_free() {
    let mut lines = Lines::default();
    let calls = [&[0][..], &[0, 1, 2], &[2]].map(keys);
    let [first, batch, small] = [0, 1, 2].map(|call: usize| lines.join(&calls[call]));
    let waits = |lines: &Lines, ticket| lines.waiting.contains_key(&ticket);
    assert!(!waits(&lines, first) && waits(&lines, batch) && waits(&lines, small));
    assert!(lines.leave(first, &calls[0]));
    assert!(!waits(&lines, batch) && waits(&lines, small));
    assert!(lines.leave(batch, &calls[1]));
    assert!(!waits(&lines, small));
    assert!(!lines.leave(small, &calls[2]));
    assert!(lines.by_key.is_empty() && lines.waiting.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// A call waits as long as one that came before, and is not over, shares a key with it.
    #[test]
    fn lines_are_as_calls_in_order(steps in prop::collection::vec(
        prop_oneof![
            prop::collection::vec(0_usize..6, 0..6).prop_map(Ok),
            (0_usize..16).prop_map(Err),
        ],
        0..60,
    )) {
        let mut lines = Lines::default();
        let mut calls: Vec<(Ticket, Vec<ObjectKey>, BTreeSet<usize>)> = Vec::new();
        for step in steps {
            match step {
                Ok(numbers) => {
                    let wanted = keys(&numbers);
                    let ticket = lines.join(&wanted);
                    calls.push((ticket, wanted, numbers.into_iter().collect()));
                }
                // Any of them may end, also one that waits.
                Err(which) if !calls.is_empty() => {
                    let (ticket, joined, _) = calls.remove(which % calls.len());
                    lines.leave(ticket, &joined);
                }
                Err(_) => {}
            }
            for (at, (ticket, _, wanted)) in calls.iter().enumerate() {
                let waits = calls[..at].iter().any(|(_, _, before)| !before.is_disjoint(wanted));
                prop_assert_eq!(lines.waiting.contains_key(ticket), waits);
            }
        }
        for (ticket, joined, _) in calls {
            lines.leave(ticket, &joined);
        }
        prop_assert!(lines.by_key.is_empty() && lines.waiting.is_empty());
    }
}

#[test]
fn an_error_while_looking_up_ends_the_wait_and_leaves_the_line() {
    let turns = Turns::new(LONG);
    let held = take(&turns, &[0]);
    let mut looks = 0;
    let interrupted = turns.take(keys(&[0, 1]).iter(), || {
        looks += 1;
        assert!(
            turns.lines.try_lock().is_some(),
            "it is called without the lock"
        );
        if looks < 3 {
            Ok(())
        } else {
            Err("interrupted")
        }
    });
    assert_eq!((interrupted.err(), looks), (Some("interrupted"), 3));
    // Nobody is in the line of either key any more, but for who had its turn.
    assert!(turns.take(keys(&[1]).iter(), || Err("it waits")).is_ok());
    drop(held);
    assert!(turns.take(keys(&[0, 1]).iter(), || Err("it waits")).is_ok());
}

#[test]
fn others_that_get_their_turns_don_t_keep_a_call_from_looking_up() {
    let turns = Turns::new(LONG);
    let _held = take(&turns, &[0]);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                drop(take(&turns, &[1]));
                turns.given.notify_all();
            }
        });
        let interrupted = turns.take(keys(&[0]).iter(), || Err("interrupted"));
        done.store(true, Ordering::SeqCst);
        assert_eq!(interrupted.err(), Some("interrupted"));
    });
}

#[test]
fn what_looks_up_never_waits_for_the_call_that_it_is_part_of() {
    let turns = Turns::new(LONG);
    let it_waits = || Err("it waits");
    for is_given_its_turn in [false, true] {
        let mut held = Some(take(&turns, &[0]));
        let outer = turns.take(keys(&[0, 1]).iter(), || {
            if is_given_its_turn {
                held = None;
            }
            for wanted in [&[0][..], &[1, 0], &[1]] {
                turns.take(keys(wanted).iter(), it_waits)?;
            }
            if is_given_its_turn {
                Ok(())
            } else {
                Err("it looked up")
            }
        });
        let ended_by = (!is_given_its_turn).then_some("it looked up");
        assert_eq!(outer.err(), ended_by);
        // Behind that, calls of this thread wait as ever.
        drop(held);
        let _held = take(&turns, &[0]);
        let waited = turns.take(keys(&[0]).iter(), it_waits);
        assert_eq!(waited.err(), Some("it waits"));
    }
}

#[test]
fn who_waited_too_long_goes_ahead_and_keeps_its_place() {
    let turns = Turns::new(Duration::ZERO);
    let held = take(&turns, &[0]);
    let ahead = take(&turns, &[0]);
    drop(held);
    let key = key(0);
    let first = turns.lines.lock().by_key.get(&key).map(|line| line.first);
    assert_eq!(first, Some(ahead.ticket));
}

#[test]
fn threads_never_replace_one_key_together_and_all_get_their_turn() {
    const KEYS: usize = 4;
    const ROUNDS: usize = 300;
    let turns = Turns::new(LONG);
    let busy: Vec<AtomicBool> = (0..KEYS).map(|_| AtomicBool::new(false)).collect();
    let done = AtomicUsize::new(0);
    let wants: [&[usize]; 6] = [&[0], &[0, 1], &[2, 1, 0, 3], &[3], &[1, 1], &[]];
    std::thread::scope(|scope| {
        for wanted in wants {
            let (turns, busy, done) = (&turns, &busy, &done);
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    let turn = take(turns, wanted);
                    let own: BTreeSet<usize> = wanted.iter().copied().collect();
                    for &number in &own {
                        assert!(!busy[number].swap(true, Ordering::SeqCst));
                    }
                    std::thread::yield_now();
                    for &number in &own {
                        busy[number].store(false, Ordering::SeqCst);
                    }
                    drop(turn);
                    done.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
    });
    assert_eq!(done.into_inner(), wants.len() * ROUNDS);
}
