//! The state of one put session: what was written, what is under way, and whether it may go on.
//!
//! Pure and synchronous; the shell serialises calls on it and moves the bytes. A *call* is the part of
//! one range call that concerns this session. Its life is `admit` → (`try_run`, while an earlier call
//! writes to the same bytes) → transfers → `finish`. Overlapping calls run one after the other, in
//! the order in which they were admitted, so the later one wins and every row's checksum is that of
//! the stored bytes (contract session-15).
//!
//! ```text
//! Open ⇄ Sealed → Committed | Revoked        Superseded from Open and Sealed
//! ```
//!
//! Sealing refuses new calls and drops those that wait; those that run are waited for
//! ([`PutState::is_idle`]). A commit that finds unwritten bytes reopens the session: the bytes can be
//! written, and the end repeated. A failed write leaves its bytes unwritten, so it needs no mark of
//! its own, unless nobody knows whether the owner of the memory still carries it out. Such a write
//! could land at any time, on top of whatever is written later: the session is *in doubt* for good,
//! takes no ranges and can't be committed, and its revoke must say so.
//!
//! A session with a table for early readers *publishes* each row that has landed with a checksum, unless a later call is
//! already waiting to write there. What is published stays as it is: calls that would write there are refused.
//! So what a reader has seen is what will be committed, if anything is.

use layercake_protocol::early::EarlyRecord;
use layercake_protocol::header::WrittenRanges;
use layercake_protocol::range::{ByteRange, RangeSet};
use smallvec::SmallVec;

use super::cut::Cut;

/// Where a put session is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Takes ranges.
    Open,
    /// An end or a revoke is under way, or was and can be repeated.
    Sealed,
    /// The object is readable.
    Committed,
    /// The reservation was given back.
    Revoked,
    /// The master gave the reservation to somebody else, or gave it up.
    Superseded,
}

/// A session does not take ranges (any more).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    /// It is sealed, or over.
    Ended,
    /// It was taken away.
    Superseded,
    /// It is in doubt.
    Unconfirmed,
    /// These bytes were published.
    Published(ByteRange),
}

/// Names a call within its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallId(u64);

#[derive(Debug, Default)]
struct Call {
    id: u64,
    running: bool,
    /// Ascending and disjoint; never empty.
    ranges: Vec<ByteRange>,
}

impl Call {
    fn overlaps(&self, other: &Self) -> bool {
        if !overlap(self.span(), other.span()) {
            return false;
        }
        let (mut a, mut b) = (
            self.ranges.iter().peekable(),
            other.ranges.iter().peekable(),
        );
        while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
            if x.overlaps(**y) {
                return true;
            }
            if x.end() <= y.start() {
                a.next()
            } else {
                b.next()
            };
        }
        false
    }

    fn span(&self) -> (u64, u64) {
        match (self.ranges.first(), self.ranges.last()) {
            (Some(first), Some(last)) => (first.start(), last.end()),
            _ => (0, 0),
        }
    }
}

/// Rows for early readers.
#[derive(Debug, Default)]
struct Early {
    /// How many the table takes; none without a table.
    slots: u32,
    /// How many were published.
    used: u32,
    published: RangeSet,
}

impl Early {
    /// Which of these bytes were published before.
    fn published(&self, range: ByteRange) -> bool {
        !self.published.is_empty() && self.published.missing(range).next() != Some(range)
    }

    /// Takes a row in, if there is room for it.
    fn publish(&mut self, range: ByteRange, crc32c: u32) -> Option<EarlyRecord> {
        if self.used == self.slots {
            return None;
        }
        self.used += 1;
        self.published.insert(range);
        Some(EarlyRecord { range, crc32c })
    }
}

/// What a call's end brings.
#[derive(Debug, Default)]
pub(crate) struct Finished {
    /// The call had run.
    pub(crate) ran: bool,
    /// What is to be published now: the records of consecutive slots. The session is busy until
    /// [`release`](PutState::release) says that this has ended.
    pub(crate) publish: Publish,
}

/// Records for consecutive slots of a session's table.
#[derive(Debug, Default)]
pub(crate) struct Publish {
    pub(crate) first_slot: u32,
    pub(crate) records: Vec<EarlyRecord>,
}

fn overlap(a: (u64, u64), b: (u64, u64)) -> bool {
    a.0 < b.1 && b.0 < a.1
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct PutState {
    size: u64,
    phase: Phase,
    written: WrittenRanges,
    /// In the order of admission.
    calls: SmallVec<[Call; 1]>,
    /// Transfers besides those of calls: of the header, and of what is published.
    holds: u32,
    early: Early,
    in_doubt: bool,
    /// The vector of a finished call, for the next one.
    spare: Vec<ByteRange>,
    next_call: u64,
}

impl PutState {
    /// A session on an object of `size` bytes whose header holds `rows` rows.
    pub(crate) fn new(size: u64, rows: usize) -> Self {
        Self {
            size,
            phase: Phase::Open,
            written: WrittenRanges::new(rows),
            calls: SmallVec::new(),
            holds: 0,
            early: Early::default(),
            in_doubt: false,
            spare: Vec::new(),
            next_call: 0,
        }
    }

    /// A header with so many rows, and a table of so many slots for early readers, was reserved. Nothing was written yet.
    pub(crate) fn reserved(&mut self, rows: usize, slots: u32) {
        self.written = WrittenRanges::new(rows);
        self.early.slots = slots;
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    /// Takes a call in. `true`: it may run at once; else when [`try_run`](Self::try_run) says so.
    pub(crate) fn admit(&mut self, cuts: &[Cut]) -> Result<(CallId, bool), Closed> {
        self.check_open()?;
        if let Some(cut) = cuts.iter().find(|cut| self.early.published(cut.range)) {
            return Err(Closed::Published(cut.range));
        }
        let mut call = Call {
            id: self.next_call,
            running: true,
            ranges: std::mem::take(&mut self.spare),
        };
        call.ranges.extend(cuts.iter().map(|cut| cut.range));
        call.running = !self.calls.iter().any(|earlier| earlier.overlaps(&call));
        self.next_call += 1;
        let answer = (CallId(call.id), call.running);
        self.calls.push(call);
        Ok(answer)
    }

    /// Lets a call that had to wait run, if it may: its transfers must follow at once then.
    pub(crate) fn try_run(&mut self, id: CallId) -> Result<bool, Closed> {
        let Some(at) = self.calls.iter().position(|call| call.id == id.0) else {
            return Err(self.check_open().err().unwrap_or(Closed::Ended));
        };
        let (earlier, rest) = self.calls.split_at_mut(at);
        let call = &mut rest[0];
        call.running |= !earlier.iter().any(|earlier| earlier.overlaps(call));
        Ok(call.running)
    }

    /// Ends a call: `outcome` gives, range by range in ascending order, its checksum if it landed.
    /// A call that never ran is taken out, and nothing is noted.
    pub(crate) fn finish(
        &mut self,
        id: CallId,
        mut outcome: impl FnMut(usize) -> Result<Option<u32>, ()>,
    ) -> Finished {
        let mut finished = Finished::default();
        let Some(at) = self.calls.iter().position(|call| call.id == id.0) else {
            return finished;
        };
        let mut call = self.calls.remove(at);
        finished.ran = call.running;
        finished.publish.first_slot = self.early.used;
        if call.running {
            for (index, &range) in call.ranges.iter().enumerate() {
                match outcome(index) {
                    Ok(crc) => {
                        self.written.record(range, crc);
                        let record = crc.and_then(|crc| self.publish(range, crc));
                        finished.publish.records.extend(record);
                    }
                    Err(()) => self.written.forget(range),
                }
            }
        }
        if !finished.publish.records.is_empty() {
            self.holds += 1;
        }
        call.ranges.clear();
        self.spare = call.ranges;
        finished
    }

    /// Publishes a row, unless a call is about to write there, or readers need not care any more.
    fn publish(&mut self, range: ByteRange, crc32c: u32) -> Option<EarlyRecord> {
        let open = self.early.slots > 0 && self.phase == Phase::Open && !self.in_doubt;
        let mut waiting = self.calls.iter().flat_map(|call| &call.ranges);
        if !open || waiting.any(|waiting| waiting.overlaps(range)) {
            return None;
        }
        self.early.publish(range, crc32c)
    }

    /// Notes that bytes of the header are about to move. Only while an end has sealed the session: one that
    /// was settled since may be somebody else's memory.
    pub(crate) fn hold(&mut self) -> Result<(), Closed> {
        match self.phase {
            Phase::Sealed => self.check_confirmed()?,
            Phase::Superseded => return Err(Closed::Superseded),
            Phase::Open | Phase::Committed | Phase::Revoked => return Err(Closed::Ended),
        }
        self.holds += 1;
        Ok(())
    }

    /// Notes that they have ended.
    pub(crate) fn release(&mut self) {
        self.holds = self.holds.saturating_sub(1);
    }

    /// Notes that nobody knows whether a write that ended is still carried out.
    pub(crate) fn doubt(&mut self) {
        self.in_doubt = true;
        self.calls.retain(|call| call.running);
    }

    /// Whether every write that ended is known to have ended.
    pub(crate) fn check_confirmed(&self) -> Result<(), Closed> {
        if self.in_doubt {
            Err(Closed::Unconfirmed)
        } else {
            Ok(())
        }
    }

    /// Whether no call runs: no byte of the session moves, or will after sealing.
    pub(crate) fn is_idle(&self) -> bool {
        self.holds == 0 && !self.calls.iter().any(|call| call.running)
    }

    /// Refuses calls from here on. Repeating it is harmless.
    pub(crate) fn seal(&mut self) -> Result<(), Closed> {
        match self.phase {
            Phase::Open | Phase::Sealed => {
                self.close(Phase::Sealed);
                Ok(())
            }
            Phase::Committed | Phase::Revoked => Err(Closed::Ended),
            Phase::Superseded => Err(Closed::Superseded),
        }
    }

    /// Takes ranges again, after an end that the session itself refused.
    pub(crate) fn reopen(&mut self) {
        if self.phase == Phase::Sealed {
            self.phase = Phase::Open;
        }
    }

    /// Notes the master's answer. A session that is over stays as it is: `false`.
    pub(crate) fn settle(&mut self, phase: Phase) -> bool {
        let going = matches!(self.phase, Phase::Open | Phase::Sealed);
        if going {
            self.close(phase);
        }
        going
    }

    /// Whether every byte was written, and the header can say so; else the first gap.
    pub(crate) fn check_complete(&self) -> Result<(), ByteRange> {
        match self.written.missing(self.size).next() {
            Some(gap) => Err(gap),
            None => Ok(()),
        }
    }

    /// What was written.
    pub(crate) fn written(&self) -> &WrittenRanges {
        &self.written
    }

    /// What was written, to give stale rows their checksum.
    pub(crate) fn written_mut(&mut self) -> &mut WrittenRanges {
        &mut self.written
    }

    fn check_open(&self) -> Result<(), Closed> {
        match self.phase {
            Phase::Open => self.check_confirmed(),
            Phase::Superseded => Err(Closed::Superseded),
            Phase::Sealed | Phase::Committed | Phase::Revoked => Err(Closed::Ended),
        }
    }

    fn close(&mut self, phase: Phase) {
        self.phase = phase;
        self.calls.retain(|call| call.running);
    }
}

#[cfg(test)]
#[path = "put_state_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "put_state_early_tests.rs"]
mod early_tests;
