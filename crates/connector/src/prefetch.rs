//! How many layers are loaded ahead of the computation (W6). Pure.
//!
//! Loads go straight into the engine's blocks, and what does not find a staging slot does without: nothing that is
//! asked for early needs room in a queue or a buffer, so that only the model's layers bound the depth. What early layers
//! cost is the link, which the pace below shares out. The controller wants just enough: if a layer takes `t` to arrive and a layer computes in
//! `c`, then `t / c` layers must be on their way for none to be waited for. Both times are smoothed, and
//! their spread or the latest peak, whichever is more, is added as a margin, since one late layer stops
//! everything behind it. A transfer that
//! is slower than the computation can't be hidden at any depth: then as much as is allowed is asked for,
//! so that the link never rests. A wait that happened all the same widens the margin for a while.
//!
//! Besides, layers are asked for at the pace at which they arrive, so that what is needed first comes first
//! (`flight`). A depth that was set is neither changed nor paced.

mod flight;

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use self::flight::Flight;
use crate::options::PrefetchLayers;

/// How fast estimates follow.
const WEIGHT: f64 = 0.2;
/// What is left of a peak with each further measurement.
const FADE: f64 = 0.995;
/// Standard deviations of margin.
const MARGIN: f64 = 3.0;

/// The depth, from what was measured.
#[derive(Clone, Debug)]
pub struct Prefetch {
    fixed: Option<NonZeroUsize>,
    transfer: Estimate,
    compute: Estimate,
    /// Layers added after waits; fades.
    extra: f64,
    flight: Flight,
}

#[derive(Clone, Copy, Debug, Default)]
struct Estimate {
    mean: f64,
    variance: f64,
    /// The latest peak, fading.
    peak: f64,
    known: bool,
}

impl Estimate {
    fn note(&mut self, time: Duration) {
        let value = time.as_secs_f64();
        self.peak = value.max(self.mean + (self.peak - self.mean) * FADE);
        if self.known {
            let off = value - self.mean;
            self.mean += WEIGHT * off;
            self.variance = (1.0 - WEIGHT) * (self.variance + WEIGHT * off * off);
        } else {
            self.mean = value;
            self.known = true;
        }
    }
}

impl Prefetch {
    /// A controller that has measured nothing.
    pub fn new(setting: PrefetchLayers) -> Self {
        Self {
            fixed: match setting {
                PrefetchLayers::Fixed(layers) => Some(layers),
                PrefetchLayers::Auto => None,
            },
            transfer: Estimate::default(),
            compute: Estimate::default(),
            extra: 0.0,
            flight: Flight::default(),
        }
    }

    /// Nothing is under way.
    pub fn clear(&mut self) {
        self.flight.clear();
    }

    /// Whether another layer may be asked for by now, as far as the pace goes; if not, after a call, or when so
    /// much time has passed.
    pub fn has_room(&mut self, now: Instant) -> Result<(), Option<Duration>> {
        match self.fixed {
            Some(_) => Ok(()),
            None => self.flight.has_room(now, self.transfer.mean),
        }
    }

    /// A call for so many bytes of a layer is under way.
    pub fn ask(&mut self, bytes: u64, now: Instant) {
        self.flight.ask(bytes, now);
    }

    /// A call for so many bytes is over, so long after it was asked for.
    pub fn land(&mut self, bytes: u64, took: Duration, now: Instant) {
        self.transfer.note(took);
        self.flight.land(bytes, now);
    }

    /// A layer of a step was computed in so much time, and its loads had been waited for so long before. For the
    /// first one all wait, whatever the depth.
    pub fn note_compute(&mut self, layer: usize, took: Duration, waited: Duration) {
        self.compute.note(took);
        if layer == 0 {
            return;
        }
        if waited > took / 8 {
            self.extra = (self.extra + 1.0).min(64.0);
        } else {
            self.extra *= FADE;
        }
    }

    /// Layers of a model with so many to have asked for beyond the one that computes; at least 1, since the next
    /// layer's load must be under way.
    pub fn depth(&self, layers: usize) -> usize {
        let most = layers.max(1);
        if let Some(fixed) = self.fixed {
            return fixed.get().min(most);
        }
        if !self.transfer.known || !self.compute.known || self.compute.mean <= 0.0 {
            return most;
        }
        let spread = self.transfer.mean + MARGIN * self.transfer.variance.sqrt();
        let transfer = spread.max(self.transfer.peak);
        let compute = self.compute.mean - self.compute.variance.sqrt().min(self.compute.mean / 2.0);
        let wanted = (transfer / compute).ceil() + 1.0 + self.extra.round();
        // Saturates: a huge or undefined ratio is beyond `most`.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "clamped to small positive numbers"
        )]
        let wanted = wanted.clamp(1.0, 1e6) as usize;
        wanted.min(most)
    }
}

#[cfg(test)]
mod tests;
