//! The master's gRPC service as its clients see it: one binary, so that it links once.

mod commands;
mod common;
mod door;
mod lane;
mod monitor;
mod repeated;
mod shutdown;
mod stalls;
mod stream;
mod waits;
