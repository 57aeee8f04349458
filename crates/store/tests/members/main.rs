//! Behaviour of members towards their master: the link and the segment host, against a small master
//! over real gRPC that misbehaves on demand.

mod fake;
mod link;
mod node;
#[path = "../common/port.rs"]
mod port;

/// Tasks that live on this test's runtime.
fn tasks() -> usize {
    tokio::runtime::Handle::current()
        .metrics()
        .num_alive_tasks()
}
