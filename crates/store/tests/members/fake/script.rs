//! What a test wants of the master: what it is like, how it treats which request, and what it records.

use std::time::Duration;

use layercake_protocol::auth::SharedToken;
use layercake_protocol::convert::Context;
use layercake_protocol::error::Refusal;
use layercake_protocol::version::{self, Version};
use layercake_protocol::wire::client_frame::Request as Body;

/// Which request a fault or a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Exists,
    GetStart,
    GetEnd,
    PutStart,
    PutEnd,
    PutRevoke,
    TakeBack,
    WaitComplete,
    Remove,
    Mount,
    Unmount,
    Heartbeat,
    FenceDone,
    Join,
    Leave,
    Other,
}

impl Kind {
    pub(super) fn of(body: &Body) -> Self {
        match body {
            Body::Exists(_) => Self::Exists,
            Body::GetStart(_) => Self::GetStart,
            Body::GetEnd(_) => Self::GetEnd,
            Body::PutStart(_) => Self::PutStart,
            Body::PutEnd(_) => Self::PutEnd,
            Body::PutRevoke(_) => Self::PutRevoke,
            Body::TakeBack(_) => Self::TakeBack,
            Body::WaitComplete(_) => Self::WaitComplete,
            Body::Remove(_) => Self::Remove,
            Body::Mount(_) => Self::Mount,
            Body::Unmount(_) => Self::Unmount,
            Body::Heartbeat(_) => Self::Heartbeat,
            Body::FenceDone(_) => Self::FenceDone,
            Body::Join(_) => Self::Join,
            Body::Leave(_) => Self::Leave,
            _ => Self::Other,
        }
    }
}

/// How the master treats one request.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The stream breaks, and nothing was done.
    Drop,
    /// It is carried out, and the stream breaks instead of the answer.
    ApplyThenDrop,
    /// It is carried out; the answer waits for [`FakeMaster::release`].
    Hold,
    /// It is carried out and never answered.
    Swallow,
    /// Nothing is done, and it is never answered.
    Ignore,
    /// The whole call is refused.
    Refuse(Refusal),
}

/// A request as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub kind: Kind,
    pub context: Context,
    pub body: Body,
}

/// What the master is like.
#[derive(Clone, Debug)]
pub(crate) struct Nature {
    pub token: Option<SharedToken>,
    /// Proves the token, but turns every caller's proof away.
    pub turns_away: bool,
    pub version: Version,
    pub term: u64,
    pub heartbeat_every: Duration,
    /// Says that it has framed lanes, which it has not.
    pub claims_lanes: bool,
    /// Says that it answers lanes on a unix socket of this name.
    pub claims_socket: Option<String>,
}

impl Default for Nature {
    fn default() -> Self {
        Self {
            token: None,
            turns_away: false,
            version: version::CURRENT,
            term: 1,
            heartbeat_every: Duration::from_mins(1),
            claims_lanes: false,
            claims_socket: None,
        }
    }
}
