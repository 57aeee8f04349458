//! The `layercake` command.
mod config;
fn main() {}
