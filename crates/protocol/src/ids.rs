//! Identifiers as types of their own, so that one can't stand in for another.
//!
//! Ids that several masters hand out in turn (generations, epochs, terms) grow for ever: a later
//! master starts above everything an earlier one used, so a stale id never equals a fresh one.

use std::fmt;

use rand::RngExt as _;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $format:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, $format, self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "(", $format, ")"), self.0)
            }
        }

        impl From<$inner> for $name {
            fn from(value: $inner) -> Self {
                Self(value)
            }
        }
    };
}

id! {
    /// One run of one transfer engine. A restarted process is another engine.
    EngineId(u128), "{:032x}"
}
id! {
    /// One run of one member of the cluster: a client, a node, or both in one process.
    ClientId(u128), "{:032x}"
}
id! {
    /// A region of memory registered with a transfer engine; unique within that engine's life.
    RegionId(u64), "{:x}"
}
id! {
    /// Memory that a node gives to the store. Drawn by the node, unique across nodes and restarts.
    SegmentId(u64), "{:016x}"
}
id! {
    /// One reservation of a piece of a segment. Every reservation has a greater one than all before
    /// it, across masters' lives: it orders the writers of a place, and names a put session.
    Generation(u64), "{}"
}
id! {
    /// One master's time in office. Grows with every restart and fail-over.
    Term(u64), "{}"
}
id! {
    /// One call on a client's stream. Unique within the client's life: a repeated call carries it again.
    RequestId(u64), "{}"
}
id! {
    /// When a request touched its prefix; one per request, across its windows and chunks.
    Epoch(u64), "{}"
}

/// A number that can't be guessed and, at 128 bits, is never drawn twice.
fn draw_u128() -> u128 {
    rand::rng().random()
}

impl EngineId {
    /// Draws the id of a new engine.
    pub fn draw() -> Self {
        Self(draw_u128())
    }
}

impl ClientId {
    /// Draws the id of a new member.
    pub fn draw() -> Self {
        Self(draw_u128())
    }
}

impl SegmentId {
    /// Draws the id of a new segment; never zero, and it fits a signed 64-bit integer.
    pub fn draw() -> Self {
        Self(rand::rng().random_range(1..=u64::MAX >> 1))
    }
}

impl Generation {
    /// The tag of memory that was never reserved.
    pub const NONE: Self = Self(0);
}

impl Epoch {
    /// "Not drawn yet": the master answers with the epoch it gave to the call.
    pub const UNSET: Self = Self(0);
}

/// The right to touch one region, handed out by its owner. Compared in constant time by the owner,
/// never shown in logs.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Capability(pub [u8; 16]);

impl Capability {
    /// Draws a capability for a new region.
    pub fn draw() -> Self {
        Self(draw_u128().to_le_bytes())
    }

    /// What may be shown to peers that need to check a capability without learning it.
    pub fn digest(&self) -> [u8; 16] {
        let mut digest = [0; 16];
        let hash = blake3::derive_key("layercake v1 capability digest", &self.0);
        digest.copy_from_slice(&hash[..16]);
        digest
    }

    /// Whether `other` is the same capability, in time that does not depend on where they differ.
    pub fn matches(&self, other: &Self) -> bool {
        constant_time_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Capability(…)")
    }
}

pub(crate) fn constant_time_eq(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |acc, (x, y)| acc | (x ^ y)) == 0
}

/// What kind of memory a region is (requirement T6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Ordinary host memory.
    #[default]
    Host,
    /// Host memory that a device driver has pinned.
    PinnedHost,
    /// Memory of a CUDA device.
    Cuda {
        /// The device's index.
        device: u32,
    },
    /// Memory of a `ROCm` device.
    Rocm {
        /// The device's index.
        device: u32,
    },
    /// Memory of an Ascend NPU.
    Npu {
        /// The device's index.
        device: u32,
    },
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host memory"),
            Self::PinnedHost => f.write_str("pinned host memory"),
            Self::Cuda { device } => write!(f, "CUDA device {device}"),
            Self::Rocm { device } => write!(f, "ROCm device {device}"),
            Self::Npu { device } => write!(f, "NPU {device}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_ids_differ_and_segments_are_never_zero() {
        assert_ne!(EngineId::draw(), EngineId::draw());
        assert_ne!(ClientId::draw(), ClientId::draw());
        for _ in 0..1000 {
            let id = SegmentId::draw().0;
            assert!(id > 0 && i64::try_from(id).is_ok());
        }
    }

    #[test]
    fn a_capability_is_never_shown() {
        let capability = Capability([0xAB; 16]);
        assert_eq!(format!("{capability:?}"), "Capability(…)");
        assert_ne!(capability.digest(), capability.0);
        assert!(capability.matches(&capability.clone()));
        let mut other = capability;
        other.0[15] ^= 1;
        assert!(!capability.matches(&other));
    }
}
