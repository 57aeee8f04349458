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

use layercake_protocol::header::WrittenRanges;
use layercake_protocol::range::ByteRange;
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
    /// Transfers besides those of calls: of the header.
    holds: u32,
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
            in_doubt: false,
            spare: Vec::new(),
            next_call: 0,
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    /// Takes a call in. `true`: it may run at once; else when [`try_run`](Self::try_run) says so.
    pub(crate) fn admit(&mut self, cuts: &[Cut]) -> Result<(CallId, bool), Closed> {
        self.check_open()?;
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
    /// A call that never ran is taken out, and nothing is noted. `true` if it had run.
    pub(crate) fn finish(
        &mut self,
        id: CallId,
        mut outcome: impl FnMut(usize) -> Result<Option<u32>, ()>,
    ) -> bool {
        let Some(at) = self.calls.iter().position(|call| call.id == id.0) else {
            return false;
        };
        let mut call = self.calls.remove(at);
        if call.running {
            for (index, &range) in call.ranges.iter().enumerate() {
                match outcome(index) {
                    Ok(crc) => self.written.record(range, crc),
                    Err(()) => self.written.forget(range),
                }
            }
        }
        call.ranges.clear();
        self.spare = call.ranges;
        call.running
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
