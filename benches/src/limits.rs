//! The machine's own limits: plain copies of scattered pieces, and raw loopback sockets.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
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

/// A plain copy of pieces, cut for some threads: each has a stretch of the destination to itself, and copies
/// what goes there in the order in which it was given.
#[derive(Debug)]
pub struct PlainCopy {
    len: usize,
    stretch: usize,
    shares: Vec<Vec<Scatter>>,
}

impl PlainCopy {
    /// Cuts places of pieces of `len` bytes, which fill their destination, for as many threads.
    pub fn new(places: &[Scatter], len: usize, threads: usize) -> Self {
        let stretch = places.len().div_ceil(threads.max(1)).max(1) * len;
        let mut shares = vec![Vec::new(); (places.len() * len).div_ceil(stretch)];
        for place in places {
            shares[place.to / stretch].push(Scatter {
                from: place.from,
                to: place.to % stretch,
            });
        }
        Self {
            len,
            stretch,
            shares,
        }
    }

    /// Copies everything once and returns how long that took, without what it takes to have the threads.
    pub fn run(&self, source: &[u8], destination: &mut [u8]) -> Duration {
        let stretches = destination.chunks_mut(self.stretch);
        let works = self.shares.iter().zip(stretches);
        let works = works.map(|(places, to)| move || self.copy(places, source, to));
        at_once(works.collect()).0
    }

    /// The same by `threads` that sleep until they are wanted, like those of any program that does not copy all the time.
    /// Who wants them takes part, and all take the next share. They are asleep when `before` runs, and the clock starts
    /// behind it.
    #[expect(
        clippy::disallowed_methods,
        reason = "nothing tells that a thread has fallen asleep"
    )]
    pub fn run_woken(
        &self,
        threads: usize,
        source: &[u8],
        destination: &mut [u8],
        before: impl FnOnce(),
    ) -> Duration {
        // None before the copy begins.
        let (shares, wanted) = (Mutex::new(None::<Vec<_>>), Condvar::new());
        let copy_all = || {
            let mut end = None;
            loop {
                let share = lock(&shares).as_mut().and_then(Vec::pop);
                let Some((places, to)) = share else {
                    return end;
                };
                self.copy(places, source, to);
                end = Some(Instant::now());
            }
        };
        std::thread::scope(|scope| {
            let sleep = || {
                let waiting = lock(&shares);
                drop(wanted.wait_while(waiting, |shares| shares.is_none()));
                copy_all()
            };
            let sleepers: Vec<_> = (1..threads).map(|_| scope.spawn(sleep)).collect();
            // More than they need to fall asleep.
            std::thread::sleep(Duration::from_millis(2));
            before();
            let stretches = destination.chunks_mut(self.stretch);
            let all = self.shares.iter().map(Vec::as_slice).zip(stretches);
            let all: Vec<_> = all.collect();
            let start = Instant::now();
            *lock(&shares) = Some(all);
            wanted.notify_all();
            let mine = copy_all();
            let ends = sleepers
                .into_iter()
                .map(|sleeper| sleeper.join().unwrap_or_else(|panic| resume_unwind(panic)));
            // A thread that came too late for a share held nobody up.
            ends.chain([mine]).flatten().max().unwrap_or(start) - start
        })
    }

    fn copy(&self, places: &[Scatter], source: &[u8], to: &mut [u8]) {
        for place in places {
            to[place.to..place.to + self.len]
                .copy_from_slice(&source[place.from..place.from + self.len]);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does all of this at once, each on a thread of its own that is there and awake before the clock starts, and
/// returns the time until the last one was done.
pub fn at_once<R: Send>(works: Vec<impl FnOnce() -> R + Send>) -> (Duration, Vec<R>) {
    let (ready, go) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let mut works = works.into_iter();
        let mine = works.next();
        let others: Vec<_> = works
            .map(|work| {
                let (ready, go) = (&ready, &go);
                scope.spawn(move || {
                    ready.fetch_add(1, Ordering::Relaxed);
                    while !go.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                    (work(), Instant::now())
                })
            })
            .collect();
        while ready.load(Ordering::Relaxed) < others.len() {
            std::thread::yield_now();
        }
        let start = Instant::now();
        go.store(true, Ordering::Release);
        let mine = mine.map(|work| (work(), Instant::now()));
        let others = others
            .into_iter()
            .map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        let (results, ends): (Vec<_>, Vec<_>) = mine.into_iter().chain(others).unzip();
        let last = ends.into_iter().max().unwrap_or(start);
        (last - start, results)
    })
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
        let streams = self.streams.iter_mut();
        let works = streams
            .zip(data.chunks(share.max(chunk)))
            .map(|(stream, data)| {
                move || -> io::Result<()> {
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
                }
            });
        let (time, sent) = at_once(works.collect());
        sent.into_iter().collect::<io::Result<()>>()?;
        Ok(time)
    }

    /// Sends pieces one by one on the first stream, each when the one before was answered. A piece is as
    /// long as what is answered, the `total` of [`connect`](Self::connect). Returns the time.
    pub fn round_trips(
        &mut self,
        data: &[u8],
        places: &[Scatter],
        len: usize,
    ) -> io::Result<Duration> {
        let start = Instant::now();
        let stream = &mut self.streams[0];
        for place in places {
            stream.write_all(&data[place.from..place.from + len])?;
            stream.read_exact(&mut [0])?;
        }
        Ok(start.elapsed())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_copy_takes_every_piece_where_it_belongs_with_any_number_of_threads() {
        const LEN: usize = 64;
        for (count, threads) in [(1, 1), (1, 3), (7, 2), (10, 3), (16, 16), (5, 9)] {
            let places = scatter(count, LEN);
            let byte = |i: usize| (i * 7 + i / 251).to_le_bytes()[0];
            let source: Vec<u8> = (0..count * LEN).map(byte).collect();
            let mut target = vec![0; source.len()];
            let copy = PlainCopy::new(&places, LEN, threads);
            assert!(copy.shares.len() <= threads);
            copy.run(&source, &mut target);
            let mut woken = vec![0; source.len()];
            copy.run_woken(threads, &source, &mut woken, || ());
            for Scatter { from, to } in places {
                assert_eq!(target[to..to + LEN], source[from..from + LEN]);
                assert_eq!(woken[to..to + LEN], source[from..from + LEN]);
            }
        }
    }

    #[test]
    fn a_thread_copies_in_the_order_that_was_given() {
        let copy = PlainCopy::new(&scatter(9, 10), 10, 2);
        for share in copy.shares {
            assert!(share.is_sorted_by_key(|place| place.from));
        }
    }
}
