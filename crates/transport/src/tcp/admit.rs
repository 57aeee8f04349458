//! The owner's judgement on one frame of a peer: which operations may move bytes, and where.
//!
//! Every region that the frame names is looked up and its capability compared once; every operation
//! is checked for access, length, bounds and generation. Those that pass have their region pinned
//! until the frame is done, and a writer's granules are claimed, before the first byte moves. The
//! others are refused one by one, with their neighbours unaffected, and counted.

use layercake_protocol::ids::Generation;

use super::frame::{Request, STATUS_OK, WireOp, encode_status};
use super::raw::Span;
use crate::backend::Context;
use crate::batch::Direction;
use crate::error::Refusal;
use crate::memory::Served;

/// A frame that was judged. Kept and reused, so that judging allocates nothing in the long run.
#[derive(Debug, Default)]
pub(super) struct Admitted {
    /// One for each operation, as it stands.
    pub(super) statuses: Vec<u8>,
    pins: Vec<Result<Served, Refusal>>,
    checks: Vec<TagCheck>,
    bytes: u64,
    pieces: u64,
}

/// What is to be looked at again after the last byte.
#[derive(Clone, Copy, Debug)]
struct TagCheck {
    op: usize,
    region: usize,
    offset: u64,
    len: u64,
    generation: Generation,
}

impl Admitted {
    /// Judges a frame. `place` is told of every operation in order: where its bytes are, with a length
    /// of its own, or nothing and the length that the peer gave if it was refused.
    pub(super) fn judge(
        &mut self,
        context: &Context,
        direction: Direction,
        request: &Request<'_>,
        mut place: impl FnMut(Option<Span>, u64),
    ) {
        self.release();
        for region in request.regions() {
            self.pins
                .push(context.registry.open(region.region, &region.capability));
        }
        for (index, op) in request.ops().enumerate() {
            let admitted = self.admit(context, direction, index, &op);
            if let Err(refusal) = admitted
                && refusal.is_security()
            {
                context.stats.add_security_refusal();
            }
            self.statuses.push(encode_status(admitted.map(|_| ())));
            place(admitted.ok(), op.len);
        }
    }

    fn admit(
        &mut self,
        context: &Context,
        direction: Direction,
        index: usize,
        op: &WireOp,
    ) -> Result<Span, Refusal> {
        let region = usize::from(op.region);
        let pin = match self.pins.get(region) {
            Some(Ok(pin)) => pin,
            Some(Err(refusal)) => return Err(*refusal),
            None => return Err(Refusal::UnknownRegion),
        };
        let entry = pin.entry();
        entry.check_op(direction, op.offset, op.len)?;
        if !op.has_acceptable_len() {
            return Err(Refusal::BadLength);
        }
        if let Some(generation) = op.generation.filter(|_| context.config.generation_checks) {
            entry.check_before(direction, op.offset, op.len, generation)?;
            let (offset, len) = (op.offset, op.len);
            self.checks.push(TagCheck {
                op: index,
                region,
                offset,
                len,
                generation,
            });
        }
        self.bytes += op.len;
        self.pieces += 1;
        let len = usize::try_from(op.len).expect("an operation inside a region fits memory");
        Ok(Span {
            addr: entry.place(op.offset),
            len,
        })
    }

    /// Whether tags are to be looked at again after the last byte.
    pub(super) fn has_checks(&self) -> bool {
        !self.checks.is_empty()
    }

    pub(super) fn all_ok(&self) -> bool {
        self.statuses.iter().all(|status| *status == STATUS_OK)
    }

    /// Looks at the tags again, after the last byte, and brings the statuses up to date.
    pub(super) fn check_after(&mut self) {
        for check in self.checks.drain(..) {
            let Some(Ok(pin)) = self.pins.get(check.region) else {
                continue;
            };
            let after = pin
                .entry()
                .check_after(check.offset, check.len, check.generation);
            if let (Some(status), Err(refusal)) = (self.statuses.get_mut(check.op), after) {
                *status = encode_status(Err(refusal));
            }
        }
    }

    /// The frame is done: lets go of its regions and counts it.
    pub(super) fn complete(&mut self, context: &Context, direction: Direction) {
        let counters = context
            .stats
            .operation(crate::config::TransportKind::Tcp, direction);
        counters.add_served(self.pieces, self.bytes);
        self.release();
    }

    fn release(&mut self) {
        self.statuses.clear();
        self.pins.clear();
        self.checks.clear();
        self.bytes = 0;
        self.pieces = 0;
    }
}
