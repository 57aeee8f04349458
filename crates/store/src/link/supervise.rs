//! The tasks of a link: one that keeps the connection, one that empties the outbox.
//!
//! The first serves a stream (reads answers and commands, sends heartbeats) until it breaks, then
//! connects anew, with pauses that grow, for as long as the link lives. A heartbeat without an answer,
//! or one that says that the master does not know this member, breaks the stream too: greeting and
//! joining anew is the one way back in, whatever went wrong. Losing the master and having it back are
//! one line of log each.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::wire;
use rand::RngExt as _;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::codec::encode_body;
use super::config::Backoff;
use super::connection::{AskError, Connection, IfLost, Request, Response};
use super::connector::Connector;
use super::greet::{Established, Inbound, establish};
use super::lane::Takes;
use super::outbox::Chore;
use super::shared::{Shared, Status};
use super::types::{CommandId, LinkState, NodeEvent, SessionEvent};
use crate::error::StoreError;

/// Pause before the master is told again.
const TELL_AGAIN: Duration = Duration::from_millis(100);

/// Keeps the link up until it is closed.
pub(super) async fn supervise<C: Connector>(shared: Arc<Shared>, connector: C, first: Established) {
    let work = async {
        let mut established = first;
        loop {
            let reason = serve(&shared, established).await;
            if matches!(shared.status(), Status::Closed) {
                // This side is leaving: it is no loss that the master forgets it, and it must not join again.
                return;
            }
            tracing::warn!(master = %shared.master, %reason, "lost the master, connecting anew");
            established = tokio::select! {
                biased;
                () = shared.closed() => return,
                established = reconnect(&shared, &connector) => established,
            };
            let over = established.connection.carrier().name();
            tracing::info!(master = %shared.master, over, "the master is back");
        }
    };
    tokio::select! {
        () = shared.cancel.cancelled() => {}
        () = work => {}
    }
    let last = shared.status();
    shared.set_status(Status::Closed);
    if let Status::Up(connection) = last {
        connection.fail();
    }
}

/// Serves one stream and says why it ended.
async fn serve(shared: &Shared, established: Established) -> StoreError {
    let Established {
        connection,
        inbound,
        heartbeat_every,
    } = established;
    shared.set_status(Status::Up(Arc::clone(&connection)));
    let reason = tokio::select! {
        reason = read(shared, &connection, inbound) => reason,
        reason = beat_until_closed(shared, &connection, heartbeat_every) => reason,
        never = connection.sweep(shared.sweep_every()) => match never {},
        () = connection.stop.cancelled() => {
            shared.unreachable("the master is in another term".to_owned())
        }
    };
    // In this order: a call that finds its connection broken looks at the status next.
    // A stream that broke is renewed at once, or refused; a master that stands still lets this wait, too.
    shared.set_status(if connection.signs.in_doubt() {
        Status::Down(reason.clone())
    } else {
        Status::Connecting
    });
    connection.fail();
    reason
}

/// Tries until it works.
async fn reconnect<C: Connector>(shared: &Shared, connector: &C) -> Established {
    let mut pauses = Pauses::new(shared.config.backoff);
    loop {
        match establish(shared, connector).await {
            Ok(established) => return established,
            Err(error) => {
                tracing::debug!(master = %shared.master, %error, "still no master");
                shared.set_status(Status::Down(error));
            }
        }
        sleep(pauses.next()).await;
    }
}

/// Pauses that double up to a limit, each shortened at random by up to half.
struct Pauses {
    next: Duration,
    most: Duration,
}

impl Pauses {
    fn new(backoff: Backoff) -> Self {
        Self {
            next: backoff.first,
            most: backoff.most,
        }
    }

    fn next(&mut self) -> Duration {
        let pause = self.next;
        self.next = pause.saturating_mul(2).min(self.most);
        pause.mul_f64(rand::rng().random_range(0.5..=1.0))
    }
}

/// Hands answers to their calls and commands to their handlers, and says why that ended.
async fn read(shared: &Shared, connection: &Connection, inbound: Inbound) -> StoreError {
    match inbound {
        Inbound::Grpc(mut inbound) => loop {
            match inbound.message().await {
                Ok(Some(frame)) => arrived(shared, connection, frame),
                Ok(None) => return shared.unreachable("it closed the stream".to_owned()),
                Err(status) => return shared.status_error(&status),
            }
        },
        Inbound::Lane(lane) => {
            let arrivals = Arrivals { shared, connection };
            let timeouts = &shared.config.timeouts;
            let reason = tokio::select! {
                biased;
                reason = lane.reader.read(&lane.writer, timeouts, &arrivals) => reason,
                error = lane.writer.run() => error.to_string(),
            };
            shared.unreachable(reason)
        }
    }
}

/// What comes in over a lane, whoever reads it.
pub(super) struct Arrivals<'a> {
    pub(super) shared: &'a Shared,
    pub(super) connection: &'a Connection,
}

impl Takes for Arrivals<'_> {
    fn take(&self, frame: wire::MasterFrame) -> Result<(), String> {
        match frame.response {
            // About the lane, not about a request.
            Some(Response::Error(error)) if frame.request_id == 0 => Err(error.detail),
            _ => {
                arrived(self.shared, self.connection, frame);
                Ok(())
            }
        }
    }

    fn is_waited_for(&self) -> bool {
        self.connection.is_waited_for()
    }

    fn end_overdue(&self) {
        self.connection.end_overdue();
    }
}

fn arrived(shared: &Shared, connection: &Connection, frame: wire::MasterFrame) {
    connection.signs.hear();
    match (frame.request_id, frame.response) {
        (0, Some(command)) => command_arrived(shared, connection, command),
        (id, Some(response)) => connection.answer(id, response),
        // A kind of answer that only a later version knows.
        (_, None) => {}
    }
}

fn command_arrived(shared: &Shared, connection: &Connection, command: Response) {
    let name = |id| CommandId {
        term: connection.term,
        id,
    };
    match command {
        Response::Fence(fence) => match layercake_protocol::command::Fence::try_from(fence) {
            Ok(fence) => shared.node_events.offer(NodeEvent::Fence {
                command: name(fence.id),
                fence,
            }),
            Err(error) => tracing::warn!(%error, "a fence makes no sense, ignored"),
        },
        Response::DropSessions(drop) => {
            match layercake_protocol::command::DropSessions::try_from(drop) {
                Ok(sessions) => shared.session_events.offer(SessionEvent::Drop {
                    command: name(sessions.id),
                    sessions,
                }),
                Err(error) => tracing::warn!(%error, "a command makes no sense, ignored"),
            }
        }
        _ => {}
    }
}

/// Sends heartbeats until the link is closed, and says why they ended before. The stream outlives them
/// to carry the leave: a heartbeat behind it would be answered as from a stranger, and one that is
/// under way no longer matters.
async fn beat_until_closed(
    shared: &Shared,
    connection: &Connection,
    every: Duration,
) -> StoreError {
    tokio::select! {
        biased;
        () = shared.closed() => std::future::pending().await,
        reason = beat(shared, connection, every) => reason,
    }
}

/// Sends heartbeats and says why they ended.
async fn beat(shared: &Shared, connection: &Connection, every: Duration) -> StoreError {
    let within = shared.config.timeouts.call;
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = shared.beat.notified() => {}
        }
        let segment_ids = shared.mounted.lock().iter().map(|id| id.0).collect();
        let request = Request {
            body: encode_body(wire::client_frame::Request::Heartbeat(
                wire::HeartbeatRequest { segment_ids },
            )),
            tenant: shared.config.tenant.clone(),
            if_lost: IfLost::Tell,
            reserves: false,
        };
        let deadline = tokio::time::Instant::now() + within;
        let id = shared.next_request();
        let heard = connection.signs.heard();
        match connection.ask(id, &request, deadline).await {
            Ok(Response::Heartbeat(answer)) if answer.known => {
                if !answer.missing_segments.is_empty() {
                    let missing = answer
                        .missing_segments
                        .into_iter()
                        .map(Into::into)
                        .collect();
                    shared.node_events.offer(NodeEvent::Missing(missing));
                }
            }
            Ok(Response::Heartbeat(_)) => {
                return shared.unreachable("it does not know this member any more".to_owned());
            }
            Ok(Response::Error(error)) => {
                return match layercake_protocol::error::Refusal::try_from(error) {
                    Ok(refusal) => shared.refused(refusal),
                    Err(error) => shared.bad_answer(error),
                };
            }
            Ok(_) => return shared.wrong_kind(),
            Err(AskError::Elapsed) => {
                connection.signs.doubt(heard);
                return shared.unreachable(format!("no answer to a heartbeat within {within:?}"));
            }
            Err(AskError::Broken { .. }) => {
                return shared.unreachable("the stream broke".to_owned());
            }
        }
    }
}

/// Delivers chores while the link is up.
pub(super) async fn empty_outbox(shared: Arc<Shared>) {
    let work = async {
        let mut state = shared.watch();
        loop {
            let chore = shared.outbox.first().await;
            let up = state
                .wait_for(|state| matches!(state, LinkState::Up { .. } | LinkState::Closed))
                .await
                .map(|state| state.clone());
            let Ok(LinkState::Up { term, life }) = up else {
                return;
            };
            let request = match &chore {
                Chore::FenceDone { command, .. } if command.term != term => None,
                Chore::Revoke { life: of, .. } | Chore::TakeBack { life: of, .. }
                    if *of != life =>
                {
                    None
                }
                chore => Some(chore.request(shared.config.tenant.clone())),
            };
            if let Some(request) = request {
                let told = shared.call(&request, shared.config.timeouts.call).await;
                if let Err(
                    StoreError::MasterUnreachable { .. } | StoreError::MasterTimeout { .. },
                ) = told
                {
                    // A lost connection is waited for above; that a master stands still is said at once.
                    sleep(TELL_AGAIN).await;
                    continue;
                }
            }
            shared.outbox.done(&chore);
        }
    };
    tokio::select! {
        () = shared.cancel.cancelled() => {}
        () = work => {}
    }
}

impl Chore {
    fn request(&self, default: layercake_protocol::key::Tenant) -> Request {
        use wire::client_frame::Request as Body;
        let (body, tenant) = match self {
            Self::FenceDone {
                command,
                writer_attached,
            } => {
                let done = wire::FenceDoneRequest {
                    fence_id: command.id,
                    writer_attached: *writer_attached,
                };
                (Body::FenceDone(done), default)
            }
            Self::Revoke {
                tenant, objects, ..
            } => {
                let objects = objects.iter().map(Into::into).collect();
                let revoke = wire::PutRevokeRequest {
                    objects,
                    unconfirmed: Vec::new(),
                };
                (Body::PutRevoke(revoke), tenant.clone())
            }
            Self::TakeBack { start, .. } => {
                (Body::TakeBack(start.take_back()), start.tenant.clone())
            }
        };
        Request {
            body: encode_body(body),
            tenant,
            // Not repeated blindly: the term or life may be another one after a reconnect.
            if_lost: IfLost::Tell,
            reserves: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_limit() {
        let backoff = Backoff {
            first: Duration::from_millis(50),
            most: Duration::from_millis(300),
        };
        let mut pauses = Pauses::new(backoff);
        for full in [50, 100, 200, 300, 300] {
            let full = Duration::from_millis(full);
            let pause = pauses.next();
            assert!(pause <= full && pause >= full / 2, "{pause:?} of {full:?}");
        }
    }
}
