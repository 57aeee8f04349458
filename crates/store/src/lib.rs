//! The store of Layercake: a client library with range sessions, and the segment host.
#![forbid(unsafe_code)]

mod client;
mod error;
pub mod link;
pub mod node;
mod session;

pub use client::{
    ClientConfig, ClientStats, EarlyRead, EarlyReading, EarlySession, EndError, GetOptions,
    GetRequest, Located, PrefixHit, Progress, PutOutcome, PutRequest, Range, RangeRead, RangeWrite,
    ReadDone, Reading, StoreClient, Writing,
};
pub use error::StoreError;
pub use node::{HeldObject, Inventory, Node, NodeConfig, NodeStats, SegmentSpec};
pub use session::{GetSession, PutSession, Source};
