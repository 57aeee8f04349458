//! What the connector's worker side costs, and what its layers hide.
//!
//! - `costs`: a layer call of 64 blocks with 2 entries, beside the store's sessions and bare batches of the
//!   transport. Counted are processor time and requests for memory of the thread that computes and of the one
//!   that the client's tasks run on; master and node have threads of their own. Entries are small, so that
//!   what is counted is not the bytes.
//! - `overlap`: how long a step takes that loads a prompt's blocks, layer by layer and as whole objects.
//!
//! `--json` prints a line for each table instead; names of tables choose some of them.

#[path = "../guard/allocations.rs"]
#[expect(dead_code, reason = "the guard keeps what it counted, too")]
mod allocations;
mod costs;
mod overlap;
mod setup;

use anyhow::Result;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |name: &str| arguments.iter().any(|argument| argument == name);
    // `cargo test --benches` only wants to know that it starts.
    if given("--test") {
        return Ok(());
    }
    let json = given("--json");
    let all = !arguments.iter().any(|argument| !argument.starts_with("--"));
    if all || given("costs") {
        costs::measure()?.print(json);
    }
    if all || given("overlap") {
        overlap::measure()?.print(json);
    }
    Ok(())
}
