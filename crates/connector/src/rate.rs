//! A smoothed rate. Pure.

/// Weight of a new measurement: the last few count, and one that is off does not decide.
const WEIGHT: f64 = 0.2;

/// So much per second, smoothed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rate {
    value: f64,
    measured: u32,
}

impl Rate {
    /// So much took so long. Nothing, or no time, says nothing.
    pub(crate) fn note(&mut self, amount: u64, seconds: f64) {
        if amount == 0 || seconds <= 0.0 {
            return;
        }
        let rate = amount as f64 / seconds;
        self.value = if self.measured == 0 {
            rate
        } else {
            self.value + WEIGHT * (rate - self.value)
        };
        self.measured = self.measured.saturating_add(1);
    }

    /// Per second, after so many measurements; none say nothing.
    pub(crate) fn after(self, measurements: u32) -> Option<f64> {
        (self.measured >= measurements.max(1)).then_some(self.value)
    }
}
