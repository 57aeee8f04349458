//! The peers that this engine has something to do with.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::OnceLock;

use layercake_protocol::ids::EngineId;
use parking_lot::RwLock;

use super::event_loop::{LoopShared, next_token};
use super::lane::Lane;
use super::peer::{Peer, PeerKey, PeerShared};
use crate::backend::Context;

#[derive(Debug)]
pub(super) struct Peers {
    context: Arc<Context>,
    loops: OnceLock<Vec<Arc<LoopShared>>>,
    known: RwLock<HashMap<PeerKey, Arc<Peer>>>,
}

impl Peers {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self {
            context,
            loops: OnceLock::new(),
            known: RwLock::default(),
        }
    }

    /// Sets the loops that lanes are assigned to; once, before the first peer.
    pub(super) fn set_loops(&self, loops: Vec<Arc<LoopShared>>) {
        let first = self.loops.set(loops).is_ok();
        debug_assert!(first, "loops are set once");
    }

    /// The peer of that name, known or new.
    pub(super) fn find(&self, engine: EngineId, addr: SocketAddr) -> Option<Arc<Peer>> {
        let key = (engine, addr);
        if let Some(peer) = self.known.read().get(&key) {
            return Some(Arc::clone(peer));
        }
        let loops = self.loops.get()?;
        let mut peers = self.known.write();
        let peer = peers
            .entry(key)
            .or_insert_with(|| Arc::new(self.create(engine, addr, loops)));
        Some(Arc::clone(peer))
    }

    fn create(&self, engine: EngineId, addr: SocketAddr, loops: &[Arc<LoopShared>]) -> Peer {
        let shared = Arc::new(PeerShared::new(engine, addr, &self.context.stats));
        let lane = |number: usize| {
            let token = next_token();
            // Tokens are spread evenly, and so are the lanes of many peers.
            let home = &loops[(token.0 + number) % loops.len()];
            let lane = Lane::new(
                Arc::clone(&shared),
                Arc::clone(&self.context),
                Arc::clone(home),
                token,
            );
            home.adopt(&lane);
            lane
        };
        let lanes = (0..usize::from(self.context.config.lanes.get()))
            .map(lane)
            .collect();
        Peer::new(shared, lanes)
    }

    /// Lets go of a peer that has retired.
    pub(super) fn forget(&self, shared: &Arc<PeerShared>) {
        let key = (shared.engine, shared.addr);
        let removed = {
            let mut peers = self.known.write();
            let same = peers
                .get(&key)
                .is_some_and(|peer| Arc::ptr_eq(peer.shared(), shared));
            if same { peers.remove(&key) } else { None }
        };
        if let Some(peer) = removed {
            for lane in peer.lanes() {
                lane.home().forget(lane.token());
            }
        }
    }
}
