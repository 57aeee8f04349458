//! What the scheduler side tells every worker for a step: typed, serialisable, versioned.
//!
//! Block hashes travel, not keys: each rank makes its own keys of them. Tables travel as differences,
//! so that a long request costs a step only what is new.

use layercake_protocol::ids::Epoch;
use serde::{Deserialize, Serialize};

use super::{BlockHash, BlockId, RequestId};
use crate::error::ConnectorError;

/// Version of [`StepMetadata`]. A worker refuses any other.
pub const METADATA_VERSION: u32 = 3;

/// One step's instructions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepMetadata {
    /// [`METADATA_VERSION`] of the writer.
    pub version: u32,
    /// Number of the step; grows by one with each.
    pub step: u64,
    /// Requests computed in this step.
    pub requests: Vec<RequestStep>,
    /// Requests that lost their blocks before this step: saves under way stop reading them before
    /// the step's start returns.
    pub preempted: Vec<RequestId>,
    /// Requests that ended with saves under way: to be reported when the last of them is over.
    pub finished: Vec<RequestId>,
    /// Requests that computed from a block whose load failed, on whichever rank: nothing of their attempt
    /// up to now is committed.
    pub void: Vec<RequestId>,
    /// The results of all ranks are known for every step up to this one: `void` and earlier steps' say what
    /// failed in them.
    pub confirmed: u64,
}

/// One request in a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestStep {
    /// The request.
    pub request: RequestId,
    /// Grows when the request starts over: after a preemption, or a load that failed.
    pub attempt: u32,
    /// The look-up's epoch; 0: none.
    pub epoch: u64,
    /// Its blocks.
    pub table: TableUpdate,
    /// Blocks to load from the store before they are used.
    pub load: Option<Span>,
    /// Blocks that are complete after this step and not known to be stored.
    pub save: Option<Span>,
    /// The engine does not keep earlier chunks: of so many blocks from the first on, those that are
    /// committed come back.
    pub restore: u32,
}

impl RequestStep {
    /// The look-up's epoch.
    pub fn epoch(&self) -> Epoch {
        Epoch(self.epoch)
    }

    /// The blocks of its whole table that come from the store.
    pub(crate) fn loaded(&self, table: &[BlockId]) -> impl Iterator<Item = BlockId> {
        let indices = self.load.iter().flat_map(Span::iter);
        let indices = indices.map(|(index, _)| index).chain(0..self.restore);
        indices.filter_map(|index| table.get(usize::try_from(index).ok()?).copied())
    }
}

/// How a request's block table changes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableUpdate {
    /// The attempt begins here: nothing that was told before is needed to understand it.
    pub begins: bool,
    /// Forget what was there.
    pub replace: bool,
    /// The blocks to append.
    pub blocks: Vec<BlockId>,
}

/// Consecutive blocks of a request by index in its table, with their hashes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Index of the first block.
    pub first: u32,
    /// Hashes of the blocks from `first` on.
    pub hashes: Vec<BlockHash>,
}

impl Span {
    /// Index and hash of each block.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (u32, &BlockHash)> {
        let hashes = self.hashes.iter().enumerate();
        hashes.map(|(at, hash)| {
            (
                self.first
                    .saturating_add(u32::try_from(at).unwrap_or(u32::MAX)),
                hash,
            )
        })
    }
}

impl StepMetadata {
    /// As JSON.
    pub fn encode(&self) -> Result<Vec<u8>, ConnectorError> {
        serde_json::to_vec(self).map_err(|error| ConnectorError::Metadata {
            detail: error.to_string(),
        })
    }

    /// Reads what [`encode`](Self::encode) wrote. The version is looked at before anything else.
    pub fn decode(bytes: &[u8]) -> Result<Self, ConnectorError> {
        #[derive(Deserialize)]
        struct Version {
            version: u64,
        }
        let bad = |error: serde_json::Error| ConnectorError::Metadata {
            detail: error.to_string(),
        };
        let Version { version } = serde_json::from_slice(bytes).map_err(bad)?;
        if version != u64::from(METADATA_VERSION) {
            return Err(ConnectorError::MetadataVersion {
                found: version,
                accepted: METADATA_VERSION,
            });
        }
        serde_json::from_slice(bytes).map_err(bad)
    }

    /// Refuses another version; a worker's first check, for metadata that came as a value.
    pub fn check_version(&self) -> Result<(), ConnectorError> {
        if self.version == METADATA_VERSION {
            Ok(())
        } else {
            Err(ConnectorError::MetadataVersion {
                found: self.version.into(),
                accepted: METADATA_VERSION,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step() -> StepMetadata {
        StepMetadata {
            version: METADATA_VERSION,
            step: 7,
            requests: vec![RequestStep {
                request: "r-1".into(),
                attempt: 2,
                epoch: 99,
                table: TableUpdate {
                    begins: true,
                    replace: true,
                    blocks: vec![4, 0, u64::MAX],
                },
                load: Some(Span {
                    first: 0,
                    hashes: vec![BlockHash::new(&[0xab, 0x00]), BlockHash::new(&[1])],
                }),
                save: None,
                restore: 0,
            }],
            preempted: vec!["r-2".into()],
            finished: vec![],
            void: vec!["r-3".into()],
            confirmed: 6,
        }
    }

    // contract: connector-3
    #[test]
    fn metadata_survives_the_way_and_another_version_is_refused_unread() {
        let bytes = step().encode().expect("encodes");
        let text = String::from_utf8(bytes.clone()).expect("JSON is text");
        assert!(text.contains("\"ab00\""), "hashes are digits: {text}");
        assert_eq!(StepMetadata::decode(&bytes).expect("decodes"), step());

        let later = br#"{"version": 4, "something": "new"}"#;
        let error = StepMetadata::decode(later).expect_err("refused");
        assert!(
            matches!(
                error,
                ConnectorError::MetadataVersion {
                    found: 4,
                    accepted: 3
                }
            ),
            "{error}"
        );
        let mut other = step();
        other.version = 0;
        assert!(other.check_version().is_err());
        assert!(step().check_version().is_ok());
        assert!(matches!(
            StepMetadata::decode(b"{}").expect_err("no version"),
            ConnectorError::Metadata { .. }
        ));
    }

    #[test]
    fn hashes_are_read_strictly() {
        let hash = BlockHash::new(&[0, 255, 16]);
        assert_eq!(
            BlockHash::from_hex(&hash.to_string()).expect("digits"),
            hash
        );
        for text in ["", "a", "0g", "AB", "0 "] {
            assert!(BlockHash::from_hex(text).is_err(), "{text:?}");
        }
    }
}
