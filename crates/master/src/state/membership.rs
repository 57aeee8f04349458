//! Members, their segments, and what time does to both.
//!
//! A node that dies takes its segments' replicas along (requirement S8): when it is not heard of for
//! `client_ttl`, or at once when a segment is mounted under its name by another engine. A node's name
//! stands for one process; if another comes under that name, the first is gone, however recent its last
//! heartbeat. When a node returns it mounts again, and begins empty: what it held is taken back only by a
//! later master.

use layercake_protocol::command::FenceId;
use layercake_protocol::endpoint::Endpoint;
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{ClientId, Generation, SegmentId};
use layercake_protocol::replica::Segment;

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::State;
use super::alloc::BinAllocator;
use super::api::{Event, HeartbeatAnswer, Joined, Location, UnmountProgress};
use super::effects::{Effects, Reason};
use super::moment::Moment;
use super::segments::MountError;
use super::shard::{Departure, Place};

/// While a segment is drained, this long lies between two looks for leases that have ended.
const DRAIN_EVERY: Duration = Duration::from_secs(1);

/// The greatest tag that a segment may come with; beyond it numbers would run out.
const MAX_GENERATION: Generation = Generation(u64::MAX / 2);

impl State {
    /// Takes a member in, or hears of one that is known. Commands that it has not answered are sent again.
    pub fn join(
        &self,
        now: Moment,
        client: ClientId,
        name: &str,
        endpoint: Option<Endpoint>,
    ) -> Joined {
        let location = endpoint.map(|endpoint| Location::from(&endpoint));
        let fresh = self.members.join(now, client, name, location);
        if fresh {
            self.call_back_of(now, client);
        }
        let mut fences = self.fences.lock();
        let events = &mut self.events.lock();
        fences.send_again(now, Some(client), Duration::ZERO, events);
        Joined { fresh }
    }

    /// A member goes and has no transfer in flight: what it was writing and reading is given up at once,
    /// and what it lent is gone.
    pub fn leave(&self, now: Moment, client: ClientId) {
        // Also where the member was taken for dead before: its word rules late writes out.
        self.members.leave(client);
        let mut effects = Effects::default();
        for number in 0..self.shards.len() {
            let mut shard = self.shard(number);
            let revoked = shard.close_sessions(client, &mut effects);
            shard.forget_client(now, client, &mut effects);
            self.tally.puts_revoked.add(revoked);
        }
        self.carry_out(now, &mut effects);
        self.free_holds(client);
        let mut freed = Vec::new();
        self.fences.lock().confirm_all(client, &mut freed);
        Self::release(freed);
        self.close_segments(now, &self.pool.lent_by(client), Reason::Unmounted);
    }

    /// A member's stream broke. It may come back in a moment or be dead: until then, or until it is given up
    /// after `client_ttl`, what it lends is not promised to anybody, and nothing is placed there. Readers
    /// may try it where there is nothing else.
    pub fn away(&self, client: ClientId) {
        self.pool.set_away(client, true);
    }

    /// A member has a stream again.
    pub fn back(&self, client: ClientId) {
        self.pool.set_away(client, false);
    }

    /// A member is alive and believes to have mounted these segments.
    pub fn heartbeat(
        &self,
        now: Moment,
        client: ClientId,
        segments: &[SegmentId],
    ) -> HeartbeatAnswer {
        let known = self.members.heard(now, client).is_some();
        let view = self.pool.view();
        let mounted = |id: &SegmentId| {
            let cell = view.by_id(*id).filter(|cell| cell.owner == client);
            // The word of a new stream and the end of the old one may come in any order.
            cell.inspect(|cell| cell.set_away(false)).is_some()
        };
        HeartbeatAnswer {
            known,
            missing: segments.iter().filter(|id| !mounted(id)).copied().collect(),
        }
    }

    /// The master itself stood still for `deaf` (stopped, or starved of processor time): what members said
    /// meanwhile lies unread, so that time is not counted as their silence. To be called before the
    /// [`tick`](Self::tick) that comes late.
    pub fn stood_still(&self, now: Moment, deaf: Duration) {
        self.members.excuse(now, deaf);
    }

    /// Takes a segment into the pool; true if it was there already. `max_generation` is the greatest tag in
    /// it: later reservations are numbered above.
    pub fn mount(
        &self,
        now: Moment,
        client: ClientId,
        segment: Segment,
        max_generation: Generation,
    ) -> Result<bool, Refusal> {
        if self.members.heard(now, client).is_none() {
            return Err(Refusal::UnknownMember);
        }
        if max_generation > MAX_GENERATION {
            return Err(Refusal::invalid(format!(
                "max_generation = {max_generation}: at most {MAX_GENERATION} is accepted"
            )));
        }
        let replaced = self.pool.namesakes(&segment.name, segment.endpoint.engine);
        if !replaced.is_empty() {
            let view = self.pool.view();
            let cells = replaced.iter().filter_map(|slot| view.cell(*slot));
            let events = cells.map(|cell| Event::SegmentReplaced {
                owner: cell.owner,
                segment: cell.info.id,
            });
            self.events.lock().extend(events);
            self.tally.lost_nodes.add(1);
            self.close_segments(now, &replaced, Reason::Lost);
        }
        self.next_generation
            .fetch_max(max_generation.0 + 1, Ordering::SeqCst);
        let (id, len) = (segment.id, segment.len);
        match self.pool.mount(client, segment) {
            Ok(()) => Ok(false),
            Err(MountError::Already) => Ok(true),
            Err(MountError::Taken(owner)) => Err(Refusal::invalid(format!(
                "segment {id} is mounted by member {owner}"
            ))),
            Err(MountError::Size) => Err(Refusal::invalid(format!(
                "a segment of {len} bytes: from one granule to {} bytes are accepted",
                BinAllocator::MAX_LEN
            ))),
        }
    }

    /// Takes a segment out of the pool. Without `drain` at once, whoever relies on it. With `drain` it takes
    /// no new objects and grants no new leases; it goes when the leases and put sessions that hold
    /// pieces of it have ended, which [`Event::SegmentDrained`] tells.
    pub fn unmount(
        &self,
        now: Moment,
        client: ClientId,
        segment: SegmentId,
        drain: bool,
    ) -> Result<UnmountProgress, Refusal> {
        self.members.heard(now, client);
        let view = self.pool.view();
        let cell = view
            .by_id(segment)
            .filter(|cell| cell.owner == client)
            .ok_or(Refusal::UnknownMember)?;
        if drain {
            if cell.is_mounted() {
                cell.drain();
                self.call_back_in(now, &[cell.slot]);
                self.depart(now, &[cell.slot], true, Reason::Unmounted);
            }
            let pieces = cell.account().0.pieces;
            if pieces > 0 {
                return Ok(UnmountProgress::Draining { pieces });
            }
        }
        self.close_segments(now, &[cell.slot], Reason::Unmounted);
        Ok(UnmountProgress::Done)
    }

    /// A member answers a command. An answer to a command of another member, or to one that needs none
    /// any more, changes nothing.
    pub fn fence_done(&self, now: Moment, client: ClientId, id: FenceId, writer_attached: bool) {
        self.members.heard(now, client);
        let mut freed = Vec::new();
        self.fences
            .lock()
            .done(client, id, writer_attached, &mut freed);
        Self::release(freed);
    }

    /// What time does: silent members are gone, sessions that were not ended are dropped, leases end,
    /// drains go on, and the pool is kept below its watermark. To be called every 100 to 500 ms.
    pub fn tick(&self, now: Moment) {
        for (client, name) in self.members.expire(now, self.config.client_ttl) {
            let lent = self.pool.lent_by(client);
            let segments = self.close_segments(now, &lent, Reason::Lost);
            self.tally.lost_nodes.add(u64::from(segments > 0));
            self.events.lock().push(Event::MemberLost {
                client,
                name,
                segments,
            });
        }
        self.sweep_sessions(now);
        self.sweep_holds(now);
        self.go_on_draining(now);
        self.relieve(now);
        let mut fences = self.fences.lock();
        let events = &mut self.events.lock();
        fences.send_again(now, None, self.config.client_ttl, events);
    }

    fn sweep_sessions(&self, now: Moment) {
        let due = self.readers_due.load(Ordering::Relaxed);
        let readers_too = now.as_micros() >= due;
        if readers_too {
            let next = (now + self.config.lease).as_micros();
            self.readers_due.store(next, Ordering::Relaxed);
        }
        let mut effects = Effects::default();
        for number in 0..self.shards.len() {
            let members = self.members.read();
            let is_member = |client| members.contains_key(&client);
            let mut shard = self.shard(number);
            shard.drop_stale(&self.config, now, &is_member, &mut effects);
            shard.sweep_removed(now, &mut effects);
            if readers_too {
                shard.forget_lapsed_readers(now, &mut effects);
            }
        }
        self.carry_out(now, &mut effects);
    }

    fn go_on_draining(&self, now: Moment) {
        let view = self.pool.view();
        let draining: Vec<_> = view.cells().filter(|cell| cell.is_draining()).collect();
        let (empty, held): (Vec<_>, Vec<_>) = draining
            .into_iter()
            .partition(|cell| cell.account().0.pieces == 0);
        for cell in empty {
            if self.close_segments(now, &[cell.slot], Reason::Unmounted) > 0 {
                self.events.lock().push(Event::SegmentDrained {
                    owner: cell.owner,
                    segment: cell.info.id,
                });
            }
        }
        if held.is_empty() || now.as_micros() < self.drains_due.load(Ordering::Relaxed) {
            return;
        }
        let next = (now + DRAIN_EVERY).as_micros();
        self.drains_due.store(next, Ordering::Relaxed);
        let slots: Vec<_> = held.iter().map(|cell| cell.slot).collect();
        self.depart(now, &slots, true, Reason::Unmounted);
    }

    /// Closes segments, with all that lies in them. Returns how many were open.
    fn close_segments(&self, now: Moment, slots: &[u32], reason: Reason) -> usize {
        if slots.is_empty() {
            return 0;
        }
        let closed = self.pool.close(slots);
        self.forget_holds(slots);
        self.fences.lock().forget_segments(&closed);
        self.depart(now, slots, false, reason);
        closed.len()
    }

    /// Takes the replicas in these segments away from their objects.
    fn depart(&self, now: Moment, slots: &[u32], drain: bool, reason: Reason) {
        let departure = Departure {
            goes: &|place: Place| slots.contains(&place.segment),
            drain,
            reason,
        };
        let mut effects = Effects::default();
        for number in 0..self.shards.len() {
            let mut next = Some(0);
            while let Some(from) = next {
                let mut shard = self.shard(number);
                next = shard.depart(now, from, departure, &mut effects);
            }
        }
        self.carry_out(now, &mut effects);
    }
}
