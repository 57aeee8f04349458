//! The settings of every program: the one place where a setting is added.

use std::net::SocketAddr;
use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use layercake_transport::TransportSet;

use super::{ByteSize, MasterAddress, Ratio, Resolved, Setting, Settings, Value};

/// Declares a group of settings: a struct of values and the table they are read by.
macro_rules! settings {
    (
        $(#[doc = $about:literal])+
        $group:ident, section $section:literal {
            $(
                #[doc = $help:literal]
                $name:ident: $type:ty = $default:literal $(, env $env:literal)? $(, is $kind:ident)?;
            )+
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Debug)]
        pub(crate) struct $group {
            $(#[doc = $help] pub(crate) $name: $type,)+
        }

        impl Settings for $group {
            const TABLE: &'static [Setting] = &[
                $(Setting {
                    section: $section,
                    name: stringify!($name),
                    env: settings!(@env $($env)?),
                    default: $default,
                    help: $help.trim_ascii(),
                    switch: settings!(@switch $($kind)?),
                    secret: settings!(@secret $($kind)?),
                    check: |text| <$type as Value>::read(text).map(|value| value.show()),
                },)+
            ];

            fn take(resolved: &Resolved) -> Result<Self> {
                Ok(Self {
                    $($name: resolved.value($section, stringify!($name))?,)+
                })
            }
        }
    };
    (@env) => { None };
    (@env $env:literal) => { Some($env) };
    (@switch switch) => { true };
    (@switch $($other:ident)?) => { false };
    (@secret secret) => { true };
    (@secret $($other:ident)?) => { false };
}

settings! {
    /// What every program has.
    Common, section "" {
        /// Shared token of the cluster
        token: Option<String> = "none", is secret;
        /// File that holds the shared token of the cluster
        token_file: Option<PathBuf> = "none";
        /// Work without a token off loopback
        insecure: bool = "false", is switch;
        /// What is logged to standard error: a level, or a list like warn,tonic=debug
        log: String = "warn";
    }
}

settings! {
    /// How a process moves bytes: nodes and clients.
    TransportSettings, section "transport" {
        /// Transports that may be used, of local, shm and tcp
        transports: TransportSet = "local,shm,tcp", env "LAYERCAKE_TRANSPORTS";
        /// TCP connections to each peer
        lanes: NonZero<u8> = "2";
        /// Bytes in flight on each TCP connection, and up to a frame of 1 MiB more; up to 1 MiB it waits for the peer after every such frame
        window: ByteSize = "4MiB";
        /// Threads that copy memory; none: by the number of cores
        copy_threads: Option<NonZero<u8>> = "none";
        /// Threads that drive TCP connections; none: by the number of cores
        io_threads: Option<NonZero<u8>> = "none";
        /// A peer that owes progress and shows none for this long is given up
        progress_deadline: Duration = "2s";
        /// Longest time for a batch of transfers
        transfer_deadline: Duration = "30s";
        /// Longest time for connecting to a peer
        connect_deadline: Duration = "3s";
    }
}

settings! {
    /// `layercake master`.
    MasterSettings, section "master" {
        /// Address that nodes and clients connect to
        listen: SocketAddr = "127.0.0.1:50061";
        /// Address of /metrics and /health over HTTP, open to whoever can reach it; none: not served
        http: Option<SocketAddr> = "none";
        /// Time for which a reader may rely on an object
        lease: Duration = "10s";
        /// Used share of the memory above which objects are evicted
        high_watermark: Ratio = "0.9";
        /// Share of the memory that one round of eviction frees
        eviction_ratio: Ratio = "0.05";
        /// A member without a heartbeat for this long is dead
        client_ttl: Duration = "10s";
        /// A put without an end for this long may be taken over
        discard_after: Duration = "30s";
        /// A put without an end for this long is dropped
        release_after: Duration = "10min";
        /// Life of a soft pin
        soft_pin_ttl: Duration = "30min";
        /// Whether soft-pinned objects are evicted when nothing else is left
        evict_soft_pinned: bool = "true", is switch;
        /// Listen on a unix socket as well, over which members on this host reach the master faster
        local_lane: bool = "true", is switch;
    }
}

settings! {
    /// `layercake node`.
    NodeSettings, section "node" {
        /// The master's address, HOST:PORT
        master: MasterAddress = "127.0.0.1:50061", env "LAYERCAKE_MASTER";
        /// Name of this node; none: made of the host's name and the process id
        name: Option<String> = "none";
        /// Memory that this node gives to the store
        capacity: ByteSize = "1GiB";
        /// Use huge pages where the machine has free ones
        huge_pages: bool = "false", is switch;
        /// Address of the data plane's TCP listener
        listen: SocketAddr = "127.0.0.1:0";
        /// Address that peers are told to connect to; none: the listener's own
        advertise: Option<SocketAddr> = "none";
        /// Address of /metrics and /health over HTTP, open to whoever can reach it; none: not served
        http: Option<SocketAddr> = "none";
    }
}

settings! {
    /// Tools that talk to a running cluster.
    ToolSettings, section "tools" {
        /// The master's address, HOST:PORT
        master: MasterAddress = "127.0.0.1:50061", env "LAYERCAKE_MASTER";
        /// Namespace of the keys
        tenant: String = "default";
    }
}

/// Every setting there is.
pub(crate) fn all() -> impl Iterator<Item = &'static Setting> {
    [
        Common::TABLE,
        TransportSettings::TABLE,
        MasterSettings::TABLE,
        NodeSettings::TABLE,
        ToolSettings::TABLE,
    ]
    .into_iter()
    .flatten()
}
