//! Calls that are answered when something has happened, or their time is over.
//!
//! They wait on events, never poll, and end with their stream: nobody is left to hear the answer.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::convert::{Context, KeyList, encode_key_results};
use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::ids::SegmentId;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::Presence;
use layercake_protocol::wire;
use layercake_protocol::wire::master_frame::Response;
use tokio::time::Instant;

use super::{Core, breathe, check_len, done};
use crate::service::waiters::{Topic, Wait};
use crate::state::UnmountProgress;

/// The longest that one call may wait; a client that wants more asks again.
const LONGEST: Duration = Duration::from_mins(10);

fn deadline(timeout_ms: u64, may_wait: bool) -> Instant {
    let timeout = if may_wait {
        Duration::from_millis(timeout_ms).min(LONGEST)
    } else {
        Duration::ZERO
    };
    Instant::now() + timeout
}

/// Waits for the next events of `wait`; `None` when the time is over.
async fn next(
    core: &Core,
    wait: &Wait<'_>,
    deadline: Instant,
) -> Result<Option<Vec<usize>>, Refusal> {
    tokio::select! {
        biased;
        indices = wait.next() => Ok(Some(indices)),
        () = core.closing.cancelled() => Err(Refusal::ShuttingDown),
        () = tokio::time::sleep_until(deadline) => Ok(None),
    }
}

/// Follows the writers of keys: each key is answered when it is complete (no refusal), when nobody
/// writes it any more (not found), or when the time is over (not ready).
pub(super) async fn wait_complete(
    core: &Arc<Core>,
    context: &Context,
    request: &wire::WaitCompleteRequest,
    list: &KeyList,
    may_wait: bool,
) -> Result<Response, Refusal> {
    check_len(list.len())?;
    let deadline = deadline(request.timeout_ms, may_wait);
    let keys: Vec<Result<ObjectKey, WireError>> =
        list.keys().map(|key| Ok(ObjectKey::new(key?)?)).collect();
    let mut results = vec![Err(Refusal::NotReady); keys.len()];
    let mut wait = core.waiters.begin();
    let mut open = 0_usize;
    // `Some` if the key's fate is known.
    let look = |key: &ObjectKey| match core.state.watch(&context.tenant, key) {
        Presence::Complete => Some(Ok(())),
        Presence::Absent => Some(Err(Refusal::NotFound)),
        Presence::Reserved => None,
    };
    for (index, key) in keys.iter().enumerate() {
        match key {
            Err(error) => results[index] = Err(error.clone().into()),
            Ok(key) => {
                wait.watch(index, Topic::Settled(context.tenant.clone(), key.clone()));
                match look(key) {
                    Some(result) => {
                        results[index] = result;
                        wait.unwatch(index);
                    }
                    None => open += 1,
                }
            }
        }
        breathe(index % super::CHUNK + 1).await;
    }
    while open > 0 {
        let Some(settled) = next(core, &wait, deadline).await? else {
            break;
        };
        for index in settled {
            // Another writer may have begun already: then that one is followed.
            if let Ok(key) = &keys[index]
                && results[index] == Err(Refusal::NotReady)
                && let Some(result) = look(key)
            {
                results[index] = result;
                wait.unwatch(index);
                open -= 1;
            }
        }
    }
    Ok(Response::Results(encode_key_results(&results)))
}

/// Takes a segment out of the pool. Draining is answered when nothing holds the segment any more; if the
/// time is over before, the call is refused as leased and the segment goes on draining.
pub(super) async fn unmount(
    core: &Arc<Core>,
    context: &Context,
    request: &wire::UnmountRequest,
    may_wait: bool,
) -> Result<Response, Refusal> {
    let deadline = deadline(request.drain_timeout_ms, may_wait);
    let segment = SegmentId(request.segment_id);
    let mut wait = core.waiters.begin();
    wait.watch(0, Topic::Drained(segment));
    let progress = core
        .state
        .unmount(core.now(), context.client, segment, request.drain);
    core.dispatch();
    match progress? {
        UnmountProgress::Done => Ok(done()),
        UnmountProgress::Draining { .. } => match next(core, &wait, deadline).await? {
            Some(_) => Ok(done()),
            None => Err(Refusal::Leased),
        },
    }
}
