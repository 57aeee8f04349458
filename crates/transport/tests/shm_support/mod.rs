//! Scenes for the tests of shared memory: engines in this process and in children that can be stopped
//! and killed.
//!
//! A child is this test binary again, running the ignored test `child`, which does what [`ROLE`] says
//! and speaks over its standard streams: one line per message, marked so that the test runner's own
//! output is told apart.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use layercake_protocol::ids::{Capability, EngineId, Generation, RegionId};
use layercake_transport::{
    Batch, Direction, Endpoint, Engine, EngineConfig, HostId, LocalSlice, Memory, Outcome, Piece,
    RemoteSlice, TransportKind, TransportSet,
};

/// Longer than anything here takes, on a busy machine too.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// The variable that makes a run of the test binary a child, and says what it does.
pub(crate) const ROLE: &str = "LAYERCAKE_TEST_ROLE";

const MARK: &str = "@@ ";

/// An engine of these transports.
pub(crate) fn engine(transports: TransportSet) -> Engine {
    Engine::start(EngineConfig {
        transports,
        ..EngineConfig::default()
    })
    .expect("an engine starts")
}

pub(crate) fn shm_only() -> TransportSet {
    TransportSet::only(TransportKind::Shm)
}

pub(crate) fn shm_and_tcp() -> TransportSet {
    shm_only().with(TransportKind::Tcp)
}

/// Bytes that differ at every place and from seed to seed.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Polls a condition until it holds.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < until, "did not come about: {what}");
        std::thread::yield_now();
    }
}

/// A region of some engine, as a peer knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Remote {
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) region: RegionId,
    pub(crate) capability: Capability,
    pub(crate) len: u64,
}

impl Remote {
    pub(crate) fn of(engine: &Engine, memory: &Memory) -> Self {
        let region = memory.region();
        Self {
            endpoint: Arc::new(engine.endpoint().clone()),
            region: region.region,
            capability: region.capability,
            len: region.len,
        }
    }

    pub(crate) fn slice(&self, offset: u64, len: u64) -> RemoteSlice {
        RemoteSlice {
            region: self.region,
            capability: self.capability,
            offset,
            len,
            generation: None,
        }
    }

    /// One line that [`Remote::parse`] reads.
    pub(crate) fn to_line(&self) -> String {
        let endpoint = &self.endpoint;
        format!(
            "{:x} {} {:x} {} {} {:x} {:x} {}",
            endpoint.engine.0,
            if endpoint.tcp.is_empty() {
                "-"
            } else {
                &endpoint.tcp
            },
            u128::from_le_bytes(endpoint.host.0),
            endpoint.shm.as_deref().unwrap_or("-"),
            endpoint.pid,
            self.region.0,
            u128::from_le_bytes(self.capability.0),
            self.len,
        )
    }

    pub(crate) fn parse(line: &str) -> Self {
        let words: Vec<_> = line.split(' ').collect();
        let [engine, tcp, host, shm, pid, region, capability, len] = words[..] else {
            panic!("not a region: {line}");
        };
        let hex = |word: &str| u128::from_str_radix(word, 16).expect("hexadecimal");
        let text = |word: &str| (word != "-").then(|| word.to_owned());
        Self {
            endpoint: Arc::new(Endpoint {
                engine: EngineId(hex(engine)),
                tcp: text(tcp).unwrap_or_default(),
                host: HostId(hex(host).to_le_bytes()),
                shm: text(shm),
                pid: pid.parse().expect("a number"),
            }),
            region: RegionId(u64::from_str_radix(region, 16).expect("hexadecimal")),
            capability: Capability(hex(capability).to_le_bytes()),
            len: len.parse().expect("a number"),
        }
    }
}

/// Moves pieces and waits for all of them.
pub(crate) fn transfer(
    engine: &Engine,
    peer: &Remote,
    direction: Direction,
    pieces: Vec<(LocalSlice, RemoteSlice)>,
) -> Outcome {
    submit(engine, peer, direction, pieces)
        .wait_timeout(LIMIT)
        .expect("a transfer ends")
}

pub(crate) fn submit(
    engine: &Engine,
    peer: &Remote,
    direction: Direction,
    pieces: Vec<(LocalSlice, RemoteSlice)>,
) -> layercake_transport::Transfer {
    let pieces = pieces.into_iter();
    engine.submit(Batch {
        peer: Arc::clone(&peer.endpoint),
        direction,
        pieces: pieces
            .map(|(local, remote)| Piece { local, remote })
            .collect(),
        checksum: true,
        deadline: None,
    })
}

pub(crate) fn with_generation(mut slice: RemoteSlice, generation: u64) -> RemoteSlice {
    slice.generation = Some(Generation(generation));
    slice
}

/// A child process, killed when dropped.
pub(crate) struct Child {
    process: std::process::Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Child {
    pub(crate) fn spawn(role: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("the test binary"))
            .args([
                "child",
                "--exact",
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child starts");
        let stdin = process.stdin.take().expect("piped");
        let stdout = BufReader::new(process.stdout.take().expect("piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The runner prints the test's name before the first line.
                if let Some((_, line)) = line.split_once(MARK)
                    && sender.send(line.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        Self {
            process,
            stdin,
            lines,
        }
    }

    pub(crate) fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.process)
    }

    pub(crate) fn say(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").expect("the child listens");
        self.stdin.flush().expect("the child listens");
    }

    pub(crate) fn hear(&self) -> String {
        self.lines.recv_timeout(LIMIT).expect("the child answers")
    }

    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.say(line);
        self.hear()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(self.pid(), signal).expect("the child is there");
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("the child is there");
        self.process.wait().expect("the child ends");
    }

    /// Waits until the child, which was told to end, has done so.
    pub(crate) fn reap(&mut self) {
        self.process.wait().expect("the child ends");
    }

    /// Stops the child and waits until it stands still.
    pub(crate) fn stop(&self) {
        self.signal(rustix::process::Signal::STOP);
        let threads = format!("/proc/{}/task", self.process.id());
        eventually("the child is stopped", || {
            let mut threads = std::fs::read_dir(&threads).expect("the child is there");
            // One that ended meanwhile moves nothing either.
            threads.all(|thread| {
                let stat =
                    thread.and_then(|thread| std::fs::read_to_string(thread.path().join("stat")));
                stat.map_or(true, |stat| {
                    let state = stat.rsplit(')').next();
                    state.is_some_and(|rest| rest.trim().starts_with('T'))
                })
            })
        });
    }

    pub(crate) fn resume(&self) {
        self.signal(rustix::process::Signal::CONT);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It may be gone already; that is what some tests are about.
        let _gone = self.process.kill();
        let _reaped = self.process.wait();
    }
}

/// A child's side of the conversation.
pub(crate) fn tell(line: &str) {
    println!("\n{MARK}{line}");
}

pub(crate) fn listen() -> Option<String> {
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line);
    (read.expect("readable") > 0).then(|| line.trim_end().to_owned())
}
