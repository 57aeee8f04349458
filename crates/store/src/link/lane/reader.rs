//! How frames come off a lane.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::lane::{Frame, Inbox, MAX_GREETING_BYTES, SAY_SOMETHING_WITHIN};
use prost::Message;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::line::Line;
use super::writer::{Offer, Writer};
use crate::link::config::Timeouts;

/// The one that reads a lane.
#[derive(Debug)]
pub(in crate::link) struct Reader {
    line: Arc<Line>,
    inbox: Inbox,
    /// Something came since the last look at the pulse.
    heard: bool,
}

impl Reader {
    pub(super) fn new(line: Arc<Line>) -> Self {
        Self {
            line,
            inbox: Inbox::new(MAX_GREETING_BYTES),
            heard: true,
        }
    }

    pub(super) fn accept_up_to(&mut self, most: usize) {
        self.inbox.accept_up_to(most);
    }

    /// The next message; `None`: the lane has ended. Nothing is lost if it is cancelled.
    pub(in crate::link) async fn message<M: Message + Default>(&mut self) -> io::Result<Option<M>> {
        loop {
            match self.frame().await? {
                Some(Frame::Message(message)) => return Ok(Some(message)),
                Some(Frame::Empty) => {}
                None => return Ok(None),
            }
        }
    }

    async fn frame<M: Message + Default>(&mut self) -> io::Result<Option<Frame<M>>> {
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        loop {
            if let Some(frame) = self.inbox.take().map_err(invalid)? {
                return Ok(Some(frame));
            }
            let Self { line, inbox, heard } = self;
            let room = inbox.room();
            match std::future::poll_fn(|cx| line.poll_read(cx, room)).await? {
                0 => return inbox.ended().map(|()| None).map_err(invalid),
                count => inbox.filled(count),
            }
            *heard = true;
        }
    }

    /// Hands every message on, and keeps the lane alive: says something when this side is silent, and
    /// asks for a sign of life when the master is. Gives the reason for the end.
    pub(in crate::link) async fn read<M: Message + Default>(
        &mut self,
        writer: &Writer,
        timeouts: &Timeouts,
        mut take: impl FnMut(M) -> Result<(), String>,
    ) -> String {
        let mut ticks = interval(timeouts.ping_every.min(SAY_SOMETHING_WITHIN));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pulse = Pulse::default();
        loop {
            tokio::select! {
                biased;
                frame = self.frame() => match frame {
                    Ok(Some(Frame::Message(message))) => {
                        if let Err(reason) = take(message) {
                            return reason;
                        }
                    }
                    Ok(Some(Frame::Empty)) => {}
                    Ok(None) => return "it closed the lane".to_owned(),
                    Err(error) => return error.to_string(),
                },
                _ = ticks.tick() => {
                    if pulse.is_dead(std::mem::take(&mut self.heard), timeouts.ping) {
                        return format!("it gave no sign of life within {:?}", timeouts.ping);
                    }
                    if let Err(Offer::Broken) = writer.say_something(pulse.asked.is_some()) {
                        return "the lane broke".to_owned();
                    }
                }
            }
        }
    }
}

/// Whether the master lives.
#[derive(Debug, Default)]
struct Pulse {
    /// Since when it is asked for a sign of life.
    asked: Option<Instant>,
}

impl Pulse {
    /// Looks: a master that was heard of is fine; one that was not is to be asked, and dead when it has not
    /// answered for `patience`.
    fn is_dead(&mut self, heard: bool, patience: Duration) -> bool {
        if heard {
            self.asked = None;
            return false;
        }
        self.asked.get_or_insert_with(Instant::now).elapsed() >= patience
    }
}
