//! One request of the trace, against the store.
//!
//! Look up the longest stored prefix; load it layer by layer and compare every byte; make the bytes of
//! the rest and save them layer by layer; commit. Blocks are worked on in windows, so that a long
//! prompt holds only so many sessions and so much staging memory at a time. What can't be loaded after
//! all is made anew, from the first such block on: a prefix has no holes.

use std::ops::Range as Span;
use std::time::Instant;

use anyhow::{Result, bail};
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::Epoch;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::layout::ObjectLayout;
use layercake_protocol::replica::{PutStart, Recency, ReplicateConfig};
use layercake_store::{
    GetOptions, GetSession, PutSession, RangeRead, RangeWrite, StoreClient, StoreError,
};
use layercake_transport::Engine;

use super::keys::BlockKeys;
use super::messages::{Done, Measured, Request};
use super::staging::Staging;

/// Sessions that are open at a time, at most.
const MOST_SESSIONS: u64 = 256;

/// Keys of one step of the look-up.
const LOOKUP_WINDOW: usize = 128;

/// Works requests off, one at a time.
pub(crate) struct SessionRequests {
    client: StoreClient,
    layout: ObjectLayout,
    keys: BlockKeys,
    replicate: ReplicateConfig,
    staging: Staging,
    window: usize,
    pub(crate) measured: Measured,
}

/// A block that is being saved.
struct Saving {
    id: u64,
    session: PutSession,
    trouble: Option<StoreError>,
}

impl SessionRequests {
    pub(crate) fn new(
        client: StoreClient,
        engine: &Engine,
        layout: ObjectLayout,
        keys: BlockKeys,
        staging_bytes: u64,
    ) -> Result<Self> {
        let staging = Staging::new(engine, layout.clone(), staging_bytes, MOST_SESSIONS)?;
        Ok(Self {
            client,
            layout,
            keys,
            replicate: ReplicateConfig::default(),
            window: staging.window(),
            staging,
            measured: Measured::default(),
        })
    }

    /// Works one request off. An error is a fault of this program; what can happen to a request is in
    /// the answer.
    pub(crate) async fn run(&mut self, request: &Request) -> Result<Done> {
        let mut done = Done {
            index: request.index,
            blocks: request.ids.len() as u64,
            ..Done::default()
        };
        let keys = self.keys.of(&request.ids)?;
        let started = Instant::now();
        let found = self.client.longest_prefix(&keys, LOOKUP_WINDOW).await;
        self.measured.lookup.record(started.elapsed());
        let found = match found {
            Ok(found) => found,
            Err(error) => {
                done.failed = Some(format!("the look-up failed: {error}"));
                return Ok(done);
            }
        };
        done.found_blocks = found.blocks as u64;
        done.keys_queried = found.keys_queried;
        done.keys_bound = done.found_blocks + LOOKUP_WINDOW as u64;
        let epoch = found.epoch;

        let mut at = 0;
        while at < found.blocks {
            let window = at..(at + self.window).min(found.blocks);
            let loaded = self
                .load(&request.ids, &keys, window.clone(), epoch, &mut done)
                .await?;
            at += loaded;
            if loaded < window.len() {
                break;
            }
        }
        done.hit_blocks = at as u64;
        done.bytes_loaded = done.hit_blocks * self.layout.object_len();

        while at < keys.len() {
            let window = at..(at + self.window).min(keys.len());
            at = window.end;
            self.save(&request.ids, &keys, window, epoch, &mut done)
                .await?;
        }
        done.bytes_saved = done.saved_blocks * self.layout.object_len();
        Ok(done)
    }

    /// Loads a window of the prefix; answers how many blocks, from its first on, hold what they must.
    async fn load(
        &mut self,
        ids: &[u64],
        keys: &[ObjectKey],
        window: Span<usize>,
        epoch: Epoch,
        done: &mut Done,
    ) -> Result<usize> {
        let options = GetOptions {
            recency: recency(epoch, window.start)?,
            fingerprint: Some(self.keys.fingerprint()),
            ..GetOptions::default()
        };
        let started = self.client.start_gets(&keys[window.clone()], options).await;
        let mut sessions: Vec<GetSession> = Vec::with_capacity(started.len());
        for result in started {
            match result {
                Ok(session) => sessions.push(session),
                Err(error) => {
                    done.not_loaded(&error);
                    break;
                }
            }
        }
        let ids = &ids[window];
        let mut good = sessions.len();
        for layer in 0..self.layout.layer_count() {
            if good == 0 {
                break;
            }
            let reads = sessions[..good]
                .iter()
                .enumerate()
                .map(|(block, session)| {
                    Ok(RangeRead {
                        session,
                        ranges: self.staging.ranges(layer, block)?,
                    })
                })
                .collect::<Result<Vec<_>>>()?;
            let started = Instant::now();
            let results = self.client.read_ranges(reads).await;
            self.measured.load_layer.record(started.elapsed());
            for (block, result) in results.into_iter().enumerate() {
                if let Err(error) = result {
                    done.not_loaded(&error);
                    good = good.min(block);
                }
            }
            good = self.staging.verify(layer, &ids[..good], done)?;
        }
        self.client.end_gets(sessions).await;
        Ok(good)
    }

    /// Saves a window of blocks.
    async fn save(
        &mut self,
        ids: &[u64],
        keys: &[ObjectKey],
        window: Span<usize>,
        epoch: Epoch,
        done: &mut Done,
    ) -> Result<()> {
        let mut saving = self.start_saving(ids, keys, window, epoch, done).await?;
        if saving.is_empty() {
            return Ok(());
        }
        for layer in 0..self.layout.layer_count() {
            for (block, saved) in saving.iter().enumerate() {
                self.staging.make(layer, block, saved.id)?;
            }
            let mut writes = Vec::with_capacity(saving.len());
            for (block, saved) in saving.iter().enumerate() {
                let ranges = self.staging.ranges(layer, block)?;
                writes.push(RangeWrite {
                    session: &saved.session,
                    ranges,
                });
            }
            let started = Instant::now();
            let results = self.client.write_ranges(writes).await;
            self.measured.save_layer.record(started.elapsed());
            for (saved, result) in saving.iter_mut().zip(results) {
                if let Err(error) = result {
                    saved.trouble.get_or_insert(error);
                }
            }
        }
        let (mut whole, mut broken) = (Vec::new(), Vec::new());
        for saved in saving {
            match saved.trouble {
                None => whole.push(saved.session),
                Some(error) => {
                    done.note("a block could not be saved", &error);
                    done.unsaved_blocks += 1;
                    broken.push(saved.session);
                }
            }
        }
        for result in self.client.end_puts(whole).await {
            match result {
                Ok(()) => done.saved_blocks += 1,
                Err(end) => {
                    done.note("a block could not be committed", &end.error);
                    done.unsaved_blocks += 1;
                    // A session that is still open is revoked by dropping it.
                    drop(end.session);
                }
            }
        }
        if !broken.is_empty() {
            for result in self.client.revoke_puts(broken).await {
                if let Err(end) = result {
                    done.note("a block could not be given up", &end.error);
                }
            }
        }
        Ok(())
    }

    async fn start_saving(
        &self,
        ids: &[u64],
        keys: &[ObjectKey],
        window: Span<usize>,
        epoch: Epoch,
        done: &mut Done,
    ) -> Result<Vec<Saving>> {
        let recency = recency(epoch, window.start)?;
        let entries = keys[window.clone()]
            .iter()
            .map(|key| PutStart {
                header_rows: self.keys.rows(),
                fingerprint: Some(self.keys.fingerprint()),
                ..PutStart::new(key.clone(), self.layout.object_len())
            })
            .collect();
        let started = self
            .client
            .start_puts(entries, &self.replicate, recency)
            .await;
        let mut saving = Vec::with_capacity(started.len());
        for (&id, result) in ids[window].iter().zip(started) {
            match result {
                Ok(session) => saving.push(Saving {
                    id,
                    session,
                    trouble: None,
                }),
                Err(StoreError::Refused(
                    Refusal::AlreadyExists | Refusal::InProgress | Refusal::NotReady,
                )) => done.skipped_blocks += 1,
                Err(StoreError::Refused(Refusal::NoSpace { .. })) => done.refused_blocks += 1,
                Err(error) => {
                    done.note("a block could not be saved", &error);
                    done.unsaved_blocks += 1;
                }
            }
        }
        Ok(saving)
    }
}

fn recency(epoch: Epoch, first: usize) -> Result<Recency> {
    let Ok(first_index) = u32::try_from(first) else {
        bail!("a request of more than 4,294,967,295 blocks");
    };
    Ok(Recency { epoch, first_index })
}
