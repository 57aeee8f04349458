//! What sessions and small objects cost, measured.
//!
//! ```text
//! cargo run --release -p layercake-store --example sessions -- [OBJECTS] [LAYERS] [ENTRY_BYTES]
//! ```
//!
//! Master, node and client in one process, each with an engine of its own. Per transport: put and get
//! sessions over OBJECTS objects of LAYERS layers with two entries each, one range call a layer, beside
//! a plain copy of as many bytes; and the latency of putting, finding and getting one object of 4 KiB.

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::{Duration, Instant};

use common::{OneKey as _, Spec, Via, fresh_key, one_replica, pattern};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{PutStart, Recency};
use layercake_store::{GetSession, PutSession, Range, RangeRead, RangeWrite, StoreClient};
use layercake_transport::{AllocateOptions, Memory};

#[derive(Clone, Copy)]
struct Shape {
    objects: u64,
    layers: u64,
    entry: u64,
}

impl Shape {
    fn layer(self) -> u64 {
        2 * self.entry
    }

    fn object(self) -> u64 {
        self.layers * self.layer()
    }

    fn total(self) -> u64 {
        self.objects * self.object()
    }

    /// The two ranges of a layer of an object, in a buffer that holds all objects.
    fn ranges(self, memory: &Memory, object: u64, layer: u64) -> Vec<Range> {
        let range = |entry| {
            let offset = layer * self.layer() + entry * self.entry;
            let local = memory.slice(object * self.object() + offset, self.entry);
            Range {
                offset,
                local: local.expect("inside"),
            }
        };
        vec![range(0), range(1)]
    }
}

/// Time of each step of one pass.
#[derive(Default)]
struct Pass {
    start: Duration,
    /// Until the calls have handed their pieces over.
    submit: Duration,
    ranges: Duration,
    end: Duration,
}

fn main() {
    let mut args = std::env::args().skip(1);
    let mut number = |default| {
        args.next()
            .map_or(default, |arg| arg.parse().expect("a number"))
    };
    let shape = Shape {
        objects: number(64),
        layers: number(32),
        entry: number(64 << 10),
    };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    println!(
        "{} objects of {} layers, 2 entries of {} bytes: {} MiB; plain copy {:.2} GB/s",
        shape.objects,
        shape.layers,
        shape.entry,
        shape.total() >> 20,
        plain_copy(shape)
    );
    for via in Via::ALL {
        runtime.block_on(sessions(shape, via));
        runtime.block_on(small(via));
    }
}

fn plain_copy(shape: Shape) -> f64 {
    let len = usize::try_from(shape.total()).expect("fits memory");
    let (from, mut to) = (vec![1_u8; len], vec![2_u8; len]);
    let start = Instant::now();
    to.copy_from_slice(&from);
    std::hint::black_box(&to);
    rate(shape.total(), start.elapsed())
}

fn rate(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}

async fn sessions(shape: Shape, via: Via) {
    let cluster = Spec::new(via)
        .nodes(&[shape.total() + shape.total() / 4])
        .start()
        .await;
    let client = cluster.client().await;
    let touched = AllocateOptions {
        pretouch: true,
        ..AllocateOptions::default()
    };
    let memory = client
        .engine()
        .allocate(shape.total(), touched)
        .expect("there is memory");
    memory.copy_in(0, &pattern(1, 1 << 20)).expect("inside");
    for round in 0..3 {
        let keys: Vec<ObjectKey> = (0..shape.objects).map(|_| fresh_key()).collect();
        let put = put_pass(&client, shape, &keys, &memory).await;
        let get = get_pass(&client, shape, &keys, &memory).await;
        if round > 0 {
            report(via, "put", shape, &put);
            report(via, "get", shape, &get);
        }
        for removed in client.remove(&keys, true).await {
            removed.expect("the master is up");
        }
    }
}

fn report(via: Via, name: &str, shape: Shape, pass: &Pass) {
    let all = pass.start + pass.ranges + pass.end;
    println!(
        "{:5} {name}: {:.2} GB/s whole, {:.2} GB/s ranges; start {:.2?}, ranges {:.2?} (of it submit \
         {:.2?}), end {:.2?}",
        via.kind(),
        rate(shape.total(), all),
        rate(shape.total(), pass.ranges),
        pass.start,
        pass.ranges,
        pass.submit,
        pass.end
    );
}

async fn put_pass(client: &StoreClient, shape: Shape, keys: &[ObjectKey], memory: &Memory) -> Pass {
    let mut pass = Pass::default();
    let clock = Instant::now();
    let rows = u32::try_from(shape.layers * 2).expect("few");
    let entries = keys.iter().map(|key| PutStart {
        header_rows: rows,
        ..PutStart::new(key.clone(), shape.object())
    });
    let started = client
        .start_puts(entries.collect(), &one_replica(), Recency::default())
        .await;
    let sessions: Vec<PutSession> = started.into_iter().map(|s| s.expect("room")).collect();
    pass.start = clock.elapsed();
    let clock = Instant::now();
    for layer in 0..shape.layers {
        let writes = (0..).zip(&sessions).map(|(object, session)| RangeWrite {
            session,
            ranges: shape.ranges(memory, object, layer),
        });
        let submit = Instant::now();
        let call = client.write_ranges(writes);
        pass.submit += submit.elapsed();
        for written in call.await {
            written.expect("the node is up");
        }
    }
    pass.ranges = clock.elapsed();
    let clock = Instant::now();
    for ended in client.end_puts(sessions).await {
        ended.expect("whole");
    }
    pass.end = clock.elapsed();
    pass
}

async fn get_pass(client: &StoreClient, shape: Shape, keys: &[ObjectKey], memory: &Memory) -> Pass {
    let mut pass = Pass::default();
    let clock = Instant::now();
    let started = client.start_gets(keys, Recency::default()).await;
    let sessions: Vec<GetSession> = started.into_iter().map(|s| s.expect("complete")).collect();
    pass.start = clock.elapsed();
    let clock = Instant::now();
    for layer in 0..shape.layers {
        let reads = (0..).zip(&sessions).map(|(object, session)| RangeRead {
            session,
            ranges: shape.ranges(memory, object, layer),
        });
        let submit = Instant::now();
        let call = client.read_ranges(reads);
        pass.submit += submit.elapsed();
        for done in call.await {
            assert_eq!(done.expect("the node is up").verified, shape.layer());
        }
    }
    pass.ranges = clock.elapsed();
    let clock = Instant::now();
    client.end_gets(sessions).await;
    pass.end = clock.elapsed();
    pass
}

async fn small(via: Via) {
    const COUNT: usize = 2000;
    let cluster = Spec::new(via).start().await;
    let client = cluster.client().await;
    let bytes = pattern(1, 4096);
    let keys: Vec<ObjectKey> = (0..COUNT).map(|_| fresh_key()).collect();
    let mut puts = Vec::with_capacity(COUNT);
    let mut finds = Vec::with_capacity(COUNT);
    let mut gets = Vec::with_capacity(COUNT);
    for key in &keys {
        let clock = Instant::now();
        client.store(key, &bytes).await;
        puts.push(clock.elapsed());
    }
    for key in &keys {
        let clock = Instant::now();
        assert!(client.has(key).await);
        finds.push(clock.elapsed());
    }
    for key in &keys {
        let clock = Instant::now();
        let loaded = client.load(key).await.expect("complete");
        gets.push(clock.elapsed());
        assert_eq!(loaded, bytes);
    }
    for (name, mut times) in [("put", puts), ("exists", finds), ("get", gets)] {
        times.sort_unstable();
        println!(
            "{:5} {name} of 4 KiB: median {:.1?}, p99 {:.1?}",
            via.kind(),
            times[COUNT / 2],
            times[COUNT * 99 / 100]
        );
    }
}
