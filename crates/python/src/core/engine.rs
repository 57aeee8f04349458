//! A transfer engine with the buffers that callers registered by address.

use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_store::StoreError;
use layercake_transport::{Access, AllocateOptions, Engine, Error, RegionDescriptor};
use thiserror::Error;

use super::buffers::{Buffer, Buffers, Resolver};
use super::copies::{Copies, ObjectCopy};
use super::settings::EngineSettings;
use crate::memory::{self, RegisterError, Unusable};

/// How long unregistering waits for transfers in flight. A transfer has 30 s.
const DRAIN: Duration = Duration::from_secs(35);

/// An engine and its registered buffers. A store and a transfer engine may share one.
#[derive(Debug)]
pub(crate) struct EngineCore {
    engine: Engine,
    buffers: Buffers,
    copies: Arc<Copies>,
    settings: EngineSettings,
}

/// Why a buffer was not registered, or not unregistered.
#[derive(Debug, Error)]
pub(crate) enum RegisterRefused {
    #[error(transparent)]
    Unusable(#[from] Unusable),
    /// Part of it is registered already.
    #[error("{0}")]
    Overlap(Error),
    #[error("no registered buffer begins at {addr:#x}")]
    Unknown { addr: u64 },
    #[error("{0}")]
    Other(Error),
}

impl From<Error> for RegisterRefused {
    fn from(error: Error) -> Self {
        match error {
            Error::Overlap { .. } => Self::Overlap(error),
            _ => Self::Other(error),
        }
    }
}

impl EngineCore {
    /// Starts an engine: its threads run and its listeners are bound when this returns.
    pub(crate) fn start(settings: &EngineSettings) -> Result<Arc<Self>, StoreError> {
        Ok(Arc::new(Self {
            engine: Engine::start(settings.config())?,
            buffers: Buffers::default(),
            copies: Arc::default(),
            settings: settings.clone(),
        }))
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// What it was started with.
    pub(crate) fn settings(&self) -> &EngineSettings {
        &self.settings
    }

    pub(crate) fn resolver(&self) -> Resolver<'_> {
        self.buffers.resolver()
    }

    /// Room for a copy of `len` bytes that a caller keeps.
    pub(crate) fn copy_room(&self, len: u64) -> Result<ObjectCopy, Error> {
        self.copies.room(len)
    }

    /// Registers memory by address. It must stay mapped until it is unregistered.
    pub(crate) fn register(
        &self,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<(), RegisterRefused> {
        let memory = memory::register(&self.engine, addr, len, access);
        let memory = memory.map_err(|error| match error {
            RegisterError::Unusable(error) => error.into(),
            RegisterError::Engine(error) => RegisterRefused::from(error),
        })?;
        self.buffers.insert(addr, Buffer { memory, access });
        Ok(())
    }

    /// Memory of the engine's own, registered. It is freed once it is unregistered and nothing moves in it.
    pub(crate) fn allocate(&self, len: u64, access: Access) -> Result<u64, Error> {
        let options = AllocateOptions {
            access,
            ..AllocateOptions::default()
        };
        let memory = self.engine.allocate(len, options)?;
        let addr = memory.addr() as u64;
        self.buffers.insert(addr, Buffer { memory, access });
        Ok(addr)
    }

    /// Unregisters the buffer that begins at `addr`, and waits until no transfer touches it.
    pub(crate) fn unregister(&self, addr: u64) -> Result<(), RegisterRefused> {
        self.unregister_within(addr, DRAIN)
    }

    /// As [`unregister`](Self::unregister), for callers that have so much time. The buffer of a call that ran out of it
    /// stays known, and can be unregistered again.
    pub(crate) fn unregister_within(
        &self,
        addr: u64,
        drain: Duration,
    ) -> Result<(), RegisterRefused> {
        let buffer = self.buffers.remove(addr);
        let buffer = buffer.ok_or(RegisterRefused::Unknown { addr })?;
        buffer.memory.unregister(drain).inspect_err(|_| {
            // It is withdrawn, and its bytes may still move: the call can be repeated.
            self.buffers.insert(addr, buffer.clone());
        })?;
        Ok(())
    }

    /// Unregisters all buffers, and waits, this long at most, until no transfer touches them. Peers and
    /// own transfers are refused from the start; whether nothing moves any more.
    pub(crate) fn unregister_all(&self, within: Duration) -> bool {
        let until = Instant::now() + within;
        let buffers = self.buffers.take_all();
        for buffer in &buffers {
            // Withdrawn whatever it answers: that is what counts here, for all of them before any wait.
            let _ = buffer.memory.unregister(Duration::ZERO);
        }
        let left = || until.saturating_duration_since(Instant::now());
        let is_busy = |buffer: &&Buffer| buffer.memory.unregister(left()).is_err();
        buffers.iter().filter(is_busy).count() == 0
    }

    /// What peers may touch: first addresses, and how the transport names the memory.
    pub(crate) fn exports(&self) -> Vec<(u64, RegionDescriptor)> {
        self.buffers.shown()
    }

    pub(crate) fn shutdown(&self, deadline: Duration) {
        self.engine.shutdown(deadline);
    }
}
