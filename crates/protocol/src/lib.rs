//! The words that all parts of Layercake share.

pub mod auth;
pub mod ids;
pub mod version;
