//! The tasks of a node: one keeps its segments mounted, one listens to the master.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use layercake_protocol::ids::SegmentId;
use layercake_protocol::replica::Segment;
use layercake_transport::Memory;
use tokio::sync::mpsc;

use super::slots::{FRESH, Phase, Stock};
use super::workshop::{Job, Made};
use super::{SegmentSpec, Shared};
use crate::error::StoreError;
use crate::link::{Life, LinkState, NodeEvent};

/// The pause before a mount that failed for a passing reason is tried again.
const RETRY: Duration = Duration::from_millis(100);

/// Keeps the segments mounted: mounts what is made, and has what was lost made anew.
pub(super) async fn keep_mounted(shared: Arc<Shared>, mut made: mpsc::Receiver<Made>) {
    let mut state = shared.link.watch();
    loop {
        let up = match *state.borrow_and_update() {
            LinkState::Up { life, .. } => Some(life),
            LinkState::Closed => return,
            _ => None,
        };
        let tried = match up {
            Some(life) => {
                let lost = shared.slots.lock().lost_before(life);
                replace(&shared, lost);
                mount_ready(&shared, life).await
            }
            None => Ok(()),
        };
        let retry = async {
            match tried {
                Ok(()) => std::future::pending().await,
                Err(Again) => tokio::time::sleep(RETRY).await,
            }
        };
        tokio::select! {
            arrived = made.recv() => match arrived {
                Some((slot, memory)) => take_made(&shared, slot, memory),
                None => return,
            },
            changed = state.changed() => if changed.is_err() { return },
            () = retry => {}
        }
    }
}

/// A mount is to be tried again.
struct Again;

async fn mount_ready(shared: &Shared, life: Life) -> Result<(), Again> {
    loop {
        let offer = shared.slots.lock().offer(life);
        let Some((slot, segment)) = offer else {
            return Ok(());
        };
        match shared.link.mount(&segment, FRESH).await {
            // What was in an earlier life belongs to the past; the next round sees to it.
            Ok(_) if self::life(shared) == Some(life) => {
                shared.slots.lock().mounted(slot, life);
                shared.tell();
            }
            Ok(_) => return Err(Again),
            Err(error) if error.is_retryable() || is_membership(&error) => {
                tracing::debug!(segment = %segment.id, %error, "not mounted yet");
                return Err(Again);
            }
            Err(error) => {
                tracing::error!(segment = %segment.id, %error, "the master does not take a segment");
                shared.slots.lock().set(slot, Phase::Gone);
                shared.fail(error);
            }
        }
    }
}

/// The master does not know this member: the link is about to join again.
fn is_membership(error: &StoreError) -> bool {
    use layercake_protocol::error::Refusal;
    matches!(error, StoreError::Refused(Refusal::UnknownMember))
}

/// The membership that the link has now, if it is up.
pub(super) fn life(shared: &Shared) -> Option<Life> {
    match shared.link.state() {
        LinkState::Up { life, .. } => Some(life),
        _ => None,
    }
}

fn take_made(shared: &Shared, slot: usize, memory: Result<Memory, layercake_transport::Error>) {
    match memory {
        Ok(memory) => {
            let region = memory.region();
            let segment = Segment {
                id: SegmentId::draw(),
                name: shared.link.name().to_owned(),
                endpoint: shared.engine.endpoint().clone(),
                region: region.region,
                capability: region.capability,
                len: region.len,
                kind: region.kind,
            };
            shared.slots.lock().made(slot, Stock { segment, memory });
        }
        Err(error) => {
            tracing::error!(%error, "no memory for a segment");
            shared.slots.lock().set(slot, Phase::Gone);
            shared.fail(error.into());
        }
    }
}

/// Has lost segments made anew.
fn replace(shared: &Shared, lost: Vec<(usize, SegmentSpec, Memory)>) {
    if lost.is_empty() {
        return;
    }
    tracing::info!(
        segments = lost.len(),
        "the master has no knowledge of these segments any more, bringing new ones"
    );
    shared.tell();
    for (slot, spec, memory) in lost {
        shared.replaced.fetch_add(1, Ordering::Relaxed);
        shared.workshop.submit(Job::Make {
            slot,
            spec,
            old: Some(memory),
        });
    }
}

/// Carries out what the master commands.
pub(super) async fn listen(shared: Arc<Shared>, mut events: mpsc::Receiver<NodeEvent>) {
    while let Some(event) = events.recv().await {
        match event {
            NodeEvent::Fence { command, fence } => {
                let memory = shared.slots.lock().memory(fence.segment).cloned();
                shared.fences.keep_out(command, &fence, memory.as_ref());
            }
            NodeEvent::Missing(ids) => {
                let lost = shared.slots.lock().lost(&ids);
                replace(&shared, lost);
            }
        }
    }
}
