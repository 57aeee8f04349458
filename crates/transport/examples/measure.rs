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

/// Each side of a comparison runs this long at a time, in turns, so that whatever else the machine does
/// hits all of them alike.
const TURN: Duration = Duration::from_millis(200);
const ROUNDS: usize = 9;
const TRIPS: usize = 5000;

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

/// How often the threads of both processes went to sleep so far, those that ended excepted.
fn sleeps(peer: &Peer) -> Result<f64> {
    let mut sum = 0.0;
    for pid in [std::process::id(), peer.endpoint.pid] {
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let status = std::fs::read_to_string(task?.path().join("status"))?;
            let count = status
                .lines()
                .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))
                .ok_or("odd status")?;
            sum += count.trim().parse::<f64>()?;
        }
    }
    Ok(sum)
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
#[derive(Default)]
struct Cost {
    /// Bytes per nanosecond, of each turn.
    rates: Vec<f64>,
    /// Processor seconds, both sides.
    cpu: f64,
    sleeps: f64,
    bytes: f64,
}

impl Cost {
    fn turn(&mut self, peer: &Peer, run: impl FnOnce() -> Result<u64>) -> Result<()> {
        let (cpu_before, sleeps_before) = (cpu(peer)?, sleeps(peer)?);
        let start = Instant::now();
        let bytes = run()? as f64;
        self.rates.push(bytes / 1e9 / start.elapsed().as_secs_f64());
        self.bytes += bytes;
        self.cpu += cpu(peer)? - cpu_before;
        self.sleeps += sleeps(peer)? - sleeps_before;
        Ok(())
    }

    fn rate(&self) -> f64 {
        let mut rates = self.rates.clone();
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    }

    fn cpu_per_gigabyte(&self) -> f64 {
        self.cpu / self.bytes * 1e9
    }
}

impl std::fmt::Display for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:5.2} GB/s {:4.2} s/GB {:5.2} sleeps/MiB",
            self.rate(),
            self.cpu_per_gigabyte(),
            self.sleeps / self.bytes * f64::from(1 << 20),
        )
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
            let mut raw_streams = RawStreams::connect(&peer)?;
            let [mut raw, mut plain, mut checked] = [(); 3].map(|()| Cost::default());
            for _ in 0..ROUNDS {
                raw.turn(&peer, || {
                    raw_throughput(&mut raw_streams, direction, piece.min(1 << 20), &buffer)
                })?;
                for (cost, safe) in [(&mut plain, false), (&mut checked, true)] {
                    cost.turn(&peer, || {
                        throughput(&engine, &peer, &local, direction, piece, safe)
                    })?;
                }
            }
            println!(
                "{:5} {piece:8} B pieces: raw {raw}; plain {plain} ({:3.0} %, {:3.0} % of the work); checked {checked} ({:3.0} %, {:3.0} %)",
                direction.name(),
                100.0 * plain.rate() / raw.rate(),
                100.0 * plain.cpu_per_gigabyte() / raw.cpu_per_gigabyte(),
                100.0 * checked.rate() / raw.rate(),
                100.0 * checked.cpu_per_gigabyte() / raw.cpu_per_gigabyte(),
            );
        }
    }
    for direction in [Direction::Write, Direction::Read] {
        let before = sleeps(&peer)?;
        let raw = raw_latency(&peer, direction)?;
        let between = sleeps(&peer)?;
        let ours = latency(&engine, &peer, &local, direction)?;
        let after = sleeps(&peer)?;
        println!(
            "{:5} 4 KiB latency: raw {raw:?}, {:.2} sleeps each; ours {ours:?}, {:.2} sleeps each (median, p99)",
            direction.name(),
            (between - before) / TRIPS as f64,
            (after - between) / TRIPS as f64,
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
    while start.elapsed() < TURN {
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
    for _ in 0..TRIPS {
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

/// Raw connections to the other process, each with memory to read into.
struct RawStreams(Vec<(TcpStream, Vec<u8>)>);

impl RawStreams {
    fn connect(peer: &Peer) -> Result<Self> {
        let stream = |_| -> Result<_> {
            let stream = TcpStream::connect(&peer.raw)?;
            stream.set_nodelay(true)?;
            Ok((stream, vec![3_u8; 64 << 20]))
        };
        Ok(Self((0..STREAMS).map(stream).collect::<Result<_>>()?))
    }
}

fn raw_throughput(
    streams: &mut RawStreams,
    direction: Direction,
    piece: u64,
    buffer: &[u8],
) -> Result<u64> {
    let piece = usize::try_from(piece)?;
    let count = (32 << 20) / piece;
    let start = Instant::now();
    let run = |stream: &mut TcpStream, into: &mut Vec<u8>| -> std::io::Result<u64> {
        let mut bytes = 0;
        while start.elapsed() < TURN {
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
        let threads: Vec<_> = streams
            .0
            .iter_mut()
            .map(|(stream, into)| scope.spawn(move || run(stream, into)))
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
    for _ in 0..TRIPS {
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
