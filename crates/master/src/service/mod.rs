//! The gRPC shell around the state machine: wire in, domain types, state, wire out.
//!
//! - `door`: versions, mutual proof of the token, tickets.
//! - `stream`: a member's long-lived stream, `lane`: the same without gRPC; `rpc`: the unary calls.
//! - `calls`: what each request does, the same for both.
//! - `links`: the master's own commands on their way to members; `waiters`: calls that wait for
//!   something to happen; `replay`: answers kept for calls that are repeated.
//!
//! The state machine is synchronous and fast, so requests are carried out where they arrive, without
//! another task or queue in between. Batches are cut into chunks with a yield after each; a batch of
//! several chunks goes on in a task of its own, and a stream has a bounded number of those: beyond that
//! it is not read, so a client that asks too much waits. Every task belongs to a stream or to the
//! [`Core`]'s tracker. Time comes from one clock.
//!
//! Events of the state machine are carried out right after the call that caused them, and every tick.

mod calls;
mod clock;
mod door;
mod expiring;
pub(crate) mod greeting;
pub(crate) mod lane;
mod links;
mod replay;
mod rpc;
mod stream;
mod waiters;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use layercake_protocol::convert::{Context, ListedFrame};
use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::ids::Term;
use layercake_protocol::wire::MasterFrame;
use layercake_protocol::wire::master_frame::Response;
use prometheus_client::registry::Registry;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{Limits, MasterConfig};
use crate::error::Error;
use crate::metrics::{Method, Metrics, StateCollector};
use crate::state::{Event, Moment, State};
use clock::Clock;
use door::Door;
use links::Links;
use replay::Replays;
use waiters::{Topic, Waiters};

pub(crate) use rpc::MasterService;

/// What all connections share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) state: State,
    pub(crate) term: Term,
    pub(crate) links: Links,
    pub(crate) metrics: Metrics,
    clock: Clock,
    limits: Limits,
    heartbeat_every: Duration,
    door: Door,
    /// The unix socket at which lanes are answered too, once there is one.
    pub(crate) local_lane: OnceLock<String>,
    pub(crate) waiters: Waiters,
    pub(crate) replays: Replays,
    next_stream: AtomicU64,
    /// Set when no new work is taken.
    pub(crate) closing: CancellationToken,
    /// Batches that go on even if their stream ends.
    pub(crate) work: TaskTracker,
}

impl Core {
    /// The core of a master with these settings, which must be valid.
    pub(crate) fn new(config: &MasterConfig, registry: &mut Registry) -> Result<Arc<Self>, Error> {
        config.validate()?;
        let term = config.term_or_clock();
        let state = State::new(config.state_in(term))?;
        let limits = config.limits;
        let core = Arc::new(Self {
            replays: Replays::new(&limits, state.terms().discard_after),
            state,
            term,
            links: Links::new(term, limits.commands_per_member),
            metrics: Metrics::register(registry),
            clock: Clock::start(),
            limits,
            heartbeat_every: config.heartbeat(),
            door: Door::new(config.token.clone(), term, &limits),
            local_lane: OnceLock::new(),
            waiters: Waiters::default(),
            next_stream: AtomicU64::new(1),
            closing: CancellationToken::new(),
            work: TaskTracker::new(),
        });
        let registry = registry.sub_registry_with_prefix("layercake_master");
        registry.register_collector(Box::new(StateCollector {
            core: Arc::downgrade(&core),
        }));
        Ok(core)
    }

    pub(crate) fn now(&self) -> Moment {
        self.clock.now()
    }

    fn draw_stream_id(&self) -> links::StreamId {
        self.next_stream.fetch_add(1, Ordering::Relaxed)
    }

    /// Carries a request out and makes its answer. `may_wait` is false where too many calls wait already:
    /// then the time of one more is over at once.
    async fn answer(self: Arc<Self>, listed: ListedFrame, may_wait: bool) -> MasterFrame {
        let begun = Instant::now();
        let ListedFrame { frame, list } = &listed;
        let method = Method::of(frame.request.as_ref());
        let request_id = frame
            .context
            .as_ref()
            .map_or(0, |context| context.request_id);
        let asked = self.metrics.calls.ask(frame.request.as_ref(), list.len());
        let result = self.carry_out(listed, may_wait).await;
        if let Some(asked) = asked {
            self.metrics.calls.answered(asked, &result);
        }
        self.metrics
            .answered(method, result.as_ref().err(), begun.elapsed());
        MasterFrame {
            request_id,
            term: self.term.0,
            response: Some(result.unwrap_or_else(|refusal| Response::Error((&refusal).into()))),
        }
    }

    async fn carry_out(
        self: &Arc<Self>,
        listed: ListedFrame,
        may_wait: bool,
    ) -> Result<Response, Refusal> {
        if self.closing.is_cancelled() {
            return Err(Refusal::ShuttingDown);
        }
        let ListedFrame { frame, list } = listed;
        let context: Context = frame
            .context
            .ok_or(WireError::Missing { field: "context" })?
            .try_into()?;
        let request = frame
            .request
            .ok_or(WireError::Missing { field: "request" })?;
        calls::carry_out(self, &context, request, &list, may_wait).await
    }

    /// Carries out what the state machine asks for.
    pub(crate) fn dispatch(&self) {
        for event in self.state.take_events() {
            match event {
                Event::Fence { to, fence } => {
                    let id = fence.id;
                    let command = Response::Fence(fence.into());
                    self.links.command(self.now(), to, id, command);
                }
                Event::DropSessions { to, drop } => {
                    let command = Response::DropSessions((&drop).into());
                    self.links.command(self.now(), to, drop.id, command);
                }
                Event::Settled { tenant, key } => {
                    self.waiters.happened(&Topic::Settled(tenant, key));
                }
                Event::SegmentDrained { segment, .. } => {
                    self.waiters.happened(&Topic::Drained(segment));
                }
                Event::MemberLost {
                    client,
                    name,
                    segments,
                } => {
                    self.links.forget(client);
                    self.replays.forget(client);
                    if segments > 0 {
                        tracing::warn!(%client, name, segments, "a node went silent, its memory is gone");
                    } else {
                        tracing::info!(%client, name, "a client went silent");
                    }
                }
                Event::SegmentReplaced { owner, segment } => {
                    self.waiters.happened(&Topic::Drained(segment));
                    tracing::warn!(%owner, %segment, "a node came back as another process, its former memory is gone");
                }
            }
        }
    }

    /// One look after everything that time does.
    fn tick(&self) {
        let now = self.now();
        self.state.tick(now);
        self.dispatch();
        self.links.tick(now, self.state.terms().client_ttl);
        self.replays.tick(now);
    }

    /// Ticks until the master is closed down.
    pub(crate) async fn run_ticker(self: Arc<Self>, every: Duration, stop: CancellationToken) {
        let mut interval = tokio::time::interval(every);
        // After a stall one tick catches up.
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut looked = self.now();
        loop {
            tokio::select! {
                _ = interval.tick() => {}
                () = stop.cancelled() => return,
            }
            let late = self.now().since(looked).saturating_sub(every);
            if late > every {
                self.state.stood_still(self.now(), late);
                if late > self.heartbeat_every {
                    tracing::warn!(
                        ?late,
                        "the master stood still, nobody's silence is counted for that time"
                    );
                }
            }
            self.tick();
            looked = self.now();
        }
    }
}
