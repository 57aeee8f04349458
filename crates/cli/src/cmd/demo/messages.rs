//! What a demo and its engines say to each other: one JSON object a line.
//!
//! An engine is told its setup and answers when it is ready; then it gets one request after the other and
//! answers each; told to finish, it answers with what it counted and ends. Its standard input closing
//! means that the demo is gone.

use serde::{Deserialize, Serialize};

/// From the demo to an engine.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToEngine {
    Setup(Setup),
    Request(Request),
    Finish,
}

/// What an engine has to do with the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Part {
    /// Nothing: it computes everything itself.
    Alone,
    /// It saves.
    Prefill,
    /// It loads.
    Decode,
}

impl Part {
    /// As a process's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Alone => "engine-alone",
            Self::Prefill => "engine-prefill",
            Self::Decode => "engine-decode",
        }
    }
}

/// What an engine is made by.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) part: Part,
    /// `host:port` of the master.
    pub(crate) master: String,
    /// Makes the weights.
    pub(crate) seed: u64,
    pub(crate) ranks: u32,
    /// Tokens of a step.
    pub(crate) step_tokens: usize,
    pub(crate) layer_micros: u64,
    pub(crate) layerwise: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) index: usize,
    pub(crate) prompt: Vec<u32>,
    pub(crate) wanted: usize,
}

/// From an engine to the demo.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromEngine {
    Ready,
    Done(Done),
    Finished(Finished),
}

/// What became of a request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Done {
    pub(crate) index: usize,
    pub(crate) tokens: Vec<u32>,
    /// Digests of the logits of each token.
    pub(crate) logits: Vec<[u8; 32]>,
    /// From its arrival to its first token.
    pub(crate) first_token_s: f64,
    pub(crate) loaded_tokens: usize,
    pub(crate) failed: bool,
    /// How long each layer's load was waited for, in microseconds.
    pub(crate) exposed_us: Vec<f64>,
    /// The first step, for a picture.
    pub(crate) spans: Vec<Stretch>,
}

/// What an engine counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Finished {
    pub(crate) keys_queried: u64,
    pub(crate) saved_blocks: u64,
    pub(crate) loaded_blocks: u64,
    pub(crate) failed_loads: u64,
}

/// What a stretch of time was spent with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    Compute,
    Wait,
    Load,
    Save,
}

/// A stretch of time, in microseconds from the step's begin.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Stretch {
    pub(crate) layer: u32,
    pub(crate) kind: Kind,
    pub(crate) begin_us: f64,
    pub(crate) end_us: f64,
}
