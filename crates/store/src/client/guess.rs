//! Reading objects while the master is asked for them (`docs/decisions/0022-a-small-get-takes-one-round-trip.md`).
//!
//! Where a read takes a round trip, a get would take two: one to the master, one to the node. A client that has a hint
//! where an object lies sends the read behind the question, and waits for both at once.
//!
//! What was read is used only if the master's answer names the very place, the very version and the size that the
//! read was for. A hint is made only once its object is complete, and a read brings bytes of that version alone or fails: so these are
//! the bytes that a read after the answer would have brought. They lie in memory of the client's own until then.
//!
//! A guess that came to nothing costs nobody time: whatever is not confirmed is not waited for, and is read as if it had never been
//! guessed. One that is confirmed takes the place of the first read, with its time-out and what is learned of
//! the node.

use std::future::poll_fn;
use std::pin::pin;

use layercake_protocol::key::ObjectKey;
use layercake_transport::{Direction, PieceError};
use smallvec::{SmallVec, smallvec};

use super::fanout::{Fanout, Flight};
use super::get_start::Candidate;
use super::hints::Hint;
use super::records::{Answer, Wanted, lost};
use super::scratch::Scratch;
use super::suspects::blames_peer;

/// Bytes that one call guesses.
const MOST: u64 = 256 << 10;

/// Objects of a call for which nothing is allocated.
pub(super) const FEW: usize = 2;

/// The guesses of one call.
pub(super) struct Guess<'a> {
    wanted: Wanted<'a>,
    keys: &'a [ObjectKey],
    made: SmallVec<[Made; FEW]>,
    scratch: Scratch,
    /// `None`: nothing was sent yet.
    flight: Option<Flight<usize>>,
}

/// Candidates, each with the index of its key and the answer of its first read.
pub(super) type Landed = SmallVec<[(usize, Candidate, Answer); FEW]>;

/// One object.
struct Made {
    /// Of its key.
    index: usize,
    hint: Hint,
    /// Where its bytes come to lie.
    at: u64,
    len: u64,
    /// The master named what was read.
    confirmed: bool,
}

impl<'a> Guess<'a> {
    /// Guesses what there are hints for. Nothing is sent yet.
    pub(super) fn make(wanted: Wanted<'a>, keys: &'a [ObjectKey]) -> Option<Self> {
        let core = wanted.core;
        if core.hints.is_empty() {
            return None;
        }
        let suspects = core.unreachable();
        let mut made = SmallVec::new();
        let mut at = 0;
        for (index, hint) in core.hints.find(keys).into_iter().enumerate() {
            let Some(hint) = hint else { continue };
            let len = wanted.first_len(&hint.place, hint.size, &keys[index]);
            if at + len > MOST || suspects.contains(&hint.place.target.segment) {
                continue;
            }
            made.push(Made {
                index,
                hint,
                at,
                len,
                confirmed: false,
            });
            at += len;
        }
        if made.is_empty() {
            return None;
        }
        Some(Self {
            wanted,
            keys,
            made,
            scratch: core.scratch.take(at).ok()?,
            flight: None,
        })
    }

    /// Asks the master, and reads meanwhile.
    pub(super) async fn along<T>(&mut self, ask: impl Future<Output = T>) -> T {
        let mut ask = pin!(ask);
        poll_fn(|cx| {
            let answer = ask.as_mut().poll(cx);
            if answer.is_pending() {
                // The question goes first.
                self.send().poll_along(cx);
            }
            answer
        })
        .await
    }

    fn send(&mut self) -> &mut Flight<usize> {
        self.flight.get_or_insert_with(|| {
            let mut fanout = Fanout::new(Direction::Read, false);
            for (at, made) in self.made.iter().enumerate() {
                let place = &made.hint.place;
                let mut remote = place.header();
                remote.len = made.len;
                if let Ok(local) = self.scratch.slice(made.at, made.len) {
                    fanout.push(&place.target, local, remote, at);
                }
            }
            fanout.submit(&self.wanted.core.engine)
        })
    }

    /// Takes out of `open` what was read where the master says that it lies, each with the answer of its first
    /// read. The others are left to be read.
    pub(super) async fn land(mut self, open: &mut Vec<(usize, Candidate)>) -> Landed {
        let core = self.wanted.core;
        // Both are in the keys' order.
        let mut candidates = open.iter().peekable();
        for made in &mut self.made {
            while candidates.next_if(|(at, _)| *at < made.index).is_some() {}
            let candidate = candidates.next_if(|(at, _)| *at == made.index);
            made.confirmed = candidate.is_some_and(|(_, it)| it.is_where(&made.hint));
            if candidate.is_none() {
                core.hints.forget(&self.keys[made.index]);
            }
        }
        if let Some(flight) = self.flight.take() {
            let mut arrived: SmallVec<[_; FEW]> = smallvec![None; self.made.len()];
            let still = flight
                .land_some(
                    |at| self.made[*at].confirmed,
                    |at, result| arrived[at] = Some(result.map(drop)),
                )
                .await;
            let mut landed = Landed::new();
            let mut rest = std::mem::take(open).into_iter().peekable();
            for (made, arrived) in self.made.iter().zip(arrived) {
                open.extend(std::iter::from_fn(|| {
                    rest.next_if(|(at, _)| *at < made.index)
                }));
                let candidate = rest.peek().map(|(_, candidate)| candidate);
                let answer = self.answer(made, arrived, candidate);
                let counters = &core.counters;
                if matches!(answer, Some(Ok(_))) {
                    counters.guesses_right.one();
                } else {
                    counters.guesses_wrong.one();
                }
                if let Some(answer) = answer
                    && let Some((index, candidate)) = rest.next()
                {
                    landed.push((index, candidate, answer));
                }
            }
            open.extend(rest);
            if still {
                self.scratch.recycle();
            }
            return landed;
        }
        self.scratch.recycle();
        Landed::new()
    }

    /// What the first read of a candidate brought; `None`: it is to be read.
    fn answer(
        &self,
        made: &Made,
        arrived: Option<Result<(), PieceError>>,
        candidate: Option<&Candidate>,
    ) -> Option<Answer> {
        let candidate = candidate.filter(|_| made.confirmed)?;
        match arrived? {
            Ok(()) => {
                let bytes = self.scratch.bytes(made.at, made.len).ok()?;
                // What does not fit is looked at once more.
                self.wanted.record(candidate, &bytes).map(Ok).ok()
            }
            Err(error) if blames_peer(error) => {
                Some(Err(lost(self.wanted.core, candidate.here(), error)))
            }
            Err(_) => None,
        }
    }
}
