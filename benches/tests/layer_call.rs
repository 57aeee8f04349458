//! The connector's layer calls ask for no memory in the long run, but for what a batch of the transport takes.

#[path = "../benches/guard/allocations.rs"]
#[expect(dead_code, reason = "the guard keeps what it counted, too")]
mod allocations;
#[path = "../benches/worker/costs.rs"]
#[expect(dead_code, reason = "the bench measures more")]
mod costs;
#[path = "../benches/worker/setup.rs"]
#[expect(dead_code, reason = "the bench measures more")]
mod setup;

use anyhow::Result;

/// What a batch of the transport may ask for: its pieces, their results, and its handle.
const BATCH: f64 = 4.0;
/// What a layer call may ask for beyond that. Four or so for its handles and answers. Of 64 blocks: so no block and no piece
/// asks for any.
const MOST: f64 = 16.0;

#[test]
fn a_layer_call_asks_for_no_memory_per_block() -> Result<()> {
    let [written, _, saved, read, _, loaded] = costs::requests(3..8)?;
    for (transport, (all, computing)) in [(written, saved), (read, loaded)] {
        assert!(computing < 0.5, "the thread that computes: {computing}");
        assert!(transport.0 <= BATCH, "the transport: {transport:?}");
        assert!(
            all <= transport.0 + MOST,
            "{all}, the transport {transport:?}"
        );
    }
    Ok(())
}
