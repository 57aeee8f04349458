//! The master's state machine.

mod alloc;
mod api;
mod config;
mod moment;

use std::sync::Arc;

use layercake_protocol::command::FenceId;
use layercake_protocol::endpoint::Endpoint;
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{ClientId, Epoch, Generation, SegmentId, Term};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{GetStarted, ObjectRef, Presence, PutStarted, Segment};
use layercake_protocol::report::{ObjectStat, SegmentStat, Status};

pub use api::{
    Amount, Caller, Counters, Event, Exists, Gauges, GetStart, HeartbeatAnswer, Joined, List,
    Listing, Location, Probe, PutBatch, Terms, UnmountProgress,
};
pub use config::{ConfigError, StateConfig};
pub use moment::Moment;

/// The object table, the pool's memory, and the members. Shared by all connections: every method takes
/// `&self` and blocks only on short locks.
#[derive(Debug)]
pub struct State {
    config: StateConfig,
}

#[expect(unused_variables, clippy::todo, reason = "bodies follow")]
impl State {
    /// An empty state with these rules.
    pub fn new(config: StateConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self { config })
    }
    /// Times that members are told.
    pub fn terms(&self) -> Terms {
        Terms {
            lease: self.config.lease,
            client_ttl: self.config.client_ttl,
            discard_after: self.config.discard_after,
        }
    }
    /// Probes keys; the answer is as long as the keys, or ends with the first miss where that was asked.
    /// Returns the epoch that was used, too.
    pub fn exists(
        &self,
        now: Moment,
        caller: &Caller,
        query: &Exists<'_>,
    ) -> (Vec<Presence>, Epoch) {
        todo!()
    }
    /// Finds and leases objects, one answer per key.
    pub fn get_start(
        &self,
        now: Moment,
        caller: &Caller,
        query: &GetStart<'_>,
    ) -> (Vec<Result<GetStarted, Refusal>>, Epoch) {
        todo!()
    }
    /// Renews the leases of open get sessions.
    pub fn renew(
        &self,
        now: Moment,
        caller: &Caller,
        objects: &[ObjectRef],
    ) -> Vec<Result<(), Refusal>> {
        todo!()
    }
    /// Ends get sessions and gives their leases back. Ending twice is harmless.
    pub fn get_end(&self, now: Moment, caller: &Caller, objects: &[ObjectRef]) {
        todo!()
    }
    /// Reserves objects and their memory, one answer per put.
    pub fn put_start(
        &self,
        now: Moment,
        caller: &Caller,
        batch: PutBatch<'_>,
    ) -> (Vec<Result<PutStarted, Refusal>>, Epoch) {
        todo!()
    }
    /// Commits put sessions. Repeating a commit is harmless.
    pub fn put_end(
        &self,
        now: Moment,
        caller: &Caller,
        objects: &[ObjectRef],
    ) -> Vec<Result<(), Refusal>> {
        todo!()
    }
    /// Gives put sessions up: the writer confirms that none of their transfers is in flight.
    pub fn put_revoke(
        &self,
        now: Moment,
        caller: &Caller,
        objects: &[ObjectRef],
    ) -> Vec<Result<(), Refusal>> {
        todo!()
    }
    /// What a key holds now. If it is reserved, [`Event::Settled`] will tell when that ends.
    pub fn watch(&self, tenant: &Tenant, key: &ObjectKey) -> Presence {
        todo!()
    }
    /// Removes complete objects.
    pub fn remove(
        &self,
        now: Moment,
        tenant: &Tenant,
        keys: &[ObjectKey],
        force: bool,
    ) -> Vec<Result<(), Refusal>> {
        todo!()
    }
    /// Removes the complete objects whose keys match and returns how many; leased ones only with force.
    pub fn remove_matching(
        &self,
        now: Moment,
        tenant: &Tenant,
        matches: &dyn Fn(&str) -> bool,
        force: bool,
    ) -> u64 {
        todo!()
    }
    /// Lists objects by key.
    pub fn list(&self, now: Moment, list: &List<'_>) -> Listing {
        todo!()
    }
    /// One object.
    pub fn stat(
        &self,
        now: Moment,
        tenant: &Tenant,
        key: &ObjectKey,
    ) -> Result<ObjectStat, Refusal> {
        todo!()
    }
    /// All segments, by name and id.
    pub fn segments(&self, now: Moment) -> Vec<SegmentStat> {
        todo!()
    }
    /// One mounted segment, as clients address it.
    pub fn segment(&self, id: SegmentId) -> Option<Arc<Segment>> {
        todo!()
    }
    /// The whole.
    pub fn status(&self, now: Moment, term: Term) -> Status {
        todo!()
    }
    /// Takes a member in, or hears of one that is known. Commands that it has not answered are sent again.
    pub fn join(
        &self,
        now: Moment,
        client: ClientId,
        name: &str,
        endpoint: Option<Endpoint>,
    ) -> Joined {
        todo!()
    }
    /// A member goes and has no transfer in flight: what it wrote and read is given up at once.
    pub fn leave(&self, now: Moment, client: ClientId) {
        todo!()
    }
    /// A member is alive and believes to have mounted these segments.
    pub fn heartbeat(
        &self,
        now: Moment,
        client: ClientId,
        segments: &[SegmentId],
    ) -> HeartbeatAnswer {
        todo!()
    }
    /// Takes a segment into the pool; true if it was there already.
    pub fn mount(
        &self,
        now: Moment,
        client: ClientId,
        segment: Segment,
        max_generation: Generation,
    ) -> Result<bool, Refusal> {
        todo!()
    }
    /// Takes a segment out of the pool: at once, or when nothing holds it any more.
    pub fn unmount(
        &self,
        now: Moment,
        client: ClientId,
        segment: SegmentId,
        drain: bool,
    ) -> Result<UnmountProgress, Refusal> {
        todo!()
    }
    /// A member answers a command.
    pub fn fence_done(&self, now: Moment, client: ClientId, id: FenceId, writer_attached: bool) {
        todo!()
    }
    /// What time does: to be called every 100 to 500 ms.
    pub fn tick(&self, now: Moment) {
        todo!()
    }
    /// Takes what the shell has to carry out, in order.
    pub fn take_events(&self) -> Vec<Event> {
        todo!()
    }
    /// What happened since the start.
    pub fn counters(&self) -> Counters {
        todo!()
    }
    /// What there is at the moment.
    pub fn gauges(&self) -> Gauges {
        todo!()
    }
}
