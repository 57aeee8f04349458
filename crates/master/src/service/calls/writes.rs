//! Put sessions, and taking objects away.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::convert::{Context, KeyList, PutStartAnswer, encode_key_results};
use layercake_protocol::endpoint::Endpoint;
use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::ids::{Epoch, RequestId, SegmentId};
use layercake_protocol::key::Tenant;
use layercake_protocol::replica::{
    ObjectRef, PutStart, PutStarted, Recency, ReplicateConfig, VersionRef,
};
use layercake_protocol::wire;
use layercake_protocol::wire::master_frame::Response;
use regex::{Regex, RegexBuilder};

use super::{
    Core, Places, Run, breathe, caller, check_len, done, position, runs, segment_ids, slots,
};
use crate::service::replay::{Answer, Record, Role};
use crate::state::{Caller, Location, Moment, PutBatch, State};

/// How long a repeated call waits for the first one, which is still being carried out.
const REPEAT_WAIT: Duration = Duration::from_secs(30);

/// Memory that one pattern may take, in bytes.
const PATTERN_BYTES: usize = 1 << 20;

/// Carries a call out once, however often it is repeated under its request id. Without an id (0) it
/// can't be told from another.
async fn once(
    core: &Arc<Core>,
    context: &Context,
    call: impl Future<Output = Answer>,
) -> Result<Answer, Refusal> {
    if context.request.0 == 0 {
        return Ok(call.await);
    }
    match core
        .replays
        .begin(core.now(), context.client, context.request)
    {
        Role::First(record) => {
            let answer = call.await;
            core.replays.finish(context.client, &record, answer.clone());
            Ok(answer)
        }
        Role::Repeated(record) => answer_of(&record).await,
        Role::TakenBack => Err(Refusal::invalid(format!(
            "request id {} was taken back",
            context.request
        ))),
    }
}

/// The answer to a call that is perhaps being carried out.
async fn answer_of(record: &Record) -> Result<Answer, Refusal> {
    tokio::time::timeout(REPEAT_WAIT, record.answer())
        .await
        .map_err(|_| Refusal::InProgress)
}

/// A request id was used for another kind of call before.
fn reused(request: RequestId) -> Refusal {
    Refusal::invalid(format!(
        "request id {request} belongs to an earlier call of another kind"
    ))
}

pub(super) async fn put_start(
    core: &Arc<Core>,
    context: &Context,
    request: wire::PutStartRequest,
    upsert: bool,
) -> Result<Response, Refusal> {
    check_len(request.entries.len())?;
    let config = request
        .config
        .ok_or(WireError::Missing { field: "config" })?
        .try_into()?;
    let endpoint: Option<Endpoint> = request.endpoint.map(TryInto::try_into).transpose()?;
    let start = Start {
        entries: request.entries,
        config,
        recency: request.recency.map(Into::into).unwrap_or_default(),
        location: endpoint.as_ref().map(Location::from),
        unreachable: segment_ids(&request.unreachable_segments),
        upsert,
        hold: request.hold,
    };
    let entries = start.entries.len();
    let answer = once(core, context, async {
        Answer::PutStart(Arc::new(start.carry_out(core, context).await))
    });
    match answer.await? {
        Answer::PutStart(answer) if answer.results.len() == entries => {
            Ok(Response::PutStart(answer.as_ref().into()))
        }
        _ => Err(reused(context.request)),
    }
}

/// A put start that makes sense as a whole.
struct Start {
    entries: Vec<wire::PutStart>,
    config: ReplicateConfig,
    recency: Recency,
    location: Option<Location>,
    unreachable: Vec<SegmentId>,
    upsert: bool,
    /// A hold is asked for.
    hold: bool,
}

impl Start {
    async fn carry_out(mut self, core: &Arc<Core>, context: &Context) -> PutStartAnswer {
        let caller = caller(context, self.location);
        let entries = std::mem::take(&mut self.entries);
        let mut epoch = self.recency.epoch;
        let mut results = Vec::with_capacity(entries.len());
        for run in runs(entries.into_iter().map(TryInto::try_into)) {
            match run {
                Run::Good(puts) => {
                    let keys = puts.len();
                    let first = self.recency.first_index;
                    let recency = Recency {
                        epoch,
                        first_index: first.saturating_add(position(results.len())),
                    };
                    let (started, drawn) = self.run(core, &caller, puts, recency).await;
                    results.extend(started);
                    epoch = drawn;
                    breathe(keys).await;
                }
                Run::Bad(refusal) => results.push(Err(refusal)),
            }
        }
        let mut places = Places::new(&core.state);
        let hold = self
            .hold
            .then(|| slots::grant(core, &caller, &self.unreachable))
            .flatten()
            .map(|(hold, _)| hold);
        if let Some(hold) = &hold {
            places.add_segment(hold.segment);
        }
        for replica in results.iter().flatten().flat_map(|put| &put.replicas) {
            // The writer finds out if its segment went away already.
            places.add(replica);
        }
        PutStartAnswer {
            segments: places.into_segments(),
            results,
            epoch,
            discard_after: core.state.terms().discard_after,
            hold,
        }
    }

    /// Reserves consecutive entries. What finds no room is tried again when holds were called back for it: a
    /// start does not fail for room that somebody has in advance.
    async fn run(
        &self,
        core: &Arc<Core>,
        caller: &Caller,
        puts: Vec<PutStart>,
        recency: Recency,
    ) -> (Vec<Result<PutStarted, Refusal>>, Epoch) {
        let kept = core.state.has_holds().then(|| puts.clone());
        let batch = |puts, recency| PutBatch {
            puts,
            config: &self.config,
            recency,
            refresh_at_end: self.recency.epoch == Epoch::UNSET,
            unreachable: &self.unreachable,
            upsert: self.upsert,
        };
        let now = core.now();
        let (mut results, epoch) = core.state.put_start(now, caller, batch(puts, recency));
        // A take-over fences the former writer: the sooner the better.
        core.dispatch();
        let Some(kept) = kept else {
            return (results, epoch);
        };
        let lacking = |result: &Result<_, _>| matches!(result, Err(Refusal::NoSpace { .. }));
        let (indices, again): (Vec<usize>, Vec<PutStart>) = kept
            .into_iter()
            .zip(&results)
            .enumerate()
            .filter(|(_, (_, result))| lacking(result))
            .map(|(index, (put, _))| {
                let place = recency.first_index.saturating_add(position(index));
                let prefix_index = put.prefix_index.or(Some(place));
                (
                    index,
                    PutStart {
                        prefix_index,
                        ..put
                    },
                )
            })
            .unzip();
        if !again.is_empty() && core.state.awaits_holds() {
            slots::regained(core).await;
            let recency = Recency { epoch, ..recency };
            let (started, _) = core
                .state
                .put_start(core.now(), caller, batch(again, recency));
            core.dispatch();
            for (index, result) in indices.into_iter().zip(started) {
                results[index] = result;
            }
        }
        (results, epoch)
    }
}

/// Ends sessions one way or the other, or removes versions: all are harmless to repeat.
async fn end<'a>(
    core: &Arc<Core>,
    context: &Context,
    objects: impl ExactSizeIterator<Item = Result<VersionRef<'a>, WireError>>,
    end: impl Fn(&State, Moment, &Caller, &[VersionRef<'a>]) -> Vec<Result<(), Refusal>>,
) -> Result<Vec<Result<(), Refusal>>, Refusal> {
    check_len(objects.len())?;
    let caller = caller(context, None);
    let mut results = Vec::with_capacity(objects.len());
    for run in runs(objects) {
        match run {
            Run::Good(objects) => {
                results.extend(end(&core.state, core.now(), &caller, &objects));
                core.dispatch();
                breathe(objects.len()).await;
            }
            Run::Bad(refusal) => results.push(Err(refusal)),
        }
    }
    Ok(results)
}

pub(super) async fn put_end(
    core: &Arc<Core>,
    context: &Context,
    list: &KeyList,
) -> Result<Response, Refusal> {
    let epoch = core.state.draw_epoch();
    let commit = |state: &State, now, caller: &_, objects: &_| {
        state.put_end::<VersionRef<'_>>(now, caller, objects, epoch)
    };
    let results = end(core, context, list.versions(), commit).await?;
    Ok(Response::Results(encode_key_results(&results)))
}

pub(super) async fn put_revoke(
    core: &Arc<Core>,
    context: &Context,
    request: &wire::PutRevokeRequest,
    list: &KeyList,
) -> Result<Response, Refusal> {
    let unconfirmed = &request.unconfirmed;
    if !unconfirmed.contains(&true) {
        let results = end(core, context, list.versions(), State::put_revoke).await?;
        return Ok(Response::Results(encode_key_results(&results)));
    }
    if unconfirmed.len() != list.len() {
        return Err(Refusal::invalid(format!(
            "{} marks for {} objects: none, or one for each, is accepted",
            unconfirmed.len(),
            list.len()
        )));
    }
    let marked = |mark: bool| {
        let objects = list.versions().zip(unconfirmed);
        let marked = objects.filter(move |(_, unconfirmed)| **unconfirmed == mark);
        marked.map(|(object, _)| object).collect::<Vec<_>>()
    };
    let doubtful = end(core, context, marked(true).into_iter(), State::put_abandon).await?;
    let sure = end(core, context, marked(false).into_iter(), State::put_revoke).await?;
    let (mut doubtful, mut sure) = (doubtful.into_iter(), sure.into_iter());
    let results: Option<Vec<_>> = unconfirmed
        .iter()
        .map(|unconfirmed| {
            if *unconfirmed {
                doubtful.next()
            } else {
                sure.next()
            }
        })
        .collect();
    let results = results.expect("every object has its answer");
    Ok(Response::Results(encode_key_results(&results)))
}

/// Gives back what a start reserved whose answer never reached the caller. One that has not come yet reserves nothing when
/// it does.
pub(super) async fn take_back(
    core: &Arc<Core>,
    context: &Context,
    request: &wire::TakeBackRequest,
) -> Result<Response, Refusal> {
    check_len(request.keys.len())?;
    if request.start == 0 {
        return Err(Refusal::invalid("no start has the request id 0"));
    }
    let start = RequestId(request.start);
    let Some(record) = core.replays.take_back(core.now(), context.client, start) else {
        return Ok(done());
    };
    let answer = match answer_of(&record).await? {
        Answer::PutStart(answer) if answer.results.len() == request.keys.len() => answer,
        _ => return Err(reused(start)),
    };
    let hold = answer
        .hold
        .as_ref()
        .map(|hold| ObjectRef::of_hold(hold.generation));
    let granted = request.keys.iter().zip(&answer.results);
    let granted = granted.filter_map(|(key, result)| {
        Some(VersionRef {
            key,
            generation: result.as_ref().ok()?.generation,
        })
    });
    let hold = hold.iter().map(|hold| VersionRef {
        key: hold.key.as_str(),
        generation: hold.generation,
    });
    let objects: Vec<_> = granted.chain(hold).map(Ok).collect();
    end(core, context, objects.into_iter(), State::put_revoke).await?;
    Ok(done())
}

pub(super) async fn remove(
    core: &Arc<Core>,
    context: &Context,
    request: &wire::RemoveRequest,
    list: &KeyList,
) -> Result<Response, Refusal> {
    check_len(list.len())?;
    let tenant = &context.tenant;
    let answer = once(core, context, async {
        Answer::Results(remove_keys(core, tenant, list, request.force).await.into())
    });
    match answer.await? {
        Answer::Results(results) if results.len() == list.len() => {
            Ok(Response::Results(encode_key_results(&results)))
        }
        _ => Err(reused(context.request)),
    }
}

pub(super) async fn remove_versions(
    core: &Arc<Core>,
    context: &Context,
    list: &KeyList,
) -> Result<Response, Refusal> {
    let results = end(core, context, list.versions(), State::remove_versions).await?;
    Ok(Response::Results(encode_key_results(&results)))
}

async fn remove_keys(
    core: &Arc<Core>,
    tenant: &Tenant,
    list: &KeyList,
    force: bool,
) -> Vec<Result<(), Refusal>> {
    let mut results = Vec::with_capacity(list.len());
    for run in runs(list.keys()) {
        match run {
            Run::Good(keys) => {
                results.extend(core.state.remove(core.now(), tenant, &keys, force));
                core.dispatch();
                breathe(keys.len()).await;
            }
            Run::Bad(refusal) => results.push(Err(refusal)),
        }
    }
    results
}

fn pattern(text: &str) -> Result<Regex, Refusal> {
    RegexBuilder::new(text)
        .size_limit(PATTERN_BYTES)
        .build()
        .map_err(|error| {
            // Before its last line, a syntax error draws the pattern with a mark under the place.
            let error = error.to_string();
            let reason = error.lines().last().unwrap_or(&error);
            let reason = reason.strip_prefix("error: ").unwrap_or(reason);
            Refusal::invalid(format!("pattern {text:?}: {reason}"))
        })
}

pub(super) async fn remove_matching(
    core: &Arc<Core>,
    context: &Context,
    request: wire::RemoveMatchingRequest,
) -> Result<Response, Refusal> {
    let pattern = pattern(&request.pattern)?;
    let answer = once(core, context, async {
        let (tenant, shared) = (context.tenant.clone(), Arc::clone(core));
        // A look at every key of the table: not on a thread that answers others.
        let scan = core.work.spawn_blocking(move || {
            let matches = |key: &str| pattern.is_match(key);
            let now = shared.now();
            shared
                .state
                .remove_matching(now, &tenant, &matches, request.force)
        });
        let removed = scan.await.unwrap_or(0);
        core.dispatch();
        Answer::Removed(removed)
    });
    match answer.await? {
        Answer::Removed(removed) => Ok(Response::RemoveMatching(wire::RemoveMatchingResponse {
            removed,
        })),
        _ => Err(reused(context.request)),
    }
}
