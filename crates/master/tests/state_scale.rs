//! Speed and memory of the state machine as its table grows. Prints figures and asserts none.
//!
//! `cargo test --release --test state_scale at_1m -- --ignored --nocapture`, or another size: each in a
//! process of its own, since memory that one frees would not count for the next. Times are those of the
//! thread's processor, so that other programs on the machine disturb little.

#![expect(
    clippy::unwrap_used,
    reason = "a measurement ends where a value is not there"
)]

use std::fmt::Write as _;
use std::time::Duration;

use layercake_master::state::{
    Caller, Exists, GetStart, Location, Moment, Probe, PutBatch, State, StateConfig,
};
use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::ids::{
    Capability, ClientId, EngineId, Generation, MemoryKind, RegionId, SegmentId,
};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{ObjectRef, PutStart, Recency, ReplicateConfig, Segment};

/// Keys of one call.
const BATCH: usize = 256;

/// Keys of which each figure is taken at most.
const SAMPLE: usize = 100_000;

/// Keys of which each figure is taken at least, in several rounds if need be: the processor's time is told
/// in steps of milliseconds.
const AT_LEAST: usize = 600_000;

const OBJECT_BYTES: u64 = 60_000;
const SEGMENTS: u64 = 8;

struct Scene {
    state: State,
    caller: Caller,
    now: Moment,
}

/// A pool with room for so many objects.
fn scene(objects: u64) -> Scene {
    let config = StateConfig {
        high_watermark: 1.0,
        ..StateConfig::default()
    };
    let state = State::new(config).unwrap();
    let now = Moment::from_micros(1);
    let endpoint = Endpoint {
        engine: EngineId(1),
        tcp: "127.0.0.1:1".to_owned(),
        host: HostId([0; 16]),
        shm: None,
        pid: 1,
    };
    let caller = Caller {
        client: ClientId(1),
        tenant: Tenant::default(),
        location: Some(Location::from(&endpoint)),
    };
    state.join(now, caller.client, "bench", Some(endpoint.clone()));
    for id in 1..=SEGMENTS {
        let segment = Segment {
            id: SegmentId(id),
            name: format!("n{id}"),
            endpoint: endpoint.clone(),
            region: RegionId(id),
            capability: Capability([0; 16]),
            len: (objects / SEGMENTS + 1) * 61_440,
            kind: MemoryKind::Host,
        };
        state
            .mount(now, caller.client, segment, Generation::NONE)
            .unwrap();
    }
    Scene { state, caller, now }
}

/// A key of 60 bytes, as a connector makes them.
fn key(number: usize) -> ObjectKey {
    let mut text = String::with_capacity(60);
    let spread = (number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    write!(text, "llama-3.1-70b@{spread:016x}{number:016x}@tp:00000003").unwrap();
    text.push_str("@p");
    assert_eq!(text.len(), 60);
    ObjectKey::new(&text).unwrap()
}

impl Scene {
    fn put_start(&self, keys: &[ObjectKey]) -> Vec<ObjectRef> {
        let config = ReplicateConfig::default();
        let puts = keys
            .iter()
            .map(|key| PutStart::new(key.clone(), OBJECT_BYTES));
        let batch = PutBatch {
            puts: puts.collect(),
            config: &config,
            recency: Recency::default(),
            unreachable: &[],
            upsert: false,
        };
        let (answers, _) = self.state.put_start(self.now, &self.caller, batch);
        keys.iter()
            .zip(answers)
            .map(|(key, answer)| ObjectRef {
                key: key.clone(),
                generation: answer.unwrap().generation,
            })
            .collect()
    }

    fn put_end(&self, objects: &[ObjectRef]) {
        let answers = self.state.put_end(self.now, &self.caller, objects);
        assert!(answers.iter().all(Result::is_ok));
    }

    fn exists(&self, keys: &[ObjectKey]) {
        let query = Exists {
            probe: Probe::Readable,
            keys,
            recency: Recency::default(),
            stop_at_first_miss: true,
            unreachable: &[],
            peek: false,
        };
        let (found, _) = self.state.exists(self.now, &self.caller, &query);
        assert_eq!(found.len(), keys.len());
    }

    fn get_start(&self, keys: &[ObjectKey]) -> Vec<ObjectRef> {
        let query = GetStart {
            keys,
            recency: Recency::default(),
            session: true,
            unreachable: &[],
        };
        let (answers, _) = self.state.get_start(self.now, &self.caller, &query);
        keys.iter()
            .zip(answers)
            .map(|(key, answer)| ObjectRef {
                key: key.clone(),
                generation: answer.unwrap().generation(),
            })
            .collect()
    }
}

/// Bytes of this process that are in memory.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// Time that this thread has spent on a processor.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
}

fn time<T>(call: impl FnOnce() -> T) -> (T, Duration) {
    let start = processor_time();
    let value = call();
    (value, processor_time().saturating_sub(start))
}

/// Adds up what calls of one kind take.
#[derive(Default)]
struct Meter {
    keys: usize,
    spent: Duration,
}

impl Meter {
    /// Calls for every batch and times them all together.
    fn run<I, O>(&mut self, batches: &[Vec<I>], mut call: impl FnMut(&[I]) -> O) -> Vec<O> {
        let calls = || batches.iter().map(|batch| call(batch)).collect();
        let (answers, spent) = time(calls);
        self.keys += batches.iter().map(Vec::len).sum::<usize>();
        self.spent += spent;
        answers
    }

    /// Million keys per second.
    fn rate(&self) -> f64 {
        self.keys as f64 / self.spent.as_secs_f64() / 1e6
    }
}

fn batches(numbers: impl Iterator<Item = usize>) -> Vec<Vec<ObjectKey>> {
    let keys: Vec<_> = numbers.map(key).collect();
    keys.chunks(BATCH).map(<[_]>::to_vec).collect()
}

fn measure(objects: usize) {
    let before = resident();
    let sample = SAMPLE.min(objects);
    let scene = scene((objects + sample) as u64);
    for first in (0..objects).step_by(BATCH) {
        let keys: Vec<_> = (first..objects.min(first + BATCH)).map(key).collect();
        scene.put_end(&scene.put_start(&keys));
    }
    let per_object = (resident() - before) / objects as u64;
    // Keys far apart, so that every call meets a cold part of a large table.
    let known = batches((0..sample).map(|number| number * (objects / sample)));
    let new = batches(objects..objects + sample);
    let [mut exists, mut get_start, mut get_end] = <[Meter; 3]>::default();
    let [mut put_start, mut put_end, mut remove, mut evict] = <[Meter; 4]>::default();
    let tenant = Tenant::default();
    for _ in 0..AT_LEAST.div_ceil(sample) {
        exists.run(&known, |keys| scene.exists(keys));
        let read = get_start.run(&known, |keys| scene.get_start(keys));
        get_end.run(&read, |objects| {
            scene.state.get_end(scene.now, &scene.caller, objects);
        });
        let started = put_start.run(&new, |keys| scene.put_start(keys));
        put_end.run(&started, |objects| scene.put_end(objects));
        remove.run(&new, |keys| {
            scene.state.remove(scene.now, &tenant, keys, true);
        });
    }
    // Once the pool is full every put evicts.
    let later = Scene {
        now: scene.now + Duration::from_hours(1),
        ..scene
    };
    later.state.gauges();
    for batch in &new {
        later.put_end(&later.put_start(batch));
    }
    let last = objects + sample;
    let newer = batches(last..last + sample);
    evict.run(&newer, |keys| later.put_end(&later.put_start(keys)));
    let single = key(last);
    let ((), spent) = time(|| {
        (0..1_000_000).for_each(|_| later.exists(std::slice::from_ref(&single)));
    });
    println!(
        "{objects:>9} objects: {per_object:>4} B each; million keys/s: exists {:.2}, get_start {:.2}, \
         get_end {:.2}, put_start {:.2}, put_end {:.2}, remove {:.2}, put with eviction {:.2}; \
         one exists {} ns; evicted {}",
        exists.rate(),
        get_start.rate(),
        get_end.rate(),
        put_start.rate(),
        put_end.rate(),
        remove.rate(),
        evict.rate(),
        spent.as_millis(),
        later.state.counters().evicted().objects,
    );
}

#[test]
#[ignore = "prints figures"]
fn at_10k() {
    measure(10_000);
}

#[test]
#[ignore = "prints figures"]
fn at_1m() {
    measure(1_000_000);
}

#[test]
#[ignore = "prints figures, and takes over a gigabyte"]
fn at_5m() {
    measure(5_000_000);
}
