//! The answers to the parts of a start, joined.

use std::collections::HashSet;
use std::sync::Arc;

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{Epoch, SegmentId};
use layercake_protocol::replica::{ObjectRef, PutStart, PutStarted, Segment};

use super::MasterLink;
use super::outbox::Chore;
use super::types::Life;
use crate::error::StoreError;

/// Results in the order of the call, and every segment once.
#[derive(Debug)]
pub(super) struct Joined<T> {
    /// That of the parts so far.
    pub(super) epoch: Epoch,
    results: Vec<Result<T, Refusal>>,
    segments: Vec<Arc<Segment>>,
    known: HashSet<SegmentId>,
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
            known: HashSet::new(),
            life: None,
        }
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
        if *self.life.get_or_insert(life) != life {
            return Err(link
                .shared()
                .unreachable("the membership ended while a long batch was started".to_owned()));
        }
        self.epoch = epoch;
        if self.results.is_empty() {
            self.results = results;
        } else {
            self.results.extend(results);
        }
        for segment in segments {
            if self.known.insert(segment.id) {
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
        let objects: Vec<ObjectRef> = self
            .entries
            .iter()
            .zip(&self.joined.results)
            .filter_map(|(entry, result)| {
                Some(ObjectRef {
                    key: entry.key.clone(),
                    generation: result.as_ref().ok()?.generation,
                })
            })
            .collect();
        if let Some(life) = self.joined.life
            && !objects.is_empty()
        {
            self.link.shared().outbox.push(Chore::Revoke {
                life,
                tenant: self.link.tenant().clone(),
                objects,
            });
        }
    }
}
