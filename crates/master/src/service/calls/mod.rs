//! What each request does, whichever way it came.
//!
//! Batches are carried out in runs: consecutive keys that could be read, at most [`CHUNK`] of them, with
//! a yield to other tasks after each full run. A key that could not be read is refused alone, and the
//! keys behind it keep their place in the prefix. The first run draws the call's epoch, the others
//! carry it on.

mod members;
mod reads;
mod slots;
mod waits;
mod writes;

use std::collections::HashMap;
use std::sync::Arc;

use layercake_protocol::convert::{Context, KeyList, MAX_KEYS_PER_REQUEST};
use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::ids::SegmentId;
use layercake_protocol::replica::{Replica, Segment};
use layercake_protocol::wire::Done;
use layercake_protocol::wire::client_frame::Request;
use layercake_protocol::wire::master_frame::Response;

use super::Core;
use crate::state::{Caller, Location, State};

/// Keys that are worked on without a yield: well below a millisecond.
const CHUNK: usize = 1024;

/// Carries a request out; what it lists is in `list`. Dropping the future gives a call that waits up; others must not be dropped
/// midway, since their answer would be lost.
pub(super) async fn carry_out(
    core: &Arc<Core>,
    context: &Context,
    request: Request,
    list: &KeyList,
    may_wait: bool,
) -> Result<Response, Refusal> {
    // A member joins in whatever term it remembers, and learns of this one.
    if let Some(term) = context.term
        && term != core.term
        && !matches!(request, Request::Join(_))
    {
        return Err(Refusal::WrongTerm);
    }
    match request {
        Request::Exists(request) => reads::exists(core, context, &request, list).await,
        Request::GetStart(request) => reads::get_start(core, context, &request, list).await,
        Request::Renew(_) => reads::renew(core, context, list).await,
        Request::GetEnd(_) => reads::get_end(core, context, list).await,
        Request::PutStart(request) => writes::put_start(core, context, request, false).await,
        Request::UpsertStart(request) => {
            let start = request.start.ok_or(WireError::Missing { field: "start" })?;
            writes::put_start(core, context, start, true).await
        }
        Request::PutSlots(request) => slots::put_slots(core, context, request).await,
        Request::PutEnd(_) => writes::put_end(core, context, list).await,
        Request::PutRevoke(request) => writes::put_revoke(core, context, &request, list).await,
        Request::WaitComplete(request) => {
            waits::wait_complete(core, context, &request, list, may_wait).await
        }
        Request::Remove(request) => writes::remove(core, context, &request, list).await,
        Request::RemoveVersions(_) => writes::remove_versions(core, context, list).await,
        Request::TakeBack(request) => writes::take_back(core, context, &request).await,
        Request::RemoveMatching(request) => writes::remove_matching(core, context, request).await,
        Request::Mount(request) => members::mount(core, context, request),
        Request::Unmount(request) => waits::unmount(core, context, &request, may_wait).await,
        Request::Heartbeat(request) => Ok(members::heartbeat(core, context, &request)),
        Request::FenceDone(request) => Ok(members::fence_done(core, context, &request)),
        Request::Join(request) => members::join(core, context, request),
        Request::Leave(_) => Ok(members::leave(core, context)),
    }
}

/// The caller, running where the request says.
fn caller(context: &Context, location: Option<Location>) -> Caller {
    Caller {
        client: context.client,
        tenant: context.tenant.clone(),
        location,
    }
}

fn done() -> Response {
    Response::Done(Done {})
}

/// Refuses a batch whose answer might not fit into a message.
fn check_len(keys: usize) -> Result<(), Refusal> {
    if keys <= MAX_KEYS_PER_REQUEST {
        return Ok(());
    }
    Err(Refusal::TooLarge {
        detail: format!("{keys} keys, {MAX_KEYS_PER_REQUEST} are accepted"),
    })
}

fn segment_ids(ids: &[u64]) -> Vec<SegmentId> {
    ids.iter().copied().map(SegmentId).collect()
}

/// Part of a batch.
enum Run<T> {
    /// Consecutive entries that could be read; never empty.
    Good(Vec<T>),
    /// One that could not.
    Bad(Refusal),
}

/// Cuts a batch into runs, converting only what the next run needs.
struct Runs<I> {
    entries: I,
    bad: Option<WireError>,
}

impl<T, I: Iterator<Item = Result<T, WireError>>> Iterator for Runs<I> {
    type Item = Run<T>;

    fn next(&mut self) -> Option<Run<T>> {
        if let Some(error) = self.bad.take() {
            return Some(Run::Bad(error.into()));
        }
        let mut good = Vec::with_capacity(self.entries.size_hint().0.min(CHUNK));
        while good.len() < CHUNK {
            match self.entries.next() {
                Some(Ok(entry)) => good.push(entry),
                Some(Err(error)) => {
                    self.bad = Some(error);
                    break;
                }
                None => break,
            }
        }
        if good.is_empty() {
            return self.bad.take().map(|error| Run::Bad(error.into()));
        }
        Some(Run::Good(good))
    }
}

fn runs<T, I: Iterator<Item = Result<T, WireError>>>(entries: I) -> Runs<I> {
    Runs { entries, bad: None }
}

/// Lets other tasks run after a full run.
async fn breathe(keys: usize) {
    if keys >= CHUNK {
        tokio::task::yield_now().await;
    }
}

/// Position of the entry that comes next, as an offset of prefix indices.
fn position(results: usize) -> u32 {
    u32::try_from(results).unwrap_or(u32::MAX)
}

/// The segments that an answer's replicas lie in, once each.
pub(in crate::service) struct Places<'a> {
    state: &'a State,
    segments: HashMap<SegmentId, Option<Arc<Segment>>>,
    /// The one that was added last, if it is there: nearly always the next one's, too.
    last: Option<SegmentId>,
}

impl<'a> Places<'a> {
    pub(in crate::service) fn new(state: &'a State) -> Self {
        Self {
            state,
            segments: HashMap::new(),
            last: None,
        }
    }

    /// Whether the replica's segment is still there; it is part of the answer then.
    pub(in crate::service) fn add(&mut self, replica: &Replica) -> bool {
        self.add_segment(replica.segment)
    }

    /// Whether the segment is still there; it is part of the answer then.
    fn add_segment(&mut self, id: SegmentId) -> bool {
        if self.last == Some(id) {
            return true;
        }
        let there = self
            .segments
            .entry(id)
            .or_insert_with(|| self.state.segment(id))
            .is_some();
        self.last = there.then_some(id);
        there
    }

    pub(in crate::service) fn into_segments(self) -> Vec<Segment> {
        self.segments
            .into_values()
            .flatten()
            .map(Arc::unwrap_or_clone)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use layercake_protocol::convert::ListedFrame;
    use layercake_protocol::wire::{ClientFrame, RemoveRequest};

    use super::*;

    fn list(keys: Vec<String>) -> KeyList {
        let request = Some(Request::Remove(RemoveRequest { keys, force: false }));
        let frame = ClientFrame {
            context: None,
            request,
        };
        ListedFrame::from(frame).list
    }

    #[test]
    fn a_batch_is_cut_into_chunks_and_bad_keys_stand_alone() {
        let mut keys: Vec<String> = (0..2 * CHUNK + 5)
            .map(|index| format!("k{index}"))
            .collect();
        for bad in [0, 1, 100, 2 * CHUNK + 4] {
            keys[bad].clear();
        }
        let mut seen = Vec::new();
        for run in runs(list(keys.clone()).keys()) {
            match run {
                Run::Bad(Refusal::InvalidArgument { .. }) => seen.push(String::new()),
                Run::Bad(other) => panic!("refused with {other}"),
                Run::Good(good) => {
                    assert!((1..=CHUNK).contains(&good.len()));
                    seen.extend(good.iter().map(ToString::to_string));
                }
            }
        }
        assert_eq!(seen, keys);
        assert!(runs(KeyList::default().keys()).next().is_none());
    }
}
