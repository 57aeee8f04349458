//! What the master knows and decides: the object table, the pool's memory, and the members.
//!
//! Pure: no clock, no I/O, no tasks. Every call takes `now`, answers from memory, and leaves what others
//! have to do (commands to nodes and clients, waiters to wake) as [`Event`]s for the shell around it.
//! [`State`] is shared by all connections; its methods take `&self` and wait for short locks only.
//!
//! | module | keeps or does |
//! |---|---|
//! | `shard` | entries, names, sessions, leases, order of eviction |
//! | `ahead`, `prefetch` | a batch's keys, looked up before their turn comes |
//! | `memory` | huge pages for the table |
//! | `segments`, `alloc` | the pool: segments and their holes |
//! | `placement` | which segments get a new object's replicas |
//! | `groups` | objects that are evicted together |
//! | `holds` | places that clients have in advance |
//! | `fences` | memory held back until a late writer is ruled out |
//! | `members`, `tenants`, `tally` | who takes part, namespaces and quotas, counters |
//! | `reads`, `puts`, `quotas`, `removal`, `eviction`, `membership`, `reports` | the calls |
//!
//! # Invariants
//!
//! - A piece of a segment belongs to one entry, to one hold, to one fence, or to nobody; it changes hands only through
//!   the segment's allocator.
//! - A reservation's number is drawn after its memory was taken, so it is greater than every number that
//!   was ever written there: numbers order the writers of a place.
//! - Only complete entries with a live replica are readable; a name stands for one of them at a time.
//! - Every put session ends at most once: committed, revoked, or taken away.
//!
//! # Locks
//!
//! In this order, each left out at will: `evicting`; the members' table; one shard; then one leaf (a
//! segment's books, a group's members, the registry of groups). `holds` and `fences` are taken with no shard's
//! lock held, and not together; a segment's books, `events` and the member's table's readers may follow. No call holds two shards.
//! What a change in a shard means elsewhere is collected as `Effects` and carried out after its lock is
//! let go.

mod ahead;
mod alloc;
mod api;
mod config;
mod effects;
mod eviction;
mod fences;
mod groups;
mod holds;
mod members;
mod membership;
mod memory;
mod moment;
mod numbers;
mod placement;
mod prefetch;
mod puts;
mod quotas;
mod reads;
mod removal;
mod reports;
mod segments;
mod shard;
mod tally;
mod tenants;

use std::sync::atomic::{AtomicU64, Ordering};

use layercake_protocol::ids::{Epoch, Generation};
use layercake_protocol::key::ObjectKey;
use parking_lot::{Mutex, MutexGuard};

use self::effects::{Effects, Fate};
use self::eviction::Pressure;
use self::fences::{Fences, Freed, Suspect};
use self::groups::Groups;
use self::holds::Holds;
use self::members::Members;
use self::memory::TableMemory;
use self::placement::Dice;
use self::segments::Pool;
use self::shard::{KeyHasher, Shard};
use self::tally::Tally;
use self::tenants::Tenants;

pub use self::api::{
    Amount, Caller, Counters, Event, Exists, Gauges, GetStart, HeartbeatAnswer, Joined, List,
    Listing, Location, Probe, PutBatch, TenantStat, Terms, UnmountProgress, Version,
};
pub use self::config::{ConfigError, StateConfig, Strategy, Tenancy};
pub use self::moment::Moment;

/// See the module's description.
#[derive(Debug)]
pub struct State {
    config: StateConfig,
    hasher: KeyHasher,
    shards: Box<[Mutex<Shard>]>,
    pool: Pool,
    members: Members,
    tenants: Tenants,
    groups: Groups,
    holds: Mutex<Holds>,
    fences: Mutex<Fences>,
    events: Mutex<Vec<Event>>,
    /// Held by whoever evicts: one at a time, so that a burst of puts doesn't evict once for each.
    evicting: Mutex<Pressure>,
    next_generation: AtomicU64,
    last_epoch: AtomicU64,
    /// When readers that did not renew are forgotten next, in microseconds since the start.
    readers_due: AtomicU64,
    /// When draining segments are looked at next, likewise.
    drains_due: AtomicU64,
    dice: Dice,
    tally: Tally,
}

impl State {
    /// An empty state with these rules.
    pub fn new(config: StateConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let hasher = KeyHasher::new(config.shards);
        let memory = TableMemory::default();
        let shards = (0..).take(config.shards);
        Ok(Self {
            shards: shards
                .map(|number| Mutex::new(Shard::new(number, hasher.clone(), &memory)))
                .collect(),
            hasher,
            pool: Pool::default(),
            members: Members::default(),
            tenants: Tenants::new(&config.tenancy),
            groups: Groups::default(),
            holds: Mutex::default(),
            fences: Mutex::default(),
            events: Mutex::default(),
            evicting: Mutex::default(),
            next_generation: AtomicU64::new(config.first_generation.0),
            last_epoch: AtomicU64::new(config.first_epoch.0 - 1),
            readers_due: AtomicU64::new(0),
            drains_due: AtomicU64::new(0),
            dice: Dice::new(config.seed),
            tally: Tally::default(),
            config,
        })
    }

    /// Times that members are told.
    pub fn terms(&self) -> Terms {
        Terms {
            lease: self.config.lease,
            client_ttl: self.config.client_ttl,
            discard_after: self.config.discard_after,
        }
    }

    /// Takes what the shell has to carry out, in order.
    pub fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut *self.events.lock())
    }

    /// What happened since the start.
    pub fn counters(&self) -> Counters {
        self.tally.snapshot()
    }

    fn shard(&self, number: usize) -> MutexGuard<'_, Shard> {
        self.shards[number].lock()
    }

    /// A number greater than all before.
    fn draw_generation(&self) -> Generation {
        self.draw_generations(1)
    }

    /// The first of so many consecutive ones.
    fn draw_generations(&self, count: u64) -> Generation {
        Generation(self.next_generation.fetch_add(count, Ordering::SeqCst))
    }

    /// An epoch later than all that were drawn.
    pub fn draw_epoch(&self) -> Epoch {
        Epoch(self.last_epoch.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// The epoch of a call: its own, no later than any that was drawn, or else a new one.
    fn epoch(&self, wanted: Epoch) -> Epoch {
        match wanted {
            Epoch::UNSET => self.draw_epoch(),
            Epoch(number) => Epoch(number.min(self.last_epoch.load(Ordering::Relaxed)).max(1)),
        }
    }

    /// Carries out what changes in shards have brought about. No shard's lock may be held.
    fn carry_out(&self, now: Moment, effects: &mut Effects) {
        if !effects.memory.is_empty() {
            let view = self.pool.view();
            for (place, extent, fate) in effects.memory.drain(..) {
                if let Some(cell) = view.cell(place.segment) {
                    cell.change(place, extent, fate);
                }
            }
        }
        for (tenant, bytes) in effects.discharged.drain(..) {
            self.tenants.discharge(tenant, bytes);
        }
        self.tally.count_gone(&effects.gone);
        effects.gone = Default::default();
        if !effects.settled.is_empty() {
            let settled = effects
                .settled
                .drain(..)
                .map(|(tenant, key)| Event::Settled {
                    tenant: self.tenants.name(tenant),
                    key: stored_key(&key),
                });
            self.events.lock().extend(settled);
        }
        if !effects.dropped.is_empty() {
            self.hold_back(now, effects);
        }
        for group in effects.unblocked.drain(..) {
            for member in group.members() {
                self.shard(member.shard as usize).stand_forth(now, member);
            }
        }
    }

    /// Keeps the memory of reservations that were taken away until their writers are ruled out.
    fn hold_back(&self, now: Moment, effects: &mut Effects) {
        self.tally.discarded_puts.add_len(effects.dropped.len());
        let view = self.pool.view();
        let mut suspects = Vec::new();
        for dropped in effects.dropped.drain(..) {
            let places = dropped.places.as_slice().iter();
            let places: Vec<_> = places
                .filter_map(|place| {
                    let cell = view.cell(place.segment)?.clone();
                    Some((cell, *place, dropped.extent.len()))
                })
                .collect();
            if places.is_empty() {
                continue;
            }
            for (cell, place, _) in &places {
                cell.change(*place, dropped.extent, Fate::Hold);
            }
            self.tally.fenced_places.add_len(places.len());
            suspects.push(Suspect {
                tenant: self.tenants.name(dropped.tenant),
                key: stored_key(&dropped.key),
                generation: dropped.generation,
                writer: dropped.writer,
                engine: dropped.engine,
                in_doubt: dropped.in_doubt,
                is_hold: false,
                places,
            });
        }
        let barrier = self.draw_generation();
        let mut fences = self.fences.lock();
        fences.hold(now, barrier, suspects, &mut self.events.lock());
    }

    /// Frees what fences held.
    fn release(freed: Vec<Freed>) {
        for Freed { cell, place, len } in freed {
            cell.release(place, len);
        }
    }
}

/// A key that is in the table came in as one.
fn stored_key(key: &str) -> ObjectKey {
    ObjectKey::new(key).expect("the table holds only what came in as a key")
}
