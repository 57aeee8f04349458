//! The master: cost per key as its table grows, memory per object, and the same by each way to it: the last
//! alone with the argument `wire`.

mod growth;
mod wire;

use anyhow::Result;

fn main() -> Result<()> {
    if growth::measure_if_child()? {
        return Ok(());
    }
    // `cargo test --benches` only wants to know that it starts.
    if std::env::args().any(|argument| argument == "--test") {
        return Ok(());
    }
    if !std::env::args().any(|argument| argument == "wire") {
        growth::print_table()?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(wire::print_table())
}
