//! Maps whose keys are numbers that this crate chose itself: slots, granules, generations.
//!
//! Nobody outside picks them, so a multiplication spreads them well enough; names that come from outside
//! are hashed with a secret key elsewhere.

use std::hash::{BuildHasherDefault, Hasher};

use hashbrown::HashMap;

/// A map from such a number.
pub(crate) type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// Spreads one number over 64 bits.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }
}
