//! How frames come off a lane.
//!
//! Whoever holds the inbox reads. A caller that blocks its thread until an answer is there holds it while it
//! waits: it *leads*, and hands the answers of others to them. When its own is there it passes the lead to another
//! one that waits so, if there is any. The link's task reads when nobody leads, for callers that do not
//! block and for commands; it would be woken in vain by every answer that a leader takes, so it stands
//! aside while there are leaders, and looks again every [`LOOK_AGAIN`]. It is called back when a call is
//! left that nobody leads for. A leader also ends calls whose time is over, so that nobody else has to be woken for
//! that. One who also looks after the connection of a transfer waits for both sockets at once.
//!
//! Order: `inbox` before any lock of a connection; `following` and `looked` alone.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use layercake_protocol::lane::{Frame, Inbox, MAX_GREETING_BYTES, SAY_SOMETHING_WITHIN};
use layercake_protocol::wire::MasterFrame;
use layercake_transport::Lead;
use parking_lot::{Mutex, MutexGuard};
use prost::Message;
use tokio::sync::Notify;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep};

use super::line::Line;
use super::writer::{Offer, Writer};
use crate::link::config::Timeouts;
use crate::link::parker::{Awaited, Parker};

/// How long the link's task stands aside at a time.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// What becomes of the frames that are read.
pub(in crate::link) trait Takes {
    /// Takes one; an error ends the lane.
    fn take(&self, frame: MasterFrame) -> Result<(), String>;

    /// Whether anybody waits for an answer.
    fn is_waited_for(&self) -> bool;

    /// Ends the calls whose time is over.
    fn end_overdue(&self);
}

/// See the module's text.
#[derive(Debug)]
pub(in crate::link) struct Reader {
    line: Arc<Line>,
    inbox: Mutex<Inbox>,
    /// Something came since the last look at the pulse.
    heard: AtomicBool,
    /// How often somebody led.
    led: AtomicU64,
    /// The link's task does not read.
    aside: AtomicBool,
    call_back: Notify,
    /// When a leader looked for calls whose time is over.
    looked: Mutex<Instant>,
    /// Why a leader found that the lane is over.
    over: Mutex<Option<String>>,
    is_over: Notify,
    /// Those who wait while another one leads.
    following: Mutex<VecDeque<Arc<Parker>>>,
}

impl Reader {
    pub(super) fn new(line: Arc<Line>) -> Self {
        Self {
            line,
            inbox: Mutex::new(Inbox::new(MAX_GREETING_BYTES)),
            heard: AtomicBool::new(true),
            led: AtomicU64::new(0),
            aside: AtomicBool::new(false),
            call_back: Notify::new(),
            looked: Mutex::new(Instant::now()),
            over: Mutex::new(None),
            is_over: Notify::new(),
            following: Mutex::default(),
        }
    }

    pub(super) fn accept_up_to(&self, most: usize) {
        self.inbox.lock().accept_up_to(most);
    }

    /// The next message, while nobody else reads; `None`: the lane has ended.
    pub(in crate::link) async fn message<M: Message + Default>(&self) -> io::Result<Option<M>> {
        std::future::poll_fn(|cx| {
            let mut inbox = self.inbox.lock();
            loop {
                match inbox.take().map_err(invalid)? {
                    Some(Frame::Message(message)) => return Poll::Ready(Ok(Some(message))),
                    Some(Frame::Empty) => continue,
                    None => {}
                }
                match ready!(self.line.poll_read(cx, inbox.room()))? {
                    0 => return Poll::Ready(inbox.ended().map(|()| None).map_err(invalid)),
                    count => inbox.filled(count),
                }
            }
        })
        .await
    }

    /// Takes all frames that are there as a whole; why the lane is over.
    fn take_all(inbox: &mut Inbox, takes: &impl Takes) -> Result<(), String> {
        loop {
            match inbox.take() {
                Ok(Some(Frame::Message(frame))) => takes.take(frame)?,
                Ok(Some(Frame::Empty)) => {}
                Ok(None) => return Ok(()),
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    /// Counts what was read, and takes what is whole by it.
    fn arrived(
        &self,
        inbox: &mut Inbox,
        read: io::Result<usize>,
        takes: &impl Takes,
    ) -> Result<(), String> {
        match read {
            Ok(0) => Err(match inbox.ended() {
                Ok(()) => "it closed the lane".to_owned(),
                Err(error) => error.to_string(),
            }),
            Ok(count) => {
                inbox.filled(count);
                self.heard.store(true, Ordering::Relaxed);
                Self::take_all(inbox, takes)
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Waits on this thread until `parker` is woken, or something else happens that is worth another look:
    /// as the leader, who looks after what `other` leads as well, or while another one leads. `false`: that is not
    /// possible on this lane, or there is another leader and something else to look after.
    pub(in crate::link) fn wait(
        &self,
        parker: &Arc<Parker>,
        takes: &impl Takes,
        other: &mut Option<Lead>,
    ) -> bool {
        if self.line.as_socket().is_none() || self.over.lock().is_some() {
            return false;
        }
        if let Some(inbox) = self.inbox.try_lock() {
            self.lead(inbox, parker, takes, other);
            return true;
        }
        if other.is_some() {
            return false;
        }
        self.following.lock().push_back(Arc::clone(parker));
        // The leader may have left just before.
        if let Some(inbox) = self.inbox.try_lock() {
            self.stop_following(parker);
            self.lead(inbox, parker, takes, other);
            return true;
        }
        parker.park();
        if self.stop_following(parker) {
            return true;
        }
        // It was called to lead. If it has no reason to wait any more, it calls another one.
        if parker.is_woken() {
            self.pass_on(takes);
        } else if let Some(inbox) = self.inbox.try_lock() {
            self.lead(inbox, parker, takes, other);
        }
        true
    }

    /// `false`: it was not among the followers, since it was called to lead.
    fn stop_following(&self, parker: &Arc<Parker>) -> bool {
        let mut following = self.following.lock();
        let found = following
            .iter()
            .position(|other| Arc::ptr_eq(other, parker));
        found.and_then(|found| following.remove(found)).is_some()
    }

    fn lead(
        &self,
        mut inbox: MutexGuard<'_, Inbox>,
        parker: &Parker,
        takes: &impl Takes,
        other: &mut Option<Lead>,
    ) {
        self.led.fetch_add(1, Ordering::Relaxed);
        let done = self.lead_until_woken(&mut inbox, parker, takes, other);
        drop(inbox);
        if let Err(reason) = done {
            *self.over.lock() = Some(reason);
            self.is_over.notify_one();
        }
        self.pass_on(takes);
    }

    fn lead_until_woken(
        &self,
        inbox: &mut Inbox,
        parker: &Parker,
        takes: &impl Takes,
        other: &mut Option<Lead>,
    ) -> Result<(), String> {
        // What the link's task read and did not take, for want of its turn.
        Self::take_all(inbox, takes)?;
        while !parker.is_woken() {
            let Some(socket) = self.line.as_socket() else {
                return Ok(());
            };
            let ready = wait_for(parker, Awaited::to_read(socket), other);
            self.look_at_deadlines(parker, takes);
            if !ready.map_err(|error| error.to_string())? {
                continue;
            }
            match self.line.try_read(inbox.room()) {
                Ok(None) => {}
                Ok(Some(count)) => self.arrived(inbox, Ok(count), takes)?,
                Err(error) => self.arrived(inbox, Err(error), takes)?,
            }
        }
        Ok(())
    }

    /// Those who lead for a moment each look as often as one who leads for long.
    fn look_at_deadlines(&self, parker: &Parker, takes: &impl Takes) {
        let now = Instant::now();
        let mut looked = self.looked.lock();
        if now - *looked >= parker.look_again() {
            *looked = now;
            drop(looked);
            takes.end_overdue();
        }
    }

    /// Has another one lead, or the link's task read, if there is something to wait for.
    fn pass_on(&self, takes: &impl Takes) {
        if self.inbox.is_locked() {
            // By one who will do it.
            return;
        }
        let next = self.following.lock().pop_front();
        match next {
            Some(next) => next.call(),
            None if takes.is_waited_for() => self.call_back(),
            None => {}
        }
    }

    /// Has the link's task read, unless somebody leads. To be called when a call was made by one who does not.
    pub(in crate::link) fn call_back(&self) {
        if self.aside.load(Ordering::Acquire) && !self.inbox.is_locked() {
            self.call_back.notify_one();
        }
    }

    /// Hands frames on while nobody leads, and keeps the lane alive: says something when this side is
    /// silent, and asks for a sign of life when the master is. Gives the reason for the end.
    pub(in crate::link) async fn read(
        &self,
        writer: &Writer,
        timeouts: &Timeouts,
        takes: &impl Takes,
    ) -> String {
        let mut ticks = interval(timeouts.ping_every.min(SAY_SOMETHING_WITHIN));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut life = SignsOfLife {
            reader: self,
            writer,
            patience: timeouts.ping,
            ticks,
            asked: None,
        };
        let mut led = self.led.load(Ordering::Relaxed);
        loop {
            let read = std::future::poll_fn(|cx| self.poll_unless_led(cx, led, takes));
            let over = tokio::select! {
                biased;
                read = read => read.err(),
                reason = life.end() => Some(reason),
            };
            if let Some(reason) = over {
                return reason;
            }
            match self.stand_aside(&mut life, takes).await {
                Ok(now) => led = now,
                Err(reason) => return reason,
            }
        }
    }

    /// Reads until somebody has led who had not by then, or the lane is over.
    fn poll_unless_led(
        &self,
        cx: &mut Context<'_>,
        led: u64,
        takes: &impl Takes,
    ) -> Poll<Result<(), String>> {
        let Some(mut inbox) = self.inbox.try_lock() else {
            return Poll::Ready(Ok(()));
        };
        if self.led.load(Ordering::Relaxed) != led {
            return Poll::Ready(Ok(()));
        }
        loop {
            let read = ready!(self.line.poll_read(cx, inbox.room()));
            self.arrived(&mut inbox, read, takes)?;
        }
    }

    /// Leaves the lane to its leaders until there are none; how often somebody had led by then.
    async fn stand_aside(
        &self,
        life: &mut SignsOfLife<'_>,
        takes: &impl Takes,
    ) -> Result<u64, String> {
        let listen = |on| self.line.listen(on).map_err(|error| error.to_string());
        self.aside.store(true, Ordering::Release);
        listen(false)?;
        // For a call that was made just before.
        if takes.is_waited_for() {
            self.call_back();
        }
        loop {
            let led = self.led.load(Ordering::Relaxed);
            let called = tokio::select! {
                biased;
                () = self.call_back.notified() => true,
                () = sleep(LOOK_AGAIN) => false,
                reason = life.end() => return Err(reason),
            };
            let now = self.led.load(Ordering::Relaxed);
            if called || (now == led && !self.inbox.is_locked()) {
                self.aside.store(false, Ordering::Release);
                listen(true)?;
                return Ok(now);
            }
        }
    }
}

/// Waits until there may be something to read on the lane (`true`), or the parker is woken, or for no reason. What can be
/// moved on the other connection meanwhile is moved.
fn wait_for(parker: &Parker, lane: Awaited<'_>, other: &mut Option<Lead>) -> io::Result<bool> {
    let Some(lead) = other else {
        return parker.poll(lane);
    };
    // If it does not come to sleep, there may be.
    let mut slept = Ok(true);
    let goes_on = lead.turn(|socket, room| {
        let polled = parker.poll_all([lane, Awaited { socket, room }]);
        let (ready, other) = match polled {
            Ok([ready, other]) => (Ok(ready), other),
            // What the system can't tell, a look at the socket does.
            Err(error) => (Err(error), true),
        };
        slept = ready;
        other
    });
    if !goes_on {
        *other = None;
    }
    slept
}

fn invalid(error: layercake_protocol::lane::LaneError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Sees to it that both sides are heard.
struct SignsOfLife<'a> {
    reader: &'a Reader,
    writer: &'a Writer,
    /// A master that has not answered for so long is dead.
    patience: Duration,
    ticks: Interval,
    /// Since when it is asked for a sign of life.
    asked: Option<Instant>,
}

impl SignsOfLife<'_> {
    /// Goes on until the lane is over for a reason that its reader does not see by itself. Nothing is lost if
    /// it is cancelled.
    async fn end(&mut self) -> String {
        loop {
            tokio::select! {
                () = self.reader.is_over.notified() => {
                    let reason = self.reader.over.lock().clone();
                    return reason.unwrap_or_default();
                }
                _ = self.ticks.tick() => {}
            }
            if self.reader.heard.swap(false, Ordering::Relaxed) {
                self.asked = None;
            } else if self.asked.get_or_insert_with(Instant::now).elapsed() >= self.patience {
                return format!("it gave no sign of life within {:?}", self.patience);
            }
            if let Err(Offer::Broken) = self.writer.say_something(self.asked.is_some()) {
                return "the lane broke".to_owned();
            }
        }
    }
}
