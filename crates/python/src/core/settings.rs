//! What a member is started with.
//!
//! `LAYERCAKE_MASTER`, `LAYERCAKE_TOKEN` and `LAYERCAKE_TRANSPORTS` stand in for what the caller did not say; a
//! variable that is empty is as good as none. They are read here for all members; variables of the logs, of the
//! drop-in's `setup` and of its commands are read where they are used.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use layercake_protocol::auth::SharedToken;
use layercake_protocol::endpoint::Endpoint;
use layercake_protocol::key::Tenant;
use layercake_store::StoreError;
use layercake_store::link::{LinkConfig, Timeouts};
use layercake_transport::{EngineConfig, TransportSet};

/// Where `layercake master` listens unless it is told otherwise.
const DEFAULT_MASTER: &str = "127.0.0.1:50061";

/// Who may connect.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trust {
    pub(crate) token: Option<SharedToken>,
    pub(crate) insecure: bool,
}

impl Trust {
    /// The given token, else the environment's. Saying `insecure` beside a token that was given is a
    /// contradiction; beside that of the environment it is an answer to the same question.
    pub(crate) fn new(token: Option<&str>, insecure: bool) -> Result<Self, StoreError> {
        let variable = std::env::var("LAYERCAKE_TOKEN")
            .ok()
            .filter(|text| !text.is_empty());
        let text = match token {
            Some(_) if insecure => {
                return Err(StoreError::InvalidConfig {
                    setting: "insecure",
                    detail: "it contradicts the token: use one of them".to_owned(),
                });
            }
            Some(text) => Some(text.to_owned()),
            None if insecure => None,
            None => variable,
        };
        let token = text.map(|text| {
            SharedToken::new(&text).map_err(|error| StoreError::InvalidConfig {
                setting: "token",
                detail: error.to_string(),
            })
        });
        Ok(Self {
            token: token.transpose()?,
            insecure,
        })
    }
}

/// How a transfer engine is started.
#[derive(Clone, Debug)]
pub(crate) struct EngineSettings {
    pub(crate) listen: SocketAddr,
    pub(crate) advertise: Option<SocketAddr>,
    /// `None`: the environment's, else all.
    pub(crate) transports: Option<TransportSet>,
    pub(crate) trust: Trust,
}

impl EngineSettings {
    /// An engine on loopback.
    pub(crate) fn local(trust: Trust) -> Self {
        Self {
            listen: EngineConfig::default().listen,
            advertise: None,
            transports: None,
            trust,
        }
    }

    /// With the transports that the caller named, else those of the environment.
    pub(crate) fn with_transports(mut self, named: Option<&str>) -> Result<Self, StoreError> {
        let variable = std::env::var("LAYERCAKE_TRANSPORTS")
            .ok()
            .filter(|text| !text.is_empty());
        let text = named.map(str::to_owned).or(variable);
        self.transports = text.map(|text| text.parse()).transpose()?;
        Ok(self)
    }

    /// Listening on `host` or `host:port`, by default on loopback, and telling others `advertise` if that is
    /// given.
    pub(crate) fn listening_on(
        mut self,
        listen: Option<&str>,
        advertise: Option<&str>,
    ) -> Result<Self, StoreError> {
        if let Some(listen) = listen {
            self.listen = address("listen", listen)?;
        }
        self.advertise = advertise
            .map(|text| address("advertise", text))
            .transpose()?;
        Ok(self)
    }

    /// These, for a member that shares the engine; settings that were given besides are contradictions.
    pub(crate) fn sharing(&self, given: &[(&'static str, bool)]) -> Result<Self, StoreError> {
        match given.iter().find(|(_, given)| *given) {
            Some((setting, _)) => Err(StoreError::InvalidConfig {
                setting,
                detail: "the engine that is shared decides on it: set it there".to_owned(),
            }),
            None => Ok(self.clone()),
        }
    }

    pub(super) fn config(&self) -> EngineConfig {
        let default = EngineConfig::default();
        EngineConfig {
            listen: self.listen,
            advertise: self.advertise,
            transports: self.transports.unwrap_or(default.transports),
            token: self.trust.token.clone(),
            insecure: self.trust.insecure,
            ..default
        }
    }
}

/// What `preferred_segments` and people call a member.
#[derive(Clone, Debug)]
pub(crate) enum MemberName {
    Given(String),
    /// This host, and the port of the member's engine.
    AtPort(String),
}

impl MemberName {
    /// The name of a member whose engine listens at `address`, `host:port`.
    fn of(&self, address: &str) -> String {
        match self {
            Self::Given(name) => name.clone(),
            Self::AtPort(host) => {
                let port = address.rsplit(':').next().unwrap_or_default();
                format!("{host}:{port}")
            }
        }
    }
}

/// How a member of a cluster is started.
#[derive(Clone, Debug)]
pub(crate) struct StoreSettings {
    /// `host:port` of the master.
    pub(crate) master: String,
    pub(crate) name: MemberName,
    pub(crate) tenant: Tenant,
    /// Bytes to lend; 0: none.
    pub(crate) capacity: u64,
    pub(crate) huge_pages: bool,
    pub(crate) checksums: bool,
    pub(crate) timeouts: Timeouts,
    /// How long starting may take, the touching of the lent memory included.
    pub(crate) ready_within: Duration,
    pub(crate) engine: EngineSettings,
}

impl StoreSettings {
    /// A client of this master that lends nothing, all else by default.
    pub(crate) fn client(master: String, engine: EngineSettings) -> Self {
        Self {
            master,
            name: MemberName::Given(default_name()),
            tenant: Tenant::default(),
            capacity: 0,
            huge_pages: false,
            checksums: true,
            timeouts: Timeouts::default(),
            ready_within: Duration::from_mins(1),
            engine,
        }
    }

    /// The master that the caller named, else the environment's, else where one listens by default.
    pub(crate) fn master_or_default(named: Option<String>) -> String {
        let variable = || {
            std::env::var("LAYERCAKE_MASTER")
                .ok()
                .filter(|text| !text.is_empty())
        };
        named
            .or_else(variable)
            .unwrap_or_else(|| DEFAULT_MASTER.to_owned())
    }

    /// The link of a member with this engine.
    pub(super) fn link(&self, endpoint: &Endpoint) -> LinkConfig {
        LinkConfig {
            endpoint: Some(endpoint.clone()),
            tenant: self.tenant.clone(),
            token: self.engine.trust.token.clone(),
            insecure: self.engine.trust.insecure,
            timeouts: self.timeouts,
            ..LinkConfig::new(self.master.clone(), self.name.of(&endpoint.tcp))
        }
    }
}

/// A socket address from `host` or `host:port`; a name is looked up.
fn address(setting: &'static str, text: &str) -> Result<SocketAddr, StoreError> {
    let refused = |why: String| StoreError::InvalidConfig {
        setting,
        detail: format!("{text:?} {why}, host or host:port is needed"),
    };
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok(address);
    }
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, 0));
    }
    let with_port = if text.contains(':') {
        text.to_owned()
    } else {
        format!("{text}:0")
    };
    let found = with_port.to_socket_addrs();
    let mut found = found.map_err(|error| refused(format!("is no address ({error})")))?;
    found
        .next()
        .ok_or_else(|| refused("has no address".to_owned()))
}

/// A name that no other member of this host has.
fn default_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy();
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{host}-{}-{number}", std::process::id())
}
