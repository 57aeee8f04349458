//! One engine of this process beside the peer's, and the batches that the benches send.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use layercake_protocol::endpoint::Endpoint;
use layercake_protocol::ids::Generation;
use layercake_transport::{
    Access, AllocateOptions, Batch, Direction, Engine, EngineConfig, Memory, Piece, RemoteSlice,
    Transfer, TransportKind, TransportSet,
};

use crate::limits::Scatter;
use crate::peer::Peer;

/// Which protections a batch asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Safety {
    /// The checksum of every piece.
    pub checksum: bool,
    /// The generation of every granule.
    pub generation: bool,
}

impl Safety {
    /// As the store uses it.
    pub const ON: Self = Self {
        checksum: true,
        generation: true,
    };
    /// Bytes and nothing else.
    pub const OFF: Self = Self {
        checksum: false,
        generation: false,
    };
}

/// The generation that the benches write and read with.
const GENERATION: Generation = Generation(7);

/// An engine that is held to one transport, and memory on both sides.
#[derive(Debug)]
pub struct Driver {
    engine: Engine,
    local: Memory,
    remote: Remote,
    kind: TransportKind,
}

#[derive(Debug)]
enum Remote {
    Process(Arc<Peer>),
    SameEngine(Memory, Arc<Endpoint>),
}

impl Driver {
    /// An engine that reaches the peer by `kind`; for the local transport the "peer" is the engine itself.
    pub fn start(kind: TransportKind, peer: &Arc<Peer>) -> Result<Self> {
        let engine = Engine::start(EngineConfig {
            transports: TransportSet::only(kind),
            ..EngineConfig::default()
        })?;
        let local = engine.allocate(peer.len, memory(Access::LocalOnly, false))?;
        let remote = if kind == TransportKind::Local {
            let memory = engine.allocate(peer.len, memory(Access::RemoteReadWrite, true))?;
            Remote::SameEngine(memory, Arc::new(engine.endpoint().clone()))
        } else {
            Remote::Process(Arc::clone(peer))
        };
        let driver = Self {
            engine,
            local,
            remote,
            kind,
        };
        // Claims every granule, so that reads with a generation find what they ask for. In both directions, so that
        // connections have been used before they are measured: what a system takes for their buffers comes slowly at first.
        let all = [Scatter { from: 0, to: 0 }];
        driver.run(Direction::Write, &all, peer.len, Safety::ON)?;
        driver.run(Direction::Read, &all, peer.len, Safety::ON)?;
        Ok(driver)
    }

    fn slice(&self, offset: u64, len: u64, generation: Option<Generation>) -> RemoteSlice {
        match &self.remote {
            Remote::Process(peer) => peer.slice(offset, len, generation),
            Remote::SameEngine(memory, _) => RemoteSlice {
                region: memory.region().region,
                capability: memory.region().capability,
                offset,
                len,
                generation,
            },
        }
    }

    /// A batch of pieces of `len` bytes at these places.
    pub fn batch(
        &self,
        direction: Direction,
        places: &[Scatter],
        len: u64,
        safety: Safety,
    ) -> Result<Batch> {
        let generation = safety.generation.then_some(GENERATION);
        let pieces = places
            .iter()
            .map(|place| {
                Ok(Piece {
                    local: self.local.slice(place.from as u64, len)?,
                    remote: self.slice(place.to as u64, len, generation),
                })
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Batch {
            peer: match &self.remote {
                Remote::Process(peer) => Arc::clone(&peer.endpoint),
                Remote::SameEngine(_, endpoint) => Arc::clone(endpoint),
            },
            direction,
            pieces,
            checksum: safety.checksum,
            deadline: None,
        })
    }

    /// Moves a batch and waits for it. Anything but success by the wanted transport is an error.
    pub fn finish(&self, batch: Batch) -> Result<()> {
        let outcome = self.engine.submit_awaited(batch).wait();
        if let Some(error) = outcome.first_error() {
            return Err(error).context(format!("a batch over {}", self.kind));
        }
        ensure!(
            outcome.transport == Some(self.kind),
            "went by {:?} instead of {}",
            outcome.transport,
            self.kind
        );
        Ok(())
    }

    /// Starts one small write to a peer other than the driver's, and does not wait for it.
    pub fn start_write_to(&self, peer: &Arc<Endpoint>) -> Result<Transfer> {
        let piece = Piece {
            local: self.local.slice(0, 4096)?,
            remote: self.slice(0, 4096, None),
        };
        Ok(self.engine.submit(Batch {
            peer: Arc::clone(peer),
            direction: Direction::Write,
            pieces: vec![piece],
            checksum: false,
            deadline: None,
        }))
    }

    /// [`batch`](Self::batch) and [`finish`](Self::finish).
    pub fn run(
        &self,
        direction: Direction,
        places: &[Scatter],
        len: u64,
        safety: Safety,
    ) -> Result<()> {
        self.finish(self.batch(direction, places, len, safety)?)
    }
}

fn memory(access: Access, generation_tags: bool) -> AllocateOptions {
    AllocateOptions {
        access,
        generation_tags,
        pretouch: true,
        huge_pages: false,
    }
}

impl Driver {
    /// Fills the local memory with bytes that follow from `seed` and their place.
    pub fn fill(&self, seed: u64) -> Result<()> {
        self.each_chunk(|offset, chunk| {
            pattern(seed, offset, chunk);
            Ok(self.local.copy_in(offset, chunk)?)
        })
    }

    /// Compares the local memory, up to `len`, with what [`fill`](Self::fill) put there.
    pub fn check(&self, seed: u64, len: u64) -> Result<()> {
        let mut found = vec![0; CHUNK];
        self.each_chunk(|offset, chunk| {
            let wanted = usize::try_from(len.saturating_sub(offset))
                .map_or(chunk.len(), |left| left.min(chunk.len()));
            if wanted == 0 {
                return Ok(());
            }
            pattern(seed, offset, chunk);
            self.local.copy_out(offset, &mut found[..wanted])?;
            ensure!(
                found[..wanted] == chunk[..wanted],
                "wrong bytes within {CHUNK} bytes of offset {offset}"
            );
            Ok(())
        })
    }

    fn each_chunk(&self, mut work: impl FnMut(u64, &mut [u8]) -> Result<()>) -> Result<()> {
        let mut chunk = vec![0; CHUNK];
        let mut offset = 0;
        while offset < self.local.len() {
            let len =
                usize::try_from(self.local.len() - offset).map_or(CHUNK, |left| left.min(CHUNK));
            work(offset, &mut chunk[..len])?;
            offset += len as u64;
        }
        Ok(())
    }
}

const CHUNK: usize = 4 << 20;

/// Eight bytes at a time of a sequence that depends on the seed and on the place.
fn pattern(seed: u64, offset: u64, bytes: &mut [u8]) {
    let mut place = offset;
    for word in bytes.chunks_mut(8) {
        let mut value = (place ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        value ^= value >> 29;
        let value = value.wrapping_mul(0xBF58_476D_1CE4_E5B9).to_le_bytes();
        word.copy_from_slice(&value[..word.len()]);
        place += 8;
    }
}
