//! A small working master over real gRPC, for tests of the link: it keeps objects in a map, answers
//! what it is asked, records what it saw, and misbehaves on demand.
//!
//! It runs on a runtime of its own, so that it can be killed like a process (all its sockets close
//! without a word), or frozen like a stopped one (it answers nothing, not even pings).

mod objects;
mod script;
mod service;
mod serving;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::wire;
use layercake_protocol::wire::master_frame::Response as Answer;
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, mpsc};
use tonic::Status;

use objects::Objects;
pub(crate) use script::{Fault, Kind, Nature, Seen};
pub(crate) use serving::Served;

/// How long a test waits for anything that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

#[derive(Default)]
struct State {
    nature: Nature,
    seen: Vec<Seen>,
    hellos: u64,
    authentications: u64,
    faults: HashMap<Kind, VecDeque<Fault>>,
    members: HashSet<u128>,
    objects: Objects,
    streams: Vec<mpsc::Sender<Result<wire::MasterFrame, Status>>>,
    missing: Vec<u64>,
    ticket: u8,
}

/// A handle on the master; clones share it, and it outlives the runtimes that serve it.
#[derive(Clone)]
pub(crate) struct FakeMaster {
    state: Arc<Mutex<State>>,
    release: Arc<Semaphore>,
    changed: Arc<Notify>,
}

impl Default for FakeMaster {
    fn default() -> Self {
        Self {
            state: Arc::default(),
            release: Arc::new(Semaphore::new(0)),
            changed: Arc::default(),
        }
    }
}

impl FakeMaster {
    pub(crate) fn new(nature: Nature) -> Self {
        let master = Self::default();
        master.state.lock().nature = nature;
        master
    }

    /// A new master in the place of the old: another term, nobody and nothing known.
    pub(crate) fn restart(&self) {
        let mut state = self.state.lock();
        state.nature.term += 1;
        state.members.clear();
        state.objects = Objects::default();
        state.streams.clear();
    }

    /// Forgets its members, as after their time to live.
    pub(crate) fn forget_members(&self) {
        self.state.lock().members.clear();
    }

    /// Forgets the tickets that it gave.
    pub(crate) fn forget_tickets(&self) {
        self.state.lock().ticket += 1;
    }

    /// Treats the next request of this kind so; several are queued.
    pub(crate) fn on(&self, kind: Kind, fault: Fault) {
        self.state
            .lock()
            .faults
            .entry(kind)
            .or_default()
            .push_back(fault);
    }

    /// Lets one held answer go.
    pub(crate) fn release(&self) {
        self.release.add_permits(1);
    }

    /// Names these segments as missing in every heartbeat's answer.
    pub(crate) fn miss_segments(&self, ids: Vec<u64>) {
        self.state.lock().missing = ids;
    }

    /// Sends a command on every open stream.
    pub(crate) async fn command(&self, command: Answer) {
        let (term, streams) = {
            let mut state = self.state.lock();
            state.streams.retain(|stream| !stream.is_closed());
            (state.nature.term, state.streams.clone())
        };
        for stream in streams {
            let frame = wire::MasterFrame {
                request_id: 0,
                term,
                response: Some(command.clone()),
            };
            // A stream that has just ended does not count.
            let _ = stream.send(Ok(frame)).await;
        }
    }

    /// What arrived of one kind.
    pub(crate) fn seen(&self, kind: Kind) -> Vec<Seen> {
        let state = self.state.lock();
        state
            .seen
            .iter()
            .filter(|seen| seen.kind == kind)
            .cloned()
            .collect()
    }

    /// How many members it knows.
    pub(crate) fn members(&self) -> usize {
        self.state.lock().members.len()
    }

    /// The kinds of what came from members that had left by then.
    pub(crate) fn seen_after_leaving(&self) -> Vec<Kind> {
        let mut left = HashSet::new();
        let state = self.state.lock();
        let late = state.seen.iter().filter(|seen| {
            let late = left.contains(&seen.context.client);
            if seen.kind == Kind::Leave {
                left.insert(seen.context.client);
            }
            late
        });
        late.map(|seen| seen.kind).collect()
    }

    pub(crate) fn greetings(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.hellos, state.authentications)
    }

    /// Makes an object.
    pub(crate) fn insert(&self, key: &str) {
        self.state.lock().objects.insert(key);
    }

    pub(crate) fn reservations(&self) -> usize {
        self.state.lock().objects.reservations()
    }

    /// Waits until what arrived fulfils a condition.
    pub(crate) async fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let met = async {
            loop {
                let changed = self.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if condition(self) {
                    return;
                }
                changed.await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, met).await;
        assert!(waited.is_ok(), "never happened: {what}");
    }
}
