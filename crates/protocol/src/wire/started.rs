//! The answers that a start has for each key, with their replicas inline.
//!
//! As generated code these would have memory of its own for each key's replicas, of which there is nearly
//! always one, on both sides of every start. The bytes are those of the `.proto` files, which describe the fields.

use prost::bytes::{Buf, BufMut, Bytes};
use prost::encoding::{
    DecodeContext, WireType, bytes, fixed64, int32, message, skip_field, uint32, uint64,
};
use prost::{DecodeError, Message};
use smallvec::SmallVec;

use super::Replica;

/// Replicas of one object: seldom more than one.
pub type Replicas = SmallVec<[Replica; 1]>;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct PutStarted {
    pub refusal: i32,
    pub generation: u64,
    pub replicas: Replicas,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct GetStarted {
    pub refusal: i32,
    pub size: u64,
    pub replicas: Replicas,
    pub fingerprint: Bytes,
    pub layout_id: u64,
    pub early_token: u64,
    pub early_slots: u32,
    pub left_out: u32,
}

/// A field that is left out when it has its default.
macro_rules! encode {
    ($kind:ident, $tag:literal, $value:expr, $buf:ident) => {
        if !is_default(&$value) {
            $kind::encode($tag, &$value, $buf);
        }
    };
}

macro_rules! encoded_len {
    ($kind:ident, $tag:literal, $value:expr) => {
        if is_default(&$value) {
            0
        } else {
            $kind::encoded_len($tag, &$value)
        }
    };
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn encode_replicas(tag: u32, replicas: &Replicas, buf: &mut impl BufMut) {
    for replica in replicas {
        message::encode(tag, replica, buf);
    }
}

fn replicas_len(tag: u32, replicas: &Replicas) -> usize {
    let lens = replicas.iter();
    lens.map(|replica| message::encoded_len(tag, replica)).sum()
}

fn merge_replica(
    wire_type: WireType,
    replicas: &mut Replicas,
    buf: &mut impl Buf,
    ctx: DecodeContext,
) -> Result<(), DecodeError> {
    let mut replica = Replica::default();
    message::merge(wire_type, &mut replica, buf, ctx)?;
    replicas.push(replica);
    Ok(())
}

impl Message for PutStarted {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        encode!(int32, 1, self.refusal, buf);
        encode!(uint64, 2, self.generation, buf);
        encode_replicas(3, &self.replicas, buf);
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        match tag {
            1 => int32::merge(wire_type, &mut self.refusal, buf, ctx),
            2 => uint64::merge(wire_type, &mut self.generation, buf, ctx),
            3 => merge_replica(wire_type, &mut self.replicas, buf, ctx),
            _ => skip_field(wire_type, tag, buf, ctx),
        }
    }

    fn encoded_len(&self) -> usize {
        encoded_len!(int32, 1, self.refusal)
            + encoded_len!(uint64, 2, self.generation)
            + replicas_len(3, &self.replicas)
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

impl Message for GetStarted {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        encode!(int32, 1, self.refusal, buf);
        encode!(uint64, 2, self.size, buf);
        encode_replicas(3, &self.replicas, buf);
        encode!(bytes, 4, self.fingerprint, buf);
        encode!(fixed64, 5, self.layout_id, buf);
        encode!(fixed64, 6, self.early_token, buf);
        encode!(uint32, 7, self.early_slots, buf);
        encode!(uint32, 8, self.left_out, buf);
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        match tag {
            1 => int32::merge(wire_type, &mut self.refusal, buf, ctx),
            2 => uint64::merge(wire_type, &mut self.size, buf, ctx),
            3 => merge_replica(wire_type, &mut self.replicas, buf, ctx),
            4 => bytes::merge(wire_type, &mut self.fingerprint, buf, ctx),
            5 => fixed64::merge(wire_type, &mut self.layout_id, buf, ctx),
            6 => fixed64::merge(wire_type, &mut self.early_token, buf, ctx),
            7 => uint32::merge(wire_type, &mut self.early_slots, buf, ctx),
            8 => uint32::merge(wire_type, &mut self.left_out, buf, ctx),
            _ => skip_field(wire_type, tag, buf, ctx),
        }
    }

    fn encoded_len(&self) -> usize {
        encoded_len!(int32, 1, self.refusal)
            + encoded_len!(uint64, 2, self.size)
            + replicas_len(3, &self.replicas)
            + encoded_len!(bytes, 4, self.fingerprint)
            + encoded_len!(fixed64, 5, self.layout_id)
            + encoded_len!(fixed64, 6, self.early_token)
            + encoded_len!(uint32, 7, self.early_slots)
            + encoded_len!(uint32, 8, self.left_out)
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}
