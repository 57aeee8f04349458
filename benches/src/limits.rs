//! The machine's own limits: plain copies of scattered pieces, and raw loopback sockets.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use socket2::SockRef;

/// Where a piece lies in its source and in its destination, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Scatter {
    /// Offset in the source.
    pub from: usize,
    /// Offset in the destination.
    pub to: usize,
}

/// Places of `count` pieces of `len` bytes, in an order that no prefetcher follows, the same every
/// time: the destination is a permutation of the source.
pub fn scatter(count: usize, len: usize) -> Vec<Scatter> {
    // A step that shares no factor with the count visits every slot once.
    let step = (count / 2 + 1..=count + 1)
        .find(|step| gcd(*step, count) == 1)
        .unwrap_or(1);
    (0..count)
        .map(|index| Scatter {
            from: index * len,
            to: (index * step % count) * len,
        })
        .collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Copies the pieces with as many threads, each its share, and returns how long that took.
pub fn copy_scattered(
    source: &[u8],
    destination: &mut [u8],
    places: &[Scatter],
    len: usize,
    threads: usize,
) -> Duration {
    if threads <= 1 {
        let start = Instant::now();
        for place in places {
            destination[place.to..place.to + len]
                .copy_from_slice(&source[place.from..place.from + len]);
        }
        return start.elapsed();
    }
    // Each thread needs a stretch of the destination to itself.
    let mut by_destination: Vec<Scatter> = places.to_vec();
    by_destination.sort_by_key(|place| place.to);
    let share = by_destination.len().div_ceil(threads).max(1);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let mut rest = destination;
        let mut base = 0;
        for places in by_destination.chunks(share) {
            let (mine, others) = std::mem::take(&mut rest).split_at_mut(places.len() * len);
            rest = others;
            let first = base;
            base += mine.len();
            scope.spawn(move || {
                for place in places {
                    let at = place.to - first;
                    mine[at..at + len].copy_from_slice(&source[place.from..place.from + len]);
                }
            });
        }
    });
    start.elapsed()
}

/// Memory of the far end of a raw connection.
const SINK_BYTES: usize = 128 << 20;

/// Who decides when the bytes of a raw connection go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Whatever congestion control the system is set to; some let timers decide, on loopback too.
    System,
    /// Nobody: as fast as the two ends can.
    None,
}

impl Pace {
    fn apply(self, stream: &TcpStream) -> io::Result<()> {
        match self {
            Self::System => Ok(()),
            // Built into every kernel, and open to every process.
            Self::None => SockRef::from(stream).set_tcp_congestion(b"reno"),
        }
    }
}

/// Raw loopback connections to threads that read (or write) as fast as they can.
#[derive(Debug)]
pub struct RawSockets {
    streams: Vec<TcpStream>,
    chunk: usize,
}

impl RawSockets {
    /// Connects `streams` sockets whose far ends take in whatever comes and answer each `total` bytes
    /// with one byte.
    pub fn connect(streams: usize, chunk: usize, total: u64, pace: Pace) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let mut near = Vec::with_capacity(streams);
        for _ in 0..streams {
            let stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            let (far, _) = listener.accept()?;
            far.set_nodelay(true)?;
            pace.apply(&stream)?;
            pace.apply(&far)?;
            std::thread::Builder::new()
                .name("raw-sink".to_owned())
                .spawn(move || sink(far, chunk, total))?;
            near.push(stream);
        }
        Ok(Self {
            streams: near,
            chunk,
        })
    }

    /// Sends `total` bytes on every stream at once, from all over `data`, waits for all answers, and
    /// returns the time.
    pub fn send(&mut self, data: &[u8], total: u64) -> io::Result<Duration> {
        let chunk = self.chunk;
        let share = data.len() / self.streams.len().max(1);
        let start = Instant::now();
        std::thread::scope(|scope| -> io::Result<()> {
            let workers: Vec<_> = self
                .streams
                .iter_mut()
                .zip(data.chunks(share.max(chunk)))
                .map(|(stream, data)| {
                    scope.spawn(move || -> io::Result<()> {
                        let mut left = total;
                        // As in a transfer, the bytes come from memory and not from a cache.
                        for piece in data.chunks_exact(chunk).cycle() {
                            let step = usize::try_from(left).map_or(chunk, |left| left.min(chunk));
                            stream.write_all(&piece[..step])?;
                            left -= step as u64;
                            if left == 0 {
                                break;
                            }
                        }
                        stream.read_exact(&mut [0])
                    })
                })
                .collect();
            for worker in workers {
                worker
                    .join()
                    .map_err(|_| io::Error::other("a sender panicked"))??;
            }
            Ok(())
        })?;
        Ok(start.elapsed())
    }

    /// Sends pieces one by one on the first stream, each when the one before was answered. A piece is as
    /// long as what is answered, the `total` of [`connect`](Self::connect).
    pub fn round_trips(&mut self, data: &[u8], places: &[Scatter], len: usize) -> io::Result<()> {
        let stream = &mut self.streams[0];
        for place in places {
            stream.write_all(&data[place.from..place.from + len])?;
            stream.read_exact(&mut [0])?;
        }
        Ok(())
    }
}

/// Reads for ever, into all of a large memory as a transfer would; each `total` bytes are answered
/// with one. Ends with the connection.
fn sink(mut stream: TcpStream, chunk: usize, total: u64) {
    // Written once, so that its pages are there.
    let mut memory = vec![1; SINK_BYTES];
    let mut left = total;
    let mut at = 0;
    loop {
        let room = usize::try_from(left)
            .map_or(chunk, |left| left.min(chunk))
            .max(1);
        if at + room > memory.len() {
            at = 0;
        }
        match stream.read(&mut memory[at..at + room]) {
            Ok(0) | Err(_) => return,
            Ok(read) => {
                left -= read as u64;
                at += read;
            }
        }
        if left == 0 {
            left = total;
            if stream.write_all(&[1]).is_err() {
                return;
            }
        }
    }
}
