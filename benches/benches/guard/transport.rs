//! Copies of this process's own memory, by the thread that submits them.
//!
//! callgrind offers programs a processor without vector multiplication of polynomials. So what is
//! counted of a checksum is the way it takes on such processors.

use std::sync::Arc;

use anyhow::{Result, ensure};
use layercake_protocol::ids::Generation;
use layercake_transport::{
    Access, AllocateOptions, Batch, Direction, Engine, EngineConfig, Memory, Piece, RemoteSlice,
    TransportKind, TransportSet,
};

use crate::{Path, count};

pub(crate) const PATHS: &[Path] = &[
    ("local write: 64 KiB with its checksum", checksum),
    ("local write: 32 pieces of 4 KiB", pieces),
];

fn checksum() -> Result<()> {
    write(1, 64 << 10, true)
}

fn pieces() -> Result<()> {
    write(32, 4 << 10, false)
}

/// Counts the second of two such batches: the first one meets memory that was never touched.
fn write(pieces: u64, len: u64, checksum: bool) -> Result<()> {
    let engine = Engine::start(EngineConfig {
        transports: TransportSet::only(TransportKind::Local),
        ..EngineConfig::default()
    })?;
    let allocate = |access, generation_tags| {
        engine.allocate(
            pieces * len,
            AllocateOptions {
                access,
                generation_tags,
                ..AllocateOptions::default()
            },
        )
    };
    let from = allocate(Access::LocalOnly, false)?;
    let to = allocate(Access::RemoteReadWrite, true)?;
    let batch = || batch(&engine, &from, &to, pieces, len, checksum);
    ensure!(
        engine.submit(batch()?).wait().first_error().is_none(),
        "the first batch failed"
    );
    let second = batch()?;
    let outcome = count(|| engine.submit(second).wait())?;
    ensure!(outcome.first_error().is_none(), "the counted batch failed");
    Ok(())
}

fn batch(
    engine: &Engine,
    from: &Memory,
    to: &Memory,
    pieces: u64,
    len: u64,
    checksum: bool,
) -> Result<Batch> {
    let pieces = (0..pieces).map(|piece| {
        Ok(Piece {
            local: from.slice(piece * len, len)?,
            remote: RemoteSlice {
                region: to.region().region,
                capability: to.region().capability,
                offset: piece * len,
                len,
                generation: Some(Generation(7)),
            },
        })
    });
    Ok(Batch {
        peer: Arc::new(engine.endpoint().clone()),
        direction: Direction::Write,
        pieces: pieces.collect::<Result<_>>()?,
        checksum,
        deadline: None,
    })
}
