//! The peers that this engine has something to do with.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

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
    /// The loop that the next peer's first lane is assigned to, among those that there are.
    next_home: AtomicUsize,
}

impl Peers {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self {
            context,
            loops: OnceLock::new(),
            known: RwLock::default(),
            next_home: AtomicUsize::new(0),
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
        // Each lane gets a thread of its own as far as there are, and peers with one lane are spread.
        let first = self.next_home.fetch_add(1, Ordering::Relaxed);
        let lane = |number: usize| {
            let token = next_token();
            let home = &loops[first.wrapping_add(number) % loops.len()];
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EngineConfig;
    use crate::tcp::event_loop::EventLoop;
    use crate::tcp::guests::Guests;

    /// With both lanes on one thread, large batches moved at half the speed of the machine.
    #[test]
    fn every_thread_gets_its_share_of_the_lanes_of_a_peer_and_of_many_peers() {
        let config = EngineConfig {
            lanes: 3.try_into().expect("not zero"),
            ..EngineConfig::default()
        };
        let context = Context::new(config);
        let guests = Guests::new(&context.config);
        let peers = Arc::new(Peers::new(Arc::clone(&context)));
        let loops: Vec<_> = (0..2)
            .map(|_| {
                let event_loop = EventLoop::new(
                    Arc::clone(&context),
                    Arc::clone(&peers),
                    Arc::clone(&guests),
                    None,
                );
                Arc::clone(event_loop.expect("descriptors are left").shared())
            })
            .collect();
        peers.set_loops(loops.clone());
        let addr = SocketAddr::from(([127, 0, 0, 1], 1));
        let mut shares = [0; 2];
        for _ in 0..8 {
            let peer = peers.find(EngineId::draw(), addr).expect("loops are set");
            // Other tokens are drawn meanwhile.
            next_token();
            let on = |home: &Arc<LoopShared>| {
                let lanes = peer.lanes().iter();
                lanes.filter(|lane| Arc::ptr_eq(lane.home(), home)).count()
            };
            let mine = [on(&loops[0]), on(&loops[1])];
            assert!(mine == [1, 2] || mine == [2, 1], "{mine:?}");
            shares = [shares[0] + mine[0], shares[1] + mine[1]];
        }
        assert_eq!(shares, [12, 12]);
    }
}
