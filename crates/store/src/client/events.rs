//! Put sessions and holds that the master takes away (requirement S7).
//!
//! The session is marked at once, so it takes no ranges any more; the master is answered when none of
//! its transfers is under way, since the memory is somebody else's from then on. A session that this
//! client does not know is over already. Where a write ended without an answer from the memory's owner,
//! the answer says that this side can't tell. The master repeats commands until they are answered.

use std::collections::HashSet;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::core::Core;
use super::holds::Shared as Hold;
use crate::link::{CommandId, SessionEvent};
use crate::session::PutShared;
use crate::session::put_state::Phase;

/// The task that answers. Runs until the link is closed or it is dropped.
pub(super) async fn drop_task(core: Arc<Core>, mut events: mpsc::Receiver<SessionEvent>) {
    let mut answering: JoinSet<CommandId> = JoinSet::new();
    let mut known = HashSet::new();
    loop {
        tokio::select! {
            event = events.recv() => {
                let Some(SessionEvent::Drop { command, sessions }) = event else {
                    return;
                };
                if !known.insert(command) {
                    continue;
                }
                let puts: Vec<Arc<PutShared>> = sessions
                    .objects
                    .iter()
                    .filter_map(|object| core.puts.find(object.generation))
                    .collect();
                for put in &puts {
                    core.settled(put, Phase::Superseded);
                }
                let holds: Vec<Arc<Hold>> = sessions
                    .objects
                    .iter()
                    .filter_map(|object| core.holds.take(object.generation))
                    .collect();
                let core = Arc::clone(&core);
                answering.spawn(async move {
                    if drained(&core, &puts, &holds).await {
                        let in_doubt = |object| core.link.is_in_doubt(object);
                        let in_doubt = sessions.objects.iter().any(in_doubt);
                        core.link.fence_done(command, in_doubt);
                    }
                    command
                });
            }
            Some(done) = answering.join_next() => {
                if let Ok(command) = done {
                    known.remove(&command);
                }
            }
        }
    }
}

/// Waits until no transfer of the sessions is under way, and no slot of the holds is in use. If that takes too long the command is left
/// unanswered, and the master repeats it.
async fn drained(core: &Core, puts: &[Arc<PutShared>], holds: &[Arc<Hold>]) -> bool {
    for hold in holds {
        hold.idle().await;
    }
    for put in puts {
        if put.idle(core.config.drain).await.is_err() {
            return false;
        }
    }
    true
}
