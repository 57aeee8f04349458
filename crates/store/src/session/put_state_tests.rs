//! The put state against a byte-by-byte model of the memory that it describes.

use proptest::prelude::*;

use super::super::cut::cut_ranges;
use super::*;

const SIZE: u64 = 32;

/// What the stored bytes are: the last writer's mark, or nothing that anyone may rely on.
type Memory = [Option<u8>; 32];

#[derive(Clone, Debug)]
enum Step {
    /// A call with these ranges starts.
    Write(Vec<(u64, u64)>),
    /// The n-th call that runs ends; its pieces landed where the bits are set.
    Finish(usize, u32),
    /// The n-th call that waits is given up.
    GiveUp(usize),
    /// An end is tried.
    End,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let write = prop::collection::vec((0_u64..28, 1_u64..5), 1..4).prop_map(Step::Write);
    let big = (0_u64..8, 20_u64..25).prop_map(|range| Step::Write(vec![range]));
    let step = prop_oneof![
        4 => write,
        3 => big,
        2 => (0..8_usize, Just(u32::MAX)).prop_map(|(n, bits)| Step::Finish(n, bits)),
        2 => (0..8_usize, any::<u32>()).prop_map(|(n, bits)| Step::Finish(n, bits)),
        1 => (0..8_usize).prop_map(Step::GiveUp),
        1 => Just(Step::End),
    ];
    prop::collection::vec(step, 1..60)
}

struct Flight {
    id: CallId,
    cuts: Vec<Cut>,
    mark: u8,
}

fn at(byte: u64) -> usize {
    usize::try_from(byte).expect("small")
}

fn crc_of(memory: &Memory, range: ByteRange) -> Option<u32> {
    let bytes: Option<Vec<u8>> = memory[at(range.start())..at(range.end())]
        .iter()
        .copied()
        .collect();
    bytes.map(|bytes| crc32c::crc32c(&bytes))
}

/// Lands a finished call's pieces in the model and in the state.
fn land(state: &mut PutState, memory: &mut Memory, flight: &Flight, bits: u32) {
    for (index, cut) in flight.cuts.iter().enumerate() {
        let landed = bits & (1 << (index % 32)) != 0;
        memory[at(cut.range.start())..at(cut.range.end())].fill(landed.then_some(flight.mark));
    }
    let cuts = &flight.cuts;
    state.finish(flight.id, |index| {
        if bits & (1 << (index % 32)) == 0 {
            return Err(());
        }
        let bytes = vec![flight.mark; at(cuts[index].range.len())];
        Ok(Some(crc32c::crc32c(&bytes)))
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// contract: session-3, session-4, session-15
    #[test]
    fn rows_say_what_the_memory_holds_and_an_end_needs_all_of_it(steps in steps()) {
        let mut state = PutState::new(SIZE, 8);
        let mut memory: Memory = [None; 32];
        let mut flights: Vec<Flight> = Vec::new();
        let mut mark = 0_u8;
        for step in steps {
            match step {
                Step::Write(ranges) => {
                    let cuts = cut_ranges(SIZE, ranges.into_iter()).expect("inside");
                    let (id, running) = state.admit(&cuts).expect("open");
                    let blocked = flights.iter().any(|other| shares_bytes(&other.cuts, &cuts));
                    prop_assert_eq!(running, !blocked, "a call waits exactly for those before it");
                    mark = mark.wrapping_add(1);
                    flights.push(Flight { id, cuts, mark });
                }
                Step::Finish(n, bits) => {
                    let running = pick(&state, &flights, n, true);
                    if let Some(at) = running {
                        let flight = flights.remove(at);
                        land(&mut state, &mut memory, &flight, bits);
                    }
                }
                Step::GiveUp(n) => {
                    if let Some(at) = pick(&state, &flights, n, false) {
                        let flight = flights.remove(at);
                        state.finish(flight.id, |_| Ok(None));
                    }
                }
                Step::End => {
                    let waiting: Vec<CallId> = flights
                        .iter()
                        .filter(|f| state.is_running(f.id) == Ok(false))
                        .map(|f| f.id)
                        .collect();
                    state.seal().expect("open");
                    for id in waiting {
                        prop_assert_eq!(state.is_running(id), Err(Closed::Ended));
                        flights.retain(|f| f.id != id);
                    }
                    let none = cut_ranges(SIZE, [(0, 1)].into_iter()).expect("inside");
                    prop_assert_eq!(state.admit(&none), Err(Closed::Ended));
                    while !state.is_idle() {
                        let flight = flights.remove(0);
                        land(&mut state, &mut memory, &flight, u32::MAX);
                    }
                    prop_assert!(flights.is_empty());
                    let whole = memory.iter().all(Option::is_some);
                    prop_assert_eq!(state.check_complete().is_ok(), whole);
                    state.reopen();
                }
            }
            // Bytes under a running call are in flux; rows over them are rewritten when it ends.
            let quiet = |range: ByteRange| {
                flights.iter().all(|f| {
                    state.is_running(f.id) != Ok(true) || f.cuts.iter().all(|c| !c.range.overlaps(range))
                })
            };
            for row in state.written().rows().filter(|row| quiet(row.range)) {
                let real = crc_of(&memory, row.range);
                prop_assert!(real.is_some(), "row {} covers bytes that did not land", row.range);
                prop_assert!(row.crc32c.is_none() || row.crc32c == real);
            }
        }
    }
}

fn shares_bytes(a: &[Cut], b: &[Cut]) -> bool {
    a.iter()
        .any(|x| b.iter().any(|y| x.range.overlaps(y.range)))
}

fn pick(state: &PutState, flights: &[Flight], n: usize, running: bool) -> Option<usize> {
    let fitting: Vec<usize> = (0..flights.len())
        .filter(|&at| state.is_running(flights[at].id) == Ok(running))
        .collect();
    (!fitting.is_empty()).then(|| fitting[n % fitting.len()])
}

#[test]
fn stale_rows_take_the_checksum_of_the_stored_bytes() {
    let mut state = PutState::new(SIZE, 8);
    for (ranges, crc) in [((0, 32), 7), ((8, 8), 9)] {
        let cuts = cut_ranges(SIZE, [ranges].into_iter()).expect("inside");
        let (id, running) = state.admit(&cuts).expect("open");
        assert!(running);
        state.finish(id, |_| Ok(Some(crc)));
    }
    let stale: Vec<ByteRange> = state.written().stale().collect();
    assert_eq!(stale.len(), 2, "both sides of the rewrite");
    for range in stale {
        assert!(state.written_mut().set_crc(range, 1));
    }
    assert!(state.written().rows().all(|row| row.crc32c.is_some()));
}

// contract: session-5, session-6
#[test]
fn a_settled_session_stays_settled() {
    let cuts = cut_ranges(SIZE, [(0, 32)].into_iter()).expect("inside");
    for (phase, refused) in [
        (Phase::Committed, Closed::Ended),
        (Phase::Revoked, Closed::Ended),
        (Phase::Superseded, Closed::Superseded),
    ] {
        let mut state = PutState::new(SIZE, 8);
        state.seal().expect("open");
        state.seal().expect("sealing again is harmless");
        state.settle(phase);
        state.settle(Phase::Revoked);
        state.reopen();
        assert_eq!(state.phase(), phase);
        assert_eq!(state.admit(&cuts), Err(refused));
        assert_eq!(state.seal(), Err(refused));
    }
}

// contract: session-14
#[test]
fn a_superseded_session_lets_its_transfers_drain() {
    let mut state = PutState::new(SIZE, 8);
    let cuts = cut_ranges(SIZE, [(0, 32)].into_iter()).expect("inside");
    let (id, _) = state.admit(&cuts).expect("open");
    let (waiting, running) = state.admit(&cuts).expect("open");
    assert!(!running);
    state.settle(Phase::Superseded);
    assert!(!state.is_idle(), "bytes may still move");
    assert_eq!(state.is_running(waiting), Err(Closed::Superseded));
    state.finish(id, |_| Err(()));
    assert!(state.is_idle());
}
