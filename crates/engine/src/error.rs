//! What can go wrong in the engine.

use layercake_connector::ConnectorError;
use layercake_connector::contract::RequestId;
use thiserror::Error;

/// Errors of the engine.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A setting that this engine can't have.
    #[error("{name} = {value} can't be: {accepted}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is accepted.
        accepted: String,
    },
    /// A request that never fits the cache.
    #[error("request {request} takes {tokens} tokens, the cache has room for {room}")]
    TooLong {
        /// The request.
        request: RequestId,
        /// Prompt and tokens to be generated.
        tokens: usize,
        /// Tokens in all blocks.
        room: usize,
    },
    /// A request that can't be computed.
    #[error("request {request} is refused: {detail}")]
    BadRequest {
        /// The request.
        request: RequestId,
        /// Why.
        detail: String,
    },
    /// A rank's thread is gone, or did not come to the others within the deadline.
    #[error("rank {rank} is lost")]
    RankLost {
        /// The rank that noticed, or that is gone.
        rank: u32,
    },
    /// An earlier step failed, which ended all requests.
    #[error("the engine has ended: {reason}")]
    Ended {
        /// What that step failed with.
        reason: String,
    },
    /// The connector refused or timed out.
    #[error(transparent)]
    Connector(#[from] ConnectorError),
    /// Memory could not be had or reached.
    #[error(transparent)]
    Memory(#[from] layercake_transport::Error),
}
