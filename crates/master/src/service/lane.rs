//! A framed lane: the same conversation as over gRPC, without gRPC around it.
//!
//! One task reads, carries out and writes: a request that is answered at once costs one wake-up, one read
//! and one write. Answers that are ready together go out in one write. What the peer does not take is
//! bounded: beyond [`WRITE_AT`] bytes nothing is read until it is gone.
//!
//! A peer that breaks the rules is told how before the lane ends. One that says nothing for
//! [`SILENCE`], not even that it is there, is cut off, unless something is being worked on for it: then it
//! may well be this side that does not listen.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use layercake_protocol::convert::{ListedFrame, MAX_MESSAGE_BYTES};
use layercake_protocol::error::Refusal;
use layercake_protocol::lane::{
    EMPTY, Frame, Inbox, LaneError, MAX_GREETING_BYTES, SILENCE, put_frame,
};
use layercake_protocol::wire::lane_answer::Answer;
use layercake_protocol::wire::master_frame::Response;
use layercake_protocol::wire::{LaneAnswer, MasterFrame};
use prost::DecodeError;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Interval, MissedTickBehavior, timeout};
use tokio_stream::Stream;

use super::Core;
use super::greeting::Peer;
use super::stream::Conversation;

/// How long a peer may take to greet.
const GREETING_TIME: Duration = Duration::from_secs(10);

/// Answers of so many bytes are written before more are made.
const WRITE_AT: usize = 64 << 10;

/// What an empty buffer of answers may keep.
const MOST_KEPT: usize = 256 << 10;

/// Greets the peer behind the magic bytes, and talks to it until either side ends the lane.
pub(crate) async fn serve<IO>(core: Arc<Core>, io: IO, peer: Peer)
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let mut carrier = Carrier::new(io);
    let closing = core.closing.clone();
    let greeted = tokio::select! {
        greeted = timeout(GREETING_TIME, greet(&core, &mut carrier, peer)) => greeted,
        () = closing.cancelled() => return,
    };
    match greeted {
        Ok(Ok(true)) => {}
        // It was told why.
        Ok(Ok(false)) => return,
        Ok(Err(error)) => {
            tracing::debug!(%peer, %error, "a lane was not greeted");
            return;
        }
        Err(_) => {
            tracing::debug!(%peer, "a lane was not greeted in time");
            return;
        }
    }
    let _open = core.metrics.lanes.open(peer);
    let mut ticks = tokio::time::interval(SILENCE);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut lane = Lane {
        conversation: Conversation::begin(core, carrier),
        ticks,
        ended: false,
    };
    if let Err(error) = std::future::poll_fn(|cx| lane.poll(cx)).await {
        tracing::debug!(%peer, %error, "a lane broke");
    }
}

/// Versions and proofs. `false`: the peer was turned away.
async fn greet<IO>(core: &Core, carrier: &mut Carrier<IO>, peer: Peer) -> io::Result<bool>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let hello = carrier.read().await?;
    let answer = core.hello(peer, &hello).map(Answer::Hello);
    if !carrier.answer(answer).await? {
        return Ok(false);
    }
    let proof = carrier.read().await?;
    let answer = core.authenticate(peer, &proof).map(Answer::Admitted);
    let admitted = carrier.answer(answer).await?;
    carrier.inbox.accept_up_to(MAX_MESSAGE_BYTES);
    Ok(admitted)
}

/// A lane after its greeting.
struct Lane<IO> {
    conversation: Conversation<Carrier<IO>>,
    ticks: Interval,
    /// Nothing more will be said.
    ended: bool,
}

impl<IO: AsyncRead + AsyncWrite + Unpin> Lane<IO> {
    /// Goes on until nothing more can be done now; ready when the lane is over.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Poll::Ready(over) = self.poll_conversation(cx) {
            return Poll::Ready(over);
        }
        // After what came was read: a master that stood still must not hold that against its peers.
        while self.ticks.poll_tick(cx).is_ready() {
            let working = self.conversation.is_working();
            let heard = &mut self.conversation.requests().heard;
            if !std::mem::replace(heard, false) && !working {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
        }
        Poll::Pending
    }

    fn poll_conversation(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.ended {
            if self.conversation.requests().unwritten() >= WRITE_AT {
                ready!(self.conversation.requests().poll_write_out(cx))?;
            }
            match self.conversation.poll_answer(cx) {
                Poll::Ready(Some(answer)) => self.conversation.requests().say(&answer),
                Poll::Ready(None) => {
                    self.ended = true;
                    self.conversation.requests().say_what_is_wrong();
                }
                Poll::Pending => break,
            }
        }
        let carrier = self.conversation.requests();
        ready!(carrier.poll_write_out(cx))?;
        if self.ended {
            return Pin::new(&mut carrier.io).poll_shutdown(cx);
        }
        Poll::Pending
    }
}

/// The byte stream under a lane, as a source of requests and a place for answers.
struct Carrier<IO> {
    io: IO,
    inbox: Inbox,
    /// Answers on their way, of which `written` bytes are gone.
    out: Vec<u8>,
    written: usize,
    /// Something came since the last tick.
    heard: bool,
    /// A sign of life was asked for. However often: one answers all, so that a peer that does nothing but
    /// ask is no burden.
    asked: bool,
    /// What ended the requests, if it was no end that the peer may make.
    wrong: Option<LaneError>,
}

impl<IO> Carrier<IO> {
    fn new(io: IO) -> Self {
        Self {
            io,
            inbox: Inbox::new(MAX_GREETING_BYTES),
            out: Vec::new(),
            written: 0,
            heard: true,
            asked: false,
            wrong: None,
        }
    }

    fn unwritten(&self) -> usize {
        self.out.len() - self.written
    }

    fn say(&mut self, answer: &MasterFrame) {
        if let Err(error) = put_frame(&mut self.out, answer) {
            let refusal = Refusal::TooLarge {
                detail: format!("the answer: {error}"),
            };
            self.refuse(answer.request_id, answer.term, &refusal);
        }
    }

    /// Tells the peer why the lane ends, if the peer is why.
    fn say_what_is_wrong(&mut self) {
        if let Some(error) = self.wrong.take() {
            tracing::debug!(%error, "a lane carried what makes no sense");
            self.refuse(0, 0, &Refusal::invalid(error.to_string()));
        }
    }

    fn refuse(&mut self, request_id: u64, term: u64, refusal: &Refusal) {
        let frame = MasterFrame {
            request_id,
            term,
            response: Some(Response::Error(refusal.into())),
        };
        if let Err(error) = put_frame(&mut self.out, &frame) {
            tracing::debug!(%error, "a refusal does not fit into a frame");
        }
    }
}

impl<IO: AsyncRead + Unpin> Carrier<IO> {
    /// The next message, or the end of the stream.
    fn poll_frame<M>(
        &mut self,
        cx: &mut Context<'_>,
        decode: impl Fn(&[u8]) -> Result<M, DecodeError>,
    ) -> Poll<io::Result<Option<M>>> {
        loop {
            match self.inbox.take_with(&decode) {
                Ok(Some(Frame::Message(message))) => return Poll::Ready(Ok(Some(message))),
                Ok(Some(Frame::Empty)) => {
                    self.asked = true;
                    continue;
                }
                Ok(None) => {}
                Err(error) => return Poll::Ready(Err(self.break_off(error))),
            }
            let mut room = ReadBuf::new(self.inbox.room());
            ready!(Pin::new(&mut self.io).poll_read(cx, &mut room))?;
            let count = room.filled().len();
            if count == 0 {
                let ended = self.inbox.ended();
                return Poll::Ready(match ended {
                    Ok(()) => Ok(None),
                    Err(error) => Err(self.break_off(error)),
                });
            }
            self.inbox.filled(count);
            self.heard = true;
        }
    }

    fn break_off(&mut self, error: LaneError) -> io::Error {
        let text = error.to_string();
        self.wrong = Some(error);
        io::Error::new(io::ErrorKind::InvalidData, text)
    }

    /// A message of the greeting.
    async fn read<M: prost::Message + Default>(&mut self) -> io::Result<M> {
        let message =
            std::future::poll_fn(|cx| self.poll_frame(cx, |bytes| M::decode(bytes))).await?;
        message.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

impl<IO: AsyncWrite + Unpin> Carrier<IO> {
    fn poll_write_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if std::mem::take(&mut self.asked) {
            self.out.extend_from_slice(&EMPTY);
        }
        while self.written < self.out.len() {
            let rest = &self.out[self.written..];
            match ready!(Pin::new(&mut self.io).poll_write(cx, rest))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => self.written += count,
            }
        }
        self.written = 0;
        self.out.clear();
        self.out.shrink_to(MOST_KEPT);
        Pin::new(&mut self.io).poll_flush(cx)
    }

    /// Answers a message of the greeting; whether it goes on.
    async fn answer(&mut self, answer: Result<Answer, Refusal>) -> io::Result<bool> {
        let admitted = answer.is_ok();
        let answer = LaneAnswer {
            answer: Some(answer.unwrap_or_else(|refusal| Answer::Refused((&refusal).into()))),
        };
        put_frame(&mut self.out, &answer).map_err(io::Error::other)?;
        std::future::poll_fn(|cx| self.poll_write_out(cx)).await?;
        Ok(admitted)
    }
}

impl<IO: AsyncRead + Unpin> Stream for Carrier<IO> {
    type Item = io::Result<ListedFrame>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let frame = self.get_mut().poll_frame(cx, ListedFrame::decode);
        frame.map(Result::transpose)
    }
}
