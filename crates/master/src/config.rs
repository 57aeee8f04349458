//! What an operator can set about a master, and what is accepted.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use layercake_protocol::auth::SharedToken;
use layercake_protocol::ids::{Epoch, Generation, Term};

use crate::error::Error;
use crate::state::StateConfig;

/// Settings of a [`Master`](crate::Master). [`validate`](Self::validate) says what is accepted.
#[derive(Clone, Debug)]
pub struct MasterConfig {
    /// Where to listen, and nowhere else on a network. Off loopback it needs `token` or `insecure`.
    pub listen: SocketAddr,
    /// The secret that members must know, and that the master proves to them.
    pub token: Option<SharedToken>,
    /// Let anybody in who can reach the listener.
    pub insecure: bool,
    /// This master's term; must be above that of every master before it. By default the seconds of the
    /// wall clock at the start, so that a restarted master is in a later one.
    pub term: Option<Term>,
    /// How often expiry, eviction and repeated commands are looked after: 1 ms to 1 s.
    pub tick: Duration,
    /// How often members are asked to report; by default a fifth of their time to live.
    pub heartbeat_every: Option<Duration>,
    /// Listen for members on this host on a unix socket as well, which is the shorter way for them. By default.
    pub local_lane: bool,
    /// How long a shutdown waits for answers under way and for clients to take them.
    pub shutdown_grace: Duration,
    /// Rules of the object table. `first_generation`, `first_epoch` and `seed` are raised to what the
    /// term stands for, see [`first_generation`].
    pub state: StateConfig,
    /// Bounds of what clients can make the master hold.
    pub limits: Limits,
}

/// Bounds of what clients can make the master hold besides objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections that said hello and have not proven the token yet. The oldest gives way.
    pub challenges: usize,
    /// Proven connections whose ticket is remembered. Those unused for long give way.
    pub tickets: usize,
    /// A ticket that is not shown for this long is forgotten: connect anew.
    pub ticket_unused: Duration,
    /// Large batches of one stream that are worked on at a time; further requests wait.
    pub batches_per_stream: usize,
    /// Calls of one stream that wait for something. One more is answered at once, as if its time were over.
    pub waits_per_stream: usize,
    /// Answers and commands of one stream that its client has not taken yet.
    pub queued_frames: usize,
    /// Commands to one member that it has not answered. The object table keeps those beyond, and
    /// repeats them when the member joins again.
    pub commands_per_member: usize,
    /// Answers that are kept for one client, to be repeated after a broken stream.
    pub replays_per_client: usize,
    /// Keys in the answers that are kept for one client; the latest answer is kept whatever its size.
    pub replayed_keys_per_client: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            challenges: 4096,
            tickets: 65_536,
            ticket_unused: Duration::from_hours(1),
            batches_per_stream: 4,
            waits_per_stream: 4096,
            queued_frames: 256,
            commands_per_member: 65_536,
            replays_per_client: 256,
            replayed_keys_per_client: 256 << 10,
        }
    }
}

impl Default for MasterConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 50051)),
            token: None,
            insecure: false,
            term: None,
            tick: Duration::from_millis(100),
            heartbeat_every: None,
            local_lane: true,
            shutdown_grace: Duration::from_secs(5),
            state: StateConfig::default(),
            limits: Limits::default(),
        }
    }
}

/// The first generation and epoch of a term: its number times 2^32.
///
/// A term by the wall clock lasts at least a second for each that the next one is greater by, and no
/// master makes 2^32 reservations a second: terms never run into each other. Where terms are
/// counted from 1 instead, each has room for four thousand million reservations. Tags found in
/// mounted segments raise the counter further.
pub fn first_generation(term: Term) -> Generation {
    Generation((term.0 << 32) + 1)
}

impl MasterConfig {
    /// The greatest term that leaves room for its generations.
    pub const MAX_TERM: u64 = (1 << 32) - 1;

    /// Checks every setting; the first that is not accepted is the error.
    pub fn validate(&self) -> Result<(), Error> {
        if !self.listen.ip().is_loopback() && self.token.is_none() && !self.insecure {
            return Err(Error::OpenListener {
                listen: self.listen,
            });
        }
        let refuse = |setting, value: String, accepted| {
            Err(Error::Setting {
                setting,
                value,
                accepted,
            })
        };
        if let Some(term) = self.term
            && !(1..=Self::MAX_TERM).contains(&term.0)
        {
            return refuse("term", term.to_string(), "1 to 4294967295");
        }
        if !(Duration::from_millis(1)..=Duration::from_secs(1)).contains(&self.tick) {
            return refuse("tick", format!("{:?}", self.tick), "1 ms to 1 s");
        }
        if let Some(every) = self.heartbeat_every
            && (every.is_zero() || every * 2 > self.state.client_ttl)
        {
            return refuse(
                "heartbeat_every",
                format!("{every:?}"),
                "over zero, and at most half of the time to live",
            );
        }
        if self.shutdown_grace > Duration::from_mins(1) {
            return refuse(
                "shutdown_grace",
                format!("{:?}", self.shutdown_grace),
                "at most 60 s",
            );
        }
        self.limits.validate()?;
        Ok(self.state.validate()?)
    }

    /// The term to start with.
    pub(crate) fn term_or_clock(&self) -> Term {
        self.term.unwrap_or_else(|| {
            let seconds = SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(1, |since| since.as_secs());
            Term(seconds.clamp(1, Self::MAX_TERM))
        })
    }

    /// The rules of the object table in this term.
    pub(crate) fn state_in(&self, term: Term) -> StateConfig {
        let first = first_generation(term);
        let mut state = self.state.clone();
        state.first_generation = state.first_generation.max(first);
        state.first_epoch = state.first_epoch.max(Epoch(first.0));
        state.seed ^= term.0;
        state
    }

    /// How often members report.
    pub(crate) fn heartbeat(&self) -> Duration {
        self.heartbeat_every.unwrap_or(self.state.client_ttl / 5)
    }
}

impl Limits {
    fn validate(&self) -> Result<(), Error> {
        for (setting, value) in [
            ("limits.challenges", self.challenges),
            ("limits.tickets", self.tickets),
            ("limits.batches_per_stream", self.batches_per_stream),
            ("limits.queued_frames", self.queued_frames),
            ("limits.commands_per_member", self.commands_per_member),
            ("limits.replays_per_client", self.replays_per_client),
        ] {
            if value == 0 {
                return Err(Error::Setting {
                    setting,
                    value: "0".into(),
                    accepted: "1 or more",
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn off_loopback() -> MasterConfig {
        MasterConfig {
            listen: "0.0.0.0:0".parse().expect("an address"),
            ..Default::default()
        }
    }

    #[test]
    fn a_listener_off_loopback_needs_a_token_or_insecure_and_says_so() {
        assert!(MasterConfig::default().validate().is_ok());
        let text = off_loopback().validate().unwrap_err().to_string();
        for word in ["0.0.0.0:0", "token", "insecure"] {
            assert!(text.contains(word), "{text}");
        }
        let insecure = MasterConfig {
            insecure: true,
            ..off_loopback()
        };
        assert!(insecure.validate().is_ok());
        let token = MasterConfig {
            token: Some(SharedToken::new("a token that is long enough").expect("it is")),
            ..off_loopback()
        };
        assert!(token.validate().is_ok());
    }

    #[test]
    fn settings_out_of_bounds_are_refused_by_name() {
        type Change = fn(&mut MasterConfig);
        let cases: [(&str, Change); 6] = [
            ("term", |c| c.term = Some(Term(0))),
            ("term", |c| c.term = Some(Term(1 << 32))),
            ("tick", |c| c.tick = Duration::ZERO),
            ("heartbeat_every", |c| {
                c.heartbeat_every = Some(c.state.client_ttl);
            }),
            ("shutdown_grace", |c| c.shutdown_grace = Duration::MAX),
            ("limits.tickets", |c| c.limits.tickets = 0),
        ];
        for (setting, change) in cases {
            let mut config = MasterConfig::default();
            change(&mut config);
            let text = config.validate().unwrap_err().to_string();
            assert!(text.contains(setting), "{setting}: {text}");
        }
        let mut config = MasterConfig::default();
        config.state.shards = 3;
        assert!(
            config
                .validate()
                .unwrap_err()
                .to_string()
                .contains("shards")
        );
    }

    #[test]
    fn later_terms_start_above_everything_of_earlier_ones() {
        let config = MasterConfig::default();
        let (one, two) = (config.state_in(Term(7)), config.state_in(Term(8)));
        assert!(two.first_generation.0 - one.first_generation.0 == 1 << 32);
        assert!(two.first_epoch > one.first_epoch);
        assert!(
            config
                .state_in(Term(MasterConfig::MAX_TERM))
                .validate()
                .is_ok()
        );
        assert!(config.term_or_clock().0 > 1_700_000_000);
    }
}
