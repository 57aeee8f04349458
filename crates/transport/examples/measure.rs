//! Measures the tcp transport between two processes beside a raw socket with as many streams.
//!
//! Run with `cargo run --release -p layercake-transport --example measure`. Prints GB/s for writes and
//! reads at several piece sizes, and the latency of a 4 KiB write and read. Nothing is asserted; both
//! sides of each comparison run in the same minute on the same machine.

use std::error::Error;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_protocol::ids::{Capability, EngineId, Generation, RegionId};
use layercake_transport::{
    Access, AllocateOptions, Batch, Direction, Endpoint, Engine, EngineConfig, HostId, Memory,
    Piece, RegionDescriptor, RemoteSlice, TransportKind, TransportSet,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const REGION: u64 = 256 << 20;
const STREAMS: usize = 2;
const TIME: Duration = Duration::from_millis(1500);

fn main() -> Result<()> {
    if std::env::args().nth(1).as_deref() == Some("peer") {
        peer()
    } else {
        drive()
    }
}

fn engine() -> Result<Engine> {
    Ok(Engine::start(EngineConfig {
        transports: TransportSet::only(TransportKind::Tcp),
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
    Ok(engine.allocate(REGION, options)?)
}

/// The other process: an engine, and a listener for raw streams. Ends with its standard input.
fn peer() -> Result<()> {
    let engine = engine()?;
    let memory = allocate(&engine, Access::RemoteReadWrite)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let raw = listener.local_addr()?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || raw_peer(stream));
        }
    });
    let region = memory.region();
    println!(
        "{} {} {} {} {raw}",
        engine.endpoint().engine,
        engine.endpoint().tcp,
        region.region.0,
        u128::from_le_bytes(region.capability.0),
    );
    let mut end = String::new();
    std::io::stdin().read_line(&mut end)?;
    Ok(())
}

/// Raw streams: a request is (bytes, answer length); the bytes go into a large buffer, as ours do.
fn raw_peer(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = vec![1_u8; 128 << 20];
    let mut at = 0;
    let mut request = [0; 16];
    loop {
        stream.read_exact(&mut request)?;
        let size = |at: usize| {
            let bytes: [u8; 8] = request[at..at + 8].try_into().expect("eight bytes");
            usize::try_from(u64::from_le_bytes(bytes)).expect("small")
        };
        let (take, give) = (size(0), size(8));
        if at + take.max(give) > buffer.len() {
            at = 0;
        }
        stream.read_exact(&mut buffer[at..at + take])?;
        stream.write_all(&buffer[at..at + give])?;
        at += take.max(give);
    }
}

/// Processor time that both processes have used, in seconds.
fn cpu(peer: &Peer) -> Result<f64> {
    let of = |pid: u32| -> Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let fields: Vec<&str> = stat
            .rsplit(')')
            .next()
            .ok_or("odd stat")?
            .split_whitespace()
            .collect();
        let [user, system] = [fields[11], fields[12]].map(str::parse::<f64>);
        Ok((user? + system?) / 100.0)
    };
    Ok(of(std::process::id())? + of(peer.endpoint.pid)?)
}

/// What moving bytes took.
struct Cost {
    /// Bytes per nanosecond.
    rate: f64,
    /// Processor seconds per gigabyte, both sides.
    cpu: f64,
}

impl Cost {
    fn of(peer: &Peer, run: impl FnOnce() -> Result<u64>) -> Result<Self> {
        let (start, before) = (Instant::now(), cpu(peer)?);
        let gigabytes = run()? as f64 / 1e9;
        Ok(Self {
            rate: gigabytes / start.elapsed().as_secs_f64(),
            cpu: (cpu(peer)? - before) / gigabytes,
        })
    }
}

impl std::fmt::Display for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:5.2} GB/s {:4.2} s/GB", self.rate, self.cpu)
    }
}

struct Peer {
    endpoint: Arc<Endpoint>,
    region: RegionDescriptor,
    raw: String,
}

fn drive() -> Result<()> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg("peer")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let [engine_id, tcp, region, capability, raw] = words[..] else {
        return Err("odd line".into());
    };
    let peer = Peer {
        endpoint: Arc::new(Endpoint {
            engine: EngineId(u128::from_str_radix(engine_id, 16)?),
            tcp: tcp.to_owned(),
            host: HostId([0; 16]),
            shm: None,
            pid: child.id(),
        }),
        region: RegionDescriptor {
            region: RegionId(region.parse()?),
            len: REGION,
            capability: Capability(capability.parse::<u128>()?.to_le_bytes()),
            kind: layercake_protocol::ids::MemoryKind::Host,
        },
        raw: raw.to_owned(),
    };
    let engine = engine()?;
    let local = allocate(&engine, Access::LocalOnly)?;
    let buffer = vec![2_u8; 128 << 20];
    // Claims the granules that are then read.
    let claim = batch(&peer, &local, Direction::Write, 1 << 20, REGION >> 20, true)?;
    assert!(engine.submit(claim).wait().is_ok());
    for direction in [Direction::Write, Direction::Read] {
        for piece in [4 << 10, 64 << 10, 1 << 20, 16 << 20] {
            let raw = Cost::of(&peer, || {
                raw_throughput(&peer, direction, piece.min(1 << 20), &buffer)
            })?;
            let plain = Cost::of(&peer, || {
                throughput(&engine, &peer, &local, direction, piece, false)
            })?;
            let checked = Cost::of(&peer, || {
                throughput(&engine, &peer, &local, direction, piece, true)
            })?;
            println!(
                "{:5} {piece:8} B pieces: raw {raw}; plain {plain} ({:3.0} %, {:3.0} % of the work); checked {checked} ({:3.0} %, {:3.0} %)",
                direction.name(),
                100.0 * plain.rate / raw.rate,
                100.0 * plain.cpu / raw.cpu,
                100.0 * checked.rate / raw.rate,
                100.0 * checked.cpu / raw.cpu,
            );
        }
    }
    for direction in [Direction::Write, Direction::Read] {
        let raw = raw_latency(&peer, direction)?;
        let ours = latency(&engine, &peer, &local, direction)?;
        println!(
            "{:5} 4 KiB latency: raw {raw:?}, ours {ours:?} (median, p99)",
            direction.name()
        );
    }
    drop(child.stdin.take());
    child.wait()?;
    Ok(())
}

fn batch(
    peer: &Peer,
    local: &Memory,
    direction: Direction,
    piece: u64,
    pieces: u64,
    checked: bool,
) -> Result<Batch> {
    let make = |index: u64| -> Result<Piece> {
        let offset = index * piece % REGION;
        Ok(Piece {
            local: local.slice(offset, piece)?,
            remote: RemoteSlice {
                region: peer.region.region,
                capability: peer.region.capability,
                offset,
                len: piece,
                generation: checked.then_some(Generation(1)),
            },
        })
    };
    Ok(Batch {
        peer: Arc::clone(&peer.endpoint),
        direction,
        pieces: (0..pieces).map(make).collect::<Result<_>>()?,
        checksum: checked,
        deadline: None,
    })
}

fn throughput(
    engine: &Engine,
    peer: &Peer,
    local: &Memory,
    direction: Direction,
    piece: u64,
    checked: bool,
) -> Result<u64> {
    let pieces = (64 << 20) / piece;
    let start = Instant::now();
    let mut bytes = 0;
    while start.elapsed() < TIME {
        let outcome = engine
            .submit(batch(peer, local, direction, piece, pieces, checked)?)
            .wait();
        if let Some(error) = outcome.first_error() {
            return Err(error.into());
        }
        bytes += piece * pieces;
    }
    Ok(bytes)
}

fn latency(
    engine: &Engine,
    peer: &Peer,
    local: &Memory,
    direction: Direction,
) -> Result<(Duration, Duration)> {
    let mut times = Vec::new();
    for _ in 0..5000 {
        let batch = batch(peer, local, direction, 4096, 1, true)?;
        let start = Instant::now();
        let outcome = engine.submit(batch).wait();
        times.push(start.elapsed());
        if let Some(error) = outcome.first_error() {
            return Err(error.into());
        }
    }
    Ok(percentiles(times))
}

fn percentiles(mut times: Vec<Duration>) -> (Duration, Duration) {
    times.sort_unstable();
    (times[times.len() / 2], times[times.len() * 99 / 100])
}

fn request(take: usize, give: usize) -> [u8; 16] {
    let mut request = [0; 16];
    request[..8].copy_from_slice(&(take as u64).to_le_bytes());
    request[8..].copy_from_slice(&(give as u64).to_le_bytes());
    request
}

fn raw_throughput(peer: &Peer, direction: Direction, piece: u64, buffer: &[u8]) -> Result<u64> {
    let piece = usize::try_from(piece)?;
    let count = (32 << 20) / piece;
    let start = Instant::now();
    let stream = |_| -> std::io::Result<u64> {
        let mut stream = TcpStream::connect(&peer.raw)?;
        stream.set_nodelay(true)?;
        let mut into = vec![3_u8; 64 << 20];
        let mut bytes = 0;
        while start.elapsed() < TIME {
            match direction {
                Direction::Write => {
                    stream.write_all(&request(count * piece, 1))?;
                    for at in 0..count {
                        stream.write_all(&buffer[at * piece..][..piece])?;
                    }
                    stream.read_exact(&mut into[..1])?;
                }
                Direction::Read => {
                    stream.write_all(&request(0, count * piece))?;
                    for at in 0..count {
                        stream.read_exact(&mut into[at * piece..][..piece])?;
                    }
                }
            }
            bytes += (count * piece) as u64;
        }
        Ok(bytes)
    };
    let total = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..STREAMS)
            .map(|n| scope.spawn(move || stream(n)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .sum::<std::io::Result<u64>>()
    })?;
    Ok(total)
}

fn raw_latency(peer: &Peer, direction: Direction) -> Result<(Duration, Duration)> {
    let mut stream = TcpStream::connect(&peer.raw)?;
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; 16 + 4096];
    let mut times = Vec::new();
    for _ in 0..5000 {
        let start = Instant::now();
        match direction {
            Direction::Write => {
                buffer[..16].copy_from_slice(&request(4096, 1));
                stream.write_all(&buffer)?;
                stream.read_exact(&mut buffer[..1])?;
            }
            Direction::Read => {
                stream.write_all(&request(0, 4096))?;
                stream.read_exact(&mut buffer[..4096])?;
            }
        }
        times.push(start.elapsed());
    }
    Ok(percentiles(times))
}
