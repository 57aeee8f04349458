//! Whether an object that several blocks need is read once and copied (W11). Pure.
//!
//! Reading `n` times costs `n` remote reads; reading once costs one, into a staging slot, and `n` local
//! copies from there. Which is less follows from two measured bandwidths. Until both are known the object is read once, since a
//! copy in memory is rarely the slower one.

use crate::options::LocalFanout;
use crate::rate::Rate;

/// The two bandwidths.
#[derive(Clone, Debug)]
pub struct FanOut {
    setting: LocalFanout,
    /// Bytes per second.
    remote: Rate,
    local: Rate,
}

impl FanOut {
    /// Nothing is measured.
    pub fn new(setting: LocalFanout) -> Self {
        Self {
            setting,
            remote: Rate::default(),
            local: Rate::default(),
        }
    }

    /// A remote read.
    pub fn note_remote(&mut self, bytes: u64, seconds: f64) {
        self.remote.note(bytes, seconds);
    }

    /// A local copy.
    pub fn note_local(&mut self, bytes: u64, seconds: f64) {
        self.local.note(bytes, seconds);
    }

    /// Whether an object that `blocks` blocks need is read once.
    pub fn read_once(&self, blocks: usize) -> bool {
        if blocks < 2 {
            return false;
        }
        match self.setting {
            LocalFanout::On => true,
            LocalFanout::Off => false,
            LocalFanout::Auto => {
                let (Some(remote), Some(local)) = (self.remote.after(1), self.local.after(1))
                else {
                    return true;
                };
                let blocks = blocks as f64;
                blocks / local <= (blocks - 1.0) / remote
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_faster_way_is_chosen_and_can_be_forced() {
        let mut auto = FanOut::new(LocalFanout::Auto);
        assert!(!auto.read_once(1));
        assert!(auto.read_once(2), "nothing is known");
        auto.note_remote(1_000, 1.0);
        auto.note_local(10_000, 1.0);
        assert!(auto.read_once(2));
        let mut close = FanOut::new(LocalFanout::Auto);
        close.note_remote(1_000, 1.0);
        close.note_local(1_500, 1.0);
        assert!(!close.read_once(2), "two copies take longer than one read");
        assert!(close.read_once(4), "four take less than three");
        for _ in 0..50 {
            auto.note_local(100, 1.0);
        }
        assert!(!auto.read_once(9));
        auto.note_local(0, 1.0);
        auto.note_remote(5, 0.0);
        let mut on = FanOut::new(LocalFanout::On);
        on.note_remote(1_000, 1.0);
        on.note_local(1, 1.0);
        assert!(on.read_once(2) && !on.read_once(1));
        assert!(!FanOut::new(LocalFanout::Off).read_once(9));
    }
}
