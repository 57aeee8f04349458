//! What a link is made with.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::auth::SharedToken;
use layercake_protocol::endpoint::Endpoint;
use layercake_protocol::key::Tenant;

use crate::error::StoreError;

/// How a member reaches its master. Plain data; [`super::MasterLink::connect`] checks it.
#[derive(Clone, Debug)]
pub struct LinkConfig {
    /// `host:port` of the master.
    pub master: String,
    /// The member's name: a node's, which `preferred_segments` refers to, or a client's for people.
    pub name: String,
    /// Namespace of the keys, unless [`super::MasterLink::with_tenant`] says otherwise.
    pub tenant: Tenant,
    /// The transfer engine of this process, by which the master tells who is near to whom. `None` for
    /// tools that move no bytes.
    pub endpoint: Option<Endpoint>,
    /// The secret that all members share.
    pub token: Option<SharedToken>,
    /// Allows a master off loopback without a token.
    pub insecure: bool,
    /// How long to wait for what.
    pub timeouts: Timeouts,
    /// Pauses between attempts to reach a lost master.
    pub backoff: Backoff,
    /// Uses a framed lane where the master has one: a call costs a fraction of what it costs over gRPC. Default
    /// yes.
    pub lane: bool,
    /// Uses a lane over a unix socket to a master on this host that offers one, if `lane` allows it. Default yes.
    pub local_lane: bool,
}

/// How long a link waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// One attempt to connect, proof of the token included. Default 3 s.
    pub connect: Duration,
    /// One message to the master. A long batch is several messages. Default 5 s.
    pub call: Duration,
    /// A quiet connection is pinged this often. Default 1 s.
    pub ping_every: Duration,
    /// A ping without an answer for this long means that the connection is dead. Default 2 s.
    pub ping: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(3),
            call: Duration::from_secs(5),
            ping_every: Duration::from_secs(1),
            ping: Duration::from_secs(2),
        }
    }
}

/// Pauses between attempts: they double from `first` to `most`, shortened at random by up to half so
/// that the members of a cluster don't come back all at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// After the first failure. Default 50 ms.
    pub first: Duration,
    /// The longest. Default 1 s.
    pub most: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self {
            first: Duration::from_millis(50),
            most: Duration::from_secs(1),
        }
    }
}

impl LinkConfig {
    /// A link to `master` for the member called `name`, all else by default.
    pub fn new(master: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            master: master.into(),
            name: name.into(),
            tenant: Tenant::default(),
            endpoint: None,
            token: None,
            insecure: false,
            timeouts: Timeouts::default(),
            backoff: Backoff::default(),
            lane: true,
            local_lane: true,
        }
    }

    pub(super) fn validate(&self) -> Result<(), StoreError> {
        let host = split_host(&self.master)?;
        if self.name.is_empty() {
            return Err(StoreError::InvalidConfig {
                setting: "name",
                detail: "it is empty, a name is needed".to_owned(),
            });
        }
        let Timeouts {
            connect,
            call,
            ping_every,
            ping,
        } = self.timeouts;
        for (setting, value) in [
            ("timeouts.connect", connect),
            ("timeouts.call", call),
            ("timeouts.ping_every", ping_every),
            ("timeouts.ping", ping),
            ("backoff.first", self.backoff.first),
        ] {
            if value.is_zero() {
                return Err(StoreError::InvalidConfig {
                    setting,
                    detail: "0, a positive duration is needed".to_owned(),
                });
            }
        }
        if self.backoff.most < self.backoff.first {
            return Err(StoreError::InvalidConfig {
                setting: "backoff.most",
                detail: format!(
                    "{:?} is less than backoff.first, {:?}",
                    self.backoff.most, self.backoff.first
                ),
            });
        }
        if self.token.is_none() && !self.insecure && !is_loopback(host) {
            return Err(StoreError::OpenConnection {
                master: Arc::from(self.master.as_str()),
            });
        }
        Ok(())
    }
}

/// The host of a `host:port`; an IPv6 address stands in brackets.
fn split_host(address: &str) -> Result<&str, StoreError> {
    let refused = |detail: &str| StoreError::InvalidConfig {
        setting: "master",
        detail: format!("\"{address}\" {detail}, host:port is needed"),
    };
    let (host, port) = address
        .rsplit_once(':')
        .ok_or_else(|| refused("has no port"))?;
    if !port.parse::<u16>().is_ok_and(|port| port != 0) {
        return Err(refused("has no usable port"));
    }
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    match bare {
        Some(v6) if v6.parse::<std::net::Ipv6Addr>().is_ok() => Ok(v6),
        Some(_) => Err(refused("has no IPv6 address in its brackets")),
        None if host.is_empty() => Err(refused("has no host")),
        None if host.contains([':', '/', '@', ' ']) => Err(refused("has no plain host")),
        None => Ok(host),
    }
}

/// Whether a host is this machine for sure. A name other than `localhost` may lead anywhere.
fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(config: &LinkConfig) -> String {
        config.validate().expect_err("must be refused").to_string()
    }

    #[test]
    fn an_address_needs_host_and_port() {
        for good in ["127.0.0.1:50051", "localhost:1", "[::1]:50051"] {
            assert!(LinkConfig::new(good, "n").validate().is_ok(), "{good}");
        }
        for bad in [
            "localhost",
            ":5",
            "localhost:0",
            "localhost:70000",
            "::1:5",
            "[x]:5",
            "http://localhost:5",
        ] {
            let text = refused(&LinkConfig::new(bad, "n"));
            assert!(text.contains(bad) && text.contains("host:port"), "{text}");
        }
    }

    #[test]
    fn a_master_off_loopback_needs_a_token_or_insecure() {
        for address in ["10.1.2.3:50051", "store.example:50051"] {
            let mut config = LinkConfig::new(address, "n");
            let text = refused(&config);
            assert!(
                text.contains("token") && text.contains("insecure"),
                "{text}"
            );
            config.insecure = true;
            assert!(config.validate().is_ok());
            config.insecure = false;
            config.token = SharedToken::new("a secret of some length").ok();
            assert!(config.validate().is_ok());
        }
    }

    #[test]
    fn settings_that_cannot_work_are_refused_by_name() {
        let mut config = LinkConfig::new("localhost:1", "");
        assert!(refused(&config).contains("name"));
        config.name = "n".to_owned();
        config.timeouts.call = Duration::ZERO;
        assert!(refused(&config).contains("timeouts.call"));
        config.timeouts.call = Duration::from_secs(1);
        config.backoff.most = Duration::from_millis(1);
        assert!(refused(&config).contains("backoff.most"));
    }
}
