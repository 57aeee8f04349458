//! How the drop-in's members start: what Mooncake's arguments and the environment say, in our terms.
//!
//! Mooncake knows no token and listens wherever it is told to, and programs written for it must start
//! unchanged. So the shared token comes from `LAYERCAKE_TOKEN`, and without one the drop-in is open, which it
//! says once if it listens off loopback.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs as _};
use std::sync::Once;

use thiserror::Error;

use crate::core::{EngineSettings, Trust};

/// The metadata server that stands for none: peers find each other by address.
pub(crate) const HANDSHAKE: &str = "P2PHANDSHAKE";

/// The variable that says where to listen, if peers are told another address.
const LISTEN: &str = "LAYERCAKE_LISTEN";

/// Why a member can't be started like that.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum Unsupported {
    #[error(
        "protocol {protocol:?} is not known: \"tcp\" is accepted, and uses shared memory between processes of one host"
    )]
    Protocol { protocol: String },
    #[error(
        "protocol \"rdma\" is not built in: use \"tcp\", or set MC_FORCE_TCP=1 to have \"rdma\" mean that"
    )]
    Rdma,
    #[error(
        "metadata server {address:?} is not supported: \"P2PHANDSHAKE\" or an http:// address is accepted"
    )]
    Metadata { address: String },
    #[error("{host:?} is no address of this host, nor one it is known by: {detail}")]
    Host { host: String, detail: String },
    #[error(
        "{host:?} stands for {ip}, which is no address of this host: nothing else is listened on. Give one that is; behind a \
         translated address, {LISTEN} says which to listen on"
    )]
    Address { host: String, ip: IpAddr },
    #[error("{0}")]
    Setting(String),
}

/// What a member was told to move bytes with.
pub(crate) fn check_protocol(protocol: &str) -> Result<(), Unsupported> {
    match protocol.to_ascii_lowercase().as_str() {
        "tcp" | "" => Ok(()),
        "rdma" if falls_back() => {
            static SAID: Once = Once::new();
            SAID.call_once(|| {
                tracing::warn!("protocol \"rdma\" is taken for \"tcp\", as MC_FORCE_TCP asks");
            });
            Ok(())
        }
        "rdma" => Err(Unsupported::Rdma),
        _ => Err(Unsupported::Protocol {
            protocol: protocol.to_owned(),
        }),
    }
}

/// Whether falling back to TCP was asked for, by the variable that Mooncake has for it.
fn falls_back() -> bool {
    std::env::var("MC_FORCE_TCP").is_ok_and(|text| {
        !matches!(
            text.to_ascii_lowercase().as_str(),
            "" | "0" | "false" | "off"
        )
    })
}

/// Where members are looked up.
pub(crate) fn check_metadata(address: &str) -> Result<(), Unsupported> {
    if address == HANDSHAKE || address.starts_with("http://") || address.starts_with("https://") {
        Ok(())
    } else {
        Err(Unsupported::Metadata {
            address: address.to_owned(),
        })
    }
}

/// The settings of a member that is known as `host`, or `host:port`, where the port does not matter: it is
/// chosen anew. An address that is not this host's own is refused, unless `LAYERCAKE_LISTEN` says where to listen
/// instead, as in a container behind a translated address: then peers are told the former.
pub(crate) fn settings(host: &str) -> Result<EngineSettings, Unsupported> {
    let ip = resolve(host)?;
    let listen = listen_elsewhere()?;
    let mut trust =
        Trust::new(None, false).map_err(|error| Unsupported::Setting(error.to_string()))?;
    if trust.token.is_none() {
        trust.insecure = true;
        let listens = listen.unwrap_or(ip);
        if !listens.is_loopback() {
            warn_of_openness(listens);
        }
    }
    let mut settings = EngineSettings::local(trust)
        .with_transports(None)
        .map_err(|error| Unsupported::Setting(error.to_string()))?;
    settings.listen = SocketAddr::new(listen.unwrap_or(ip), 0);
    if listen.is_some() {
        settings.advertise = Some(SocketAddr::new(ip, 0));
    }
    // Its own listeners are bound later, to ports of their own.
    match TcpListener::bind(settings.listen) {
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => Err(Unsupported::Address {
            host: host.to_owned(),
            ip: settings.listen.ip(),
        }),
        _ => Ok(settings),
    }
}

/// The address to listen on, where it is another than peers are told.
fn listen_elsewhere() -> Result<Option<IpAddr>, Unsupported> {
    match std::env::var(LISTEN) {
        Ok(text) if !text.is_empty() => text.parse().map(Some).map_err(|_| {
            Unsupported::Setting(format!(
                "{LISTEN} is {text:?}: an address of this host is needed, without a port"
            ))
        }),
        _ => Ok(None),
    }
}

fn warn_of_openness(ip: IpAddr) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        tracing::warn!(
            "listening on {ip} without a shared token: everyone on that network is let in. Set LAYERCAKE_TOKEN to \
             the same secret everywhere to keep others out"
        );
    });
}

/// The address of `host` or `host:port`.
fn resolve(host: &str) -> Result<IpAddr, Unsupported> {
    let bare = without_port(host);
    if bare.is_empty() || bare.eq_ignore_ascii_case("localhost") {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Ok(ip);
    }
    let refused = |detail: String| Unsupported::Host {
        host: host.to_owned(),
        detail,
    };
    let found = (bare, 0).to_socket_addrs();
    let found = found.map_err(|error| refused(error.to_string()))?;
    let found: Vec<IpAddr> = found.map(|address| address.ip()).collect();
    let means_this_host = is_local_name(bare);
    let ip = preferred(&found, means_this_host)
        .ok_or_else(|| refused("it has no address".to_owned()))?;
    if ip.is_loopback() && !means_this_host {
        tracing::warn!(
            "{bare:?} has no address here but {ip}, which other hosts can't reach: give an address, or have the \
             name stand for one"
        );
    }
    Ok(ip)
}

/// Whether a name says that it stands for loopback.
fn is_local_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.split('.').any(|part| {
        matches!(
            part,
            "localhost" | "localhost4" | "localhost6" | "ip6-localhost" | "ip6-loopback"
        )
    })
}

/// The address of several that others reach best: hosts' own names often stand for a loopback address too. The
/// first of equals.
fn preferred(found: &[IpAddr], loopback: bool) -> Option<IpAddr> {
    let rank = |ip: &&IpAddr| match ip {
        _ if loopback => 0,
        _ if ip.is_loopback() => 2,
        // It needs an interface beside it, which is not told to others.
        IpAddr::V6(v6) if v6.is_unicast_link_local() => 1,
        _ => 0,
    };
    found.iter().min_by_key(rank).copied()
}

/// `host:port` for a `host` that may have another port already.
pub(crate) fn at_port(host: &str, port: u16) -> String {
    match without_port(host) {
        "" => format!("127.0.0.1:{port}"),
        v6 if v6.contains(':') => format!("[{v6}]:{port}"),
        bare => format!("{bare}:{port}"),
    }
}

/// `host`, `host:port`, `[v6]:port` or a bare v6 address, without brackets and port.
fn without_port(host: &str) -> &str {
    if let Some((inside, _)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return inside;
    }
    match host.rsplit_once(':') {
        Some((before, port))
            if !before.contains(':') && port.bytes().all(|b| b.is_ascii_digit()) =>
        {
            before
        }
        _ => host,
    }
}
