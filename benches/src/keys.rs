//! Keys as a connector makes them, and numbers in a repeatable random order.

use anyhow::Result;
use layercake_protocol::key::ObjectKey;

/// The key of this number, of 60 bytes.
pub fn key(number: usize) -> Result<ObjectKey> {
    let spread = (number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    Ok(ObjectKey::new(&format!(
        "llama-3.1-70b@{spread:016x}{number:016x}@tp:00000003@p"
    ))?)
}

/// The keys of `count` numbers.
pub fn keys(from: usize, count: usize) -> Result<Vec<ObjectKey>> {
    (from..from + count).map(key).collect()
}

/// Repeatable random numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A sequence of its own for each seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `bound`, which is at least 1.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 31;
        usize::try_from((u128::from(x) * bound as u128) >> 64).unwrap_or(0)
    }
}
