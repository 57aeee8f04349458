//! Stable digests of what must be equal for two deployments to read each other's bytes.
//!
//! A [`Fingerprint`] (K3) covers the deployment, a [`LayoutDigest`] (K2) the KV cache groups or the
//! order and lengths within one object (L1). Both are 128 bits of BLAKE3 over a canonical encoding:
//! every field in a fixed order, each with its tag and its length before its bytes, lists with their
//! count. So no two different inputs have the same encoding, and the digests resist inputs made to
//! collide. The encoding is versioned by the hash's context string and by [`SCHEMA_VERSION`]; its
//! values are pinned by tests, since a silent change would turn every stored block into a miss.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Version of what is stored under a fingerprint: raised when the bytes of an object change meaning.
pub const SCHEMA_VERSION: u32 = 1;

/// A text is not 32 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{text:?} is no digest: 32 digits 0-9 and a-f are expected")]
pub struct DigestTextError {
    /// The text given.
    pub text: String,
}

macro_rules! digest {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; 16]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", u128::from_be_bytes(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = DigestTextError;

            fn from_str(text: &str) -> Result<Self, DigestTextError> {
                parse_digest(text).map(Self)
            }
        }
    };
}

digest! {
    /// Digest of all that two deployments must have in common to share blocks.
    Fingerprint
}
digest! {
    /// Digest of a layout: of the groups of a deployment, or of the entries of one object.
    LayoutDigest
}

fn parse_digest(text: &str) -> Result<[u8; 16], DigestTextError> {
    let error = || DigestTextError {
        text: text.to_owned(),
    };
    if text.len() != 32 || !text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(error());
    }
    u128::from_str_radix(text, 16)
        .map(u128::to_be_bytes)
        .map_err(|_| error())
}

/// How a model's KV heads are spread over the tensor-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorParallel {
    /// Tensor-parallel ranks.
    pub size: u32,
    /// Ranks whose bytes differ: the others hold copies and store nothing.
    pub storing_ranks: u32,
}

/// What goes into a [`Fingerprint`]. All fields count; none has a default, so none is forgotten.
#[derive(Clone, Copy, Debug)]
pub struct FingerprintFields<'a> {
    /// The tenant.
    pub tenant: &'a str,
    /// The model's name.
    pub model: &'a str,
    /// Revision or another id of the weights.
    pub revision: &'a str,
    /// Data type of the KV cache.
    pub kv_dtype: &'a str,
    /// Tokens in a block.
    pub block_size: u32,
    /// Layout over the tensor-parallel ranks.
    pub tensor_parallel: TensorParallel,
    /// Digest of the groups.
    pub layout: LayoutDigest,
}

impl FingerprintFields<'_> {
    /// The fingerprint of these fields under [`SCHEMA_VERSION`].
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint_of_schema(SCHEMA_VERSION)
    }

    fn fingerprint_of_schema(&self, version: u32) -> Fingerprint {
        let mut canon = Canon::new("layercake v1 fingerprint");
        canon.number(version.into());
        canon.text(self.tenant);
        canon.text(self.model);
        canon.text(self.revision);
        canon.text(self.kv_dtype);
        canon.number(self.block_size.into());
        canon.number(self.tensor_parallel.size.into());
        canon.number(self.tensor_parallel.storing_ranks.into());
        canon.bytes(&self.layout.0);
        Fingerprint(canon.finish())
    }
}

/// One KV cache group as the scheduler and every worker see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSignature {
    /// Raw tokens in a block of this group.
    pub block_size: u32,
    /// Names of its layers, in the group's order.
    pub layers: Vec<String>,
    /// Byte lengths of one block's pages, in the group's order.
    pub page_bytes: Vec<u64>,
}

/// The groups of a deployment: what a hybrid key's layout digest covers (K2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutSignature {
    /// Tensor-parallel ranks.
    pub tp_size: u32,
    /// The groups of each pipeline stage, in order: all stages, since membership is local to a stage
    /// while the digest must be equal everywhere. One stage without pipeline parallelism.
    pub stages: Vec<Vec<GroupSignature>>,
}

impl LayoutSignature {
    /// The digest of this layout.
    pub fn digest(&self) -> LayoutDigest {
        let mut canon = Canon::new("layercake v1 group layout digest");
        canon.number(SCHEMA_VERSION.into());
        canon.number(self.tp_size.into());
        canon.list(self.stages.len());
        for stage in &self.stages {
            canon.list(stage.len());
            for group in stage {
                canon.number(group.block_size.into());
                canon.list(group.layers.len());
                for layer in &group.layers {
                    canon.text(layer);
                }
                canon.list(group.page_bytes.len());
                for &page in &group.page_bytes {
                    canon.number(page);
                }
            }
        }
        LayoutDigest(canon.finish())
    }
}

/// A hash over tagged, length-prefixed fields.
pub(crate) struct Canon(blake3::Hasher);

impl Canon {
    /// Starts an encoding of its own kind: equal fields under another context hash differently.
    pub(crate) fn new(context: &str) -> Self {
        Self(blake3::Hasher::new_derive_key(context))
    }

    pub(crate) fn number(&mut self, value: u64) {
        self.0.update(b"n").update(&value.to_le_bytes());
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.field(*b"t", text.as_bytes());
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.field(*b"b", bytes);
    }

    pub(crate) fn list(&mut self, count: usize) {
        self.0.update(b"l").update(&(count as u64).to_le_bytes());
    }

    fn field(&mut self, tag: [u8; 1], bytes: &[u8]) {
        self.0
            .update(&tag)
            .update(&(bytes.len() as u64).to_le_bytes())
            .update(bytes);
    }

    pub(crate) fn finish(&self) -> [u8; 16] {
        let mut digest = [0; 16];
        digest.copy_from_slice(&self.0.finalize().as_bytes()[..16]);
        digest
    }
}
