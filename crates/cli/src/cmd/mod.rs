//! The subcommands, one module each.

pub(crate) mod admin;
pub(crate) mod config;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod master;
pub(crate) mod node;
mod nodes;
pub(crate) mod replay;
mod show;
pub(crate) mod workload;
