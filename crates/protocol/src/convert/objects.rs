//! Keys, replicas, reservations, and who asks for them.

use std::time::Duration;

use bytes::Bytes;

use super::{array, invalid, required};
use crate::early::EarlyToken;
use crate::error::WireError;
use crate::fingerprint::Fingerprint;
use crate::ids::{ClientId, Epoch, Generation, RequestId, SegmentId, Term};
use crate::key::{KeyError, ObjectKey, Tenant};
use crate::replica::{GRANULE, ObjectRef, PutStart, Recency, Replica, ReplicateConfig};
use crate::wire;

/// Who asks, in which term, and how a repeated call is recognised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// The term the caller believes in; `None`: it does not know one yet.
    pub term: Option<Term>,
    /// The caller.
    pub client: ClientId,
    /// The call.
    pub request: RequestId,
    /// Namespace of all keys in the request.
    pub tenant: Tenant,
}

impl From<&Context> for wire::Context {
    fn from(context: &Context) -> Self {
        let tenant = context.tenant.as_str();
        Self {
            term: context.term.map_or(0, |term| term.0),
            client_id: Some(context.client.into()),
            request_id: context.request.0,
            // The default namespace is the absent one: most calls then don't carry a name.
            tenant: if tenant == Tenant::DEFAULT {
                String::new()
            } else {
                tenant.to_owned()
            },
        }
    }
}

impl TryFrom<wire::Context> for Context {
    type Error = WireError;

    fn try_from(context: wire::Context) -> Result<Self, WireError> {
        Ok(Self {
            term: Some(Term(context.term)).filter(|term| term.0 != 0),
            client: required("context.client_id", context.client_id)?.into(),
            request: RequestId(context.request_id),
            tenant: if context.tenant.is_empty() {
                Tenant::default()
            } else {
                Tenant::new(&context.tenant)
                    .map_err(|error| invalid("context.tenant", error.to_string()))?
            },
        })
    }
}

impl From<KeyError> for WireError {
    fn from(error: KeyError) -> Self {
        invalid("key", error.to_string())
    }
}

/// 16 bytes, or none.
pub(super) fn encode_fingerprint(fingerprint: Option<Fingerprint>) -> Bytes {
    fingerprint.map_or_else(Bytes::new, |print| Bytes::copy_from_slice(&print.0))
}

pub(super) fn decode_fingerprint(bytes: &[u8]) -> Result<Option<Fingerprint>, WireError> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let print = array("fingerprint", bytes)?;
    // An object's header can't tell it from none.
    if print == [0; 16] {
        return Err(invalid("fingerprint", "16 zeros, which stand for none"));
    }
    Ok(Some(Fingerprint(print)))
}

impl From<Replica> for wire::Replica {
    fn from(replica: Replica) -> Self {
        Self {
            segment_id: replica.segment.0,
            offset: replica.offset,
            header_len: replica.header_len,
            generation: replica.generation.0,
        }
    }
}

impl TryFrom<wire::Replica> for Replica {
    type Error = WireError;

    fn try_from(replica: wire::Replica) -> Result<Self, WireError> {
        let wire::Replica {
            segment_id,
            offset,
            header_len,
            generation,
        } = replica;
        if segment_id == 0 {
            return Err(WireError::Missing {
                field: "replica.segment_id",
            });
        }
        if generation == 0 {
            return Err(WireError::Missing {
                field: "replica.generation",
            });
        }
        if !offset.is_multiple_of(GRANULE) || offset.checked_add(header_len.into()).is_none() {
            return Err(invalid(
                "replica.offset",
                format!(
                    "{offset}: a multiple of {GRANULE} with room for {header_len} bytes behind it is needed"
                ),
            ));
        }
        Ok(Self {
            segment: SegmentId(segment_id),
            offset,
            header_len,
            generation: Generation(generation),
        })
    }
}

impl From<&ReplicateConfig> for wire::ReplicateConfig {
    fn from(config: &ReplicateConfig) -> Self {
        Self {
            replicas: config.replicas,
            preferred_segments: config.preferred_segments.clone(),
            prefer_same_node: config.prefer_same_node,
            soft_pin: config.soft_pin,
            hard_pin: config.hard_pin,
            soft_pin_ttl_ms: config.soft_pin_ttl.map_or(0, encode_millis),
            keep_soft_pin: config.keep_soft_pin,
        }
    }
}

impl TryFrom<wire::ReplicateConfig> for ReplicateConfig {
    type Error = WireError;

    fn try_from(config: wire::ReplicateConfig) -> Result<Self, WireError> {
        if config.replicas == 0 {
            return Err(invalid("config.replicas", "0, at least 1 is needed"));
        }
        Ok(Self {
            replicas: config.replicas,
            preferred_segments: config.preferred_segments,
            prefer_same_node: config.prefer_same_node,
            soft_pin: config.soft_pin,
            soft_pin_ttl: Some(config.soft_pin_ttl_ms)
                .filter(|ttl| *ttl != 0)
                .map(Duration::from_millis),
            keep_soft_pin: config.keep_soft_pin,
            hard_pin: config.hard_pin,
        })
    }
}

impl From<Recency> for wire::Recency {
    fn from(recency: Recency) -> Self {
        Self {
            epoch: recency.epoch.0,
            first_index: recency.first_index,
        }
    }
}

impl From<wire::Recency> for Recency {
    fn from(recency: wire::Recency) -> Self {
        Self {
            epoch: Epoch(recency.epoch),
            first_index: recency.first_index,
        }
    }
}

impl PutStart {
    /// Its message without the key, which a batch writes from where it is.
    pub(super) fn without_key(&self) -> wire::PutStart {
        wire::PutStart {
            key: String::new(),
            size: self.size,
            header_rows: self.header_rows,
            group: self.group.clone().unwrap_or_default(),
            fingerprint: encode_fingerprint(self.fingerprint),
            layout_id: self.layout_id,
            prefix_index: self.prefix_index,
            copy_of: self.copy_of.map_or(0, |generation| generation.0),
            early_token: self.early.map_or(0, |token| token.0.get()),
        }
    }
}

impl From<PutStart> for wire::PutStart {
    fn from(start: PutStart) -> Self {
        Self {
            key: start.key.as_str().to_owned(),
            ..start.without_key()
        }
    }
}

impl TryFrom<wire::PutStart> for PutStart {
    type Error = WireError;

    fn try_from(start: wire::PutStart) -> Result<Self, WireError> {
        if start.size == 0 {
            return Err(invalid("size", "0, at least 1 byte is needed"));
        }
        Ok(Self {
            key: ObjectKey::new(&start.key)?,
            size: start.size,
            header_rows: start.header_rows,
            group: Some(start.group).filter(|group| !group.is_empty()),
            fingerprint: decode_fingerprint(&start.fingerprint)?,
            layout_id: start.layout_id,
            prefix_index: start.prefix_index,
            copy_of: Some(Generation(start.copy_of))
                .filter(|generation| *generation != Generation::NONE),
            early: EarlyToken::new(start.early_token),
        })
    }
}

impl From<&ObjectRef> for wire::ObjectRef {
    fn from(object: &ObjectRef) -> Self {
        Self {
            key: object.key.as_str().to_owned(),
            generation: object.generation.0,
        }
    }
}

impl TryFrom<wire::ObjectRef> for ObjectRef {
    type Error = WireError;

    fn try_from(object: wire::ObjectRef) -> Result<Self, WireError> {
        if object.generation == 0 {
            return Err(WireError::Missing {
                field: "generation",
            });
        }
        Ok(Self {
            key: ObjectKey::new(&object.key)?,
            generation: Generation(object.generation),
        })
    }
}

/// A duration in whole milliseconds, rounded up so that a short one does not become "not set".
pub(super) fn encode_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}
