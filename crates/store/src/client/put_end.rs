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
    open: Vec<(usize, PutSession)>,
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
            ending.check_complete(&core);
            ending.refresh(&core).await;
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
            for (_, session) in &ending.open {
                session.shared().set_intent(Intent::Revoke);
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
                    ending.open.push((index, session));
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
        for (_, session) in &self.open {
            // What moves does so by itself: a session that is idle at the deadline is found to be.
            results.push(session.shared().idle_until(deadline, drain).await);
        }
        self.keep(core, results);
    }

    /// Refuses sessions in doubt; refuses and reopens those with bytes that nobody wrote.
    fn check_complete(&mut self, core: &Core) {
        let results = self.open.iter().map(|(_, session)| {
            let put = session.shared();
            put.check_confirmed()?;
            put.check_complete().inspect_err(|_| put.reopen())
        });
        let results = results.collect();
        self.keep(core, results);
    }

    async fn refresh(&mut self, core: &Core) {
        let puts: Vec<Arc<PutShared>> = self.shared().cloned().collect();
        let results = refresh_stale(core, &puts).await;
        self.keep(core, results);
    }

    fn shared(&self) -> impl Iterator<Item = &Arc<PutShared>> {
        self.open.iter().map(|(_, session)| session.shared())
    }

    /// Writes the headers that were not written by an earlier attempt.
    async fn headers(&mut self, core: &Core) {
        let unwritten = self.shared().filter(|put| put.intent() != Intent::End);
        let puts: Vec<Arc<PutShared>> = unwritten.cloned().collect();
        let mut written = write_headers(core, &puts).await.into_iter();
        let results = self
            .open
            .iter()
            .map(|(_, session)| match session.shared().intent() {
                Intent::End => Ok(()),
                Intent::Revoke => written.next().unwrap_or(Err(StoreError::UnknownSession)),
            });
        let results: Vec<_> = results.collect();
        for ((_, session), result) in self.open.iter().zip(&results) {
            if result.is_ok() {
                session.shared().set_intent(Intent::End);
            }
        }
        self.keep(core, results);
    }

    /// Asks the master.
    async fn settle(mut self, core: &Core, intent: Intent) -> Vec<Result<(), EndError>> {
        if !self.open.is_empty() {
            let objects = self
                .open
                .iter()
                .map(|(_, session)| session.shared().object.clone());
            let objects: Vec<_> = objects.collect();
            let answer = match intent {
                Intent::End => core.link.put_end(&objects).await,
                Intent::Revoke => core.link.put_revoke(&objects).await,
            };
            match answer {
                Ok(results) => {
                    for ((index, session), result) in self.open.drain(..).zip(results) {
                        let phase = phase_after(intent, &result);
                        self.answers[index] = Some(settled(core, session, phase, result));
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
        let open = std::mem::take(&mut self.open);
        for ((index, session), result) in open.into_iter().zip(results) {
            match result {
                Ok(()) => self.open.push((index, session)),
                Err(error) => self.answers[index] = Some(Err(again(core, error, session))),
            }
        }
    }
}

/// Gives a session back, and remembers it for a start of its key.
fn again(core: &Core, error: StoreError, session: PutSession) -> EndError {
    core.finisher.left_sealed(session.shared());
    EndError::again(error, session)
}

/// What the master's answer means for a session.
fn settled(
    core: &Core,
    session: PutSession,
    phase: Option<Phase>,
    result: Result<(), layercake_protocol::error::Refusal>,
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
