//! What a replay and its workers say to each other: one JSON object a line.
//!
//! A worker is told its setup and answers when it is ready; then it gets one request after the other
//! and answers each; told to finish, it answers with what it measured and ends. Its standard input
//! closing means that the replay is gone: it ends at once.

use layercake_store::StoreError;
use serde::{Deserialize, Serialize};

use super::histogram::Histogram;

/// From the replay to a worker.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToWorker {
    Setup(Setup),
    Request(Request),
    Finish,
}

/// What all workers of a replay work with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// For people: what this worker is called.
    pub(crate) name: String,
    /// `host:port` of the master.
    pub(crate) master: String,
    /// Namespace of the keys.
    pub(crate) tenant: String,
    /// The model's layers, in the form of `--layer-entries`.
    pub(crate) geometry: String,
    /// Part of every key: runs with different ones share nothing.
    pub(crate) run: String,
    /// Bytes that a worker may stage for one layer.
    pub(crate) staging_bytes: u64,
    /// Blocks of the longest request.
    pub(crate) most_blocks: u64,
    /// Go through the connector.
    pub(crate) connector: bool,
}

/// One request of the trace.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    /// Its place in the trace.
    pub(crate) index: usize,
    /// Its blocks, first to last.
    pub(crate) ids: Vec<u64>,
}

/// From a worker to the replay.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromWorker {
    /// Set up: the master and its segments can be reached.
    Ready,
    Done(Done),
    Finished(Measured),
    /// It can't go on.
    Failed(String),
}

/// What became of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Done {
    /// Its place in the trace.
    pub(crate) index: usize,
    /// Blocks of its prompt.
    pub(crate) blocks: u64,
    /// Keys that the master was asked for.
    pub(crate) keys_queried: u64,
    /// The most that its look-up may ask for: its hit and one window.
    pub(crate) keys_bound: u64,
    /// Blocks of its prefix that the look-up promised.
    pub(crate) found_blocks: u64,
    /// Blocks of its prefix that were loaded, and held what they must.
    pub(crate) hit_blocks: u64,
    /// Blocks that were loaded without an error, and did not.
    pub(crate) mismatched_blocks: u64,
    /// Blocks that the store itself found damaged when they were loaded.
    pub(crate) corrupt_blocks: u64,
    /// Blocks committed.
    pub(crate) saved_blocks: u64,
    /// Blocks that others had stored, or were storing, when this request came to save them.
    pub(crate) skipped_blocks: u64,
    /// Blocks that found no room.
    pub(crate) refused_blocks: u64,
    /// Blocks whose save failed in another way.
    pub(crate) unsaved_blocks: u64,
    /// Payload bytes written and committed.
    pub(crate) bytes_saved: u64,
    /// Payload bytes read and verified.
    pub(crate) bytes_loaded: u64,
    /// The request as a whole failed.
    pub(crate) failed: Option<String>,
    /// The first thing that went wrong with a block, for people.
    pub(crate) trouble: Option<String>,
}

impl Done {
    /// Counts a block that could not be loaded. One that is gone is no fault; a damaged one is.
    pub(crate) fn not_loaded(&mut self, error: &StoreError) {
        if matches!(error, StoreError::ChecksumMismatch { .. }) {
            self.corrupt_blocks += 1;
        }
        self.note("a block could not be loaded", error);
    }

    /// Keeps the first trouble, for people.
    pub(crate) fn note(&mut self, what: &str, error: &StoreError) {
        self.trouble
            .get_or_insert_with(|| format!("{what}: {error}"));
    }
}

/// What a worker measured over all its requests.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// Time of a request's look-up.
    pub(crate) lookup: Histogram,
    /// Time to save one layer of a window of blocks.
    pub(crate) save_layer: Histogram,
    /// Time to load one layer of a window of blocks.
    pub(crate) load_layer: Histogram,
    /// Bytes moved, by transport.
    pub(crate) transports: Vec<Moved>,
}

/// Bytes that went over one transport, headers included.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Moved {
    pub(crate) transport: String,
    pub(crate) bytes_written: u64,
    pub(crate) bytes_read: u64,
}

impl Measured {
    /// Adds what another worker measured.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.lookup.merge(&other.lookup);
        self.save_layer.merge(&other.save_layer);
        self.load_layer.merge(&other.load_layer);
        for theirs in &other.transports {
            match self
                .transports
                .iter_mut()
                .find(|ours| ours.transport == theirs.transport)
            {
                Some(ours) => {
                    ours.bytes_written += theirs.bytes_written;
                    ours.bytes_read += theirs.bytes_read;
                }
                None => self.transports.push(theirs.clone()),
            }
        }
    }
}
