//! What an engine is started with.
//!
//! Plain data with defaults that suit one machine: loopback, every transport that is built in, every
//! check on. [`crate::Engine::start`] validates it once and refuses what contradicts itself, by name.
//! Nothing here is read from the environment; programs above do that.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZero;
use std::str::FromStr;
use std::time::Duration;

use layercake_protocol::auth::SharedToken;

use crate::error::Error;

/// A way for bytes to travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum TransportKind {
    /// Both ends are in this engine: copied by its copy threads, a small batch by the thread that submits it.
    Local,
    /// Both ends are on this host: copied once between the processes' memory, by the same threads.
    Shm,
    /// Framed over TCP connections; reaches any host.
    Tcp,
    /// The deterministic transport of tests.
    Mock,
}

impl TransportKind {
    /// Every kind, in the order in which they are preferred.
    pub const ALL: [Self; 4] = [Self::Local, Self::Shm, Self::Tcp, Self::Mock];

    /// The name used in configuration, logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Mock => "mock",
        }
    }

    /// Whether a read takes a round trip to the peer, rather than a copy by this side.
    pub const fn reads_ask_the_peer(self) -> bool {
        match self {
            Self::Local | Self::Shm => false,
            Self::Tcp | Self::Mock => true,
        }
    }

    pub(crate) const fn index(self) -> usize {
        self as usize
    }

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which transports an engine may use.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TransportSet(u8);

impl TransportSet {
    /// No transport; an engine does not start with it.
    pub const EMPTY: Self = Self(0);

    /// What [`EngineConfig::default`] uses: local, shm and tcp.
    pub const STANDARD: Self = Self::EMPTY
        .with(TransportKind::Local)
        .with(TransportKind::Shm)
        .with(TransportKind::Tcp);

    /// The set of one transport.
    pub const fn only(kind: TransportKind) -> Self {
        Self(kind.bit())
    }

    /// This set and `kind`.
    #[must_use]
    pub const fn with(self, kind: TransportKind) -> Self {
        Self(self.0 | kind.bit())
    }

    /// Whether `kind` may be used.
    pub const fn contains(self, kind: TransportKind) -> bool {
        self.0 & kind.bit() != 0
    }

    /// Whether nothing may be used.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The members, in the order in which they are preferred.
    pub fn iter(self) -> impl Iterator<Item = TransportKind> {
        TransportKind::ALL
            .into_iter()
            .filter(move |kind| self.contains(*kind))
    }
}

impl Default for TransportSet {
    fn default() -> Self {
        Self::STANDARD
    }
}

impl fmt::Display for TransportSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, kind) in self.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            f.write_str(kind.name())?;
        }
        Ok(())
    }
}

impl fmt::Debug for TransportSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TransportSet({self})")
    }
}

impl FromStr for TransportSet {
    type Err = Error;

    /// Reads a list such as `shm,tcp`. Unknown names, transports that this build lacks and an empty
    /// list are refused by name.
    fn from_str(text: &str) -> Result<Self, Error> {
        let mut set = Self::EMPTY;
        for name in text.split(',').map(str::trim) {
            let kind = TransportKind::ALL
                .into_iter()
                .find(|kind| kind.name() == name)
                .ok_or_else(|| Error::UnknownTransport {
                    name: name.to_owned(),
                })?;
            set = set.with(kind);
        }
        set.check_built()?;
        Ok(set)
    }
}

impl TransportSet {
    pub(crate) fn check_built(self) -> Result<(), Error> {
        if self.contains(TransportKind::Mock) && !cfg!(feature = "mock") {
            return Err(Error::TransportNotBuilt {
                kind: TransportKind::Mock,
            });
        }
        Ok(())
    }
}

/// How long an engine waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// A peer that owes progress and shows none for this long is given up. Default 2 s.
    pub progress: Duration,
    /// A batch as a whole, unless it carries its own. Default 30 s.
    pub transfer: Duration,
    /// Connecting to a peer, greeting included. Default 3 s.
    pub connect: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            progress: Duration::from_secs(2),
            transfer: Duration::from_secs(30),
            connect: Duration::from_secs(3),
        }
    }
}

/// What an engine is started with.
#[derive(Clone, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent switches, set by name"
)]
pub struct EngineConfig {
    /// Where the TCP listener binds, and nowhere else. Default `127.0.0.1:0`.
    pub listen: SocketAddr,
    /// What peers are told to connect to, where that differs from the bound address; port 0 stands for the
    /// bound one.
    pub advertise: Option<SocketAddr>,
    /// The transports that may be used. Default local, shm and tcp.
    pub transports: TransportSet,
    /// TCP connections per peer. Default 2.
    pub lanes: NonZero<u8>,
    /// Threads that drive TCP connections. Default: 2, or fewer on a smaller machine.
    pub io_threads: NonZero<u8>,
    /// Threads that copy memory. Default: half of the cores, between 1 and 8.
    pub copy_threads: NonZero<u8>,
    /// Bytes in flight per TCP connection. Default 4 MiB, at least 64 KiB. Bytes go out in frames of up
    /// to 1 MiB: the window and up to one frame more may be in flight, and with a window of up to 1 MiB a
    /// connection waits for the peer after every such frame.
    pub window_bytes: u64,
    /// TCP connections that peers may have open to this engine at once; further ones are closed as soon
    /// as they are accepted, and counted. Default 16,384; the process's limit of descriptors may be lower.
    pub max_connections: NonZero<u32>,
    /// Those among them that have not greeted this engine yet; each is given up after
    /// [`Deadlines::connect`]. Default 1,024.
    pub max_greetings: NonZero<u32>,
    /// The secret that all members share; connections prove it to each other.
    pub token: Option<SharedToken>,
    /// Allows listening off loopback without a token.
    pub insecure: bool,
    /// How long to wait.
    pub deadlines: Deadlines,
    /// Whether batches that ask for checksums get them. Off only to measure their cost.
    pub checksums: bool,
    /// Whether generation tags are checked. Off only to measure their cost: fences keep nobody out
    /// then, and a segment host refuses such an engine.
    pub generation_checks: bool,
    /// Lets any process of this user attach to this one's memory where the kernel asks for consent.
    pub allow_ptrace_attach: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let threads = |n: usize| {
            NonZero::new(u8::try_from(n).unwrap_or(u8::MAX)).unwrap_or(NonZero::<u8>::MIN)
        };
        let places = |n| NonZero::new(n).unwrap_or(NonZero::<u32>::MIN);
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            advertise: None,
            transports: TransportSet::STANDARD,
            lanes: threads(2),
            io_threads: threads(cores.min(2)),
            copy_threads: threads((cores / 2).clamp(1, 8)),
            window_bytes: 4 << 20,
            max_connections: places(16 << 10),
            max_greetings: places(1 << 10),
            token: None,
            insecure: false,
            deadlines: Deadlines::default(),
            checksums: true,
            generation_checks: true,
            allow_ptrace_attach: false,
        }
    }
}

/// The smallest window: below it a connection would wait for the peer after every small piece.
pub(crate) const MIN_WINDOW_BYTES: u64 = 64 << 10;

impl EngineConfig {
    /// Refuses settings that contradict each other or can't work, naming them.
    pub(crate) fn validate(&self) -> Result<(), Error> {
        if self.transports.is_empty() {
            return Err(Error::NoTransport);
        }
        self.transports.check_built()?;
        if self.window_bytes < MIN_WINDOW_BYTES {
            return Err(Error::WindowTooSmall {
                bytes: self.window_bytes,
            });
        }
        for (setting, value) in [
            ("deadlines.progress", self.deadlines.progress),
            ("deadlines.transfer", self.deadlines.transfer),
            ("deadlines.connect", self.deadlines.connect),
        ] {
            if value.is_zero() {
                return Err(Error::ZeroDeadline { setting });
            }
        }
        let tcp = self.transports.contains(TransportKind::Tcp);
        if tcp && !self.listen.ip().is_loopback() && self.token.is_none() && !self.insecure {
            return Err(Error::OpenListener {
                listen: self.listen,
            });
        }
        if tcp && self.listen.ip().is_unspecified() && self.advertise.is_none() {
            return Err(Error::NothingToAdvertise {
                listen: self.listen,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transports_are_read_by_name_and_others_refused_by_name() {
        let set: TransportSet = "shm, tcp".parse().expect("both are known");
        assert!(set.contains(TransportKind::Shm) && !set.contains(TransportKind::Local));
        assert_eq!(set.to_string(), "shm,tcp");
        for (text, name) in [("rdma", "rdma"), ("tcp,", "\"\""), ("TCP", "TCP")] {
            let error = text.parse::<TransportSet>().expect_err(text);
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    // contract: transport-12
    #[test]
    fn an_open_listener_needs_a_token_or_insecure() {
        let mut config = EngineConfig {
            listen: SocketAddr::from(([0, 0, 0, 0], 0)),
            advertise: Some(SocketAddr::from(([192, 0, 2, 1], 7000))),
            ..EngineConfig::default()
        };
        let error = config
            .validate()
            .expect_err("open and unprotected")
            .to_string();
        assert!(
            error.contains("token") && error.contains("insecure"),
            "{error}"
        );
        config.insecure = true;
        assert!(config.validate().is_ok());
        config.insecure = false;
        config.token = SharedToken::new("a secret of some length").ok();
        assert!(config.validate().is_ok());
        config.advertise = None;
        let error = config
            .validate()
            .expect_err("peers can't connect to 0.0.0.0");
        assert!(error.to_string().contains("advertise"), "{error}");
    }

    #[test]
    fn settings_that_cannot_work_are_refused() {
        let refused = |change: fn(&mut EngineConfig)| {
            let mut config = EngineConfig::default();
            change(&mut config);
            config.validate().is_err()
        };
        assert!(refused(|c| c.transports = TransportSet::EMPTY));
        assert!(refused(|c| c.window_bytes = 1));
        assert!(refused(|c| c.deadlines.progress = Duration::ZERO));
    }
}
