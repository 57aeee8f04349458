//! What the connector's worker side costs, and what its layers hide.
//!
//! - `costs`: a layer call of 64 blocks with 2 entries, beside the store's sessions and bare batches of the
//!   transport: time, processor time and requests for memory. With small entries, so that what is counted is not the
//!   bytes, and with usual ones.
//! - `overlap`: how long a step takes that loads a prompt's blocks, layer by layer and as whole objects.
//! - `sessions`, `objects`: what is open at once, and what the master has, of a prompt of 100,000 tokens.
//!
//! `--json` prints a line for each table instead; names of tables choose some of them.

#[path = "../guard/allocations.rs"]
#[expect(dead_code, reason = "the guard keeps what it counted, too")]
mod allocations;
#[expect(dead_code, reason = "a test asks for a part of it")]
mod costs;
mod overlap;
mod prompt;
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
        for report in costs::measure()? {
            report.print(json);
        }
    }
    if all || given("overlap") {
        overlap::measure()?.print(json);
    }
    if all || given("sessions") {
        prompt::sessions()?.print(json);
    }
    if all || given("objects") {
        prompt::objects()?.print(json);
    }
    Ok(())
}
