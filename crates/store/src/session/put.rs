//! The state of a put session, behind its lock.

use std::sync::{Arc, Weak};
use std::time::Duration;

use layercake_protocol::early::EarlyTable;
use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::header::{Checksums, HeaderFields, HeaderState, WrittenRanges};
use layercake_protocol::ids::{Epoch, Generation};
use layercake_protocol::key::Tenant;
use layercake_protocol::replica::{ObjectRef, PutStart};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::cut::Cut;
use super::put_state::{CallId, Closed, Finished, Phase, Publish, PutState};
use super::source::Source;
use crate::client::{Places, Round};
use crate::error::StoreError;

/// What happens to a session that its owner lets go of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Intent {
    /// Give the reservation back.
    Revoke,
    /// The header is written and the master may have committed: ask again until it answers.
    End,
}

/// What an end has to do before it asks the master.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeftToDo {
    /// Rows need checksums of the stored bytes.
    pub(crate) refresh: bool,
    /// The header is to be written.
    pub(crate) header: bool,
}

/// How a session stands when its owner lets go of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Abandoned {
    /// Its intent can be carried out at once.
    Idle,
    /// The end of its last transfer says when that is so.
    Busy,
    /// It is over.
    Over,
}

/// What goes into the object's header besides the written ranges.
#[derive(Debug)]
pub(crate) struct PutHeader {
    pub(crate) tenant: Tenant,
    pub(crate) group: Option<String>,
    pub(crate) fingerprint: Option<Fingerprint>,
    pub(crate) layout_id: u64,
    pub(crate) epoch: Epoch,
    pub(crate) prefix_index: u32,
}

/// What the master's answer makes of a session.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) generation: Generation,
    pub(crate) places: Places,
    pub(crate) epoch: Epoch,
    pub(crate) prefix_index: u32,
    /// That every replica's header has room for.
    pub(crate) rows: usize,
    pub(crate) early: Option<EarlyTable>,
}

/// The state of a put session, shared with its transfers under way.
#[derive(Debug)]
pub(crate) struct PutShared {
    pub(crate) object: ObjectRef,
    pub(crate) size: u64,
    /// Every one gets every byte.
    pub(crate) places: Places,
    pub(crate) header: PutHeader,
    /// Where what is written is published.
    pub(crate) early: Option<EarlyTable>,
    state: Mutex<Guarded>,
    /// Told whenever a call ends or the phase changes.
    changed: Notify,
}

#[derive(Debug)]
struct Guarded {
    put: PutState,
    /// What moves bytes of calls. Weak: a round holds its sessions.
    rounds: SmallVec<[Weak<Round>; 1]>,
    /// What calls write from, if its owner may withdraw it.
    source: Option<Source>,
    intent: Intent,
    abandoned: bool,
}

/// What the end of a call means.
#[derive(Debug)]
pub(crate) struct CallEnd {
    /// It makes an abandoned session idle: its intent can be carried out.
    pub(crate) abandoned: bool,
    /// The source of its bytes was withdrawn.
    pub(crate) withdrawn: bool,
    /// What is to be published: [`PutShared::end_publishing`] must follow if that is anything.
    pub(crate) publish: Publish,
}

/// A call that a session has taken in.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) call: CallId,
    /// It may run at once; else when its turn has come.
    pub(crate) ready: bool,
    /// What the session was written from then. The call reads that to its end, whatever the session is written from later.
    pub(crate) source: Option<Source>,
}

fn is_withdrawn(source: Option<&Source>) -> bool {
    source.is_some_and(Source::is_withdrawn)
}

impl PutShared {
    /// What there is to know of a session before the master has reserved anything: nobody may have it yet.
    pub(crate) fn asked(entry: &PutStart, tenant: &Tenant) -> Self {
        Self {
            object: ObjectRef {
                key: entry.key.clone(),
                generation: Generation::NONE,
            },
            size: entry.size,
            places: Places::new(),
            header: PutHeader {
                tenant: tenant.clone(),
                group: entry.group.clone(),
                fingerprint: entry.fingerprint,
                layout_id: entry.layout_id,
                epoch: Epoch::UNSET,
                prefix_index: 0,
            },
            early: None,
            state: Mutex::new(Guarded {
                put: PutState::new(entry.size, 0),
                rounds: SmallVec::new(),
                source: None,
                intent: Intent::Revoke,
                abandoned: false,
            }),
            changed: Notify::new(),
        }
    }

    /// The rest of it. Nothing was written yet.
    pub(crate) fn reserved(&mut self, made: Made) {
        let Made {
            generation,
            places,
            epoch,
            prefix_index,
            rows,
            early,
        } = made;
        self.object.generation = generation;
        self.places = places;
        (self.header.epoch, self.header.prefix_index) = (epoch, prefix_index);
        self.early = early;
        let slots = early.map_or(0, |table| table.slots);
        self.state.get_mut().put.reserved(rows, slots);
    }

    pub(crate) fn admit(&self, cuts: &[Cut]) -> Result<Admitted, StoreError> {
        let mut state = self.state.lock();
        if is_withdrawn(state.source.as_ref()) {
            return Err(StoreError::SourceWithdrawn);
        }
        let (call, ready) = state.put.admit(cuts).map_err(closed)?;
        Ok(Admitted {
            call,
            ready,
            source: state.source.clone(),
        })
    }

    /// Waits until a call that had to wait may run.
    pub(crate) async fn may_run(
        &self,
        call: CallId,
        source: Option<&Source>,
    ) -> Result<(), StoreError> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.try_run(call, source)? {
                return Ok(());
            }
            self.progress(changed).await;
        }
    }

    /// Waits for something that is under way to end, or for another change.
    async fn progress(&self, changed: impl Future<Output = ()>) {
        let round = self.state.lock().rounds.iter().find_map(Weak::upgrade);
        // Nobody else may be looking at the round, so this is not left to others.
        match round {
            Some(round) => round.settled().await,
            None => changed.await,
        }
    }

    /// Notes a round that moves bytes of the session.
    pub(crate) fn flying(&self, round: &Arc<Round>) {
        self.state.lock().rounds.push(Arc::downgrade(round));
        self.changed.notify_waiters();
    }

    /// Lets a call that had to wait run, if it may: its transfers must follow at once then. One whose source was
    /// withdrawn meanwhile is over.
    pub(crate) fn try_run(
        &self,
        call: CallId,
        source: Option<&Source>,
    ) -> Result<bool, StoreError> {
        if is_withdrawn(source) {
            // It never ran, so nothing is noted; others need not wait for it.
            self.state.lock().put.finish(call, |_| Err(()));
            self.changed.notify_waiters();
            return Err(StoreError::SourceWithdrawn);
        }
        self.state.lock().put.try_run(call).map_err(closed)
    }

    /// Ends a call. Nothing of it counts as written if its source was withdrawn.
    pub(crate) fn finish(
        &self,
        call: CallId,
        source: Option<&Source>,
        round: &Round,
        mut outcome: impl FnMut(usize) -> Result<Option<u32>, ()>,
    ) -> CallEnd {
        let ended = {
            let mut state = self.state.lock();
            state
                .rounds
                .retain(|known| !std::ptr::eq(known.as_ptr(), round));
            let withdrawn = is_withdrawn(source);
            let outcome = |at| if withdrawn { Err(()) } else { outcome(at) };
            let Finished { ran, publish } = state.put.finish(call, outcome);
            CallEnd {
                abandoned: ran && state.abandoned && state.put.is_idle(),
                withdrawn,
                publish,
            }
        };
        self.changed.notify_waiters();
        ended
    }

    /// Notes that no byte of what was to be published moves any more. `true` if this makes an abandoned session
    /// idle.
    pub(crate) fn end_publishing(&self) -> bool {
        let ready = {
            let mut state = self.state.lock();
            state.put.release();
            state.abandoned && state.put.is_idle()
        };
        self.changed.notify_waiters();
        ready
    }

    /// Notes that bytes of the header are about to move, and gives it to `encode`. Refused once the session was
    /// settled, or its owner has let go of it: then its memory may be anybody's. Whatever `encode`
    /// answers, [`end_header`](Self::end_header) must follow.
    pub(crate) fn begin_header<T>(
        &self,
        checksums: Checksums,
        encode: impl FnOnce(&HeaderFields<'_>, &WrittenRanges) -> T,
    ) -> Result<T, StoreError> {
        let header = HeaderFields {
            state: HeaderState::Sealed,
            generation: self.object.generation,
            tenant: &self.header.tenant,
            key: &self.object.key,
            group: self.header.group.as_deref(),
            payload_len: self.size,
            fingerprint: self.header.fingerprint,
            layout_id: self.header.layout_id,
            epoch: self.header.epoch,
            prefix_index: self.header.prefix_index,
            checksums,
        };
        let mut state = self.state.lock();
        if state.abandoned {
            return Err(StoreError::SessionEnded);
        }
        state.put.hold().map_err(closed)?;
        Ok(encode(&header, state.put.written()))
    }

    /// Notes that no byte of the header moves any more. If it is `written`, what is left to do is to commit.
    pub(crate) fn end_header(&self, written: bool) {
        {
            let mut state = self.state.lock();
            state.put.release();
            if written {
                state.intent = Intent::End;
            }
        }
        self.changed.notify_waiters();
    }

    /// Notes that nobody knows whether a write that ended is still carried out.
    pub(crate) fn doubt(&self) {
        self.state.lock().put.doubt();
        self.changed.notify_waiters();
    }

    pub(crate) fn seal(&self) -> Result<(), StoreError> {
        let sealed = self.state.lock().put.seal().map_err(closed);
        self.changed.notify_waiters();
        sealed
    }

    /// Notes the master's answer. `false` if the session was over before.
    pub(crate) fn settle(&self, phase: Phase) -> bool {
        let settled = self.state.lock().put.settle(phase);
        self.changed.notify_waiters();
        settled
    }

    /// Whether no byte of the session moves, and, since it is settled, none will.
    pub(crate) fn is_still(&self) -> bool {
        self.state.lock().put.is_idle()
    }

    pub(crate) fn phase(&self) -> Phase {
        self.state.lock().put.phase()
    }

    /// Waits until no transfer of the session is under way.
    pub(crate) async fn idle(&self, deadline: Duration) -> Result<(), StoreError> {
        self.idle_until(Instant::now() + deadline, deadline).await
    }

    /// As [`idle`](Self::idle), for several sessions against one deadline, `after` which time it is.
    pub(crate) async fn idle_until(
        &self,
        deadline: Instant,
        after: Duration,
    ) -> Result<(), StoreError> {
        if self.state.lock().put.is_idle() {
            return Ok(());
        }
        let idle = async {
            loop {
                let changed = self.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if self.state.lock().put.is_idle() {
                    return;
                }
                self.progress(changed).await;
            }
        };
        let ended = tokio::time::timeout_at(deadline, idle).await;
        ended.map_err(|_| StoreError::Timeout {
            what: "the session's transfers",
            after,
        })
    }

    /// What is left to do before the session can be committed. Refused if it is in doubt; one with bytes that
    /// nobody wrote is refused and opened again.
    pub(crate) fn left_to_do(&self) -> Result<LeftToDo, StoreError> {
        let mut state = self.state.lock();
        state.put.check_confirmed().map_err(closed)?;
        if let Err(gap) = state.put.check_complete() {
            state.put.reopen();
            return Err(StoreError::Incomplete {
                first_missing: gap.start(),
            });
        }
        Ok(LeftToDo {
            refresh: state.put.written().stale().next().is_some(),
            header: state.intent != Intent::End,
        })
    }

    /// Runs `f` on the state, for the few steps that only the end of a session takes.
    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut PutState) -> T) -> T {
        f(&mut self.state.lock().put)
    }

    /// What calls write from, from here on.
    pub(crate) fn set_source(&self, source: Source) {
        self.state.lock().source = Some(source);
    }

    /// What happens to the session if it is dropped.
    pub(crate) fn intent(&self) -> Intent {
        self.state.lock().intent
    }

    pub(crate) fn set_intent(&self, intent: Intent) {
        self.state.lock().intent = intent;
    }

    /// Seals a session whose owner let go of it.
    pub(crate) fn abandon(&self) -> Abandoned {
        let abandoned = {
            let mut state = self.state.lock();
            if state.put.seal().is_err() {
                return Abandoned::Over;
            }
            state.abandoned = true;
            if state.put.is_idle() {
                Abandoned::Idle
            } else {
                Abandoned::Busy
            }
        };
        self.changed.notify_waiters();
        abandoned
    }
}

fn closed(closed: Closed) -> StoreError {
    match closed {
        Closed::Ended => StoreError::SessionEnded,
        Closed::Superseded => StoreError::Refused(layercake_protocol::error::Refusal::Superseded),
        Closed::Unconfirmed => StoreError::Unconfirmed,
        Closed::Published(range) => StoreError::Published {
            offset: range.start(),
            len: range.len(),
        },
    }
}
