//! Calls of a member about itself: segments and commands. Joining, heartbeats and leaving are the
//! link's own business.

use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{Generation, SegmentId};
use layercake_protocol::replica::Segment;
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request as Body;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::MasterLink;
use super::connection::Response;
use super::keys::{LONGEST_WAIT, millis};
use super::outbox::Chore;
use super::types::{CommandId, NodeEvent, SessionEvent};
use crate::error::StoreError;

impl MasterLink {
    /// Gives a segment to the store. `max_generation` is the greatest tag in it. Says whether the
    /// master had it already; repeating it is harmless.
    pub async fn mount(
        &self,
        segment: &Segment,
        max_generation: Generation,
    ) -> Result<bool, StoreError> {
        let request = self.once(Body::Mount(wire::MountRequest {
            segment: Some(segment.into()),
            max_generation: max_generation.0,
        }));
        match self.call(&request).await?.0 {
            Response::Mount(answer) => Ok(answer.already_mounted),
            _ => Err(self.shared().wrong_kind()),
        }
    }

    /// Takes a segment back. With `drain` the master puts no new objects there and answers when the
    /// last lease on the segment is over. If that takes longer than the time given, the answer is
    /// [`Refusal::Leased`], and the segment goes on draining: repeat the call, or unmount without
    /// drain, which ends it at once, leased or not.
    pub async fn unmount(
        &self,
        segment: SegmentId,
        drain: Option<Duration>,
    ) -> Result<(), StoreError> {
        let deadline = Instant::now() + drain.unwrap_or_default();
        loop {
            let asked = Instant::now();
            let left = deadline.saturating_duration_since(asked);
            let wait = left.min(LONGEST_WAIT);
            let request = self.once(Body::Unmount(wire::UnmountRequest {
                segment_id: segment.0,
                drain: drain.is_some(),
                drain_timeout_ms: millis(wait),
            }));
            let within = wait + self.shared().config.timeouts.call;
            match self.shared().call(&request, within).await {
                Ok((Response::Done(_), _)) => return Ok(()),
                Ok(_) => return Err(self.shared().wrong_kind()),
                Err(StoreError::Refused(Refusal::Leased))
                    if left > wait && asked.elapsed() >= wait => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Answers a command. Queued: it is delivered as soon as the link is up in the term that the
    /// command came from, and dropped if that term is over.
    pub fn fence_done(&self, command: CommandId, writer_attached: bool) {
        self.shared().outbox.push(Chore::FenceDone {
            command,
            writer_attached,
        });
    }

    /// What heartbeats say this member has mounted.
    pub fn set_mounted(&self, segments: Vec<SegmentId>) {
        *self.shared().mounted.lock() = segments;
    }

    /// The commands for a node. `None` if they were taken before: a link serves one node.
    pub fn node_events(&self) -> Option<mpsc::Receiver<NodeEvent>> {
        self.shared().node_events.take()
    }

    /// The commands for a client. `None` if they were taken before: a link serves one client.
    pub fn session_events(&self) -> Option<mpsc::Receiver<SessionEvent>> {
        self.shared().session_events.take()
    }
}
