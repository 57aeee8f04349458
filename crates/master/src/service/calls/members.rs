//! Joining, staying and leaving, and the memory that members bring.

use std::sync::Arc;

use layercake_protocol::convert::Context;
use layercake_protocol::endpoint::Endpoint;
use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::ids::Generation;
use layercake_protocol::wire;
use layercake_protocol::wire::master_frame::Response;

use super::{Core, done, segment_ids};
use crate::service::waiters::Topic;

fn millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn join(
    core: &Arc<Core>,
    context: &Context,
    request: wire::JoinRequest,
) -> Result<Response, Refusal> {
    let endpoint: Option<Endpoint> = request.endpoint.map(TryInto::try_into).transpose()?;
    let joined = core
        .state
        .join(core.now(), context.client, &request.name, endpoint);
    core.dispatch();
    Ok(Response::Join(wire::JoinResponse {
        term: core.term.0,
        heartbeat_every_ms: millis(core.heartbeat_every),
        client_ttl_ms: millis(core.state.terms().client_ttl),
        fresh: joined.fresh,
        shared_tenants: core.state.shares_tenants(),
        lease_ms: millis(core.state.terms().lease),
    }))
}

pub(super) fn leave(core: &Arc<Core>, context: &Context) -> Response {
    core.state.leave(core.now(), context.client);
    core.waiters.happened(&Topic::Room);
    core.links.forget(context.client);
    core.replays.forget(context.client);
    core.dispatch();
    done()
}

pub(super) fn heartbeat(
    core: &Arc<Core>,
    context: &Context,
    request: &wire::HeartbeatRequest,
) -> Response {
    let segments = segment_ids(&request.segment_ids);
    let answer = core.state.heartbeat(core.now(), context.client, &segments);
    Response::Heartbeat(wire::HeartbeatResponse {
        known: answer.known,
        missing_segments: answer.missing.into_iter().map(|id| id.0).collect(),
    })
}

pub(super) fn mount(
    core: &Arc<Core>,
    context: &Context,
    request: wire::MountRequest,
) -> Result<Response, Refusal> {
    let segment = request
        .segment
        .ok_or(WireError::Missing { field: "segment" })?
        .try_into()?;
    let max_generation = Generation(request.max_generation);
    let mounted = core
        .state
        .mount(core.now(), context.client, segment, max_generation);
    // A node that came back in place of its former process takes that one's segments away.
    core.dispatch();
    Ok(Response::Mount(wire::MountResponse {
        already_mounted: mounted?,
    }))
}

pub(super) fn fence_done(
    core: &Arc<Core>,
    context: &Context,
    request: &wire::FenceDoneRequest,
) -> Response {
    core.links.answered(context.client, request.fence_id);
    core.state.fence_done(
        core.now(),
        context.client,
        request.fence_id,
        request.writer_attached,
    );
    core.waiters.happened(&Topic::Room);
    core.dispatch();
    done()
}
