//! How the thread that computes hands its layers over to be saved.
//!
//! It waits for room in the queue, but no longer in all of a step than the option `save_stall_ms` says;
//! then the step's saves are given up. A store that stays slow is given less and less: half after each
//! step that was given up, twice as much after each that was not.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::StoreWorker;
use super::caches::Caches;
use super::sender::{SaveJob, SaveStep};
use super::step::Save;
use crate::contract::Event;
use crate::plan::SaveRow;

/// The least part of the option that a slow store is given.
const LEAST: u32 = 64;

impl StoreWorker {
    pub(super) fn begin_saves(
        &mut self,
        caches: &Arc<Caches>,
        rows: Vec<SaveRow>,
        loads: bool,
    ) -> Option<Save> {
        if rows.is_empty() {
            return None;
        }
        let step = Arc::new(SaveStep {
            caches: Arc::clone(caches),
            rows,
            publish: self.shared.options.per_layer_readiness && !loads,
            given_up: false.into(),
        });
        let mut stall = self.stall;
        // Whole objects are opened when they are put.
        if self.shared.options.layerwise
            && !self.push_save(SaveJob::Open(Arc::clone(&step)), &mut stall)
        {
            step.never_opened(&self.shared);
            self.too_slow();
            return None;
        }
        Some(Save {
            handed: vec![false; caches.layers()],
            step,
            ended: false,
            stall,
        })
    }

    pub(super) fn hand_over(&mut self, layer: usize, ready: Event) {
        let layerwise = self.shared.options.layerwise;
        let Some(save) = self.step.as_mut().and_then(|step| step.save.as_mut()) else {
            return;
        };
        let fresh = save
            .handed
            .get_mut(layer)
            .is_some_and(|handed| !std::mem::replace(handed, true));
        if !fresh || !layerwise || save.step.given_up.load(Ordering::Acquire) {
            return;
        }
        let (step, mut stall) = (Arc::clone(&save.step), save.stall);
        let taken = self.push_save(SaveJob::Layer(Arc::clone(&step), layer, ready), &mut stall);
        if let Some(save) = self.step.as_mut().and_then(|step| step.save.as_mut()) {
            save.stall = stall;
        }
        if !taken {
            self.shared.give_up(&step);
            self.too_slow();
        }
    }

    /// Ends the step's saves, as far as they may be.
    pub(super) fn end_saves(&mut self, ready: Event) {
        let save = self.step.as_mut().and_then(|step| step.save.as_mut());
        let Some(save) = save.filter(|save| !save.ended) else {
            return;
        };
        save.ended = true;
        let (step, mut stall) = (Arc::clone(&save.step), save.stall);
        if step.given_up.load(Ordering::Acquire) {
            // The sender knows, and waits for no end.
            return;
        }
        if self.push_save(SaveJob::End(Arc::clone(&step), ready), &mut stall) {
            self.stall = (self.stall * 2).min(self.shared.options.save_stall);
            return;
        }
        self.drop_saves(&step);
        self.too_slow();
    }

    /// The step was left: what it had to save is not whole.
    pub(super) fn give_up_saves(&mut self) {
        let save = self.step.as_mut().and_then(|step| step.save.as_mut());
        if let Some(save) = save.filter(|save| !save.ended) {
            save.ended = true;
            let step = Arc::clone(&save.step);
            self.drop_saves(&step);
        }
    }

    fn drop_saves(&self, step: &SaveStep) {
        self.shared.give_up(step);
        if !self.shared.options.layerwise {
            // The sender never heard of it.
            step.never_opened(&self.shared);
        }
    }

    fn push_save(&self, job: SaveJob, stall: &mut Duration) -> bool {
        let before = *stall;
        let taken = self.saves_queue.push(job, stall);
        let waited = before.saturating_sub(*stall).as_micros();
        let waited = u64::try_from(waited).unwrap_or(u64::MAX);
        self.shared.counters.save_stall_micros.add(waited);
        taken
    }

    fn too_slow(&mut self) {
        tracing::warn!("saves are too slow: a step's blocks are not saved");
        self.stall = (self.stall / 2).max(self.shared.options.save_stall / LEAST);
    }
}
