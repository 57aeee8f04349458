//! How objects are placed and kept: what Python says, in the words of the store.

use std::time::Duration;

use layercake_protocol::replica::ReplicateConfig;
use pyo3::prelude::*;

use crate::args::{Int, Seconds};
use crate::errors::Kind;

/// How many replicas of an object there are, where they lie, and how well they are kept.
///
/// Args:
///     replicas: Number of replicas, each in another segment; at least 1. With fewer segments than that there
///         are as many replicas as segments.
///     preferred_segments: Names of members that lend memory, best first; one that is unknown or full is
///         passed over.
///     prefer_same_node: Prefer memory of this process, then of this host.
///     soft_pin: Evict only when nothing else is left.
///     soft_pin_ttl: Seconds until the soft pin ends; ``None``: the master's default.
///     hard_pin: Never evict.
#[pyclass(frozen, name = "ReplicateConfig", module = "layercake", from_py_object)]
#[derive(Clone, Debug)]
pub(crate) struct PyReplicateConfig {
    config: ReplicateConfig,
}

#[pymethods]
impl PyReplicateConfig {
    #[new]
    #[pyo3(signature = (*, replicas = Int(1), preferred_segments = Vec::new(), prefer_same_node = false, soft_pin = false, soft_pin_ttl = None, hard_pin = false))]
    fn new(
        replicas: Int,
        preferred_segments: Vec<String>,
        prefer_same_node: bool,
        soft_pin: bool,
        soft_pin_ttl: Option<Seconds>,
        hard_pin: bool,
    ) -> PyResult<Self> {
        let count = u32::try_from(replicas.0).ok().filter(|count| *count > 0);
        let Some(replicas) = count else {
            return Err(Kind::InvalidArgument.err(format!(
                "replicas is {}: at least 1 and less than 2**32 are accepted",
                replicas.0
            )));
        };
        Ok(Self {
            config: ReplicateConfig {
                replicas,
                preferred_segments,
                prefer_same_node,
                soft_pin,
                soft_pin_ttl: soft_pin_ttl.map(|ttl| ttl.0),
                keep_soft_pin: false,
                hard_pin,
            },
        })
    }

    /// Number of replicas.
    #[getter]
    fn replicas(&self) -> u32 {
        self.config.replicas
    }

    /// Names of members that lend memory, best first.
    #[getter]
    fn preferred_segments(&self) -> Vec<String> {
        self.config.preferred_segments.clone()
    }

    /// Whether memory of this process, then of this host, is preferred.
    #[getter]
    fn prefer_same_node(&self) -> bool {
        self.config.prefer_same_node
    }

    /// Whether to evict only when nothing else is left.
    #[getter]
    fn soft_pin(&self) -> bool {
        self.config.soft_pin
    }

    /// Seconds until the soft pin ends; ``None``: the master's default.
    #[getter]
    fn soft_pin_ttl(&self) -> Option<f64> {
        self.config.soft_pin_ttl.as_ref().map(Duration::as_secs_f64)
    }

    /// Whether never to evict.
    #[getter]
    fn hard_pin(&self) -> bool {
        self.config.hard_pin
    }

    fn __repr__(&self) -> String {
        let ReplicateConfig {
            replicas,
            preferred_segments,
            prefer_same_node,
            soft_pin,
            hard_pin,
            ..
        } = &self.config;
        format!(
            "ReplicateConfig(replicas={replicas}, preferred_segments={preferred_segments:?}, prefer_same_node={}, \
             soft_pin={}, hard_pin={})",
            text(*prefer_same_node),
            text(*soft_pin),
            text(*hard_pin)
        )
    }
}

fn text(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

/// What a call was given, or the default.
pub(crate) fn or_default(config: Option<&PyReplicateConfig>) -> ReplicateConfig {
    config.map_or_else(ReplicateConfig::default, |config| config.config.clone())
}
