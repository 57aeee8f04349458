//! One member's long-lived stream, whatever carries it: gRPC, or a framed lane.
//!
//! The stream of answers reads the stream of requests itself: whoever polls it for the next answer
//! carries the next request out on the spot. So a request costs no task switch and no queue, and a
//! client that does not take its answers is not read. Only what does not end at once goes elsewhere: a
//! batch of several chunks becomes a task of the core's tracker, which ends even if the stream does not
//! live to see it; a call that waits becomes a task of this stream, and is dropped with it. Their
//! answers, and the master's own commands, come through one bounded queue.
//!
//! A stream speaks for one member, the one that its first request names. Its end does not end the
//! member. When the master closes down, what is under way is answered, and the stream ends.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use layercake_protocol::convert::ListedFrame;
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::ClientId;
use layercake_protocol::wire::client_frame::Request;
use layercake_protocol::wire::master_frame::Response;
use layercake_protocol::wire::{ClientFrame, MasterFrame};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::Stream;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::{Status, Streaming};

use super::Core;
use super::links::{Outbox, StreamId};

/// Requests that are answered in a row before other tasks of the thread get their turn.
const IN_A_ROW: u32 = 32;

/// What goes on outside of the stream's own poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A batch of several chunks.
    Batch,
    /// A call that waits for something to happen.
    Wait,
}

type Work = Pin<Box<dyn Future<Output = MasterFrame> + Send>>;

/// The answers to one stream of requests.
pub(crate) struct Conversation<S> {
    core: Arc<Core>,
    id: StreamId,
    member: Option<ClientId>,
    requests: S,
    /// The client has said all, or is gone.
    over: bool,
    outbox: Outbox,
    arrived: mpsc::Receiver<MasterFrame>,
    /// Ends when the work does; what waits is aborted when the stream is dropped.
    under_way: JoinSet<Kind>,
    batches: usize,
    waits: usize,
    closing: Pin<Box<WaitForCancellationFutureOwned>>,
    in_a_row: u32,
}

impl<S> Conversation<S> {
    pub(super) fn begin(core: Arc<Core>, requests: S) -> Self {
        let (outbox, arrived) = mpsc::channel(core.limits.queued_frames);
        core.metrics.streams.inc();
        Self {
            id: core.draw_stream_id(),
            closing: Box::pin(core.closing.clone().cancelled_owned()),
            core,
            member: None,
            requests,
            over: false,
            outbox,
            arrived,
            under_way: JoinSet::new(),
            batches: 0,
            waits: 0,
            in_a_row: 0,
        }
    }

    /// Where the requests come from.
    pub(super) fn requests(&mut self) -> &mut S {
        &mut self.requests
    }

    /// Whether something is being worked on that is not answered yet.
    pub(super) fn is_working(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Makes sure that the stream speaks for one member.
    fn identify(&mut self, frame: &ClientFrame) -> Result<(), Refusal> {
        // A frame without an id is refused where it is read.
        let Some(id) = frame.context.as_ref().and_then(|context| context.client_id) else {
            return Ok(());
        };
        let member = ClientId::from(id);
        match self.member {
            None => {
                self.member = Some(member);
                let outbox = self.outbox.clone();
                self.core
                    .links
                    .attach(self.core.now(), member, self.id, outbox);
                self.core.state.back(member);
                Ok(())
            }
            Some(known) if known == member => Ok(()),
            Some(known) => Err(Refusal::invalid(format!(
                "client_id {member}, this stream is that of {known}"
            ))),
        }
    }

    /// Begins a request; the answer, if it is there at once.
    fn take(&mut self, frame: ListedFrame, cx: &mut Context<'_>) -> Option<MasterFrame> {
        if let Err(refusal) = self.identify(&frame.frame) {
            return Some(MasterFrame {
                request_id: frame.frame.context.map_or(0, |context| context.request_id),
                term: self.core.term.0,
                response: Some(Response::Error((&refusal).into())),
            });
        }
        let kind = match frame.frame.request {
            Some(Request::WaitComplete(_) | Request::Unmount(_)) => Kind::Wait,
            _ => Kind::Batch,
        };
        let may_wait = self.waits < self.core.limits.waits_per_stream;
        let mut work: Work = Box::pin(Arc::clone(&self.core).answer(frame, may_wait));
        // Nearly always this is all: only waits and large batches are not done at the first try.
        if let Poll::Ready(answer) = work.as_mut().poll(cx) {
            return Some(answer);
        }
        self.go_on_elsewhere(kind, work);
        None
    }

    fn go_on_elsewhere(&mut self, kind: Kind, work: Work) {
        let outbox = self.outbox.clone();
        let work = async move {
            // Whoever is not there any more gets no answer.
            let _ = outbox.send(work.await).await;
        };
        match kind {
            Kind::Batch => {
                self.batches += 1;
                let task = self.core.work.spawn(work);
                self.under_way.spawn(async move {
                    if let Err(error) = task.await {
                        tracing::error!(%error, "a batch was not carried out");
                    }
                    kind
                });
            }
            Kind::Wait => {
                self.waits += 1;
                self.under_way.spawn(async move {
                    work.await;
                    kind
                });
            }
        }
    }

    /// Takes note of what has ended meanwhile.
    fn reap(&mut self, cx: &mut Context<'_>) {
        while let Poll::Ready(Some(ended)) = self.under_way.poll_join_next(cx) {
            match ended {
                Ok(Kind::Batch) => self.batches -= 1,
                Ok(Kind::Wait) => self.waits -= 1,
                Err(error) => {
                    tracing::error!(%error, "a call that waits was not carried out");
                    self.waits -= 1;
                }
            }
        }
    }
}

impl<S, F, E> Conversation<S>
where
    S: Stream<Item = Result<F, E>> + Unpin,
    F: Into<ListedFrame>,
{
    /// The next answer or command; `None`: all is said.
    pub(super) fn poll_answer(&mut self, cx: &mut Context<'_>) -> Poll<Option<MasterFrame>> {
        if self.in_a_row >= IN_A_ROW {
            self.in_a_row = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        loop {
            if let Poll::Ready(Some(frame)) = self.arrived.poll_recv(cx) {
                self.in_a_row += 1;
                return Poll::Ready(Some(frame));
            }
            self.reap(cx);
            let frame = if self.over || self.batches >= self.core.limits.batches_per_stream {
                None
            } else {
                match Pin::new(&mut self.requests).poll_next(cx) {
                    Poll::Ready(Some(Ok(frame))) => Some(frame.into()),
                    // A broken stream is the client's to notice: it opens another.
                    Poll::Ready(Some(Err(_)) | None) => {
                        self.over = true;
                        None
                    }
                    Poll::Pending => None,
                }
            };
            let Some(frame) = frame else {
                let closing = self.closing.as_mut().poll(cx).is_ready();
                if (self.over || closing) && self.under_way.is_empty() {
                    // Answers are queued before their work counts as ended.
                    return Poll::Ready(self.arrived.try_recv().ok());
                }
                self.in_a_row = 0;
                return Poll::Pending;
            };
            if let Some(answer) = self.take(frame, cx) {
                self.in_a_row += 1;
                return Poll::Ready(Some(answer));
            }
        }
    }
}

/// As gRPC carries it.
impl Stream for Conversation<Streaming<ClientFrame>> {
    type Item = Result<MasterFrame, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.get_mut().poll_answer(cx).map(|answer| answer.map(Ok))
    }
}

impl<S> Drop for Conversation<S> {
    fn drop(&mut self) {
        self.core.metrics.streams.dec();
        if let Some(member) = self.member {
            let now = self.core.now();
            if self.core.links.detach(now, member, self.id) {
                self.core.state.away(member);
            }
        }
    }
}

impl<S> fmt::Debug for Conversation<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conversation")
            .field("id", &self.id)
            .field("member", &self.member)
            .field("batches", &self.batches)
            .field("waits", &self.waits)
            .finish_non_exhaustive()
    }
}
