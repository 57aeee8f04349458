//! Starting and ending get sessions.
//!
//! A start is one call to the master, which leases the objects, and then one batch per peer that reads
//! the headers (`records`), and seldom a second one. Where it is known what the master will say, the batch does not
//! wait for it (`guess`). A header that does not fit what the master promised, or the caller expects, refuses
//! its key before a byte of the object moves; a replica whose header can't be had is passed over for
//! the next one.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use layercake_protocol::error::Refusal;
use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::header::Expected;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{GetStarted, Recency};

use super::StoreClient;
use super::core::{Core, now};
use super::guess::{Guess, Landed};
use super::hints::Hint;
use super::leases::Leases;
use super::places::{Place, Places, Targets};
use super::records::{Answer, Eager, Record, Wanted};
use crate::error::{Failures, StoreError};
use crate::link::StartOptions;
use crate::session::lease::{Grant, Lease};
use crate::session::{GetSession, GetShared, LeaseHold};

/// How get sessions are started.
#[derive(Clone, Copy, Debug, Default)]
pub struct GetOptions {
    /// When the request touched the keys.
    pub recency: Recency,
    /// Refuse objects of another deployment.
    pub fingerprint: Option<Fingerprint>,
    /// Leave the leases to run out after the sessions' end instead of giving them back: whoever asks next
    /// finds the object protected for as long as a lease lasts, and the end costs no message.
    pub keep_lease: bool,
    /// Objects of at most this many bytes are fetched along with their headers where that saves a round trip, and
    /// kept as long as the session: reading them is a copy then.
    pub fetch: u64,
}

impl From<Recency> for GetOptions {
    fn from(recency: Recency) -> Self {
        Self {
            recency,
            ..Self::default()
        }
    }
}

/// A key on its way to a session.
pub(super) struct Candidate {
    pub(super) size: u64,
    places: Places,
    lease: LeaseHold,
    /// The replica to try.
    place: usize,
    /// There are replicas that were not named, since they are out of reach.
    left_out: bool,
    /// Of replicas before.
    failures: Failures,
    /// What is mostly enough of its header was not.
    pub(super) whole_header: bool,
}

impl StoreClient {
    /// Opens a session on each object, in one call to the master. The answers align with `keys`; a key
    /// may be there more than once.
    ///
    /// The leases are renewed in the background for as long as the sessions are in use
    /// ([`ClientConfig::session_idle`](super::ClientConfig::session_idle)).
    pub async fn start_gets(
        &self,
        keys: &[ObjectKey],
        options: impl Into<GetOptions>,
    ) -> Vec<Result<GetSession, StoreError>> {
        let options = options.into();
        self.open(keys, options, Eager::IfFar(options.fetch)).await
    }

    /// Opens sessions, and fetches the whole payload of small objects along with their headers.
    pub(super) async fn open(
        &self,
        keys: &[ObjectKey],
        options: GetOptions,
        eager: Eager,
    ) -> Vec<Result<GetSession, StoreError>> {
        let (core, keys) = (Arc::clone(self.core()), keys.to_vec());
        let work = async move { start(&core, &keys, options, eager).await };
        self.core().see_through(work).await
    }

    /// Ends sessions, and returns when their leases have been given back: those whose last session this was,
    /// in one call. One that still has reads under way follows when they are done.
    pub async fn end_gets(&self, sessions: Vec<GetSession>) {
        GetSession::end_all(sessions);
        let core = Arc::clone(self.core());
        self.core()
            .see_through(async move { core.leases.give_back(&core).await })
            .await;
    }

    /// Ends sessions of this client without waiting: their leases are given back in the background, in one call.
    /// A removal by this client waits until that is done.
    pub fn release_gets(&self, sessions: Vec<GetSession>) {
        if !sessions.is_empty() {
            self.core().leases.end_soon(sessions);
        }
    }
}

async fn start(
    core: &Arc<Core>,
    keys: &[ObjectKey],
    options: GetOptions,
    eager: Eager,
) -> Vec<Result<GetSession, StoreError>> {
    let wanted = Wanted {
        core,
        fingerprint: options.fingerprint,
        eager,
    };
    let asking = lease_keys(core, keys, options.recency, options.keep_lease);
    let mut guess = Guess::make(wanted, keys);
    let mut opening = match &mut guess {
        Some(guess) => guess.along(asking).await,
        None => asking.await,
    };
    let guessed = match guess {
        Some(guess) => guess.land(&mut opening.open).await,
        None => Landed::new(),
    };
    let found = opening.open.iter().map(|(_, candidate)| {
        let key = &candidate.lease().object().key;
        (key, candidate.here(), candidate.size)
    });
    core.hints.note(&core.engine, found);
    for (index, candidate, record) in guessed {
        opening.take(index, candidate, record);
    }
    while !opening.open.is_empty() {
        let round = std::mem::take(&mut opening.open);
        let take = |index, candidate, record| opening.take(index, candidate, record);
        wanted.read_all(round, take).await;
    }
    opening.answers
}

/// Sessions that are being opened.
struct Opening<'a> {
    core: &'a Core,
    /// Of those that are still open it does not matter.
    answers: Vec<Result<GetSession, StoreError>>,
    /// Those whose records are still to be read, by the positions of their answers.
    open: Vec<(usize, Candidate)>,
}

impl<'a> Opening<'a> {
    fn new(core: &'a Core, keys: usize) -> Self {
        Self {
            core,
            answers: Vec::with_capacity(keys),
            open: Vec::with_capacity(keys),
        }
    }

    /// None of the keys comes to be open.
    fn refused(core: &'a Core, keys: usize, error: &StoreError) -> Self {
        Self {
            core,
            answers: vec![Err(error.clone()); keys],
            open: Vec::new(),
        }
    }

    /// Takes what the master said of the next key.
    fn lease(&mut self, candidate: Result<Candidate, StoreError>) {
        let candidate = candidate.map(|candidate| {
            self.open.push((self.answers.len(), candidate));
        });
        let answer = candidate.and(Err(StoreError::UnknownSession));
        self.answers.push(answer);
    }

    /// Takes what the read of a candidate's record brought.
    fn take(&mut self, index: usize, mut candidate: Candidate, record: Answer) {
        match record {
            Ok(Some(record)) => {
                self.answers[index] = Ok(candidate.into_session(self.core, record));
            }
            Ok(None) => {
                candidate.whole_header = true;
                self.open.push((index, candidate));
            }
            Err(error) => {
                let is_final = matches!(error, StoreError::FingerprintMismatch { .. });
                if !is_final && candidate.next_place(self.core) {
                    candidate.failures.note(error);
                    self.open.push((index, candidate));
                } else {
                    self.answers[index] = Err(candidate.failures.with(error));
                }
            }
        }
    }
}

impl Candidate {
    /// Goes on to the next replica. `false`: there is none.
    fn next_place(&mut self, core: &Core) -> bool {
        self.place += 1;
        let more = self.place < self.places.len();
        if more {
            core.counters.failovers.one();
        }
        more
    }

    fn into_session(self, core: &Core, record: Record) -> GetSession {
        core.counters.gets_started.one();
        let Record {
            fingerprint,
            layout_id,
            rows,
            payload,
        } = record;
        GetSession::new(GetShared {
            size: self.size,
            fingerprint,
            layout_id,
            places: self.places,
            left_out: self.left_out,
            rows,
            payload,
            preferred: AtomicUsize::new(self.place),
            lease: self.lease,
        })
    }

    pub(super) fn lease(&self) -> &Lease {
        self.lease.lease()
    }

    pub(super) fn here(&self) -> &Place {
        &self.places[self.place]
    }

    /// Whether the object lies, at the replica that is tried first, where a hint says.
    pub(super) fn is_where(&self, hint: &Hint) -> bool {
        let here = self.here();
        self.size == hint.size
            && here.replica == hint.place.replica
            && here.target.is_same(&hint.place.target)
    }

    /// What the header must say.
    pub(super) fn expected<'a>(
        &'a self,
        core: &'a Core,
        fingerprint: Option<Fingerprint>,
    ) -> Expected<'a> {
        let object = self.lease.lease().object();
        Expected {
            tenant: &core.config.tenant,
            key: &object.key,
            generation: object.generation,
            payload_len: self.size,
            fingerprint,
        }
    }
}

/// Asks the master for the objects and their leases.
async fn lease_keys<'a>(
    core: &'a Arc<Core>,
    keys: &[ObjectKey],
    recency: Recency,
    keep_lease: bool,
) -> Opening<'a> {
    let mut opening = Opening::new(core, keys.len());
    if keys.is_empty() {
        return opening;
    }
    let starting = match Leases::start(core, keys).await {
        Ok(starting) => starting,
        Err(error) => return Opening::refused(core, keys.len(), &error),
    };
    let unreachable = core.unreachable();
    let options = StartOptions {
        recency,
        unreachable: &unreachable,
        ..StartOptions::default()
    };
    let sent = now();
    let started = match core.link.get_start(keys, options, true).await {
        Ok(started) => started,
        Err(error) => return Opening::refused(core, keys.len(), &error),
    };
    let targets = Targets::new(&started.segments);
    let grant = Grant {
        sent,
        lease: started.lease,
    };
    let results = started.results.iter();
    let granted = results.map(|result| Some(result.as_ref().ok()?.generation()));
    let holds = starting.answer(grant, granted);
    let hits = holds.iter().flatten().count() as u64;
    core.counters.hits.add(hits);
    core.counters.misses.add(keys.len() as u64 - hits);
    if keep_lease {
        holds.iter().flatten().for_each(|hold| hold.lease().keep());
    }
    for (result, hold) in started.results.into_iter().zip(holds) {
        let found = result.map_err(StoreError::from);
        opening.lease(found.and_then(|found| candidate(&targets, &found, hold)));
    }
    opening
}

fn candidate(
    targets: &Targets,
    found: &GetStarted,
    lease: Option<LeaseHold>,
) -> Result<Candidate, StoreError> {
    let lease = lease.ok_or(StoreError::UnknownSession)?;
    let places = targets.places(&found.replicas, found.size);
    if places.is_empty() {
        return Err(Refusal::Unreachable.into());
    }
    Ok(Candidate {
        size: found.size,
        places,
        lease,
        place: 0,
        left_out: found.left_out > 0,
        failures: Failures::begin(found.left_out > 0),
        whole_header: false,
    })
}
