//! The connector's options, under the names that users know, read from a JSON map.
//!
//! Reading is strict: an unknown name, a value of the wrong type or out of bounds, and options that
//! contradict each other are refused by name with what is accepted, before the first request. A
//! boolean is no number and a number no boolean; only `audit_log` is switched by the numbers 0 and 1.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use layercake_protocol::layout::MAX_LAYERS;
use layercake_protocol::replica::ReplicateConfig;
use serde_json::{Map, Value};

use crate::error::ConnectorError;

/// Who saves and who loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `kv_producer`: saves, never loads.
    Producer,
    /// `kv_consumer`: loads, never saves.
    Consumer,
    /// `kv_both`.
    Both,
}

impl Role {
    /// As it is written in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Producer => "kv_producer",
            Self::Consumer => "kv_consumer",
            Self::Both => "kv_both",
        }
    }

    /// Whether this role saves.
    pub fn saves(self) -> bool {
        self != Self::Consumer
    }

    /// Whether this role loads.
    pub fn loads(self) -> bool {
        self != Self::Producer
    }
}

/// What happens to a request whose load failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailurePolicy {
    /// The request fails.
    Fail,
    /// It goes on from the last block before the failed one.
    Recompute,
}

/// How many layers are loaded ahead of the computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefetchLayers {
    /// As many as recent times of transfer and computation call for.
    Auto,
    /// So many.
    Fixed(NonZeroUsize),
}

/// Whether a block that several requests need is read once and copied locally.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalFanout {
    /// Where measured bandwidths say that it pays.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// All options. [`Options::default`] is what an empty map gives.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is an option of its own"
)]
pub struct Options {
    /// `kv_role`, default `kv_both`.
    pub role: Role,
    /// `kv_load_failure_policy`, default `recompute`.
    pub failure_policy: FailurePolicy,
    /// `use_layerwise`, default true. Off: whole objects before the first layer and after the last.
    pub layerwise: bool,
    /// `layerwise_prefetch_layers`, default `"auto"`.
    pub prefetch_layers: PrefetchLayers,
    /// `layerwise_max_transfer_blocks`: rows in one call of the store, default 64.
    pub max_transfer_blocks: NonZeroUsize,
    /// `layerwise_max_transfer_bytes`: bytes of one contiguous piece, default 16 MiB. Times `max_transfer_blocks` it is
    /// the most that a call of several rows has in all.
    pub max_transfer_bytes: NonZeroU64,
    /// `save_decode_cache`: also save blocks that hold generated tokens, default false.
    pub save_decode_cache: bool,
    /// `preferred_segment`: where objects should lie, by a segment's name; default: no preference.
    pub preferred_segment: Option<String>,
    /// `prefer_alloc_in_same_node`, default false.
    pub prefer_same_node: bool,
    /// `local_fanout`: `"auto"`, `"on"` or `"off"`; default `"auto"`.
    pub local_fanout: LocalFanout,
    /// `per_layer_readiness`, default false: layers are published as they are saved, and blocks that others are
    /// saving so are loaded before they are complete.
    pub per_layer_readiness: bool,
    /// `session_window_blocks`: get sessions that are open at once, default 1024.
    pub session_window_blocks: NonZeroUsize,
    /// `lookup_window_blocks`: blocks in one question to the master, default 64.
    pub lookup_window_blocks: NonZeroUsize,
    /// `decline_slow_loads`, default true: blocks that compute faster than they load are computed.
    pub decline_slow_loads: bool,
    /// `sharing_group`: a name that all engines are given which are to share blocks; default none. One whose
    /// [`Identity`](crate::checks::Identity) is not that of the others is refused at start-up.
    pub sharing_group: Option<String>,
    /// `audit_log` 1 with `audit_log_path`: a file of JSON lines about objects, ranges and commits.
    pub audit_log: Option<PathBuf>,
    /// `lookup_timeout_ms`: after so long a look-up ends, and what it has not verified is a miss; default 1 s.
    pub lookup_timeout: Duration,
    /// `layer_timeout_ms`: how long the computation waits for a layer; default 120 s, more than the
    /// transfers below are given, so that it passes only if those are stuck.
    pub layer_timeout: Duration,
    /// `save_stall_ms`: how long in all of a step the computation waits for saves that are behind, before the
    /// step's saves are given up; default 1 s, less while the store stays slow.
    pub save_stall: Duration,
}

impl Default for Options {
    fn default() -> Self {
        const fn count(value: usize) -> NonZeroUsize {
            NonZeroUsize::new(value).expect("a literal above 0")
        }
        Self {
            role: Role::Both,
            failure_policy: FailurePolicy::Recompute,
            layerwise: true,
            prefetch_layers: PrefetchLayers::Auto,
            max_transfer_blocks: const { count(64) },
            max_transfer_bytes: const { NonZeroU64::new(16 << 20).expect("a literal above 0") },
            save_decode_cache: false,
            preferred_segment: None,
            prefer_same_node: false,
            local_fanout: LocalFanout::Auto,
            per_layer_readiness: false,
            session_window_blocks: const { count(1024) },
            lookup_window_blocks: const { count(64) },
            decline_slow_loads: true,
            sharing_group: None,
            audit_log: None,
            lookup_timeout: Duration::from_secs(1),
            layer_timeout: Duration::from_mins(2),
            save_stall: Duration::from_secs(1),
        }
    }
}

/// Every name, in the order of the documentation.
const NAMES: [&str; 20] = [
    "kv_role",
    "kv_load_failure_policy",
    "use_layerwise",
    "layerwise_prefetch_layers",
    "layerwise_max_transfer_blocks",
    "layerwise_max_transfer_bytes",
    "save_decode_cache",
    "preferred_segment",
    "prefer_alloc_in_same_node",
    "local_fanout",
    "per_layer_readiness",
    "session_window_blocks",
    "lookup_window_blocks",
    "decline_slow_loads",
    "sharing_group",
    "audit_log",
    "audit_log_path",
    "lookup_timeout_ms",
    "layer_timeout_ms",
    "save_stall_ms",
];

/// The most blocks that a window or a call may have.
const MAX_BLOCKS: u64 = 1 << 20;
/// The longest time-out, in milliseconds.
const MAX_MS: u64 = 24 * 60 * 60 * 1000;

impl Options {
    /// Reads a JSON map.
    pub fn from_json(map: &Map<String, Value>) -> Result<Self, ConnectorError> {
        if let Some(name) = map.keys().find(|name| !NAMES.contains(&name.as_str())) {
            return Err(ConnectorError::UnknownOption {
                name: name.clone(),
                accepted: NAMES.join(", "),
            });
        }
        let map = Reader(map);
        let mut options = Self::default();
        map.choice(
            "kv_role",
            &mut options.role,
            &[
                ("kv_producer", Role::Producer),
                ("kv_consumer", Role::Consumer),
                ("kv_both", Role::Both),
            ],
        )?;
        map.choice(
            "kv_load_failure_policy",
            &mut options.failure_policy,
            &[
                ("fail", FailurePolicy::Fail),
                ("recompute", FailurePolicy::Recompute),
            ],
        )?;
        map.switch("use_layerwise", &mut options.layerwise)?;
        map.prefetch(&mut options.prefetch_layers)?;
        map.blocks(
            "layerwise_max_transfer_blocks",
            &mut options.max_transfer_blocks,
        )?;
        map.bytes(
            "layerwise_max_transfer_bytes",
            &mut options.max_transfer_bytes,
        )?;
        map.switch("save_decode_cache", &mut options.save_decode_cache)?;
        options.preferred_segment = map.text("preferred_segment")?;
        map.switch("prefer_alloc_in_same_node", &mut options.prefer_same_node)?;
        map.choice(
            "local_fanout",
            &mut options.local_fanout,
            &[
                ("auto", LocalFanout::Auto),
                ("on", LocalFanout::On),
                ("off", LocalFanout::Off),
            ],
        )?;
        map.switch("per_layer_readiness", &mut options.per_layer_readiness)?;
        map.blocks("session_window_blocks", &mut options.session_window_blocks)?;
        map.blocks("lookup_window_blocks", &mut options.lookup_window_blocks)?;
        map.switch("decline_slow_loads", &mut options.decline_slow_loads)?;
        options.sharing_group = map.text("sharing_group")?;
        options.audit_log = map.audit_log()?;
        map.milliseconds("lookup_timeout_ms", &mut options.lookup_timeout)?;
        map.milliseconds("layer_timeout_ms", &mut options.layer_timeout)?;
        map.milliseconds("save_stall_ms", &mut options.save_stall)?;
        map.contradictions(&options)?;
        Ok(options)
    }

    /// Where objects go: session puts and whole-object puts follow the same policy.
    pub fn replicate(&self) -> ReplicateConfig {
        ReplicateConfig {
            preferred_segments: self.preferred_segment.iter().cloned().collect(),
            prefer_same_node: self.prefer_same_node,
            ..ReplicateConfig::default()
        }
    }
}

struct Reader<'a>(&'a Map<String, Value>);

impl Reader<'_> {
    fn bad(&self, name: &'static str, accepted: impl Into<String>) -> ConnectorError {
        ConnectorError::BadOption {
            name,
            value: self.0.get(name).map_or_else(String::new, Value::to_string),
            accepted: accepted.into(),
        }
    }

    fn choice<T: Copy>(
        &self,
        name: &'static str,
        into: &mut T,
        accepted: &[(&str, T)],
    ) -> Result<(), ConnectorError> {
        let Some(value) = self.0.get(name) else {
            return Ok(());
        };
        let found = accepted
            .iter()
            .find(|(text, _)| value.as_str() == Some(text));
        let Some((_, found)) = found else {
            let names: Vec<String> = accepted
                .iter()
                .map(|(text, _)| format!("{text:?}"))
                .collect();
            return Err(self.bad(name, names.join(" or ")));
        };
        *into = *found;
        Ok(())
    }

    fn switch(&self, name: &'static str, into: &mut bool) -> Result<(), ConnectorError> {
        if let Some(value) = self.0.get(name) {
            *into = value
                .as_bool()
                .ok_or_else(|| self.bad(name, "true or false"))?;
        }
        Ok(())
    }

    fn number(&self, name: &'static str, most: u64) -> Result<Option<NonZeroU64>, ConnectorError> {
        let Some(value) = self.0.get(name) else {
            return Ok(None);
        };
        let number = value.as_u64().filter(|&number| number <= most);
        match number.and_then(NonZeroU64::new) {
            Some(number) => Ok(Some(number)),
            None => Err(self.bad(name, format!("a whole number from 1 to {most}"))),
        }
    }

    fn blocks(&self, name: &'static str, into: &mut NonZeroUsize) -> Result<(), ConnectorError> {
        if let Some(number) = self.number(name, MAX_BLOCKS)? {
            *into = NonZeroUsize::try_from(number)
                .map_err(|_| self.bad(name, "a number that this machine can count to"))?;
        }
        Ok(())
    }

    fn bytes(&self, name: &'static str, into: &mut NonZeroU64) -> Result<(), ConnectorError> {
        if let Some(number) = self.number(name, 1 << 40)? {
            *into = number;
        }
        Ok(())
    }

    fn milliseconds(&self, name: &'static str, into: &mut Duration) -> Result<(), ConnectorError> {
        if let Some(number) = self.number(name, MAX_MS)? {
            *into = Duration::from_millis(number.get());
        }
        Ok(())
    }

    fn text(&self, name: &'static str) -> Result<Option<String>, ConnectorError> {
        match self.0.get(name) {
            None => Ok(None),
            Some(Value::String(text)) if !text.is_empty() => Ok(Some(text.clone())),
            Some(_) => Err(self.bad(name, "a text that is not empty")),
        }
    }

    fn prefetch(&self, into: &mut PrefetchLayers) -> Result<(), ConnectorError> {
        const NAME: &str = "layerwise_prefetch_layers";
        let Some(value) = self.0.get(NAME) else {
            return Ok(());
        };
        if value.as_str() == Some("auto") {
            *into = PrefetchLayers::Auto;
            return Ok(());
        }
        let layers = value
            .as_u64()
            .and_then(|layers| usize::try_from(layers).ok());
        let layers = layers.filter(|&layers| layers <= MAX_LAYERS);
        match layers.and_then(NonZeroUsize::new) {
            Some(layers) => {
                *into = PrefetchLayers::Fixed(layers);
                Ok(())
            }
            None => Err(self.bad(
                NAME,
                format!("\"auto\" or a whole number from 1 to {MAX_LAYERS}"),
            )),
        }
    }

    fn audit_log(&self) -> Result<Option<PathBuf>, ConnectorError> {
        let on = match self.0.get("audit_log") {
            None => false,
            Some(value) => match value.as_u64() {
                Some(0) => false,
                Some(1) => true,
                _ => return Err(self.bad("audit_log", "0 or 1")),
            },
        };
        match (on, self.text("audit_log_path")?) {
            (true, Some(path)) => Ok(Some(path.into())),
            (true, None) => Err(ConnectorError::Contradiction {
                first: "audit_log = 1",
                second: "audit_log_path",
                detail: "the log needs a file to go to",
            }),
            (false, Some(_)) => Err(ConnectorError::Contradiction {
                first: "audit_log = 0",
                second: "audit_log_path",
                detail: "a path is given for a log that is off",
            }),
            (false, None) => Ok(None),
        }
    }

    fn contradictions(&self, options: &Options) -> Result<(), ConnectorError> {
        let layerwise = [
            "layerwise_prefetch_layers",
            "local_fanout",
            "session_window_blocks",
        ];
        if !options.layerwise
            && let Some(second) = layerwise
                .into_iter()
                .find(|name| self.0.contains_key(*name))
        {
            return Err(ConnectorError::Contradiction {
                first: "use_layerwise = false",
                second,
                detail: "whole objects are not loaded layer by layer",
            });
        }
        if !options.layerwise && options.per_layer_readiness {
            return Err(ConnectorError::Contradiction {
                first: "use_layerwise = false",
                second: "per_layer_readiness = true",
                detail: "whole objects are not saved layer by layer",
            });
        }
        let of_saves = [
            ("save_decode_cache = true", options.save_decode_cache),
            ("preferred_segment", options.preferred_segment.is_some()),
            ("prefer_alloc_in_same_node = true", options.prefer_same_node),
        ];
        if !options.role.saves()
            && let Some((second, _)) = of_saves.into_iter().find(|(_, given)| *given)
        {
            return Err(ConnectorError::Contradiction {
                first: "kv_role = \"kv_consumer\"",
                second,
                detail: "a consumer saves nothing",
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
