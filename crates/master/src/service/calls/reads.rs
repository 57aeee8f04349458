//! Existence queries and read sessions.

use std::sync::Arc;

use layercake_protocol::convert::{
    Context, GetStartAnswer, KeyList, encode_presences, encode_refusals,
};
use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::ids::Epoch;
use layercake_protocol::replica::{GetStarted, Presence, Recency};
use layercake_protocol::wire;
use layercake_protocol::wire::master_frame::Response;

use super::{Core, Places, Run, breathe, caller, check_len, position, runs, segment_ids};
use crate::state::{Exists, GetStart, Probe};

/// What the call knows of its recency; the epoch is known after the first run.
fn recency(request: Option<&wire::Recency>) -> Recency {
    request.copied().map(Into::into).unwrap_or_default()
}

/// Recency of a run that begins behind `results` entries.
fn recency_of_run(call: Recency, epoch: Epoch, results: usize) -> Recency {
    Recency {
        epoch,
        first_index: call.first_index.saturating_add(position(results)),
    }
}

fn probe(probe: i32) -> Result<Probe, WireError> {
    match wire::Probe::try_from(probe) {
        Ok(wire::Probe::Exists) => Ok(Probe::Exists),
        Ok(wire::Probe::Readable) => Ok(Probe::Readable),
        Ok(wire::Probe::Unspecified) => Err(WireError::Missing { field: "probe" }),
        Err(_) => Err(WireError::Invalid {
            field: "probe",
            detail: format!("{probe} is not a query that this version knows"),
        }),
    }
}

pub(super) async fn exists(
    core: &Arc<Core>,
    context: &Context,
    request: &wire::ExistsRequest,
    list: &KeyList,
) -> Result<Response, Refusal> {
    check_len(list.len())?;
    let probe = probe(request.probe)?;
    let caller = caller(context, None);
    let unreachable = segment_ids(&request.unreachable_segments);
    let call = recency(request.recency.as_ref());
    let mut epoch = call.epoch;
    let mut states = Vec::with_capacity(list.len());
    for run in runs(list.keys()) {
        let keys = match run {
            Run::Good(keys) => {
                let query = Exists {
                    probe,
                    keys: &keys,
                    recency: recency_of_run(call, epoch, states.len()),
                    stop_at_first_miss: request.stop_at_first_miss,
                    unreachable: &unreachable,
                    peek: request.peek,
                };
                let (found, drawn) = core.state.exists(core.now(), &caller, &query);
                states.extend(found);
                epoch = drawn;
                keys.len()
            }
            // Nothing can be stored under what is no key.
            Run::Bad(_) => {
                states.push(Presence::Absent);
                1
            }
        };
        if request.stop_at_first_miss && states.last() != Some(&Presence::Complete) {
            break;
        }
        breathe(keys).await;
    }
    Ok(Response::Exists(wire::ExistsResponse {
        states: encode_presences(&states),
        epoch: epoch.0,
    }))
}

pub(super) async fn get_start(
    core: &Arc<Core>,
    context: &Context,
    request: &wire::GetStartRequest,
    list: &KeyList,
) -> Result<Response, Refusal> {
    check_len(list.len())?;
    let caller = caller(context, None);
    let unreachable = segment_ids(&request.unreachable_segments);
    let call = recency(request.recency.as_ref());
    let mut epoch = call.epoch;
    let mut results: Vec<Result<GetStarted, Refusal>> = Vec::with_capacity(list.len());
    let mut places = Places::new(&core.state);
    for run in runs(list.keys()) {
        match run {
            Run::Good(keys) => {
                let query = GetStart {
                    keys: &keys,
                    recency: recency_of_run(call, epoch, results.len()),
                    session: request.session,
                    unreachable: &unreachable,
                };
                let (got, drawn) = if request.unfinished {
                    (core.state.unfinished(core.now(), &caller, &query), epoch)
                } else {
                    core.state.get_start(core.now(), &caller, &query)
                };
                results.extend(
                    got.into_iter()
                        .map(|result| still_there(result, &mut places)),
                );
                epoch = drawn;
                breathe(keys.len()).await;
            }
            Run::Bad(refusal) => results.push(Err(refusal)),
        }
    }
    core.dispatch();
    let answer = GetStartAnswer {
        results,
        segments: places.into_segments(),
        lease: core.state.terms().lease,
        epoch,
    };
    Ok(Response::GetStart(answer.into()))
}

/// Leaves replicas out whose segment went away since they were found.
fn still_there(
    result: Result<GetStarted, Refusal>,
    places: &mut Places<'_>,
) -> Result<GetStarted, Refusal> {
    let mut got = result?;
    got.replicas.retain(|replica| places.add(replica));
    if got.replicas.is_empty() {
        return Err(Refusal::Unreachable);
    }
    Ok(got)
}

pub(super) async fn renew(
    core: &Arc<Core>,
    context: &Context,
    list: &KeyList,
) -> Result<Response, Refusal> {
    check_len(list.len())?;
    let caller = caller(context, None);
    let mut results = Vec::with_capacity(list.len());
    for run in runs(list.versions()) {
        match run {
            Run::Good(objects) => {
                results.extend(core.state.renew(core.now(), &caller, &objects));
                breathe(objects.len()).await;
            }
            Run::Bad(refusal) => results.push(Err(refusal)),
        }
    }
    Ok(Response::Renew(wire::RenewResponse {
        refusals: encode_refusals(&results),
        lease_ms: u64::try_from(core.state.terms().lease.as_millis()).unwrap_or(u64::MAX),
    }))
}

pub(super) async fn get_end(
    core: &Arc<Core>,
    context: &Context,
    list: &KeyList,
) -> Result<Response, Refusal> {
    check_len(list.len())?;
    let caller = caller(context, None);
    for run in runs(list.versions()) {
        // What names no session has none to end.
        if let Run::Good(objects) = run {
            core.state.get_end(core.now(), &caller, &objects);
            breathe(objects.len()).await;
        }
    }
    core.dispatch();
    Ok(Response::GetEnd(wire::GetEndResponse {}))
}
