//! The gRPC messages: generated, but for the two that a start has for each key.
//!
//! They stay at the edge: everything behind a connection speaks the domain types of this crate.

#![expect(
    missing_docs,
    unused_qualifications,
    clippy::pedantic,
    clippy::allow_attributes_without_reason,
    reason = "generated code; the .proto files are its documentation"
)]

mod started;

pub use started::{GetStarted, PutStarted, Replicas};

tonic::include_proto!("layercake.v1");
