//! The answers to the parts of a start, joined.

use std::sync::Arc;

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::Epoch;
use layercake_protocol::replica::{ObjectRef, PutStart, PutStarted, Segment};

use super::MasterLink;
use super::types::Life;
use crate::error::StoreError;

/// Results in the order of the call, and every segment once.
#[derive(Debug)]
pub(super) struct Joined<T> {
    /// That of the parts so far.
    pub(super) epoch: Epoch,
    results: Vec<Result<T, Refusal>>,
    segments: Vec<Arc<Segment>>,
    life: Option<Life>,
}

/// Results, segments, epoch and life of a whole start.
pub(super) type Whole<T> = (Vec<Result<T, Refusal>>, Vec<Arc<Segment>>, Epoch, Life);

impl<T> Joined<T> {
    pub(super) fn new(epoch: Epoch) -> Self {
        Self {
            epoch,
            results: Vec::new(),
            segments: Vec::new(),
            life: None,
        }
    }

    /// Whether all parts so far come from this life.
    pub(super) fn is_of(&self, life: Life) -> bool {
        self.life.is_none_or(|ours| ours == life)
    }

    /// Appends a part. All parts must come from one life: what an earlier one gave is void.
    pub(super) fn add(
        &mut self,
        link: &MasterLink,
        life: Life,
        results: Vec<Result<T, Refusal>>,
        segments: Vec<Segment>,
        epoch: Epoch,
    ) -> Result<(), StoreError> {
        if !self.is_of(life) {
            return Err(link.shared().membership_ended());
        }
        self.life = Some(life);
        self.epoch = epoch;
        if self.results.is_empty() {
            self.results = results;
        } else {
            self.results.extend(results);
        }
        let known = self.segments.len();
        for segment in segments {
            // A part names each once, and there is seldom more than one part.
            if self.segments[..known].iter().all(|it| it.id != segment.id) {
                self.segments.push(Arc::new(segment));
            }
        }
        Ok(())
    }

    pub(super) fn finish(&mut self) -> Whole<T> {
        (
            std::mem::take(&mut self.results),
            std::mem::take(&mut self.segments),
            self.epoch,
            self.life.unwrap_or(Life(0)),
        )
    }
}

/// Reservations of a start that is under way. Dropped before it is finished, it gives them back.
#[derive(Debug)]
pub(super) struct Reserved<'a> {
    pub(super) joined: Joined<PutStarted>,
    link: &'a MasterLink,
    entries: &'a [PutStart],
}

impl<'a> Reserved<'a> {
    pub(super) fn new(link: &'a MasterLink, entries: &'a [PutStart], epoch: Epoch) -> Self {
        Self {
            joined: Joined::new(epoch),
            link,
            entries,
        }
    }

    pub(super) fn finish(mut self) -> Whole<PutStarted> {
        self.joined.finish()
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if let Some(life) = self.joined.life {
            let objects = granted(self.entries, &self.joined.results);
            self.link.give_back(life, objects);
        }
    }
}

/// What a start has reserved.
pub(super) fn granted(
    entries: &[PutStart],
    results: &[Result<PutStarted, Refusal>],
) -> Vec<ObjectRef> {
    let granted = entries.iter().zip(results).filter_map(|(entry, result)| {
        Some(ObjectRef {
            key: entry.key.clone(),
            generation: result.as_ref().ok()?.generation,
        })
    });
    granted.collect()
}
