//! Shared memory between two engines of one process.

mod bytes;
mod checks;
mod peers;
#[path = "../shm_support/mod.rs"]
mod shm_support;

use layercake_transport::{
    Access, AllocateOptions, Direction, Engine, LocalSlice, Memory, Outcome, RemoteSlice,
    TransportSet,
};

use shm_support::*;

const READ_WRITE: AllocateOptions = AllocateOptions {
    access: Access::RemoteReadWrite,
    generation_tags: true,
    pretouch: false,
    huge_pages: false,
};

/// Two engines, and memory of each.
struct Scene {
    owner: Engine,
    peer: Engine,
    theirs: Memory,
    mine: Memory,
    remote: Remote,
}

fn scene(len: u64, options: AllocateOptions) -> Scene {
    scene_of(shm_only(), shm_only(), len, options)
}

fn scene_of(owner: TransportSet, peer: TransportSet, len: u64, options: AllocateOptions) -> Scene {
    let (owner, peer) = (engine(owner), engine(peer));
    let theirs = owner.allocate(len, options).expect("allocated");
    let mine = peer
        .allocate(len, AllocateOptions::default())
        .expect("allocated");
    let remote = Remote::of(&owner, &theirs);
    Scene {
        owner,
        peer,
        theirs,
        mine,
        remote,
    }
}

impl Scene {
    fn pair(&self, offset: u64, len: u64) -> (LocalSlice, RemoteSlice) {
        let local = self.mine.slice(offset, len).expect("inside");
        (local, self.remote.slice(offset, len))
    }

    fn write(&self, pieces: Vec<(LocalSlice, RemoteSlice)>) -> Outcome {
        transfer(&self.peer, &self.remote, Direction::Write, pieces)
    }

    fn read(&self, pieces: Vec<(LocalSlice, RemoteSlice)>) -> Outcome {
        transfer(&self.peer, &self.remote, Direction::Read, pieces)
    }
}

fn content(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(memory.len()).expect("fits")];
    memory.copy_out(0, &mut bytes).expect("inside");
    bytes
}
