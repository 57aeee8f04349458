//! Measures shared memory between two processes beside a plain copy of the same scattered pieces.
//!
//! Run with `cargo run --release -p layercake-transport --example measure_shm [quick]`. Prints GB/s of writes
//! and reads at several piece sizes, with and without checksums, by one copying thread and by two, each
//! with its share of what `copy_nonoverlapping` does in this process between mappings of the same
//! kind, measured right beside it; and the latency of a 4 KiB write and read. Nothing is asserted.

#![expect(unsafe_code, reason = "a plain copy is what is compared with")]

use std::error::Error;
use std::io::BufRead as _;
use std::num::NonZero;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use layercake_protocol::ids::{Capability, EngineId, Generation, RegionId};
use layercake_transport::{
    Access, AllocateOptions, Batch, Direction, Endpoint, Engine, EngineConfig, HostBuffer, HostId,
    Memory, Piece, RemoteSlice, Transfer, TransportKind, TransportSet,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Larger than the processor's caches.
const REGION: usize = 512 << 20;
/// Bytes of one batch: some of its runs fit between what else the machine does, and the best counts.
const BATCH: usize = 16 << 20;
/// Batches of different places that take turns, so that none finds its bytes in a cache.
const TURNS: usize = REGION / BATCH;
const TIME: Duration = Duration::from_millis(700);

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("peer") => peer(),
        Some("quick") => drive(&[1], &[64 << 10, 1 << 20]),
        _ => drive(&[1, 2], &[4 << 10, 64 << 10, 1 << 20, 16 << 20]),
    }
}

fn engine(copy_threads: u8) -> Result<Engine> {
    Ok(Engine::start(EngineConfig {
        transports: TransportSet::only(TransportKind::Shm),
        copy_threads: NonZero::new(copy_threads).ok_or("at least one thread")?,
        ..EngineConfig::default()
    })?)
}

fn allocate(engine: &Engine, access: Access) -> Result<Memory> {
    let options = AllocateOptions {
        access,
        generation_tags: true,
        pretouch: true,
        huge_pages: false,
    };
    Ok(engine.allocate(REGION as u64, options)?)
}

/// The other process: memory, and nothing to do. Ends with its standard input.
fn peer() -> Result<()> {
    let engine = engine(1)?;
    let mapped = allocate(&engine, Access::RemoteReadWrite)?;
    let by_address = HostBuffer::from(vec![1_u8; REGION]);
    let by_address = engine.register(by_address, Access::RemoteReadWrite)?;
    let endpoint = engine.endpoint();
    let regions = [&mapped, &by_address].map(|memory| {
        let region = memory.region();
        let capability = u128::from_le_bytes(region.capability.0);
        format!("{} {capability}", region.region.0)
    });
    println!(
        "{} {} {}",
        endpoint.engine.0,
        endpoint.shm.as_deref().unwrap_or_default(),
        regions.join(" ")
    );
    let mut end = String::new();
    std::io::stdin().read_line(&mut end)?;
    Ok(())
}

struct Peer {
    endpoint: Arc<Endpoint>,
    mapped: (RegionId, Capability),
    by_address: (RegionId, Capability),
}

fn start_peer(host: HostId) -> Result<(std::process::Child, Peer)> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg("peer")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = child.stdout.take().ok_or("no output")?;
    let mut line = String::new();
    std::io::BufReader::new(stdout).read_line(&mut line)?;
    let words: Vec<_> = line.split_whitespace().collect();
    let [engine, shm, region, key, other_region, other_key] = words[..] else {
        return Err(format!("unexpected: {line}").into());
    };
    let place = |region: &str, key: &str| -> Result<_> {
        let capability = Capability(key.parse::<u128>()?.to_le_bytes());
        Ok((RegionId(region.parse()?), capability))
    };
    let endpoint = Endpoint {
        engine: EngineId(engine.parse()?),
        tcp: String::new(),
        host,
        shm: Some(shm.to_owned()),
        pid: child.id(),
    };
    let peer = Peer {
        endpoint: Arc::new(endpoint),
        mapped: place(region, key)?,
        by_address: place(other_region, other_key)?,
    };
    Ok((child, peer))
}

/// Places of the pieces of one size of each turn, in an order that no prefetcher guesses.
fn places(size: usize, seed: u64) -> Vec<Vec<usize>> {
    let mut places: Vec<_> = (0..REGION / size).collect();
    let mut state = seed | 1;
    for i in (1..places.len()).rev() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        places.swap(i, usize::try_from(state >> 33).expect("31 bits") % (i + 1));
    }
    let turn = |places: &[usize]| places.iter().map(|place| place * size).collect();
    places.chunks(BATCH / size).map(turn).collect()
}

/// One batch for each turn.
fn batches(
    peer: &Peer,
    (region, capability): (RegionId, Capability),
    mine: &Memory,
    direction: Direction,
    size: usize,
    checksum: bool,
) -> Result<Vec<Batch>> {
    let len = size as u64;
    let piece = |(near, far): (usize, usize)| -> Result<Piece> {
        Ok(Piece {
            local: mine.slice(near as u64, len)?,
            remote: RemoteSlice {
                region,
                capability,
                offset: far as u64,
                len,
                generation: None,
            },
        })
    };
    let turns = places(size, 1).into_iter().zip(places(size, 2));
    let batches = turns.map(|(near, far)| -> Result<Batch> {
        Ok(Batch {
            peer: Arc::clone(&peer.endpoint),
            direction,
            pieces: near
                .into_iter()
                .zip(far)
                .map(piece)
                .collect::<Result<_>>()?,
            checksum,
            deadline: None,
        })
    });
    batches.collect()
}

/// Waits without taking part in the work.
fn wait_idle(transfer: Transfer) -> Result<()> {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut transfer = std::pin::pin!(transfer);
    loop {
        match transfer.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(outcome) => return outcome.first_error().map_or(Ok(()), |e| Err(e.into())),
            Poll::Pending => std::thread::park(),
        }
    }
}

/// The best GB/s of several runs.
fn rate(mut run: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    let (begun, mut best) = (Instant::now(), Duration::MAX);
    for turn in (0..TURNS).cycle() {
        let start = Instant::now();
        run(turn)?;
        best = best.min(start.elapsed());
        if begun.elapsed() > TIME {
            break;
        }
    }
    Ok(BATCH as f64 / best.as_secs_f64() / 1e9)
}

/// A plain copy between two mappings, by one thread or two.
fn memcpy_rate(from: &Memory, to: &Memory, size: usize, threads: usize) -> Result<f64> {
    let turns: Vec<Vec<_>> = places(size, 1)
        .into_iter()
        .zip(places(size, 2))
        .map(|(near, far)| near.into_iter().zip(far).collect())
        .collect();
    let (from, to) = (from.addr(), to.addr());
    let copy = |pairs: &[(usize, usize)]| {
        for (source, target) in pairs {
            // SAFETY: both places lie in regions of `REGION` bytes that live on, and nobody else
            // touches them while this is measured.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    (from + source) as *const u8,
                    (to + target) as *mut u8,
                    size,
                );
            }
        }
    };
    rate(|turn| {
        let mut parts = turns[turn].chunks(turns[turn].len().div_ceil(threads));
        let first = parts.next().unwrap_or_default();
        std::thread::scope(|scope| {
            for part in parts {
                scope.spawn(move || copy(part));
            }
            copy(first);
        });
        Ok(())
    })
}

fn latency(engine: &Engine, batch: &Batch) -> Result<Duration> {
    let mut one = batch.clone();
    one.pieces.truncate(1);
    let mut times = Vec::new();
    for _ in 0..20_000 {
        let batch = one.clone();
        let start = Instant::now();
        let outcome = engine.submit(batch).wait();
        times.push(start.elapsed());
        if let Some(error) = outcome.first_error() {
            return Err(error.into());
        }
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

/// Writes all of the peer's mapped region once, so that all of its tags are the same.
fn raise_tags(engine: &Engine, peer: &Peer, mine: &Memory) -> Result<()> {
    let size = 1 << 20;
    let mut all = batches(peer, peer.mapped, mine, Direction::Write, size, false)?.remove(0);
    let first = all.pieces[0].clone();
    all.pieces.clear();
    for offset in (0..REGION as u64).step_by(size) {
        let mut piece = first.clone();
        piece.remote.offset = offset;
        piece.remote.generation = Some(Generation(1));
        all.pieces.push(piece);
    }
    let outcome = engine.submit(all).wait();
    outcome.first_error().map_or(Ok(()), |e| Err(e.into()))
}

fn drive(threads: &[usize], sizes: &[usize]) -> Result<()> {
    let engine = engine(1)?;
    let (mut child, peer) = start_peer(engine.endpoint().host)?;
    let mine = allocate(&engine, Access::LocalOnly)?;
    let other = allocate(&engine, Access::LocalOnly)?;
    raise_tags(&engine, &peer, &mine)?;
    println!(
        "GB/s of {} MiB batches; per cent of memcpy by as many threads",
        BATCH >> 20
    );
    println!("                          memcpy    plain          crc            generations+crc");
    for &size in sizes {
        for &threads in threads {
            for direction in [Direction::Write, Direction::Read] {
                let plain = batches(&peer, peer.mapped, &mine, direction, size, false)?;
                let mut summed = plain.clone();
                for batch in &mut summed {
                    batch.checksum = true;
                }
                let mut checked = summed.clone();
                for piece in checked.iter_mut().flat_map(|batch| &mut batch.pieces) {
                    piece.remote.generation = Some(Generation(1));
                }
                let (from, to) = match direction {
                    Direction::Write => (&mine, &other),
                    Direction::Read => (&other, &mine),
                };
                let base = memcpy_rate(from, to, size, threads)?;
                print!(
                    "{:>6} KiB {threads} thread(s) {:<5} {base:6.1}",
                    size >> 10,
                    direction.name()
                );
                for batches in [&plain, &summed, &checked] {
                    let rate = rate(|turn| {
                        let transfer = engine.submit(batches[turn].clone());
                        if threads == 1 {
                            return wait_idle(transfer);
                        }
                        let outcome = transfer.wait();
                        outcome.first_error().map_or(Ok(()), |e| Err(e.into()))
                    })?;
                    print!("   {rate:6.1} ({:3.0} %)", 100.0 * rate / base);
                }
                println!();
            }
        }
    }
    for (name, place) in [("mapped", peer.mapped), ("by address", peer.by_address)] {
        for direction in [Direction::Write, Direction::Read] {
            let small = batches(&peer, place, &mine, direction, 4096, true)?;
            let large = batches(&peer, place, &mine, direction, 1 << 20, true)?;
            let latency = latency(&engine, &small[0])?;
            let rate = rate(|turn| wait_idle(engine.submit(large[turn].clone())))?;
            println!(
                "{name}: 4 KiB {} in {latency:?} at the median; 1 MiB pieces, one thread: {rate:.1} GB/s",
                direction.name()
            );
        }
    }
    drop(child.stdin.take());
    child.wait()?;
    Ok(())
}
