//! The pure hot paths, for counting their instructions.
//!
//! How long something takes depends on the machine and on what else it does; how many instructions it
//! takes hardly does. `cargo xtask bench --guard` runs this program once per path under callgrind, which
//! counts what happens inside [`counted_by_guard`] alone, and compares with `benches/guard.toml`.
//!
//! - `guard --list`: the names of the paths.
//! - `guard --path NAME`: that path once, prepared outside of what is counted; prints its requests for memory.
//! - otherwise every path once, so that `cargo bench` and `cargo test --benches` see that they work.
//!
//! One thread, fixed input. What differs from run to run are the seeds of the tables' hashes; every path
//! therefore does enough for these to even out.

#[expect(dead_code, reason = "others count all threads")]
mod allocations;
mod connector;
mod frames;
mod master;
mod objects;
mod transport;

use std::hint::black_box;

use anyhow::{Context as _, Result};
use layercake_protocol::key::ObjectKey;

/// Keys in a batch.
const BATCH: usize = 256;

/// A path's name and what runs it.
type Path = (&'static str, fn() -> Result<()>);

fn paths() -> impl Iterator<Item = Path> {
    [
        master::PATHS,
        frames::PATHS,
        objects::PATHS,
        transport::PATHS,
        connector::PATHS,
    ]
    .concat()
    .into_iter()
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--list"] => paths().for_each(|(name, _)| println!("{name}")),
        ["--path", wanted] => {
            let (_, run) = paths()
                .find(|(name, _)| *name == wanted)
                .with_context(|| format!("no path is called {wanted:?}; see --list"))?;
            run()?;
            println!("{}", allocations::counted());
        }
        _ => paths().try_for_each(|(name, run)| run().context(name))?,
    }
    Ok(())
}

/// What callgrind counts: everything that runs inside. It is told this name, so there is one of it: no
/// generic parameters, never inlined.
#[inline(never)]
fn counted_by_guard(work: &mut dyn FnMut()) {
    work();
    // Not in place of the return: the counter has to see both entry and exit.
    black_box(());
}

/// Counts `work` and returns what it made.
fn count<T>(work: impl FnOnce() -> T) -> Result<T> {
    let (mut work, mut made) = (Some(work), None);
    let before = allocations::so_far();
    counted_by_guard(&mut || made = work.take().map(|work| black_box(work())));
    allocations::note_counted(allocations::so_far() - before);
    made.context("the work ran")
}

fn keys(from: usize) -> Result<Vec<ObjectKey>> {
    layercake_benches::keys::keys(from, BATCH)
}
