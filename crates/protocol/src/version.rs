//! Versions that every connection exchanges first (requirement O8).

use std::fmt;

use thiserror::Error;

/// What one side of a connection speaks.
///
/// `protocol` counts changes of the bytes on the wire, `semantics` changes of what they mean. Each
/// side accepts its own version and the one before. Both count from 1: a 0 is a number that was not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// Version of the messages and frames.
    pub protocol: u32,
    /// Version of the rules behind them.
    pub semantics: u32,
}

/// What this build speaks.
pub const CURRENT: Version = Version {
    protocol: 1,
    semantics: 1,
};

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.protocol, self.semantics)
    }
}

/// The peer speaks a version that this build can't work with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "the peer speaks version {theirs}, this side {ours}: only versions one apart work together, upgrade the older side"
)]
pub struct VersionMismatch {
    /// This side's version.
    pub ours: Version,
    /// The peer's version.
    pub theirs: Version,
}

impl Version {
    /// Checks that a peer's version is this one or a neighbour of it. One with a 0 is nobody's.
    pub fn accept(self, theirs: Self) -> Result<(), VersionMismatch> {
        let near = |ours: u32, theirs: u32| theirs != 0 && ours.abs_diff(theirs) <= 1;
        if near(self.protocol, theirs.protocol) && near(self.semantics, theirs.semantics) {
            Ok(())
        } else {
            Err(VersionMismatch { ours: self, theirs })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(protocol: u32, semantics: u32) -> Version {
        Version {
            protocol,
            semantics,
        }
    }

    #[test]
    fn neighbours_work_together_and_others_are_refused_naming_both() {
        let ours = version(4, 2);
        for theirs in [version(4, 2), version(3, 2), version(5, 1), version(4, 3)] {
            assert_eq!(ours.accept(theirs), Ok(()));
        }
        for theirs in [version(2, 2), version(6, 2), version(4, 0), version(4, 4)] {
            let error = ours.accept(theirs).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(&ours.to_string()) && text.contains(&theirs.to_string()));
        }
    }

    #[test]
    fn a_number_that_was_not_set_is_refused_beside_the_first_version_too() {
        let ours = version(1, 1);
        assert_eq!(ours.accept(ours), Ok(()));
        for theirs in [version(0, 1), version(1, 0), version(0, 0)] {
            assert_eq!(ours.accept(theirs), Err(VersionMismatch { ours, theirs }));
        }
    }
}
