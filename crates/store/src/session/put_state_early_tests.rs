//! What a put session publishes, against the model of the memory that it describes.

use layercake_protocol::early::EarlyRecord;
use proptest::prelude::*;

use super::tests::{Flight, Memory, SIZE, Step, crc_of, cuts_of, land, pick, steps};
use super::*;

const SLOTS: u32 = 6;

fn publishing(slots: u32) -> PutState {
    let mut state = PutState::new(SIZE, 0);
    state.reserved(8, slots);
    state
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// From the moment at which a row is published its bytes are there, and stay, whatever is written, waits,
    /// fails or is tried later. Slots are given in order, no more than there are.
    #[test]
    fn what_was_published_stays(steps in steps()) {
        let mut state = publishing(SLOTS);
        let mut memory: Memory = [None; 32];
        let mut flights: Vec<Flight> = Vec::new();
        let mut published: Vec<EarlyRecord> = Vec::new();
        let mut mark = 0_u8;
        for step in steps {
            match step {
                Step::Write(ranges) => {
                    let cuts = cuts_of(ranges.into_iter());
                    let taken = |cut: &&Cut| {
                        published.iter().any(|record| record.range.overlaps(cut.range))
                    };
                    let refused = cuts.iter().find(taken).map(|cut| cut.range);
                    match state.admit(&cuts) {
                        Ok((id, running)) => {
                            prop_assert_eq!(refused, None);
                            mark = mark.wrapping_add(1);
                            flights.push(Flight { id, cuts, mark, running });
                        }
                        Err(closed) => {
                            prop_assert_eq!(Some(closed), refused.map(Closed::Published));
                        }
                    }
                }
                Step::Run(n) => {
                    if let Some(at) = pick(&flights, n, false) {
                        flights[at].running = state.try_run(flights[at].id) == Ok(true);
                    }
                }
                Step::Finish(n, bits) => {
                    if let Some(at) = pick(&flights, n, true) {
                        let flight = flights.remove(at);
                        let publish = land(&mut state, &mut memory, &flight, bits);
                        let first = usize::try_from(publish.first_slot).expect("few");
                        prop_assert_eq!(first, published.len(), "slot after slot");
                        if !publish.records.is_empty() {
                            prop_assert!(!state.is_idle(), "busy until it has landed");
                            state.release();
                        }
                        published.extend(publish.records);
                        prop_assert!(published.len() <= 6);
                    }
                }
                Step::GiveUp(n) => {
                    if let Some(at) = pick(&flights, n, false) {
                        let flight = flights.remove(at);
                        let finished = state.finish(flight.id, |_| Ok(None));
                        prop_assert!(finished.publish.records.is_empty());
                    }
                }
                Step::End => {
                    state.seal().expect("open");
                    flights.retain(|flight| flight.running);
                    while let Some(flight) = flights.pop() {
                        let publish = land(&mut state, &mut memory, &flight, u32::MAX);
                        prop_assert!(publish.records.is_empty(), "the commit tells soon");
                    }
                    state.reopen();
                }
            }
            for record in &published {
                prop_assert_eq!(crc_of(&memory, record.range), Some(record.crc32c));
                let busy = |flight: &Flight| flight.cuts.iter().any(|c| c.range.overlaps(record.range));
                prop_assert!(!flights.iter().any(busy), "nobody writes there any more");
            }
        }
    }
}

#[test]
fn rows_are_published_in_turn_and_only_while_that_helps() {
    let mut state = publishing(2);
    let publish = |state: &mut PutState, offset| {
        let cuts = cuts_of([(offset, 4)].into_iter());
        let (call, _) = state.admit(&cuts).expect("open");
        let finished = state.finish(call, |_| Ok(Some(7)));
        if !finished.publish.records.is_empty() {
            state.release();
        }
        (finished.publish.first_slot, finished.publish.records.len())
    };
    assert_eq!(publish(&mut state, 8), (0, 1));
    assert_eq!(publish(&mut state, 0), (1, 1));
    assert_eq!(publish(&mut state, 4), (2, 0), "the table is full");
    assert_eq!(
        publish(&mut state, 4),
        (2, 0),
        "so that may be written again"
    );

    let mut state = publishing(2);
    let cuts = cuts_of([(0, 4)].into_iter());
    let (call, _) = state.admit(&cuts).expect("open");
    let unsummed = state.finish(call, |_| Ok(None));
    assert!(unsummed.publish.records.is_empty(), "nobody could check it");
    let (call, _) = state.admit(&cuts).expect("open");
    state.doubt();
    let doubted = state.finish(call, |_| Ok(Some(7)));
    assert!(
        doubted.publish.records.is_empty(),
        "the doubtful write may land there"
    );
}
