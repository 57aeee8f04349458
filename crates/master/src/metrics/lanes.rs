//! How many framed lanes are open, and over what.

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::service::greeting::Peer;

/// Counts open lanes by what carries them.
#[derive(Debug)]
pub(crate) struct Lanes {
    tcp: Gauge,
    unix: Gauge,
}

impl Lanes {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let lanes = Family::<[(&'static str, &'static str); 1], Gauge>::default();
        registry.register(
            "lanes",
            "Framed lanes of members that are open, by what carries them",
            lanes.clone(),
        );
        Self {
            tcp: lanes.get_or_create_owned(&[("over", "tcp")]),
            unix: lanes.get_or_create_owned(&[("over", "unix")]),
        }
    }

    /// Counts one until the guard is dropped.
    pub(crate) fn open(&self, peer: Peer) -> OpenLane {
        let gauge = match peer {
            Peer::Local { .. } => &self.unix,
            Peer::At(_) | Peer::Unknown => &self.tcp,
        };
        gauge.inc();
        OpenLane(gauge.clone())
    }
}

/// A lane that counts.
#[derive(Debug)]
pub(crate) struct OpenLane(Gauge);

impl Drop for OpenLane {
    fn drop(&mut self) {
        self.0.dec();
    }
}
