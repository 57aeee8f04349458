//! Ending and revoking put sessions.
//!
//! Both seal first, then wait until no byte of the sessions moves, all against one deadline, then talk to
//! the master, in one call for all sessions. An end in between refuses what has gaps, takes the checksums of rows that a
//! rewrite cut from the stored bytes, and writes the header, which a host needs to know what it holds,
//! to every replica.
//!
//! What may be repeated comes back: [`EndError`] holds the session, sealed. Dropping it leaves the rest
//! to the background: once the header is written that is the end, repeated until the master answers,
//! else a revoke. A start of the same key does not wait for the drop.

use std::sync::Arc;

use layercake_protocol::error::Refusal;
use thiserror::Error;
use tokio::time::Instant;

use super::StoreClient;
use super::core::Core;
use super::finisher::phase_after;
use super::headers::write_headers;
use super::refresh::refresh_stale;
use crate::error::StoreError;
use crate::session::put_state::Phase;
use crate::session::{Intent, PutSession, PutShared};

/// An end or a revoke that did not come about.
#[derive(Debug, Error)]
#[error("{error}")]
pub struct EndError {
    /// What is wrong.
    #[source]
    pub error: StoreError,
    /// The session, if there is something left to do with it: for [`StoreError::Incomplete`] it is open,
    /// the bytes can be written and the end repeated; else it is sealed, and the call can be
    /// repeated or the session revoked. `None`: it is over.
    pub session: Option<PutSession>,
}

impl EndError {
    fn over(error: StoreError) -> Self {
        Self {
            error,
            session: None,
        }
    }

    fn again(error: StoreError, session: PutSession) -> Self {
        Self {
            error,
            session: Some(session),
        }
    }
}

/// One answer per session, and the sessions that have none yet.
#[derive(Default)]
struct Ending {
    answers: Vec<Option<Result<(), EndError>>>,
    open: Vec<Open>,
}

/// A session that has no answer yet.
struct Open {
    /// Of its answer.
    index: usize,
    session: PutSession,
    header_due: bool,
}

impl Open {
    fn put(&self) -> &PutShared {
        self.session.shared()
    }
}

impl StoreClient {
    /// Commits objects that are fully written. The answers align with `sessions`.
    ///
    /// Repeating an end whose answer was lost is harmless: it is applied once.
    pub async fn end_puts(&self, sessions: Vec<PutSession>) -> Vec<Result<(), EndError>> {
        let core = Arc::clone(self.core());
        let work = async move {
            let mut ending = Ending::seal(sessions);
            ending.drain(&core).await;
            if ending.check(&core) {
                ending.refresh(&core).await;
            }
            ending.headers(&core).await;
            ending.settle(&core, Intent::End).await
        };
        self.core().see_through(work).await
    }

    /// Gives reservations back: their room is free at once. The answers align with `sessions`.
    pub async fn revoke_puts(&self, sessions: Vec<PutSession>) -> Vec<Result<(), EndError>> {
        let core = Arc::clone(self.core());
        let work = async move {
            let mut ending = Ending::seal(sessions);
            for open in &ending.open {
                open.put().set_intent(Intent::Revoke);
            }
            ending.drain(&core).await;
            ending.settle(&core, Intent::Revoke).await
        };
        self.core().see_through(work).await
    }
}

impl Ending {
    fn seal(sessions: Vec<PutSession>) -> Self {
        let mut ending = Self::default();
        for (index, session) in sessions.into_iter().enumerate() {
            match session.shared().seal() {
                Ok(()) => {
                    ending.answers.push(None);
                    ending.open.push(Open {
                        index,
                        session,
                        header_due: false,
                    });
                }
                Err(error) => ending.answers.push(Some(Err(EndError::over(error)))),
            }
        }
        ending
    }

    /// Waits until nothing moves.
    async fn drain(&mut self, core: &Core) {
        let drain = core.config.drain;
        let deadline = Instant::now() + drain;
        let mut results = Vec::with_capacity(self.open.len());
        for open in &self.open {
            // What moves does so by itself: a session that is idle at the deadline is found to be.
            results.push(open.put().idle_until(deadline, drain).await);
        }
        self.keep(core, results);
    }

    /// Refuses sessions in doubt; refuses and reopens those with bytes that nobody wrote. Tells whether any has rows
    /// that need the checksums of stored bytes.
    fn check(&mut self, core: &Core) -> bool {
        let mut stale = false;
        let results = self.open.iter_mut().map(|open| {
            let left = open.put().left_to_do()?;
            open.header_due = left.header;
            stale |= left.refresh;
            Ok(())
        });
        let results = results.collect();
        self.keep(core, results);
        stale
    }

    async fn refresh(&mut self, core: &Core) {
        let puts: Vec<&PutShared> = self.open.iter().map(Open::put).collect();
        let results = refresh_stale(core, &puts).await;
        self.keep(core, results);
    }

    /// Writes the headers that were not written by an earlier attempt.
    async fn headers(&mut self, core: &Core) {
        let due = self.open.iter().filter(|open| open.header_due);
        let puts: Vec<&PutShared> = due.map(Open::put).collect();
        let mut written = write_headers(core, &puts).await.into_iter();
        let results = self.open.iter().map(|open| {
            if open.header_due {
                written.next().unwrap_or(Err(StoreError::UnknownSession))
            } else {
                Ok(())
            }
        });
        let results = results.collect();
        self.keep(core, results);
    }

    /// Asks the master.
    async fn settle(mut self, core: &Core, intent: Intent) -> Vec<Result<(), EndError>> {
        if !self.open.is_empty() {
            let objects = self.open.iter().map(|open| open.put().object.clone());
            let objects: Vec<_> = objects.collect();
            let answer = match intent {
                Intent::End => core.link.put_end(&objects).await,
                Intent::Revoke => core.link.put_revoke(&objects).await,
            };
            match answer {
                Ok(results) => {
                    if matches!(intent, Intent::End) {
                        note_committed(core, &self.open, &results);
                    }
                    for (open, result) in self.open.drain(..).zip(results) {
                        let phase = phase_after(intent, &result);
                        self.answers[open.index] = Some(settled(core, open.session, phase, result));
                    }
                }
                Err(error) => {
                    let results = self.open.iter().map(|_| Err(error.clone())).collect();
                    self.keep(core, results);
                }
            }
        }
        let answers = self.answers.into_iter();
        answers
            .map(|answer| answer.unwrap_or_else(|| Err(EndError::over(StoreError::UnknownSession))))
            .collect()
    }

    /// Answers for the open sessions whose result is an error, giving the session back.
    fn keep(&mut self, core: &Core, results: Vec<Result<(), StoreError>>) {
        if results.iter().all(Result::is_ok) {
            return;
        }
        let open = std::mem::take(&mut self.open);
        for (open, result) in open.into_iter().zip(results) {
            match result {
                Ok(()) => self.open.push(open),
                Err(error) => {
                    self.answers[open.index] = Some(Err(again(core, error, open.session)));
                }
            }
        }
    }
}

/// Gives a session back, and remembers it for a start of its key.
fn again(core: &Core, error: StoreError, session: PutSession) -> EndError {
    core.finisher.left_sealed(session.shared());
    EndError::again(error, session)
}

/// Notes where committed objects lie. Of several replicas the master may name another one first.
fn note_committed(core: &Core, open: &[Open], results: &[Result<(), Refusal>]) {
    let committed = open
        .iter()
        .zip(results)
        .filter(|(_, result)| result.is_ok());
    let single = committed.filter_map(|(open, _)| {
        let put = open.put();
        match &put.places[..] {
            [place] => Some((&put.object.key, place, put.size)),
            _ => None,
        }
    });
    core.hints.note(&core.engine, single);
}

/// What the master's answer means for a session.
fn settled(
    core: &Core,
    session: PutSession,
    phase: Option<Phase>,
    result: Result<(), Refusal>,
) -> Result<(), EndError> {
    match phase {
        Some(phase) => {
            core.settled(session.shared(), phase);
            result.map_err(|refusal| EndError::over(refusal.into()))
        }
        None => match result {
            Ok(()) => Ok(()),
            Err(refusal) => Err(again(core, refusal.into(), session)),
        },
    }
}
