//! Starting put sessions.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;

use layercake_protocol::early::EarlyTable;
use layercake_protocol::error::Refusal;
use layercake_protocol::header::HeaderSpec;
use layercake_protocol::ids::Epoch;
use layercake_protocol::key::Tenant;
use layercake_protocol::replica::{ObjectRef, PutStart, PutStarted, Recency, ReplicateConfig};

use super::StoreClient;
use super::core::Core;
use super::early::without_checksums;
use super::places::{Place, Places, Targets};
use crate::error::StoreError;
use crate::link::StartOptions;
use crate::session::{Made, PutSession, PutShared};

/// What objects a start is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Those of free keys.
    New,
    /// The same, and whoever puts them would rather have had a place in advance.
    Small,
    /// Those that replace what is there.
    Replacing,
}

impl StoreClient {
    /// Reserves room for objects and opens a session on each, in one call to the master.
    ///
    /// Every entry has its own answer: [`Refusal::AlreadyExists`] and [`Refusal::InProgress`] are
    /// ordinary ones, [`Refusal::NoSpace`] names the largest free piece. A session of this client on the
    /// same key whose end is still open is finished first.
    pub async fn start_puts(
        &self,
        entries: Vec<PutStart>,
        config: &ReplicateConfig,
        recency: Recency,
    ) -> Vec<Result<PutSession, StoreError>> {
        self.start_writing(entries, config, recency, Kind::New)
            .await
    }

    /// As [`start_puts`](Self::start_puts), but a complete object of the key is replaced when the session
    /// commits; until then the old one stays readable. An open reservation of the key is taken over.
    pub async fn start_upserts(
        &self,
        entries: Vec<PutStart>,
        config: &ReplicateConfig,
        recency: Recency,
    ) -> Vec<Result<PutSession, StoreError>> {
        self.start_writing(entries, config, recency, Kind::Replacing)
            .await
    }

    pub(super) async fn start_writing(
        &self,
        entries: Vec<PutStart>,
        config: &ReplicateConfig,
        recency: Recency,
        kind: Kind,
    ) -> Vec<Result<PutSession, StoreError>> {
        let (core, config) = (Arc::clone(self.core()), config.clone());
        let work = async move { start(&core, entries, &config, recency, kind).await };
        self.core().see_through(work).await
    }
}

async fn start(
    core: &Arc<Core>,
    mut entries: Vec<PutStart>,
    config: &ReplicateConfig,
    recency: Recency,
    kind: Kind,
) -> Vec<Result<PutSession, StoreError>> {
    if entries.is_empty() {
        return Vec::new();
    }
    for entry in &mut entries {
        // A caller may use one entry for several starts.
        if entry.early.is_some() {
            *entry = entry.clone().early_reads();
        }
    }
    if entries.iter().any(|entry| entry.early.is_some()) && !core.config.checksums {
        return entries.iter().map(|_| Err(without_checksums())).collect();
    }
    core.finisher
        .make_way(core, entries.iter().map(|entry| &entry.key))
        .await;
    let unreachable = core.unreachable();
    let asking = (kind == Kind::Small).then(|| core.holds.ask()).flatten();
    let options = StartOptions {
        recency,
        unreachable: &unreachable,
        hold: asking.is_some(),
    };
    let request = async {
        if kind == Kind::Replacing {
            core.link.upsert_start(&entries, config, options).await
        } else {
            core.link.put_start(&entries, config, options).await
        }
    };
    // What a lease holds can't make room.
    let mut started = pin!(core.leases.ahead_of(core, request));
    let mut asked = Vec::new();
    let started = poll_fn(|cx| {
        let started = started.as_mut().poll(cx);
        if asked.is_empty() {
            // While the master works: there is nothing else to do for this thread then, and this waits for memory.
            let entries = entries.iter();
            asked.extend(entries.map(|it| Arc::new(PutShared::asked(it, &core.config.tenant))));
        }
        started
    });
    let started = started.await;
    let started = match started {
        Ok(started) => started,
        Err(error) => return entries.iter().map(|_| Err(error.clone())).collect(),
    };
    let targets = Targets::new(&started.segments);
    if let (Some(asking), Some(hold)) = (asking, started.hold)
        && let Some(target) = targets.find(hold.segment)
    {
        asking.granted(hold, target);
    }
    let mut unusable = Vec::new();
    let sessions = entries.iter().zip(asked).zip(started.results).enumerate();
    let sessions = sessions
        .map(|(index, ((entry, mut shared), result))| {
            let started_one = result?;
            let index = prefix_index(entry, recency, index);
            let made = made(core, entry, &started_one, &targets, (started.epoch, index));
            let made = made.inspect_err(|_| {
                unusable.push(ObjectRef {
                    key: entry.key.clone(),
                    generation: started_one.generation,
                });
            })?;
            let session = Arc::get_mut(&mut shared).expect("nobody else has it yet");
            session.reserved(made);
            core.puts.add(&shared);
            core.counters.puts_started.one();
            Ok(PutSession::new(shared, Arc::clone(core)))
        })
        .collect();
    if !unusable.is_empty()
        && let Err(error) = core.link.put_revoke(&unusable).await
    {
        tracing::debug!(%error, count = unusable.len(), "reservations are given back later");
        core.link.give_back(started.life, unusable);
    }
    sessions
}

fn prefix_index(entry: &PutStart, recency: Recency, position: usize) -> u32 {
    entry.prefix_index.unwrap_or_else(|| {
        let position = u32::try_from(position).unwrap_or(u32::MAX);
        recency.first_index.saturating_add(position)
    })
}

/// What a reservation makes of a session.
fn made(
    core: &Core,
    entry: &PutStart,
    started: &PutStarted,
    targets: &Targets,
    (epoch, prefix_index): (Epoch, u32),
) -> Result<Made, StoreError> {
    let places = targets.places(&started.replicas, entry.size);
    if places.is_empty() || places.len() != started.replicas.len() {
        return Err(Refusal::Unreachable.into());
    }
    // A master of another version may have left no room for it.
    let early = entry.early_table().filter(|_| {
        let wanted = entry.header_len(&core.config.tenant).ok();
        let has = |place: &Place| Some(place.replica.header_len) == wanted;
        places.iter().all(has)
    });
    let rows = rows(&core.config.tenant, entry, &places, early)?;
    Ok(Made {
        generation: started.generation,
        places,
        epoch,
        prefix_index,
        rows,
        early,
    })
}

/// The rows that every replica's header has room for.
fn rows(
    tenant: &Tenant,
    entry: &PutStart,
    places: &Places,
    early: Option<EarlyTable>,
) -> Result<usize, StoreError> {
    let spec = HeaderSpec {
        tenant_len: tenant.as_str().len(),
        key_len: entry.key.as_str().len(),
        group_len: entry.group.as_ref().map_or(0, String::len),
        rows: 0,
    };
    let capacities = places
        .iter()
        .map(|place| place.replica.header_len)
        .map(|len| early.map_or(Some(len), |table| table.leaves(len)))
        .map(|len| spec.row_capacity(len.unwrap_or(0)));
    match capacities.min() {
        Some(rows) if rows > 0 => Ok(rows),
        _ => Err(Refusal::invalid("the reserved place has no room for a header").into()),
    }
}
