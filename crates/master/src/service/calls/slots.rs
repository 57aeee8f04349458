//! Holds: places in advance, and objects that were written into them.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::convert::{Context, PutSlotsAnswer};
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::SegmentId;
use layercake_protocol::replica::{Hold, Recency, Segment};
use layercake_protocol::wire;
use layercake_protocol::wire::master_frame::Response;
use tokio::time::{Instant, timeout_at};

use super::{Core, Run, breathe, caller, check_len, position, runs, segment_ids};
use crate::service::waiters::Topic;
use crate::state::Caller;

/// How long a start that finds no room waits for holds that were called back.
const REGAIN: Duration = Duration::from_secs(2);

pub(super) async fn put_slots(
    core: &Arc<Core>,
    context: &Context,
    request: wire::PutSlotsRequest,
) -> Result<Response, Refusal> {
    check_len(request.entries.len())?;
    let caller = caller(context, None);
    let Recency {
        mut epoch,
        first_index,
    } = request.recency.map(Into::into).unwrap_or_default();
    let mut results = Vec::with_capacity(request.entries.len());
    for run in runs(request.entries.into_iter().map(TryInto::try_into)) {
        match run {
            Run::Good(slots) => {
                let recency = Recency {
                    epoch,
                    first_index: first_index.saturating_add(position(results.len())),
                };
                let (committed, drawn) = core.state.put_slots(core.now(), &caller, &slots, recency);
                epoch = drawn;
                results.extend(committed);
                core.dispatch();
                breathe(slots.len()).await;
            }
            Run::Bad(refusal) => results.push(Err(refusal)),
        }
    }
    let unreachable = segment_ids(&request.unreachable_segments);
    let answer = PutSlotsAnswer {
        results,
        hold: request
            .hold
            .then(|| grant(core, &caller, &unreachable))
            .flatten(),
    };
    Ok(Response::PutSlots((&answer).into()))
}

/// A hold for this caller, and its segment, if there is room to spare.
pub(super) fn grant(
    core: &Core,
    caller: &Caller,
    unreachable: &[SegmentId],
) -> Option<(Hold, Segment)> {
    let hold = core.state.grant_hold(core.now(), caller, unreachable)?;
    let segment = core.state.segment(hold.segment)?;
    Some((hold, Arc::unwrap_or_clone(segment)))
}

/// Waits until holds that were called back are free again, or some time is over.
pub(super) async fn regained(core: &Core) {
    let until = Instant::now() + REGAIN;
    let mut wait = core.waiters.begin();
    wait.watch(0, Topic::Room);
    while core.state.awaits_holds() {
        tokio::select! {
            room = timeout_at(until, wait.next()) => if room.is_err() {
                return;
            },
            () = core.closing.cancelled() => return,
        }
    }
}
