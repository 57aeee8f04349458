//! Copying and moving replicas of objects.
//!
//! A version's replicas are written together and share its generation, so a copy is a new version with the same
//! bytes: read under a lease, checked against their checksums, written to all places anew, and put in the
//! place of the version that was read, provided that is still the complete one. Its leases, pins and
//! recency go over to the copy. Open get sessions read on where they are.
//!
//! Until the commit both versions need room; a segment that has none for its replica fails the call, and
//! nothing is changed.

use std::num::NonZeroU64;

use layercake_protocol::error::Refusal;
use layercake_protocol::header::Rows;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::range::ByteRange;
use layercake_protocol::replica::{ObjectState, PutStart, Recency, ReplicateConfig};
use layercake_protocol::report::ObjectStat;

use super::StoreClient;
use super::get_start::GetOptions;
use super::read::RangeRead;
use super::write::{Range, RangeWrite};
use crate::error::StoreError;
use crate::session::{GetSession, PutSession};

/// Bytes that are under way at a time, unless one written range is larger.
const WAVE: u64 = 8 << 20;

/// The length at which bytes are cut that belong to no written range.
const UNIT: NonZeroU64 = NonZeroU64::new(1 << 20).expect("not zero");

impl StoreClient {
    /// Gives an object replicas in the segments of these names, beside those that it has. Names where it has
    /// one already change nothing.
    ///
    /// [`Refusal::InvalidArgument`]: no segment has such a name; [`Refusal::NoSpace`]: one has no room;
    /// [`Refusal::Superseded`]: the object was replaced meanwhile; [`Refusal::InProgress`]: it is being
    /// replaced.
    pub async fn copy_replicas(
        &self,
        key: &ObjectKey,
        targets: &[String],
    ) -> Result<(), StoreError> {
        self.relocate(key, None, targets).await
    }

    /// Gives an object a replica in the segment called `target` instead of the one in `source`. Errors as
    /// [`copy_replicas`](Self::copy_replicas), and [`Refusal::InvalidArgument`] if `source` has none.
    pub async fn move_replica(
        &self,
        key: &ObjectKey,
        source: &str,
        target: &str,
    ) -> Result<(), StoreError> {
        self.relocate(key, Some(source), &[target.to_owned()]).await
    }

    /// Takes the replica of an object in the segment called `source` away, and with the last one the object.
    /// [`Refusal::Leased`]: somebody relies on it.
    pub async fn drop_replica(&self, key: &ObjectKey, source: &str) -> Result<(), StoreError> {
        self.core().leases.give_back(self.core()).await;
        let (stat, names) = self.replica_names(key).await?;
        if !stat.lease_remaining.is_zero() {
            return Err(Refusal::Leased.into());
        }
        if names.iter().all(|name| name == source) {
            let removed = self.remove(std::slice::from_ref(key), false).await.pop();
            return removed.unwrap_or(Err(StoreError::UnknownSession));
        }
        self.relocate(key, Some(source), &[]).await
    }

    async fn relocate(
        &self,
        key: &ObjectKey,
        source: Option<&str>,
        targets: &[String],
    ) -> Result<(), StoreError> {
        let (stat, mut names) = self.replica_names(key).await?;
        self.check_segments(targets).await?;
        let before = names.clone();
        if let Some(source) = source {
            let at = names.iter().position(|name| name == source);
            let at =
                at.ok_or_else(|| Refusal::invalid(format!("no replica is in segment {source:?}")))?;
            names.remove(at);
        }
        for target in targets {
            if !names.contains(target) {
                names.push(target.clone());
            }
        }
        if names == before {
            return Ok(());
        }
        let sessions = self
            .start_gets(std::slice::from_ref(key), GetOptions::default())
            .await;
        let from = sessions
            .into_iter()
            .next()
            .unwrap_or(Err(StoreError::UnknownSession))?;
        if from.generation() != stat.generation {
            return Err(Refusal::Superseded.into());
        }
        let copied = self.copy(&from, &stat, names).await;
        self.end_gets(vec![from]).await;
        copied
    }

    /// What the master knows about a complete object, and the names of the segments that it lies in.
    async fn replica_names(
        &self,
        key: &ObjectKey,
    ) -> Result<(ObjectStat, Vec<String>), StoreError> {
        let detail = self.stat(key).await?;
        if detail.object.state != ObjectState::Complete {
            return Err(Refusal::NotReady.into());
        }
        let name_of = |id| detail.segments.iter().find(|segment| segment.id == id);
        let replicas = detail.object.replicas.iter();
        let names = replicas.filter_map(|replica| Some(name_of(replica.segment)?.name.clone()));
        Ok((detail.object.clone(), names.collect()))
    }

    async fn check_segments(&self, names: &[String]) -> Result<(), StoreError> {
        let segments = self.link().segments().await?;
        let is_there = |name: &&String| segments.iter().any(|stat| stat.segment.name == **name);
        match names.iter().find(|name| !is_there(name)) {
            Some(name) => Err(Refusal::invalid(format!("no segment is called {name:?}")).into()),
            None => Ok(()),
        }
    }

    async fn copy(
        &self,
        from: &GetSession,
        stat: &ObjectStat,
        names: Vec<String>,
    ) -> Result<(), StoreError> {
        let rows = cuts(from.written_ranges(), from.size());
        let entry = PutStart {
            header_rows: u32::try_from(rows.len()).unwrap_or(u32::MAX),
            group: stat.group.clone(),
            fingerprint: from.fingerprint(),
            layout_id: from.layout_id(),
            copy_of: Some(from.generation()),
            ..PutStart::new(from.key().clone(), from.size())
        };
        let config = ReplicateConfig {
            replicas: u32::try_from(names.len()).unwrap_or(u32::MAX),
            preferred_segments: names,
            ..ReplicateConfig::default()
        };
        let started = self
            .start_upserts(vec![entry], &config, Recency::default())
            .await;
        let to = started
            .into_iter()
            .next()
            .unwrap_or(Err(StoreError::UnknownSession))?;
        let written = match self.check_places(&to, &config.preferred_segments).await {
            Ok(()) => self.copy_bytes(from, &to, &rows).await,
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            // What a revoke can't do now, the background does.
            drop(self.revoke_puts(vec![to]).await);
            return Err(error);
        }
        match self.end_puts(vec![to]).await.pop() {
            Some(Err(failure)) => Err(failure.error),
            _ => Ok(()),
        }
    }

    /// Refuses a reservation that is not where it was wanted.
    async fn check_places(&self, to: &PutSession, names: &[String]) -> Result<(), StoreError> {
        let segments = self.link().segments().await?;
        let is_in = |name: &String| {
            to.replicas().any(|replica| {
                let stat = segments
                    .iter()
                    .find(|stat| stat.segment.id == replica.segment);
                stat.is_some_and(|stat| stat.segment.name == *name)
            })
        };
        if names.iter().all(is_in) {
            return Ok(());
        }
        let left_out = segments
            .iter()
            .filter(|stat| names.contains(&stat.segment.name));
        let largest_free = left_out.map(|stat| stat.largest_free).min().unwrap_or(0);
        Err(Refusal::NoSpace { largest_free }.into())
    }

    async fn copy_bytes(
        &self,
        from: &GetSession,
        to: &PutSession,
        rows: &[ByteRange],
    ) -> Result<(), StoreError> {
        let mut rest = rows;
        while let Some(first) = rest.first() {
            let mut bytes = 0;
            let fitting = rest.iter().take_while(|row| {
                bytes += row.len();
                bytes <= WAVE
            });
            let (wave, later) = rest.split_at(fitting.count().max(1));
            let start = first.start();
            let len = wave.iter().map(|row| row.len()).sum();
            let scratch = self.core().scratch.take(len)?;
            let ranges = || {
                let range = |row: &ByteRange| {
                    let local = scratch.slice(row.start() - start, row.len())?;
                    Ok(Range {
                        offset: row.start(),
                        local,
                    })
                };
                wave.iter()
                    .map(range)
                    .collect::<Result<Vec<Range>, StoreError>>()
            };
            let read = RangeRead {
                session: from,
                ranges: ranges()?,
            };
            let read = self.read_ranges(vec![read]).await.pop();
            read.unwrap_or(Err(StoreError::UnknownSession))?;
            let write = RangeWrite {
                session: to,
                ranges: ranges()?,
            };
            let written = self.write_ranges(vec![write]).await.pop();
            written.unwrap_or(Err(StoreError::UnknownSession))?;
            scratch.recycle();
            rest = later;
        }
        Ok(())
    }
}

/// An object's bytes, cut where its rows are: each is read whole, and so verified.
fn cuts(rows: &Rows, size: u64) -> Vec<ByteRange> {
    let mut cuts = Vec::with_capacity(rows.len());
    let mut at = 0;
    for row in rows.iter() {
        cuts.extend(unwritten(at, row.range.start()));
        cuts.push(row.range);
        at = row.range.end();
    }
    cuts.extend(unwritten(at, size));
    cuts
}

/// Bytes that belong to no row, in pieces.
fn unwritten(start: u64, end: u64) -> impl Iterator<Item = ByteRange> {
    let gap = ByteRange::from_bounds(start, end).ok();
    gap.into_iter().flat_map(|gap| gap.split_every(UNIT))
}
