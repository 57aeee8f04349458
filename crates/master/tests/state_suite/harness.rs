//! A pool of nodes around the state machine, with a clock that tests move by hand.

use std::cell::Cell;
use std::time::Duration;

pub(crate) use layercake_master::state::*;
pub(crate) use layercake_protocol::endpoint::{Endpoint, HostId};
pub(crate) use layercake_protocol::error::Refusal;
pub(crate) use layercake_protocol::ids::*;
pub(crate) use layercake_protocol::key::{ObjectKey, Tenant};
pub(crate) use layercake_protocol::replica::*;

/// A mebibyte.
pub(crate) const MIB: u64 = 1 << 20;

/// A second.
pub(crate) const SECOND: Duration = Duration::from_secs(1);

pub(crate) fn key(text: &str) -> ObjectKey {
    ObjectKey::new(text).unwrap()
}

pub(crate) fn keys(prefix: &str, range: std::ops::Range<usize>) -> Vec<ObjectKey> {
    range.map(|n| key(&format!("{prefix}{n}"))).collect()
}

pub(crate) fn endpoint(engine: u128, host: u8) -> Endpoint {
    Endpoint {
        engine: EngineId(engine),
        tcp: format!("127.0.0.1:{engine}"),
        host: HostId([host; 16]),
        shm: None,
        pid: 1,
    }
}

/// A node that lends one segment.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) client: ClientId,
    pub(crate) segment: Segment,
}

pub(crate) struct World {
    pub(crate) state: State,
    now: Cell<Moment>,
    drawn: Cell<u64>,
}

impl World {
    /// One node with 64 MiB and default rules.
    pub(crate) fn new() -> Self {
        let world = Self::with(StateConfig::default());
        world.node("node-0", 64 * MIB);
        world
    }

    /// No nodes yet.
    pub(crate) fn with(config: StateConfig) -> Self {
        Self {
            state: State::new(config).unwrap(),
            now: Cell::new(Moment::from_micros(1_000_000)),
            drawn: Cell::new(0),
        }
    }

    pub(crate) fn now(&self) -> Moment {
        self.now.get()
    }

    /// Moves the clock, while every member goes on sending heartbeats.
    pub(crate) fn pass(&self, time: Duration) {
        let mut left = time;
        while !left.is_zero() {
            let step = left.min(SECOND);
            self.skip(step);
            left -= step;
            for n in 1..=self.drawn.get() {
                self.state.heartbeat(self.now(), ClientId(n.into()), &[]);
            }
        }
    }

    /// Moves the clock, and nobody is heard of.
    pub(crate) fn skip(&self, time: Duration) {
        self.now.set(self.now() + time);
    }

    pub(crate) fn tick(&self) {
        self.state.tick(self.now());
    }

    fn draw(&self) -> u64 {
        self.drawn.set(self.drawn.get() + 1);
        self.drawn.get()
    }

    /// A member on host 0 that has joined.
    pub(crate) fn client(&self) -> Caller {
        self.client_on(0)
    }

    pub(crate) fn client_on(&self, host: u8) -> Caller {
        let number = u128::from(self.draw());
        let endpoint = endpoint(number, host);
        let location = Some(Location::from(&endpoint));
        let client = ClientId(number);
        self.state
            .join(self.now(), client, "a client", Some(endpoint));
        Caller {
            client,
            tenant: Tenant::default(),
            location,
        }
    }

    pub(crate) fn node(&self, name: &str, len: u64) -> Node {
        self.node_on(name, len, 0)
    }

    pub(crate) fn node_on(&self, name: &str, len: u64, host: u8) -> Node {
        let node = self.node_unmounted(name, len, host);
        assert_eq!(self.mount(&node), Ok(false));
        node
    }

    pub(crate) fn node_unmounted(&self, name: &str, len: u64, host: u8) -> Node {
        let number = self.draw();
        let endpoint = endpoint(number.into(), host);
        let client = ClientId(number.into());
        self.state
            .join(self.now(), client, name, Some(endpoint.clone()));
        let segment = Segment {
            id: SegmentId(number),
            name: name.to_owned(),
            endpoint,
            region: RegionId(1),
            capability: Capability([7; 16]),
            len,
            kind: MemoryKind::Host,
        };
        Node { client, segment }
    }

    pub(crate) fn mount(&self, node: &Node) -> Result<bool, Refusal> {
        self.state.mount(
            self.now(),
            node.client,
            node.segment.clone(),
            Generation::NONE,
        )
    }

    pub(crate) fn put_batch(
        &self,
        caller: &Caller,
        puts: Vec<PutStart>,
        config: &ReplicateConfig,
        recency: Recency,
    ) -> Vec<Result<PutStarted, Refusal>> {
        let batch = PutBatch {
            puts,
            config,
            recency,
            refresh_at_end: recency.epoch == Epoch::UNSET,
            unreachable: &[],
            upsert: false,
        };
        self.state.put_start(self.now(), caller, batch).0
    }

    pub(crate) fn put_with(
        &self,
        caller: &Caller,
        put: PutStart,
        config: &ReplicateConfig,
    ) -> Result<PutStarted, Refusal> {
        let mut answers = self.put_batch(caller, vec![put], config, Recency::default());
        answers.pop().unwrap()
    }

    pub(crate) fn put(
        &self,
        caller: &Caller,
        key: &ObjectKey,
        size: u64,
    ) -> Result<PutStarted, Refusal> {
        let put = PutStart::new(key.clone(), size);
        self.put_with(caller, put, &ReplicateConfig::default())
    }

    pub(crate) fn upsert(
        &self,
        caller: &Caller,
        key: &ObjectKey,
        size: u64,
    ) -> Result<PutStarted, Refusal> {
        let batch = PutBatch {
            puts: vec![PutStart::new(key.clone(), size)],
            config: &ReplicateConfig::default(),
            recency: Recency::default(),
            refresh_at_end: true,
            unreachable: &[],
            upsert: true,
        };
        let mut answers = self.state.put_start(self.now(), caller, batch).0;
        answers.pop().unwrap()
    }

    pub(crate) fn commit(
        &self,
        caller: &Caller,
        key: &ObjectKey,
        started: &PutStarted,
    ) -> Result<(), Refusal> {
        let object = object(key, started.generation);
        let epoch = self.state.draw_epoch();
        let mut answers = self.state.put_end(self.now(), caller, &[object], epoch);
        answers.pop().unwrap()
    }

    pub(crate) fn revoke(
        &self,
        caller: &Caller,
        key: &ObjectKey,
        started: &PutStarted,
    ) -> Result<(), Refusal> {
        let object = object(key, started.generation);
        self.state
            .put_revoke(self.now(), caller, &[object])
            .pop()
            .unwrap()
    }

    /// Puts and commits.
    pub(crate) fn store(&self, caller: &Caller, key: &ObjectKey, size: u64) -> PutStarted {
        self.store_with(
            caller,
            PutStart::new(key.clone(), size),
            &ReplicateConfig::default(),
        )
    }

    pub(crate) fn store_with(
        &self,
        caller: &Caller,
        put: PutStart,
        config: &ReplicateConfig,
    ) -> PutStarted {
        let key = put.key.clone();
        let started = self.put_with(caller, put, config).unwrap();
        assert_eq!(self.commit(caller, &key, &started), Ok(()));
        started
    }

    fn get_as(
        &self,
        caller: &Caller,
        key: &ObjectKey,
        session: bool,
    ) -> Result<GetStarted, Refusal> {
        let query = GetStart {
            keys: std::slice::from_ref(key),
            recency: Recency::default(),
            session,
            unreachable: &[],
        };
        let mut answers = self.state.get_start(self.now(), caller, &query).0;
        answers.pop().unwrap()
    }

    /// Opens a get session.
    pub(crate) fn get(&self, caller: &Caller, key: &ObjectKey) -> Result<GetStarted, Refusal> {
        self.get_as(caller, key, true)
    }

    /// Asks about an object that is being written.
    pub(crate) fn unfinished(
        &self,
        caller: &Caller,
        key: &ObjectKey,
    ) -> Result<GetStarted, Refusal> {
        let query = GetStart {
            keys: std::slice::from_ref(key),
            recency: Recency::default(),
            session: false,
            unreachable: &[],
        };
        let mut answers = self.state.unfinished(self.now(), caller, &query);
        answers.pop().unwrap()
    }

    /// Reads without a session.
    pub(crate) fn read(&self, caller: &Caller, key: &ObjectKey) -> Result<GetStarted, Refusal> {
        self.get_as(caller, key, false)
    }

    pub(crate) fn renew(
        &self,
        caller: &Caller,
        key: &ObjectKey,
        generation: Generation,
    ) -> Result<(), Refusal> {
        let object = object(key, generation);
        self.state
            .renew(self.now(), caller, &[object])
            .pop()
            .unwrap()
    }

    pub(crate) fn end(&self, caller: &Caller, key: &ObjectKey, generation: Generation) {
        self.state
            .get_end(self.now(), caller, &[object(key, generation)]);
    }

    pub(crate) fn remove(&self, key: &ObjectKey, force: bool) -> Result<(), Refusal> {
        let keys = std::slice::from_ref(key);
        let mut answers = self
            .state
            .remove(self.now(), &Tenant::default(), keys, force);
        answers.pop().unwrap()
    }

    pub(crate) fn remove_version(&self, object: &ObjectRef) -> Result<(), Refusal> {
        let objects = std::slice::from_ref(object);
        let mut answers = self.state.remove_versions(self.now(), &nobody(), objects);
        answers.pop().unwrap()
    }

    /// Probes keys, with a lease, as a client that has not joined.
    pub(crate) fn probe(&self, keys: &[ObjectKey]) -> Vec<Presence> {
        self.probe_at(keys, Recency::default())
    }

    pub(crate) fn probe_at(&self, keys: &[ObjectKey], recency: Recency) -> Vec<Presence> {
        self.exists(&nobody(), keys, recency, false)
    }

    pub(crate) fn probe_as(&self, caller: &Caller, keys: &[ObjectKey]) -> Vec<Presence> {
        self.exists(caller, keys, Recency::default(), false)
    }

    /// What a key holds, without a trace.
    pub(crate) fn presence(&self, key: &ObjectKey) -> Presence {
        self.exists(
            &nobody(),
            std::slice::from_ref(key),
            Recency::default(),
            true,
        )[0]
    }

    /// How many of these keys are there, without a trace.
    pub(crate) fn count(&self, keys: &[ObjectKey]) -> usize {
        let found = self.exists(&nobody(), keys, Recency::default(), true);
        found.iter().filter(|p| **p == Presence::Complete).count()
    }

    fn exists(
        &self,
        caller: &Caller,
        keys: &[ObjectKey],
        recency: Recency,
        peek: bool,
    ) -> Vec<Presence> {
        let query = Exists {
            probe: Probe::Readable,
            keys,
            recency,
            stop_at_first_miss: false,
            unreachable: &[],
            peek,
        };
        self.state.exists(self.now(), caller, &query).0
    }

    /// An epoch later than all before.
    pub(crate) fn epoch(&self) -> Epoch {
        let caller = nobody();
        let query: Exists<'_> = Exists {
            probe: Probe::Exists,
            keys: &[],
            recency: Recency::default(),
            stop_at_first_miss: false,
            unreachable: &[],
            peek: true,
        };
        self.state.exists(self.now(), &caller, &query).1
    }

    /// Bytes in use, in granules.
    pub(crate) fn used(&self) -> u64 {
        self.state.gauges().used_bytes
    }

    pub(crate) fn quarantined(&self) -> u64 {
        self.state.gauges().quarantined_bytes
    }
}

pub(crate) fn object(key: &ObjectKey, generation: Generation) -> ObjectRef {
    ObjectRef {
        key: key.clone(),
        generation,
    }
}

/// Payload bytes of an object whose place takes this many granules, short keys and default headers given.
pub(crate) fn granules(n: u64) -> u64 {
    n * GRANULE - 1024
}

/// A caller that has not joined.
pub(crate) fn nobody() -> Caller {
    Caller {
        client: ClientId(0),
        tenant: Tenant::default(),
        location: None,
    }
}
