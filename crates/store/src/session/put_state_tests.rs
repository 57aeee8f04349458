//! The put state against a byte-by-byte model of the memory that it describes.

use proptest::prelude::*;

use super::super::cut::cut_ranges;
use super::*;

pub(super) const SIZE: u64 = 32;

/// What the stored bytes are: the last writer's mark, or nothing that anyone may rely on.
pub(super) type Memory = [Option<u8>; 32];

#[derive(Clone, Debug)]
pub(super) enum Step {
    /// A call with these ranges starts.
    Write(Vec<(u64, u64)>),
    /// The n-th call that waits tries to run.
    Run(usize),
    /// The n-th call that runs ends; its pieces landed where the bits are set.
    Finish(usize, u32),
    /// The n-th call that waits is given up.
    GiveUp(usize),
    /// An end is tried.
    End,
}

pub(super) fn steps() -> impl Strategy<Value = Vec<Step>> {
    let write = prop::collection::vec((0_u64..28, 1_u64..5), 1..4).prop_map(Step::Write);
    let big = (0_u64..8, 20_u64..25).prop_map(|range| Step::Write(vec![range]));
    let step = prop_oneof![
        4 => write,
        3 => big,
        3 => (0..8_usize).prop_map(Step::Run),
        2 => (0..8_usize, Just(u32::MAX)).prop_map(|(n, bits)| Step::Finish(n, bits)),
        2 => (0..8_usize, any::<u32>()).prop_map(|(n, bits)| Step::Finish(n, bits)),
        1 => (0..8_usize).prop_map(Step::GiveUp),
        1 => Just(Step::End),
    ];
    prop::collection::vec(step, 1..60)
}

pub(super) struct Flight {
    pub(super) id: CallId,
    pub(super) cuts: Vec<Cut>,
    pub(super) mark: u8,
    pub(super) running: bool,
}

pub(super) fn cuts_of(ranges: impl ExactSizeIterator<Item = (u64, u64)>) -> Vec<Cut> {
    let mut cuts = Vec::new();
    cut_ranges(SIZE, ranges, &mut cuts).expect("inside");
    cuts
}

pub(super) fn at(byte: u64) -> usize {
    usize::try_from(byte).expect("small")
}

pub(super) fn crc_of(memory: &Memory, range: ByteRange) -> Option<u32> {
    let bytes: Option<Vec<u8>> = memory[at(range.start())..at(range.end())]
        .iter()
        .copied()
        .collect();
    bytes.map(|bytes| crc32c::crc32c(&bytes))
}

/// Lands a finished call's pieces in the model and in the state. Gives what is published.
pub(super) fn land(
    state: &mut PutState,
    memory: &mut Memory,
    flight: &Flight,
    bits: u32,
) -> Publish {
    for (index, cut) in flight.cuts.iter().enumerate() {
        let landed = bits & (1 << (index % 32)) != 0;
        memory[at(cut.range.start())..at(cut.range.end())].fill(landed.then_some(flight.mark));
    }
    let cuts = &flight.cuts;
    state
        .finish(flight.id, |index| {
            if bits & (1 << (index % 32)) == 0 {
                return Err(());
            }
            let bytes = vec![flight.mark; at(cuts[index].range.len())];
            Ok(Some(crc32c::crc32c(&bytes)))
        })
        .publish
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
                    let cuts = cuts_of(ranges.into_iter());
                    let (id, running) = state.admit(&cuts).expect("open");
                    let free = is_free(&flights, &cuts);
                    prop_assert_eq!(running, free, "a call waits exactly for those before it");
                    mark = mark.wrapping_add(1);
                    flights.push(Flight { id, cuts, mark, running });
                }
                Step::Run(n) => {
                    if let Some(at) = pick(&flights, n, false) {
                        let free = is_free(&flights[..at], &flights[at].cuts);
                        prop_assert_eq!(state.try_run(flights[at].id), Ok(free));
                        flights[at].running = free;
                    }
                }
                Step::Finish(n, bits) => {
                    if let Some(at) = pick(&flights, n, true) {
                        let flight = flights.remove(at);
                        land(&mut state, &mut memory, &flight, bits);
                    }
                }
                Step::GiveUp(n) => {
                    if let Some(at) = pick(&flights, n, false) {
                        let flight = flights.remove(at);
                        prop_assert!(!state.finish(flight.id, |_| Ok(None)).ran, "it never ran");
                    }
                }
                Step::End => {
                    state.seal().expect("open");
                    for flight in flights.extract_if(.., |flight| !flight.running) {
                        prop_assert_eq!(state.try_run(flight.id), Err(Closed::Ended));
                    }
                    let none = cuts_of([(0, 1)].into_iter());
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
            let running = flights.iter().filter(|flight| flight.running);
            let busy: Vec<Cut> = running.flat_map(|flight| flight.cuts.clone()).collect();
            let quiet = |range: ByteRange| busy.iter().all(|cut| !cut.range.overlaps(range));
            for row in state.written().rows().filter(|row| quiet(row.range)) {
                let real = crc_of(&memory, row.range);
                prop_assert!(real.is_some(), "row {} covers bytes that did not land", row.range);
                prop_assert!(row.crc32c.is_none() || row.crc32c == real);
            }
        }
    }
}

/// Whether none of `earlier` writes to the bytes of `cuts`.
fn is_free(earlier: &[Flight], cuts: &[Cut]) -> bool {
    let taken = |cut: &Cut| cuts.iter().any(|other| other.range.overlaps(cut.range));
    !earlier.iter().any(|flight| flight.cuts.iter().any(taken))
}

pub(super) fn pick(flights: &[Flight], n: usize, running: bool) -> Option<usize> {
    let fitting = (0..flights.len()).filter(|&at| flights[at].running == running);
    let fitting: Vec<usize> = fitting.collect();
    (!fitting.is_empty()).then(|| fitting[n % fitting.len()])
}

#[test]
fn stale_rows_take_the_checksum_of_the_stored_bytes() {
    let mut state = PutState::new(SIZE, 8);
    for (ranges, crc) in [((0, 32), 7), ((8, 8), 9)] {
        let cuts = cuts_of([ranges].into_iter());
        let (id, running) = state.admit(&cuts).expect("open");
        assert!(running);
        state.finish(id, |_| Ok(Some(crc)));
    }
    let cut: Vec<ByteRange> = state.written().stale().collect();
    assert_eq!(cut.len(), 2, "both sides of the rewrite");
    for range in cut {
        assert!(state.written_mut().set_crc(range, 1));
    }
    assert!(state.written().rows().all(|row| row.crc32c.is_some()));
}

// contract: session-5, session-6
#[test]
fn a_settled_session_stays_settled() {
    let cuts = cuts_of([(0, 32)].into_iter());
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

// contract: session-3
#[test]
fn a_session_in_doubt_takes_nothing_and_commits_nothing() {
    let mut state = PutState::new(SIZE, 8);
    let cuts = cuts_of([(0, 32)].into_iter());
    let (id, _) = state.admit(&cuts).expect("open");
    let (waiting, running) = state.admit(&cuts).expect("open");
    assert!(!running);
    state.doubt();
    state.finish(id, |_| Err(()));
    assert!(state.is_idle());
    assert_eq!(state.try_run(waiting), Err(Closed::Unconfirmed));
    assert_eq!(
        state.admit(&cuts),
        Err(Closed::Unconfirmed),
        "nothing heals it"
    );
    state.seal().expect("it can be revoked");
    assert_eq!(state.check_confirmed(), Err(Closed::Unconfirmed));
    assert_eq!(state.hold(), Err(Closed::Unconfirmed));
    state.reopen();
    assert_eq!(state.admit(&cuts), Err(Closed::Unconfirmed));
    assert!(state.settle(Phase::Revoked));
}

// contract: session-14
#[test]
fn a_header_moves_only_while_an_end_has_sealed_the_session() {
    let mut state = PutState::new(SIZE, 8);
    assert_eq!(state.hold(), Err(Closed::Ended), "not sealed yet");
    state.seal().expect("open");
    state.hold().expect("sealed");
    assert!(!state.is_idle(), "the header is under way");
    state.settle(Phase::Superseded);
    assert!(!state.is_idle(), "and goes on being so");
    state.release();
    assert!(state.is_idle());
    assert_eq!(state.hold(), Err(Closed::Superseded));
    assert!(state.is_idle(), "a refused one is not counted");
    for (phase, refused) in [
        (Phase::Committed, Closed::Ended),
        (Phase::Revoked, Closed::Ended),
        (Phase::Superseded, Closed::Superseded),
    ] {
        let mut state = PutState::new(SIZE, 8);
        state.seal().expect("open");
        state.settle(phase);
        assert_eq!(state.hold(), Err(refused));
    }
}

// contract: session-14
#[test]
fn a_superseded_session_lets_its_transfers_drain() {
    let mut state = PutState::new(SIZE, 8);
    let cuts = cuts_of([(0, 32)].into_iter());
    let (id, _) = state.admit(&cuts).expect("open");
    let (waiting, running) = state.admit(&cuts).expect("open");
    assert!(!running);
    state.settle(Phase::Superseded);
    assert!(!state.is_idle(), "bytes may still move");
    assert_eq!(state.try_run(waiting), Err(Closed::Superseded));
    state.finish(id, |_| Err(()));
    assert!(state.is_idle());
}
