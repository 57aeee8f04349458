//! The questions to the master: at the start, and when nothing comes.

use std::sync::Arc;

use layercake_protocol::error::Refusal;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::GetStarted;

use parking_lot::Mutex;

use super::{EarlySession, Progress, Seen, Shared, Stage, Writing, without_checksums};
use crate::client::StoreClient;
use crate::client::get_start::GetOptions;
use crate::client::places::Targets;
use crate::error::StoreError;
use crate::link::StartOptions;

/// What the master says about a key.
enum Found {
    Writing(GetStarted, Arc<Targets>),
    Complete,
    Not(Refusal),
}

impl StoreClient {
    /// Opens a session on each object, whether it is complete or being written by a writer that publishes what it
    /// has. The answers align with `keys`. One call to the master for those that are complete, and one more for
    /// the others.
    ///
    /// An object of a writer that does not publish is refused with [`Refusal::NotReady`]. Without
    /// [`checksums`](crate::ClientConfig::checksums) all are refused.
    pub async fn start_early_gets(
        &self,
        keys: &[ObjectKey],
        options: impl Into<GetOptions>,
    ) -> Vec<Result<EarlySession, StoreError>> {
        let options = options.into();
        if !self.core().config.checksums {
            return keys.iter().map(|_| Err(without_checksums())).collect();
        }
        let mut answers = self.complete(keys, options).await;
        let open = not_ready(&answers);
        let asked: Vec<ObjectKey> = open.iter().map(|at| keys[*at].clone()).collect();
        let mut committed = Vec::new();
        match self.unfinished(&asked, options).await {
            Ok(found) => {
                for (at, found) in open.into_iter().zip(found) {
                    answers[at] = match found {
                        Found::Writing(found, targets) => {
                            session(&keys[at], &found, &targets, options)
                        }
                        Found::Complete => {
                            committed.push(at);
                            Err(Refusal::NotReady.into())
                        }
                        Found::Not(refusal) => Err(refusal.into()),
                    };
                }
            }
            Err(error) => open
                .into_iter()
                .for_each(|at| answers[at] = Err(error.clone())),
        }
        // They were committed between the two questions.
        let asked: Vec<ObjectKey> = committed.iter().map(|at| keys[*at].clone()).collect();
        let opened = self.complete(&asked, options).await;
        for (at, opened) in committed.into_iter().zip(opened) {
            answers[at] = opened;
        }
        answers
    }

    /// How far the writers of objects have come, for a reader that would read what is there. Grants no lease.
    pub async fn progress(&self, keys: &[ObjectKey]) -> Result<Vec<Progress>, StoreError> {
        let found = self.unfinished(keys, GetOptions::default()).await?;
        let progress = found.iter().map(|found| match found {
            Found::Writing(..) => Progress::Publishing,
            Found::Complete => Progress::Complete,
            Found::Not(Refusal::NotFound) => Progress::Absent,
            Found::Not(_) => Progress::Unreadable,
        });
        Ok(progress.collect())
    }

    /// Sessions on complete objects.
    async fn complete(
        &self,
        keys: &[ObjectKey],
        options: GetOptions,
    ) -> Vec<Result<EarlySession, StoreError>> {
        let opened = self.start_gets(keys, options).await.into_iter();
        opened
            .map(|opened| Ok(EarlySession::complete(opened?, options)))
            .collect()
    }

    async fn unfinished(
        &self,
        keys: &[ObjectKey],
        options: GetOptions,
    ) -> Result<Vec<Found>, StoreError> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let unreachable = self.core().unreachable();
        let options = StartOptions {
            recency: options.recency,
            unreachable: &unreachable,
            ..StartOptions::default()
        };
        let found = self.core().link.unfinished(keys, options).await?;
        let targets = Arc::new(Targets::new(&found.segments));
        let results = found.results.into_iter();
        Ok(results
            .map(|result| match result {
                Ok(found) if found.early.is_some() => Found::Writing(found, Arc::clone(&targets)),
                Ok(_) | Err(Refusal::AlreadyExists) => Found::Complete,
                Err(refusal) => Found::Not(refusal),
            })
            .collect())
    }

    /// Asks what became of objects that were being written, and has their sessions know. What the master can't say now
    /// stays as it is.
    pub(super) async fn look_after(&self, sessions: &[EarlySession]) {
        let Some(first) = sessions.first() else {
            return;
        };
        let keys: Vec<ObjectKey> = sessions.iter().map(|it| it.key().clone()).collect();
        let found = match self.unfinished(&keys, first.shared.options).await {
            Ok(found) => found,
            Err(error) => {
                tracing::debug!(%error, count = keys.len(), "early readers wait for the master");
                return;
            }
        };
        let mut committed = Vec::new();
        for (session, found) in sessions.iter().zip(found) {
            match found {
                Found::Writing(found, _) if found.generation() == session.generation() => {}
                Found::Complete => committed.push(session),
                // Somebody else writes the key.
                Found::Writing(..) | Found::Not(Refusal::NotReady) => superseded(session),
                Found::Not(Refusal::NotFound) => gone(session),
                Found::Not(refusal) if refusal.is_retryable() => {}
                Found::Not(refusal) => session.advance(Stage::Over(refusal.into())),
            }
        }
        for session in committed {
            self.take_up(session).await;
        }
    }

    /// Goes on with a session whose object is complete.
    async fn take_up(&self, session: &EarlySession) {
        let keys = std::slice::from_ref(session.key());
        let opened = self.start_gets(keys, session.shared.options).await;
        match opened.into_iter().next() {
            Some(Ok(opened)) if opened.generation() == session.generation() => {
                session.advance(Stage::Complete(opened));
            }
            Some(Ok(_) | Err(StoreError::Refused(Refusal::NotReady))) => superseded(session),
            Some(Err(StoreError::Refused(Refusal::NotFound))) => gone(session),
            Some(Err(error)) if !error.is_retryable() => session.advance(Stage::Over(error)),
            Some(Err(_)) | None => {}
        }
    }
}

fn superseded(session: &EarlySession) {
    session.advance(Stage::Over(Refusal::Superseded.into()));
}

fn gone(session: &EarlySession) {
    let generation = session.generation();
    session.advance(Stage::Over(StoreError::WriterGone { generation }));
}

/// Positions of the keys that are being written.
fn not_ready(answers: &[Result<EarlySession, StoreError>]) -> Vec<usize> {
    let answers = answers.iter().enumerate();
    answers
        .filter(|(_, answer)| matches!(answer, Err(StoreError::Refused(Refusal::NotReady))))
        .map(|(at, _)| at)
        .collect()
}

/// A session on an object that is being written.
fn session(
    key: &ObjectKey,
    found: &GetStarted,
    targets: &Targets,
    options: GetOptions,
) -> Result<EarlySession, StoreError> {
    let table = found.early.ok_or(Refusal::NotReady)?;
    if let Some(expected) = options.fingerprint
        && found.fingerprint != Some(expected)
    {
        return Err(StoreError::FingerprintMismatch {
            expected,
            found: found.fingerprint,
        });
    }
    let mut places = targets.places(&found.replicas, found.size);
    places.retain(|place| table.leaves(place.replica.header_len).is_some());
    if places.is_empty() {
        return Err(Refusal::Unreachable.into());
    }
    let writing = Writing {
        places,
        left_out: found.left_out > 0,
        table,
        seen: Seen::new(table.slots),
    };
    Ok(EarlySession::new(Shared {
        key: key.clone(),
        size: found.size,
        generation: found.generation(),
        layout_id: found.layout_id,
        options,
        stage: Mutex::new(Stage::Writing(writing)),
    }))
}
