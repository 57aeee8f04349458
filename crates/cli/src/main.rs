//! The `layercake` command.
#![forbid(unsafe_code)]
mod cmd;
mod config;
mod output;
fn main() {}
