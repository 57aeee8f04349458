//! The threads that drive connections.
//!
//! Each loop owns the connections that peers opened to it, and looks after the lanes that were
//! assigned to it; a lane may be driven by other threads too, under its lock. Sockets are watched edge
//! by edge. A loop ticks while anything is owed on either side, for the deadlines, and for a second
//! after that; then it sleeps until an event or a notice: an idle engine costs nothing.
//!
//! Whoever makes a lane busy behind a loop's back calls [`LoopShared::keep_ticking`]: the lane's flag
//! is set before the loop's is read, and the loop sets its own before it reads the lanes', so one of
//! the two sees the other.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Registry, Token, Waker};
use parking_lot::Mutex;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::conn::{Closed, Conn, Scratch};
use super::guests::{Guest, Guests};
use super::lane::{Lane, Readiness};
use super::peers::Peers;
use super::socket;
use crate::backend::Context;
use crate::error::Error;

const WAKER: Token = Token(0);
const LISTENER: Token = Token(1);
/// The first token that connections and lanes get.
const FIRST_TOKEN: usize = 2;

/// How often deadlines are looked at.
const TICK: Duration = Duration::from_millis(50);

/// How long a loop goes on ticking when nothing is owed any more.
const LINGER: Duration = Duration::from_secs(1);

/// Between two ticks this process stood still itself: peers can't be blamed for the time.
const STOOD_STILL: Duration = Duration::from_millis(500);

/// Draws tokens; all loops of the process share it.
static NEXT_TOKEN: AtomicUsize = AtomicUsize::new(FIRST_TOKEN);

pub(super) fn next_token() -> Token {
    Token(NEXT_TOKEN.fetch_add(1, Ordering::Relaxed))
}

enum Command {
    Adopt(Arc<Lane>),
    Forget(Token),
    Service(Token),
    Accept(TcpStream, SocketAddr, Guest),
    Tick,
    Stop,
}

#[derive(Default)]
struct Commands {
    list: Vec<Command>,
    /// The loop has ended: nobody would take them.
    closed: bool,
}

/// The part of a loop that other threads reach.
pub(super) struct LoopShared {
    registry: Registry,
    waker: Waker,
    commands: Mutex<Commands>,
    /// The loop sleeps without a time-out.
    asleep: AtomicBool,
}

impl LoopShared {
    fn command(&self, command: Command) {
        let first = {
            let mut commands = self.commands.lock();
            if commands.closed {
                return;
            }
            commands.list.push(command);
            commands.list.len() == 1
        };
        if first && let Err(error) = self.waker.wake() {
            tracing::error!(%error, "an event loop can't be woken");
        }
    }

    /// Looks after a lane from now on.
    pub(super) fn adopt(&self, lane: &Arc<Lane>) {
        self.command(Command::Adopt(Arc::clone(lane)));
    }

    /// Lets go of a lane.
    pub(super) fn forget(&self, lane: Token) {
        self.command(Command::Forget(lane));
    }

    /// Drives a lane soon.
    pub(super) fn service(&self, lane: Token) {
        self.command(Command::Service(lane));
    }

    /// A lane became busy: its deadlines need ticks.
    pub(super) fn keep_ticking(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.command(Command::Tick);
        }
    }

    pub(super) fn stop(&self) {
        self.command(Command::Stop);
    }

    /// Leaves a lane's socket to threads that wait for it; only its end is still told. Any interest in
    /// bytes, in urgent ones too, would have the system wake the loop for whatever comes in, to find that
    /// there is nothing to tell.
    pub(super) fn hand_over(&self, stream: &TcpStream, token: Token) -> io::Result<()> {
        let data = EventData::new_u64(token.0 as u64);
        Ok(epoll::modify(
            &self.registry,
            stream,
            data,
            EventFlags::ET | EventFlags::RDHUP,
        )?)
    }

    /// Watches a lane's socket again; what has come meanwhile is told at once.
    pub(super) fn take_back(
        &self,
        stream: &TcpStream,
        token: Token,
        writable: bool,
    ) -> io::Result<()> {
        let mut interest = Interest::READABLE;
        if writable {
            interest |= Interest::WRITABLE;
        }
        self.registry
            .reregister(&mut SourceFd(&stream.as_raw_fd()), token, interest)
    }

    /// Watches a lane's socket. Closing it ends that.
    pub(super) fn watch(&self, stream: &TcpStream, token: Token) -> io::Result<()> {
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.registry
            .register(&mut SourceFd(&stream.as_raw_fd()), token, interest)
    }
}

impl fmt::Debug for LoopShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoopShared").finish_non_exhaustive()
    }
}

/// One loop, run by one thread.
pub(super) struct EventLoop {
    shared: Arc<LoopShared>,
    poll: Poll,
    context: Arc<Context>,
    peers: Arc<Peers>,
    guests: Arc<Guests>,
    listener: Option<TcpListener>,
    /// The system has no more descriptors to accept with; tried again at the next tick.
    accept_later: bool,
    /// All loops, for accepted connections to be spread over.
    loops: Vec<Arc<LoopShared>>,
    next_loop: usize,
    conns: HashMap<Token, Conn>,
    lanes: HashMap<Token, Arc<Lane>>,
    /// What is to be driven without waiting for an event.
    again: Vec<Token>,
    scratch: Scratch,
    last_tick: Instant,
    last_busy: Instant,
}

impl EventLoop {
    pub(super) fn new(
        context: Arc<Context>,
        peers: Arc<Peers>,
        guests: Arc<Guests>,
        listener: Option<TcpListener>,
    ) -> Result<Self, Error> {
        let failed = |source| Error::system("event loop", source);
        let poll = Poll::new().map_err(failed)?;
        let shared = LoopShared {
            registry: poll.registry().try_clone().map_err(failed)?,
            waker: Waker::new(poll.registry(), WAKER).map_err(failed)?,
            commands: Mutex::default(),
            asleep: AtomicBool::new(false),
        };
        if let Some(listener) = &listener {
            poll.registry()
                .register(
                    &mut SourceFd(&listener.as_raw_fd()),
                    LISTENER,
                    Interest::READABLE,
                )
                .map_err(failed)?;
        }
        let now = Instant::now();
        Ok(Self {
            shared: Arc::new(shared),
            poll,
            context,
            peers,
            guests,
            listener,
            accept_later: false,
            loops: Vec::new(),
            next_loop: 0,
            conns: HashMap::new(),
            lanes: HashMap::new(),
            again: Vec::new(),
            scratch: Scratch::new(),
            last_tick: now,
            last_busy: now,
        })
    }

    pub(super) fn shared(&self) -> &Arc<LoopShared> {
        &self.shared
    }

    pub(super) fn set_loops(&mut self, loops: Vec<Arc<LoopShared>>) {
        self.loops = loops;
    }

    /// Runs until told to stop.
    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(256);
        loop {
            let timeout = self.timeout();
            match self.poll.poll(&mut events, timeout) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    tracing::error!(%error, "an event loop failed; its connections are closed");
                    break;
                }
                Ok(()) | Err(_) => {}
            }
            let now = Instant::now();
            if self.shared.asleep.swap(false, Ordering::SeqCst) {
                self.last_tick = now;
            }
            if self.take_commands(now) {
                break;
            }
            self.note_hang_ups(&events);
            for token in std::mem::take(&mut self.again) {
                self.drive(token, Readiness::default(), now);
            }
            for event in &events {
                let (readable, writable) = (event.is_readable(), event.is_writable());
                // A hang-up that comes alone, where nothing else is told, has no name with mio.
                let alone = !readable && !writable;
                let ready = Readiness {
                    readable,
                    writable,
                    closed: event.is_read_closed() || event.is_error() || alone,
                };
                self.drive(event.token(), ready, now);
            }
            self.tick(now);
        }
        self.stop();
    }

    /// Lets connections know that their peers have gone before anything that came from these is carried
    /// out.
    fn note_hang_ups(&mut self, events: &Events) {
        for event in events {
            if (event.is_read_closed() || event.is_error())
                && let Some(conn) = self.conns.get_mut(&event.token())
            {
                conn.note(Readiness {
                    closed: true,
                    ..Readiness::default()
                });
            }
        }
    }

    /// How long to wait for events.
    fn timeout(&mut self) -> Option<Duration> {
        if !self.again.is_empty() {
            return Some(Duration::ZERO);
        }
        let now = Instant::now();
        if self.is_busy() {
            self.last_busy = now;
        }
        if now.saturating_duration_since(self.last_busy) < LINGER {
            return Some(TICK);
        }
        self.shared.asleep.store(true, Ordering::SeqCst);
        if self.lanes.values().any(|lane| lane.is_busy()) {
            self.shared.asleep.store(false, Ordering::SeqCst);
            self.last_busy = now;
            return Some(TICK);
        }
        None
    }

    fn is_busy(&self) -> bool {
        self.accept_later
            || self.conns.values().any(Conn::is_busy)
            || self.lanes.values().any(|lane| lane.is_busy())
    }

    /// Returns whether the loop is to stop.
    fn take_commands(&mut self, now: Instant) -> bool {
        let commands = std::mem::take(&mut self.shared.commands.lock().list);
        for command in commands {
            match command {
                Command::Adopt(lane) => {
                    self.lanes.insert(lane.token(), lane);
                }
                Command::Forget(token) => {
                    self.lanes.remove(&token);
                }
                Command::Service(token) => {
                    if let Some(lane) = self.lanes.get(&token) {
                        lane.noticed();
                    }
                    self.drive(token, Readiness::default(), now);
                }
                Command::Accept(stream, peer, guest) => self.add(stream, peer, guest, now),
                Command::Tick => self.last_busy = now,
                Command::Stop => return true,
            }
        }
        false
    }

    fn drive(&mut self, token: Token, ready: Readiness, now: Instant) {
        match token {
            WAKER => {}
            LISTENER => self.accept(now),
            token => {
                if let Some(lane) = self.lanes.get(&token) {
                    if lane.service(ready, now) {
                        self.again.push(token);
                    }
                } else if let Some(conn) = self.conns.get_mut(&token) {
                    conn.note(ready);
                    match conn.run(now, &mut self.scratch) {
                        Ok(true) => self.again.push(token),
                        Ok(false) => {}
                        Err(closed) => self.close(token, &closed),
                    }
                }
            }
        }
    }

    fn accept(&mut self, now: Instant) {
        while let Some(listener) = &self.listener {
            match listener.accept() {
                Ok((stream, peer)) => {
                    let Some(guest) = self.guests.admit() else {
                        tracing::debug!(%peer, "no room for another connection");
                        self.context.stats.add_turned_away();
                        continue;
                    };
                    self.next_loop = (self.next_loop + 1) % self.loops.len().max(1);
                    match self.loops.get(self.next_loop) {
                        Some(other) if !Arc::ptr_eq(other, &self.shared) => {
                            other.command(Command::Accept(stream, peer, guest));
                        }
                        _ => self.add(stream, peer, guest, now),
                    }
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                    _ => {
                        if !self.accept_later {
                            tracing::warn!(%error, "can't accept connections for now");
                        }
                        self.accept_later = true;
                        return;
                    }
                },
            }
        }
    }

    fn add(&mut self, stream: TcpStream, peer: SocketAddr, guest: Guest, now: Instant) {
        let token = next_token();
        let watched = socket::configure(&stream).and_then(|()| self.shared.watch(&stream, token));
        if let Err(error) = watched {
            tracing::debug!(%peer, %error, "a connection ended at once");
            return;
        }
        socket::unpace_on_host(&stream);
        self.conns.insert(
            token,
            Conn::new(stream, peer, guest, Arc::clone(&self.context), now),
        );
        self.drive(token, Readiness::default(), now);
    }

    fn close(&mut self, token: Token, closed: &Closed) {
        if let Some(conn) = self.conns.remove(&token) {
            conn.count(closed);
            tracing::debug!(peer = %conn.peer(), %closed, "connection closed");
        }
    }

    fn tick(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.last_tick);
        if since < TICK {
            return;
        }
        let forgive = since >= STOOD_STILL;
        self.last_tick = now;
        if std::mem::take(&mut self.accept_later) {
            self.accept(now);
        }
        self.tick_conns(now, forgive);
        self.context.registry.reap();
        let mut idle = Vec::new();
        for lane in self.lanes.values() {
            if lane.tick(now, forgive) {
                self.again.push(lane.token());
            }
            if !lane.is_busy() && lane.peer().try_retire() {
                idle.push(Arc::clone(lane.peer()));
            }
        }
        for peer in idle {
            self.peers.forget(&peer);
        }
    }

    fn tick_conns(&mut self, now: Instant, forgive: bool) {
        let deadlines = &self.context.config.deadlines;
        let mut overdue = Vec::new();
        for (token, conn) in &mut self.conns {
            if forgive {
                conn.forgive(now);
            }
            if conn.is_overdue(now, deadlines) {
                // What has come meanwhile counts before the verdict.
                conn.note(Readiness {
                    readable: true,
                    writable: true,
                    closed: false,
                });
                let stalled = match conn.run(now, &mut self.scratch) {
                    Ok(_) if conn.is_overdue(now, deadlines) => Closed::Stalled,
                    Ok(more) => {
                        self.again.extend(more.then_some(*token));
                        continue;
                    }
                    Err(closed) => closed,
                };
                overdue.push((*token, stalled));
            }
        }
        for (token, closed) in overdue {
            self.close(token, &closed);
        }
    }

    fn stop(&mut self) {
        self.conns.clear();
        self.listener = None;
        let left = {
            let mut commands = self.shared.commands.lock();
            commands.closed = true;
            std::mem::take(&mut commands.list)
        };
        for command in left {
            if let Command::Adopt(lane) = command {
                self.lanes.insert(lane.token(), lane);
            }
        }
        for lane in self.lanes.drain() {
            lane.1.close();
        }
    }
}
