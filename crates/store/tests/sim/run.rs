//! One simulated run: a master, a member that lends a segment, clients that put, get, wait for and
//! remove a few keys, and chaos between them.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use layercake_master::{Master, MasterConfig};
use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{
    Capability, EngineId, Generation, MemoryKind, RegionId, SegmentId, Term,
};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{ObjectRef, Presence, PutStart, ReplicateConfig, Segment};
use layercake_store::StoreError;
use layercake_store::link::{
    Backoff, Exists, LinkConfig, LinkState, MasterLink, StartOptions, Timeouts,
};
use prometheus_client::registry::Registry;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::time::Instant;

use crate::model::{CHURN, Model, Report};
use crate::network::{MASTER, PORT, SimConnector, incoming};

/// What disturbs a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chaos {
    None,
    /// Partitions, held messages and delays between clients and the master.
    Network,
    /// The master is killed and started anew.
    Master,
    Both,
}

const CLIENTS: usize = 3;
const ROUNDS: usize = 70;
const CALL: Duration = Duration::from_secs(3);
/// How much later than its deadline a call may end: a few ticks of the simulation.
const SLACK: Duration = Duration::from_millis(50);
/// Longer than any run: nothing ends for want of heartbeats but on purpose.
const TTL: Duration = Duration::from_hours(1);

type Shared = Rc<RefCell<Model>>;

/// Runs until every client has done its rounds, has the master back, and finds what it must.
pub(crate) fn run(seed: u64, chaos: Chaos) -> Report {
    println!("seed {seed}, {chaos:?}");
    let mut sim = turmoil::Builder::new()
        .rng_seed(seed)
        .tick_duration(Duration::from_millis(5))
        .simulation_duration(Duration::from_mins(10))
        .min_message_latency(Duration::from_millis(1))
        .max_message_latency(Duration::from_millis(20))
        .build();
    let model = Shared::default();
    let term = Arc::new(AtomicU64::new(0));
    let calm = Arc::new(AtomicBool::new(false));
    let mounted = Arc::new(AtomicU64::new(0));

    let terms = Arc::clone(&term);
    sim.host(MASTER, move || serve(Arc::clone(&terms)));
    let eras = Arc::clone(&mounted);
    sim.host("node", move || lend(Arc::clone(&eras)));
    let clients: Vec<String> = (0..CLIENTS).map(|n| format!("client-{n}")).collect();
    let done = Rc::new(RefCell::new(0));
    for (n, name) in clients.iter().enumerate() {
        let rng = StdRng::seed_from_u64(seed * 100 + n as u64);
        let (model, calm, done) = (model.clone(), calm.clone(), Rc::clone(&done));
        let (name, mounted) = (name.clone(), Arc::clone(&mounted));
        sim.client(name.clone(), async move {
            let mut client = Client::connect(&name, model, rng).await?;
            client.until_mounted(&mounted).await;
            for _ in 0..ROUNDS {
                client.round().await;
            }
            *done.borrow_mut() += 1;
            client.settle(&calm, &mounted).await;
            Ok(())
        });
    }

    let mut rng = StdRng::seed_from_u64(seed);
    let network = matches!(chaos, Chaos::Network | Chaos::Both);
    let master = matches!(chaos, Chaos::Master | Chaos::Both);
    let mut next = Duration::from_secs(2);
    loop {
        let finished = sim
            .step()
            .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        if finished {
            break;
        }
        if *done.borrow() == CLIENTS && !calm.swap(true, Ordering::Relaxed) {
            for name in &clients {
                sim.repair(name.as_str(), MASTER);
                sim.release(name.as_str(), MASTER);
                sim.set_link_latency(name.as_str(), MASTER, Duration::from_millis(5));
            }
        }
        if calm.load(Ordering::Relaxed) || sim.elapsed() < next {
            continue;
        }
        next = sim.elapsed() + Duration::from_millis(rng.random_range(200..3000));
        let name = clients[rng.random_range(0..CLIENTS)].as_str();
        if network {
            match rng.random_range(0..5) {
                0 => sim.partition(name, MASTER),
                1 => sim.hold(name, MASTER),
                2 => {
                    let latency = Duration::from_millis(rng.random_range(1..400));
                    sim.set_link_latency(name, MASTER, latency);
                }
                // Twice as likely, so that each trouble is over in time.
                _ => {
                    for name in &clients {
                        sim.repair(name.as_str(), MASTER);
                        sim.release(name.as_str(), MASTER);
                    }
                }
            }
        }
        if master && rng.random_bool(0.4) {
            {
                let mut model = model.borrow_mut();
                model.era += 1;
                model.report.restarts += 1;
            }
            sim.crash(MASTER);
            sim.bounce(MASTER);
        }
    }
    drop(sim);
    let report = model.borrow().report.clone();
    println!("{report:?}");
    report
}

/// A master of the next term.
async fn serve(term: Arc<AtomicU64>) -> turmoil::Result {
    let mut config = MasterConfig {
        term: Some(Term(term.fetch_add(1, Ordering::Relaxed) + 1)),
        insecure: true,
        ..MasterConfig::default()
    };
    config.state.client_ttl = TTL;
    config.heartbeat_every = Some(Duration::from_millis(500));
    config.state.seed = 1;
    let master = Master::new(config, &mut Registry::default())?;
    master
        .serve(incoming().await?, std::future::pending())
        .await?;
    Ok(())
}

fn link_config(name: &str) -> LinkConfig {
    LinkConfig {
        insecure: true,
        timeouts: Timeouts {
            connect: Duration::from_secs(2),
            call: CALL,
            ping_every: Duration::from_millis(500),
            ping: Duration::from_secs(1),
        },
        backoff: Backoff {
            first: Duration::from_millis(50),
            most: Duration::from_millis(500),
        },
        ..LinkConfig::new(format!("{MASTER}:{PORT}"), name)
    }
}

async fn connect(name: &str) -> MasterLink {
    loop {
        match MasterLink::connect_with(link_config(name), SimConnector).await {
            Ok(link) => return link,
            Err(error) => {
                assert!(error.is_retryable(), "{error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Lends a segment in every life of its membership. There is no memory behind it: clients only talk
/// about it. `mounted` is the last term in which it is there.
async fn lend(mounted: Arc<AtomicU64>) -> turmoil::Result {
    let link = connect("node").await;
    let mut state = link.watch();
    loop {
        let up = state
            .wait_for(|state| matches!(state, LinkState::Up { .. }))
            .await?
            .clone();
        if let LinkState::Up { term, .. } = up
            && mounted.load(Ordering::Relaxed) != term.0
        {
            let segment = Segment {
                id: SegmentId::draw(),
                name: "node".to_owned(),
                endpoint: Endpoint {
                    engine: EngineId(1),
                    tcp: "node:1".to_owned(),
                    host: HostId([1; 16]),
                    shm: None,
                    pid: 1,
                },
                region: RegionId(1),
                capability: Capability([0; 16]),
                len: 1 << 30,
                kind: MemoryKind::Host,
            };
            if link.mount(&segment, Generation::NONE).await.is_ok() {
                mounted.store(term.0, Ordering::Relaxed);
            }
            continue;
        }
        state.changed().await?;
    }
}

struct Client {
    link: MasterLink,
    model: Shared,
    rng: StdRng,
}

impl Client {
    async fn connect(name: &str, model: Shared, rng: StdRng) -> turmoil::Result<Self> {
        let link = connect(name).await;
        Ok(Self { link, model, rng })
    }

    /// Waits until the master has memory to give.
    async fn until_mounted(&self, mounted: &AtomicU64) {
        loop {
            let term = match self.link.state() {
                LinkState::Up { term, .. } => term.0,
                _ => 0,
            };
            if term != 0 && mounted.load(Ordering::Relaxed) == term {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn era(&self) -> u64 {
        self.model.borrow().era
    }

    /// Checks that a call ends in time, and counts it.
    async fn timed<T>(
        &self,
        within: Duration,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Option<T> {
        let start = Instant::now();
        let result = call.await;
        let took = start.elapsed();
        assert!(took <= within + SLACK, "a call of {within:?} took {took:?}");
        let report = &mut self.model.borrow_mut().report;
        report.calls += 1;
        match result {
            Ok(answer) => Some(answer),
            Err(error) => {
                assert!(error.is_retryable(), "nothing of this is final: {error}");
                report.failed += 1;
                None
            }
        }
    }

    fn key(&mut self) -> ObjectKey {
        let kind = if self.rng.random_bool(0.3) {
            CHURN
        } else {
            "stable"
        };
        let number = self.rng.random_range(0..40);
        ObjectKey::new(&format!("{kind}-{number}")).expect("short")
    }

    async fn round(&mut self) {
        let key = self.key();
        match self.rng.random_range(0..10) {
            0..4 => self.put(&key).await,
            4..7 => self.get(&key).await,
            7 => self.exists(&key).await,
            8 => self.follow(&key).await,
            _ if key.as_str().starts_with(CHURN) => {
                self.timed(CALL, self.link.remove(std::slice::from_ref(&key), false))
                    .await;
            }
            _ => self.get(&key).await,
        }
        let pause = Duration::from_millis(self.rng.random_range(0..300));
        tokio::time::sleep(pause).await;
    }

    async fn put(&mut self, key: &ObjectKey) {
        let entry = [PutStart::new(key.clone(), 10_000)];
        let config = ReplicateConfig::default();
        let start = self
            .link
            .put_start(&entry, &config, StartOptions::default());
        let Some(started) = self.timed(CALL, start).await else {
            return;
        };
        let started = match &started.results[0] {
            Ok(started) => started,
            Err(Refusal::AlreadyExists | Refusal::InProgress | Refusal::NoSpace { .. }) => return,
            Err(other) => panic!("{key}: {other}"),
        };
        let object = ObjectRef {
            key: key.clone(),
            generation: started.generation,
        };
        self.model.borrow_mut().reserved(key, started.generation);
        // As if bytes moved.
        tokio::time::sleep(Duration::from_millis(self.rng.random_range(0..200))).await;
        let objects = std::slice::from_ref(&object);
        if self.rng.random_bool(0.1) {
            self.timed(CALL, self.link.put_revoke(objects)).await;
            return;
        }
        let era = self.era();
        self.model.borrow_mut().offers(object.generation);
        let Some(ended) = self.timed(CALL, self.link.put_end(objects)).await else {
            return;
        };
        match ended[..] {
            [Ok(())] => self
                .model
                .borrow_mut()
                .committed(key, object.generation, era),
            // The master that knew the reservation is gone, or has discarded it.
            [Err(Refusal::Superseded | Refusal::NotFound)] => {}
            _ => panic!("{key}: {ended:?}"),
        }
    }

    async fn get(&mut self, key: &ObjectKey) {
        let expected = self.model.borrow().expected(key);
        let keys = std::slice::from_ref(key);
        let start = self.link.get_start(keys, StartOptions::default(), true);
        let Some(got) = self.timed(CALL, start).await else {
            return;
        };
        let found = match &got.results[0] {
            Ok(got) => Some(got.generation()),
            Err(Refusal::NotFound | Refusal::NotReady | Refusal::Unreachable) => None,
            Err(other) => panic!("{key}: {other}"),
        };
        self.model.borrow().found(key, found, expected);
        if let Some(generation) = found {
            let object = ObjectRef {
                key: key.clone(),
                generation,
            };
            self.timed(CALL, self.link.get_end(&[object])).await;
        }
    }

    async fn exists(&mut self, key: &ObjectKey) {
        let expected = self.model.borrow().expected(key);
        let keys = [key.clone()];
        let query = Exists::readable(&keys);
        let Some(existence) = self.timed(CALL, self.link.exists(&query)).await else {
            return;
        };
        if let Some((era, _)) = expected
            && era == self.era()
        {
            assert_eq!(existence.states, [Presence::Complete], "{key}");
        }
    }

    /// Waits for whoever writes the key.
    async fn follow(&mut self, key: &ObjectKey) {
        let expected = self.model.borrow().expected(key);
        let patience = Duration::from_millis(self.rng.random_range(0..2000));
        let wait = self.link.wait_complete(std::slice::from_ref(key), patience);
        let Some(results) = self.timed(CALL + patience, wait).await else {
            return;
        };
        if let Some((era, _)) = expected
            && era == self.era()
        {
            assert_eq!(results, [Ok(())], "{key}");
        }
    }

    /// When the chaos is over, everything works.
    async fn settle(&mut self, calm: &AtomicBool, mounted: &AtomicU64) {
        while !calm.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let back = tokio::time::timeout(Duration::from_secs(20), async {
            self.until_mounted(mounted).await;
            while self.link.exists(&Exists::readable(&[])).await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        assert!(
            back.await.is_ok(),
            "the master never came back: {:?}",
            self.link.state()
        );
        let failed = self.model.borrow().report.failed;
        let keys: Vec<ObjectKey> = (0..40)
            .map(|n| ObjectKey::new(&format!("stable-{n}")).expect("short"))
            .collect();
        for key in &keys {
            self.get(key).await;
        }
        let before = self.model.borrow().report.committed;
        let last = ObjectKey::new(&format!("{CHURN}-last-{}", self.link.name())).expect("short");
        self.put(&last).await;
        let report = self.model.borrow().report.clone();
        assert_eq!(report.failed, failed, "nothing fails any more");
        // One in ten is revoked.
        assert!(report.committed >= before);
        let closed = self.link.close(Duration::from_secs(5)).await;
        assert!(closed.is_ok(), "{closed:?}");
    }
}
