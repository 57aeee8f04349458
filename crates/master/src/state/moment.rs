//! Time as the state machine sees it: handed in with every call, never read from a clock.

use std::fmt;
use std::ops::Add;
use std::time::Duration;

/// A point in time, in microseconds since this master started.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(u64);

impl Moment {
    /// When this master started; also "never" where a past moment is meant.
    pub const START: Self = Self(0);
    /// Later than everything.
    pub const END: Self = Self(u64::MAX);

    /// This many microseconds after the start.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Microseconds since the start.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Time since the start.
    pub const fn since_start(self) -> Duration {
        Duration::from_micros(self.0)
    }

    /// Time from `earlier` to this moment; zero if `earlier` is later.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(micros))
    }
}

impl fmt::Debug for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "start+{:?}", self.since_start())
    }
}
