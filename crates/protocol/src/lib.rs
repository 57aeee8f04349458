//! The words that all parts of Layercake share.

pub mod auth;
pub mod checksum;
pub mod code;
pub mod command;
pub mod convert;
pub mod early;
pub mod endpoint;
pub mod error;
pub mod fingerprint;
pub mod header;
pub mod ids;
pub mod key;
pub mod lane;
pub mod layout;
pub mod range;
pub mod replica;
pub mod report;
pub mod version;
pub mod wire;
