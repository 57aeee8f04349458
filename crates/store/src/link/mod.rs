//! The link to the master: one stream that many calls share.
//!
//! *To be read with* `docs/contracts/session.md`. A [`MasterLink`] greets the master (versions, mutual
//! proof of the token), opens the stream, joins as a member, sends heartbeats, and does all of it again
//! when the connection is lost.

mod config;
mod connector;
mod types;

pub use config::{Backoff, LinkConfig, Timeouts};
pub use connector::{Connector, TcpConnector};
pub use types::{
    CommandId, Existence, Exists, GetsStarted, Life, LinkState, NodeEvent, ObjectDetail, ObjectPage,
    PutsStarted, Renewed, SessionEvent, StartOptions,
};
