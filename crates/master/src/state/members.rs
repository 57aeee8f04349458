//! Who takes part: clients, nodes, and processes that are both.
//!
//! A member is alive as long as it is heard of, by heartbeat or by any call of a session. The table only
//! says who there is; what a member's end means for its segments and sessions is the business of
//! [`State`](super::State).
//!
//! Locks: the table may be held while a shard's lock is taken, never the other way round.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use layercake_protocol::ids::ClientId;
use parking_lot::{RwLock, RwLockReadGuard};

use super::api::Location;
use super::moment::Moment;

/// One member.
#[derive(Debug)]
pub(crate) struct Member {
    /// For people.
    name: String,
    location: Option<Location>,
    /// In microseconds since the start.
    last_heard: AtomicU64,
}

impl Member {
    pub(crate) fn location(&self) -> Option<Location> {
        self.location
    }

    pub(crate) fn last_heard(&self) -> Moment {
        Moment::from_micros(self.last_heard.load(Ordering::Relaxed))
    }

    fn heard(&self, now: Moment) {
        self.last_heard
            .fetch_max(now.as_micros(), Ordering::Relaxed);
    }
}

/// See the module's description.
#[derive(Debug, Default)]
pub(crate) struct Members {
    table: RwLock<HashMap<ClientId, Member>>,
}

impl Members {
    /// Takes a member in; true: it was not known.
    pub(crate) fn join(
        &self,
        now: Moment,
        client: ClientId,
        name: &str,
        location: Option<Location>,
    ) -> bool {
        let member = Member {
            name: name.to_owned(),
            location,
            last_heard: AtomicU64::new(now.as_micros()),
        };
        self.table.write().insert(client, member).is_none()
    }

    pub(crate) fn leave(&self, client: ClientId) {
        self.table.write().remove(&client);
    }

    /// A member is heard of. `None`: it is not known; otherwise where it runs, if it said so.
    #[expect(
        clippy::option_option,
        reason = "known or not, and then located or not"
    )]
    pub(crate) fn heard(&self, now: Moment, client: ClientId) -> Option<Option<Location>> {
        let table = self.table.read();
        let member = table.get(&client)?;
        member.heard(now);
        Some(member.location())
    }

    /// Nobody could be heard for `deaf`: it does not count as silence.
    pub(crate) fn excuse(&self, now: Moment, deaf: Duration) {
        for member in self.table.read().values() {
            let heard = member.last_heard() + deaf;
            member.heard(heard.min(now));
        }
    }

    /// Takes out those that were not heard of for `ttl`.
    pub(crate) fn expire(&self, now: Moment, ttl: Duration) -> Vec<(ClientId, String)> {
        let silent = |member: &Member| now.since(member.last_heard()) >= ttl;
        if !self.table.read().values().any(silent) {
            return Vec::new();
        }
        let mut table = self.table.write();
        let gone = table.extract_if(|_, member| silent(member));
        gone.map(|(client, member)| (client, member.name)).collect()
    }

    /// How many can move bytes: nodes and clients, without the tools that come and go.
    pub(crate) fn located(&self) -> u64 {
        let table = self.table.read();
        let located = table.values().filter(|member| member.location.is_some());
        located.count() as u64
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, HashMap<ClientId, Member>> {
        self.table.read()
    }
}
