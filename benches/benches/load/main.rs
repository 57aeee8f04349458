//! The master under load: probes while objects are evicted, thousands of members, how full a pool gets.
//!
//! `--json` prints a line for each table instead; names of tables (`probes`, `members`, `placement`) choose
//! some of them. The master is a process of its own that is reached over loopback; its memory and
//! processor time are read from the kernel.

mod master;
mod members;
mod placement;
mod probes;

use anyhow::Result;

fn main() -> Result<()> {
    master::serve_if_child();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |name: &str| arguments.iter().any(|argument| argument == name);
    // `cargo test --benches` only wants to know that it starts.
    if given("--test") {
        return Ok(());
    }
    let json = given("--json");
    let all = !arguments.iter().any(|argument| !argument.starts_with("--"));
    if all || given("placement") {
        placement::measure()?.print(json);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    if all || given("members") {
        runtime.block_on(members::measure())?.print(json);
    }
    if all || given("probes") {
        runtime.block_on(probes::measure())?.print(json);
    }
    Ok(())
}
