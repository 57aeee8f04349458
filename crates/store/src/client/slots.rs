//! Putting small objects into slots of holds: one write, one call to the master.
//!
//! Header and payload are put together in local memory, with the checksums of what was copied there, and written
//! as one piece; then the master commits. Whatever is not settled by that takes the two round trips that
//! every other put takes: a call without slots, a hold that was called back, a node out of reach. A slot is
//! used for one try only.

use std::sync::Arc;

use layercake_protocol::error::Refusal;
use layercake_protocol::header::{
    Checksums, HEADER_ALIGN, HeaderFields, HeaderSpec, HeaderState, WrittenRanges,
};
use layercake_protocol::range::ByteRange;
use layercake_protocol::replica::{ObjectRef, PutStart, ReplicateConfig, SlotPut};
use layercake_transport::{Direction, PieceError};

use super::StoreClient;
use super::core::Core;
use super::fanout::{Failure, Fanout, Flight};
use super::holds::{Asking, Slot};
use super::places::Targets;
use super::put::{PutOutcome, PutRequest};
use super::scratch::Scratch;
use super::write::Range;
use crate::error::StoreError;
use crate::link::StartOptions;

/// Objects of up to this many bytes are put into slots. From there on the second round trip is a small part of a
/// put, and the copy that saves it is not.
const SMALL: u64 = 32 << 10;

/// And calls of up to this many bytes in all, which is what a hold has room for.
const MOST: u64 = 256 << 10;

/// And objects of up to this many pieces.
const PIECES: usize = 16;

/// Whether a place that was chosen in advance is as good as any.
pub(super) fn is_plain(config: &ReplicateConfig) -> bool {
    // Nothing is replaced, so there is no pin to be kept.
    let plain = ReplicateConfig {
        keep_soft_pin: config.keep_soft_pin,
        ..ReplicateConfig::default()
    };
    *config == plain
}

/// Whether all objects of a call are small, and few enough for a hold.
pub(super) fn are_small(requests: &[PutRequest]) -> bool {
    let small = |request: &PutRequest| {
        request.size() <= SMALL && request.pieces.len() <= PIECES && request.group.is_none()
    };
    let bytes = requests.iter().map(PutRequest::size);
    requests.iter().all(small) && bytes.fold(0, u64::saturating_add) <= MOST
}

/// An answer, or none where the put is to be made in two round trips.
type Answer = Option<Result<PutOutcome, StoreError>>;

impl StoreClient {
    /// Puts objects into slots, if there are slots for all of them. One answer for each request.
    pub(super) async fn put_in_slots(&self, requests: &[PutRequest]) -> Vec<Answer> {
        let nothing = || requests.iter().map(|_| None).collect();
        let tenant_len = self.core().config.tenant.as_str().len();
        let mut puts = Vec::with_capacity(requests.len());
        for request in requests {
            match Put::new(request, tenant_len) {
                Some(put) => puts.push(put),
                None => return nothing(),
            }
        }
        let core = Arc::clone(self.core());
        let work = async move {
            let keys = puts.iter().map(|put| &put.start.key);
            core.finisher.make_way(&core, keys).await;
            let lens: Vec<u64> = puts.iter().map(Put::len).collect();
            let slots = core.holds.cut(&lens)?;
            let asking = core.holds.ask();
            let writing = Writing::begin(&core, &puts, &slots)?;
            let written = writing.end(&core, &slots).await;
            Some(commit(&core, puts, &slots, &written, asking).await)
        };
        self.core().see_through(work).await.unwrap_or_else(nothing)
    }
}

/// One object, and how long its header is.
struct Put {
    start: PutStart,
    ranges: Vec<Range>,
    header_len: u32,
}

impl Put {
    /// `None`: it can't be put at all, which the master will say.
    fn new(request: &PutRequest, tenant_len: usize) -> Option<Self> {
        let ranges = request.ranges();
        let start = PutStart {
            header_rows: u32::try_from(ranges.len()).ok()?,
            fingerprint: request.fingerprint,
            ..PutStart::new(request.key.clone(), request.size())
        };
        let spec = HeaderSpec {
            tenant_len,
            key_len: start.key.as_str().len(),
            group_len: 0,
            rows: ranges.len(),
        };
        Some(Self {
            header_len: spec.encoded_len().ok()?,
            start,
            ranges,
        })
    }

    /// Bytes of header and payload.
    fn len(&self) -> u64 {
        u64::from(self.header_len) + self.start.size
    }
}

/// Objects on their way into their slots.
struct Writing {
    scratch: Scratch,
    flight: Flight<usize>,
}

impl Writing {
    /// Puts the bytes together and hands them over. `None`: that can't be done, nothing was handed over.
    fn begin(core: &Core, puts: &[Put], slots: &[Slot]) -> Option<Self> {
        let align = HEADER_ALIGN as u64;
        let room = puts.iter().map(|put| put.len().next_multiple_of(align));
        let scratch = core.scratch.take(room.sum()).ok()?;
        let mut fanout = Fanout::new(Direction::Write, false);
        let mut header = Vec::new();
        let mut at = 0;
        for (index, (put, slot)) in puts.iter().zip(slots).enumerate() {
            let payload = at + u64::from(put.header_len);
            let mut written = WrittenRanges::new(put.ranges.len());
            for range in &put.ranges {
                let local = scratch.slice(payload + range.offset, range.local.len());
                let crc = range.local.copy_to(&local.ok()?)?;
                let bytes = ByteRange::new(range.offset, range.local.len()).ok()?;
                written.record(bytes, Some(crc).filter(|_| core.config.checksums));
            }
            header.clear();
            header.resize(put.header_len as usize, 0);
            let fields = HeaderFields {
                state: HeaderState::Sealed,
                generation: slot.generation(),
                tenant: &core.config.tenant,
                key: &put.start.key,
                group: None,
                payload_len: put.start.size,
                fingerprint: put.start.fingerprint,
                layout_id: put.start.layout_id,
                epoch: slot.epoch(),
                prefix_index: u32::try_from(index).unwrap_or(u32::MAX),
                checksums: if core.config.checksums {
                    Checksums::Crc32c
                } else {
                    Checksums::None
                },
            };
            fields
                .encode_into(written.runs(), put.header_len, &mut header)
                .ok()?;
            scratch.copy_in(at, &header).ok()?;
            let target = slot.target();
            let remote = target.tagged(slot.offset(), put.len(), slot.generation());
            fanout.push(target, scratch.slice(at, put.len()).ok()?, remote, index);
            at += put.len().next_multiple_of(align);
        }
        Some(Self {
            scratch,
            flight: fanout.submit(&core.engine),
        })
    }

    /// Waits until nothing moves. True for each object that lies in its slot.
    async fn end(self, core: &Core, slots: &[Slot]) -> Vec<bool> {
        let mut written = vec![true; slots.len()];
        let landed = self.flight.land_writes(|index, result| {
            let target = slots[index].target();
            match result {
                Ok(_) => core.suspects.clear(target.segment),
                Err(failure) => {
                    failed(core, &slots[index], failure);
                    written[index] = false;
                }
            }
        });
        landed.await;
        self.scratch.recycle();
        written
    }
}

/// A write into a slot failed: its hold is not used any more.
fn failed(core: &Core, slot: &Slot, failure: Failure) {
    let Failure { error, in_doubt } = failure;
    if in_doubt {
        // Noted before it is given back, which then says so.
        core.link.put_in_doubt(&ObjectRef::of_hold(slot.hold()));
    }
    if error != PieceError::Refused(layercake_transport::Refusal::StaleGeneration) {
        core.suspects.failed(slot.target(), error);
    }
    core.holds.give_up(slot.hold());
}

/// Has the master commit what was written.
async fn commit(
    core: &Core,
    puts: Vec<Put>,
    slots: &[Slot],
    written: &[bool],
    asking: Option<Asking<'_>>,
) -> Vec<Answer> {
    let mut answers: Vec<Answer> = puts.iter().map(|_| None).collect();
    let header_lens: Vec<u32> = puts.iter().map(|put| put.header_len).collect();
    let mut indices = Vec::with_capacity(puts.len());
    let mut entries = Vec::with_capacity(puts.len());
    for (index, put) in puts.into_iter().enumerate().filter(|(at, _)| written[*at]) {
        indices.push(index);
        entries.push(SlotPut {
            put: PutStart {
                prefix_index: u32::try_from(index).ok(),
                ..put.start
            },
            generation: slots[index].generation(),
        });
    }
    if entries.is_empty() {
        return answers;
    }
    let unreachable = core.unreachable();
    let options = StartOptions {
        unreachable: &unreachable,
        hold: asking.is_some(),
        ..StartOptions::default()
    };
    let answer = match core.link.put_slots(&entries, options).await {
        Ok(answer) => answer,
        Err(error) => {
            for index in indices {
                answers[index] = Some(Err(error.clone()));
            }
            return answers;
        }
    };
    for ((index, entry), result) in indices.into_iter().zip(&entries).zip(answer.results) {
        answers[index] = match result {
            Ok(()) => {
                core.counters.puts_started.one();
                core.counters.puts_committed.one();
                core.counters.bytes_written.add(entry.put.size);
                let place = slots[index].place(header_lens[index]);
                let object = (&entry.put.key, &place, entry.put.size);
                core.hints.note(&core.engine, [object]);
                Some(Ok(PutOutcome::Stored))
            }
            Err(Refusal::AlreadyExists) => Some(Ok(PutOutcome::Existed)),
            Err(Refusal::InProgress) => Some(Ok(PutOutcome::InProgress)),
            Err(refusal) => {
                tracing::debug!(%refusal, key = %entry.put.key, "a slot was not committed");
                core.holds.give_up(slots[index].hold());
                None
            }
        };
    }
    if let (Some(asking), Some((hold, segment))) = (asking, answer.hold)
        && let Some(target) = Targets::new([&Arc::new(segment)]).find(hold.segment)
    {
        asking.granted(hold, target);
    }
    answers
}
