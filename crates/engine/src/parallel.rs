//! Ranks that compute together.
//!
//! Each rank is a thread. In a layer they meet at an [`Exchange`]: every rank brings its part of each
//! token's vector and takes the whole. A rank that fails breaks the exchange, so that nobody waits for
//! it; every wait has a deadline besides: what a layer may take to compute, and what its connector may hold the slowest
//! rank up for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_connector::options::Options;
use parking_lot::{Condvar, Mutex};

use crate::error::EngineError;

/// The most that a layer takes to compute.
const LAYER: Duration = Duration::from_mins(10);

/// How long ranks wait for one another. The connector may hold a rank up between two layers while saves let go of its
/// blocks, while a layer is loaded, and while saves are behind.
pub(crate) fn patience(options: Option<&Options>) -> Duration {
    options.map_or(LAYER, |options| {
        let loads = options.layer_timeout.saturating_mul(2);
        LAYER
            .saturating_add(loads)
            .saturating_add(options.save_stall)
    })
}

/// Where ranks meet.
#[derive(Debug)]
struct Exchange {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// What each rank brought in even and in odd rounds. A rank that is at a round has left the one
    /// before, so two sets are enough.
    parts: [Vec<Vec<f32>>; 2],
    arrived: [usize; 2],
    complete: u64,
    broken: bool,
}

/// A rank's way to the others.
#[derive(Debug)]
pub(crate) struct Port {
    exchange: Arc<Exchange>,
    rank: usize,
    ranks: usize,
    round: u64,
    patience: Duration,
}

/// The ports of ranks that compute together, and wait so long for one another.
pub(crate) fn ports(ranks: u32, patience: Duration) -> Vec<Port> {
    let count = ranks as usize;
    let parts = || vec![Vec::new(); count];
    let exchange = Arc::new(Exchange {
        state: Mutex::new(State {
            parts: [parts(), parts()],
            arrived: [0; 2],
            complete: 0,
            broken: false,
        }),
        changed: Condvar::new(),
    });
    let port = |rank| Port {
        exchange: Arc::clone(&exchange),
        rank,
        ranks: count,
        round: 0,
        patience,
    };
    (0..count).map(port).collect()
}

impl Port {
    /// This rank's number.
    pub(crate) fn rank(&self) -> u32 {
        u32::try_from(self.rank).unwrap_or(u32::MAX)
    }

    /// Puts the ranks' parts of `tokens` vectors together: of each vector the first rank's part first.
    pub(crate) fn gather(&mut self, part: &[f32], tokens: usize) -> Result<Vec<f32>, EngineError> {
        if self.ranks == 1 {
            return Ok(part.to_vec());
        }
        let lost = EngineError::RankLost { rank: self.rank() };
        let set = usize::from(!self.round.is_multiple_of(2));
        self.round += 1;
        let until = Instant::now() + self.patience;
        let mut state = self.exchange.state.lock();
        let mine = &mut state.parts[set][self.rank];
        mine.clear();
        mine.extend_from_slice(part);
        state.arrived[set] += 1;
        if state.arrived[set] == self.ranks {
            state.arrived[set] = 0;
            state.complete = self.round;
            self.exchange.changed.notify_all();
        }
        while state.complete < self.round && !state.broken {
            if self
                .exchange
                .changed
                .wait_until(&mut state, until)
                .timed_out()
            {
                state.broken = true;
                self.exchange.changed.notify_all();
            }
        }
        if state.complete < self.round {
            return Err(lost);
        }
        let width = part.len() / tokens.max(1);
        let mut whole = Vec::with_capacity(part.len() * self.ranks);
        for token in 0..tokens {
            for part in &state.parts[set] {
                whole.extend_from_slice(&part[token * width..(token + 1) * width]);
            }
        }
        Ok(whole)
    }

    /// This rank computes no further: nobody waits for it.
    pub(crate) fn leave(&self) {
        self.exchange.state.lock().broken = true;
        self.exchange.changed.notify_all();
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn everybody_gets_all_parts_in_order_round_after_round() {
        thread::scope(|scope| {
            for mut port in ports(3, LAYER) {
                scope.spawn(move || {
                    for round in 0..200_u16 {
                        let of = |rank: u16, token: u16| f32::from(round * 10 + rank * 3 + token);
                        let rank = u16::try_from(port.rank()).expect("small");
                        let part = [of(rank, 0), of(rank, 1)];
                        let whole = port.gather(&part, 2).expect("all are there");
                        let all = [0, 1].map(|token| [0, 1, 2].map(|rank| of(rank, token)));
                        assert_eq!(whole, all.concat());
                    }
                });
            }
        });
    }

    #[test]
    fn ranks_wait_for_as_long_as_the_connector_may_hold_one_up() {
        let mut options = Options::default();
        assert!(patience(Some(&options)) > patience(None));
        options.layer_timeout = Duration::from_hours(24);
        assert!(patience(Some(&options)) > options.layer_timeout);
        // And no longer than that.
        let mut ports = ports(2, Duration::from_millis(1));
        let error = ports[0].gather(&[1.0], 1).expect_err("the other is late");
        assert!(matches!(error, EngineError::RankLost { rank: 0 }));
    }

    #[test]
    fn nobody_waits_for_a_rank_that_left() {
        let mut ports = ports(2, LAYER);
        let gone = ports.pop().expect("two");
        let mut left = ports.pop().expect("two");
        let waiting = thread::spawn(move || left.gather(&[1.0], 1));
        drop(gone);
        let error = waiting.join().expect("no panic").expect_err("alone");
        assert!(matches!(error, EngineError::RankLost { rank: 0 }));
    }
}
