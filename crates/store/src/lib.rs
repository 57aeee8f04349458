//! The store of Layercake: a client library with range sessions, and the segment host.
#![forbid(unsafe_code)]

mod error;
pub mod link;

pub use error::StoreError;
