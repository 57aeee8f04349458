//! The thread that talks to the other engines of the host: greetings, descriptors, hang-ups.
//!
//! One loop over readiness events drives all sockets, as owner and as initiator, without ever waiting
//! on one of them. It hands out what [`Exports`] allows, carries on what [`Initiator`] parked, and tells
//! both of hang-ups. Payload bytes don't pass here, apart from small batches that were parked.
//!
//! A greeting has a deadline. While anything waits the loop looks at the time every few milliseconds;
//! otherwise it sleeps. A peer that sends what is no message, or more than it takes answers for, loses
//! its connection. If it is attached that means that it is no longer listened to: it may be copying, so
//! it is told to go and counts as attached until it has hung up.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use layercake_protocol::ids::EngineId;
use layercake_protocol::version::CURRENT;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};

use self::messages::Next;
use super::attachment::Attachment;
use super::greeting::{InitiatorGreeting, OwnerGreeting};
use super::initiator::{Initiator, NotAttached};
use super::owner::{Exports, PeerKey};
use super::socket::Channel;
use super::wire::{Message, RefusedReason};
use crate::backend::Context;
use crate::endpoint::Endpoint;
use crate::error::PieceError;

mod messages;
#[cfg(test)]
mod tests;

pub(super) const WAKER: Token = Token(0);
const LISTENER: Token = Token(1);
const FIRST_CONNECTION: usize = 2;

/// How often the loop looks at the time while something waits.
const TICK: Duration = Duration::from_millis(10);

/// How often it looks for dropped regions that are in use no more.
const REAP: Duration = Duration::from_millis(100);

/// Messages taken from one connection before the others get their turn.
const BURST: usize = 64;

/// Answers that may wait for a peer to take them.
const MAX_OUTBOX: usize = 1024;

/// Peers that may be in the middle of greeting this engine.
const MAX_GREETINGS: usize = 256;

/// What the thread shares with the back end.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) context: Arc<Context>,
    pub(super) exports: Arc<Exports>,
    pub(super) initiator: Initiator,
    pub(super) stop: AtomicBool,
    /// A word that peers read to learn whether they reach this process's memory, and its value.
    pub(super) probe: Box<u128>,
}

struct Connection {
    channel: Arc<Channel>,
    role: Role,
    outbox: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
}

enum Role {
    /// A peer greets this engine.
    Greeted {
        greeting: OwnerGreeting,
        deadline: Instant,
    },
    /// A peer copies from and to this engine's memory.
    Serving(PeerKey),
    /// The same, told to go: its hang-up is waited for, and nothing it sends is read.
    Leaving(PeerKey),
    /// This engine greets an owner.
    Greeting {
        owner: EngineId,
        greeting: InitiatorGreeting,
        deadline: Instant,
    },
    /// This engine copies from and to an owner's memory.
    Attached(Arc<Attachment>),
}

/// An owner whose queue was full.
struct Retry {
    peer: Arc<Endpoint>,
    deadline: Instant,
}

/// See the module's text.
pub(super) struct Service {
    shared: Arc<Shared>,
    poll: Poll,
    listener: OwnedFd,
    connections: HashMap<Token, Connection>,
    next_token: usize,
    retries: Vec<Retry>,
    /// Connections with more messages than one turn takes.
    again: Vec<Token>,
    /// Accepting failed for want of descriptors: tried again with the next tick.
    accept_again: bool,
}

impl Service {
    pub(super) fn new(shared: Arc<Shared>, poll: Poll, listener: OwnedFd) -> io::Result<Self> {
        let registry = poll.registry();
        registry.register(
            &mut SourceFd(&listener.as_raw_fd()),
            LISTENER,
            Interest::READABLE,
        )?;
        Ok(Self {
            shared,
            poll,
            listener,
            connections: HashMap::new(),
            next_token: FIRST_CONNECTION,
            retries: Vec::new(),
            again: Vec::new(),
            accept_again: false,
        })
    }

    /// Runs until it is told to stop.
    pub(super) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let _ended = CloseOnExit(&shared);
        let mut events = Events::with_capacity(256);
        let mut next = None;
        while !self.shared.stop.load(Ordering::Acquire) {
            let timeout = if self.again.is_empty() {
                next
            } else {
                Some(Duration::ZERO)
            };
            if let Err(error) = self.poll.poll(&mut events, timeout)
                && error.kind() != io::ErrorKind::Interrupted
            {
                tracing::error!(%error, "the shared-memory thread can't wait for events");
                break;
            }
            for token in std::mem::take(&mut self.again) {
                self.read(token);
            }
            for event in &events {
                match event.token() {
                    WAKER => {}
                    LISTENER => self.accept(),
                    token => {
                        if event.is_writable() {
                            self.flush(token);
                        }
                        self.read(token);
                    }
                }
            }
            for peer in self.shared.initiator.take_to_attach() {
                let deadline = Instant::now() + self.shared.context.config.deadlines.connect;
                self.connect(peer, deadline);
            }
            next = self.tick();
        }
        let connections = std::mem::take(&mut self.connections);
        for connection in connections.into_values() {
            self.unwatch(&connection.channel);
            if let Role::Attached(attachment) = &connection.role {
                self.shared.initiator.detached(attachment);
            }
            // Serving ones stay with the exports until their copies are over.
        }
    }

    fn connect_timeout(&self) -> Duration {
        self.shared.context.config.deadlines.connect
    }

    /// Looks at everything that waits; says when to look again, if anything does.
    fn tick(&mut self) -> Option<Duration> {
        let now = Instant::now();
        if self.accept_again {
            self.accept();
        }
        for retry in std::mem::take(&mut self.retries) {
            if now < retry.deadline {
                self.connect(retry.peer, retry.deadline);
            } else {
                let late = NotAttached::Fail(PieceError::Unreachable);
                self.shared.initiator.not_attached(retry.peer.engine, late);
            }
        }
        let late = |connection: &Connection| match &connection.role {
            Role::Greeted { deadline, .. } | Role::Greeting { deadline, .. } => *deadline <= now,
            Role::Serving(_) | Role::Leaving(_) | Role::Attached(_) => false,
        };
        let late = self.connections.iter().filter(|(_, c)| late(c));
        let late: Vec<Token> = late.map(|(token, _)| *token).collect();
        for token in late {
            self.close(token, PieceError::Unreachable);
        }
        let parked = self.shared.initiator.tick(now);
        let mut connections = self.connections.values();
        let waits = parked
            || self.accept_again
            || !self.retries.is_empty()
            || connections.any(|c| matches!(c.role, Role::Greeted { .. } | Role::Greeting { .. }));
        let registry = &self.shared.context.registry;
        registry.reap();
        if waits {
            Some(TICK)
        } else {
            (registry.lingering() > 0).then_some(REAP)
        }
    }

    fn accept(&mut self) {
        let was_failing = std::mem::take(&mut self.accept_again);
        loop {
            match Channel::accept(&self.listener) {
                Ok(channel) => self.greeted(channel),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    if !was_failing {
                        tracing::warn!(%error, "can't accept a peer on this host");
                    }
                    self.accept_again = true;
                    return;
                }
            }
        }
    }

    fn greeted(&mut self, channel: Channel) {
        let greetings = self.connections.values();
        let greetings = greetings.filter(|c| matches!(c.role, Role::Greeted { .. }));
        let refused = if !channel.is_same_user() {
            Some(RefusedReason::OtherUser)
        } else if greetings.count() >= MAX_GREETINGS {
            Some(RefusedReason::Busy)
        } else {
            None
        };
        if let Some(reason) = refused {
            refuse(&channel, reason);
            return;
        }
        let context = &self.shared.context;
        let role = Role::Greeted {
            greeting: OwnerGreeting::new(context.engine, context.config.token.clone()),
            deadline: Instant::now() + self.connect_timeout(),
        };
        // If it can't be watched it is dropped: the peer sees the hang-up.
        let _token = self.add(Arc::new(channel), role);
    }

    fn connect(&mut self, peer: Arc<Endpoint>, deadline: Instant) {
        let owner = peer.engine;
        let name = peer.shm.as_deref().unwrap_or_default();
        let failed = match Channel::connect(name) {
            Ok(channel) if !channel.is_same_user() => NotAttached::FallBack,
            Ok(channel) => {
                let context = &self.shared.context;
                let token = context.config.token.clone();
                let (greeting, hello) = InitiatorGreeting::new(context.engine, owner, token);
                let role = Role::Greeting {
                    owner,
                    greeting,
                    deadline,
                };
                match self.add(Arc::new(channel), role) {
                    Some(token) => {
                        self.send(token, &hello, Vec::new());
                        return;
                    }
                    None => NotAttached::FallBack,
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.retries.push(Retry { peer, deadline });
                return;
            }
            // The name vanished with its engine.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                NotAttached::Fail(PieceError::PeerGone)
            }
            Err(error) => {
                tracing::debug!(%owner, %error, "shared memory does not reach a peer on this host");
                NotAttached::FallBack
            }
        };
        self.shared.initiator.not_attached(owner, failed);
    }

    /// Watches a connection; none if the system refuses.
    fn add(&mut self, channel: Arc<Channel>, role: Role) -> Option<Token> {
        let token = Token(self.next_token);
        for (number, watched) in channel.watched().enumerate() {
            let interest = if number == 0 {
                Interest::READABLE | Interest::WRITABLE
            } else {
                Interest::READABLE
            };
            let fd = watched.as_raw_fd();
            let registry = self.poll.registry();
            if let Err(error) = registry.register(&mut SourceFd(&fd), token, interest) {
                tracing::warn!(%error, "can't watch a peer on this host");
                self.unwatch(&channel);
                return None;
            }
        }
        self.next_token += 1;
        let connection = Connection {
            channel,
            role,
            outbox: VecDeque::new(),
        };
        self.connections.insert(token, connection);
        Some(token)
    }

    fn unwatch(&self, channel: &Channel) {
        for watched in channel.watched() {
            let registry = self.poll.registry();
            if let Err(error) = registry.deregister(&mut SourceFd(&watched.as_raw_fd())) {
                tracing::debug!(%error, "a connection was not watched");
            }
        }
    }

    /// Takes the messages that have come.
    fn read(&mut self, token: Token) {
        for _ in 0..BURST {
            let Some(connection) = self.connections.get(&token) else {
                return;
            };
            if matches!(connection.role, Role::Leaving(_)) {
                return self.close(token, PieceError::PeerGone);
            }
            match connection.channel.receive() {
                Ok(Some(received)) => match self.on_received(token, received) {
                    Next::Keep => {}
                    Next::Close => return self.close(token, PieceError::PeerGone),
                    Next::Broken(what) => {
                        tracing::warn!("a peer on this host broke the protocol: {what}");
                        self.shared.context.stats.add_malformed();
                        return self.close(token, PieceError::Protocol);
                    }
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // Nothing more will come from a process that has ended, whoever else holds its
                    // end of the socket.
                    if !connection.channel.is_open() {
                        self.close(token, PieceError::PeerGone);
                    }
                    return;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(None) | Err(_) => return self.close(token, PieceError::PeerGone),
            }
        }
        self.again.push(token);
    }

    /// Sends a message, behind those that wait.
    fn send(&mut self, token: Token, message: &Message, descriptors: Vec<OwnedFd>) {
        debug_assert_eq!(message.descriptors(), descriptors.len());
        if let Some(connection) = self.connections.get_mut(&token) {
            connection.outbox.push_back((message.encode(), descriptors));
        }
        self.flush(token);
    }

    fn flush(&mut self, token: Token) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        while let Some((bytes, descriptors)) = connection.outbox.front() {
            let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
            match connection.channel.send(bytes, &borrowed) {
                Ok(()) => {
                    connection.outbox.pop_front();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if connection.outbox.len() > MAX_OUTBOX {
                        tracing::warn!("a peer on this host asks and does not listen");
                        self.close(token, PieceError::Protocol);
                    }
                    return;
                }
                // Its hang-up is about to be read.
                Err(_) => return,
            }
        }
    }

    /// Ends a connection; what waits for it fails with this.
    fn close(&mut self, token: Token, error: PieceError) {
        if self.sends_away(token) {
            return;
        }
        let Some(connection) = self.drop_connection(token) else {
            return;
        };
        match connection.role {
            Role::Greeted { .. } => {}
            Role::Serving(key) | Role::Leaving(key) => self.shared.exports.detach(key),
            Role::Greeting { owner, .. } => {
                let failed = NotAttached::Fail(error);
                self.shared.initiator.not_attached(owner, failed);
            }
            Role::Attached(attachment) => self.shared.initiator.detached(&attachment),
        }
    }

    /// Has a peer go that may be copying; false if it has gone, or never could copy. Its socket stays
    /// watched, so its hang-up brings the loop back here.
    fn sends_away(&mut self, token: Token) -> bool {
        let Some(connection) = self.connections.get_mut(&token) else {
            return false;
        };
        match connection.role {
            Role::Serving(key) if connection.channel.is_open() => {
                connection.channel.close_sending();
                connection.outbox = VecDeque::new();
                connection.role = Role::Leaving(key);
                true
            }
            Role::Leaving(_) => connection.channel.is_open(),
            _ => false,
        }
    }

    fn drop_connection(&mut self, token: Token) -> Option<Connection> {
        let connection = self.connections.remove(&token)?;
        self.unwatch(&connection.channel);
        Some(connection)
    }
}

/// However the thread ends, nothing goes on waiting for it.
struct CloseOnExit<'a>(&'a Shared);

impl Drop for CloseOnExit<'_> {
    fn drop(&mut self) {
        self.0.initiator.close();
    }
}

/// Says why, as far as the peer still listens.
fn refuse(channel: &Channel, reason: RefusedReason) {
    let message = Message::Refused {
        reason,
        version: CURRENT,
    };
    if let Err(error) = channel.send(&message.encode(), &[]) {
        tracing::debug!(%error, "a refused peer did not wait for the reason");
    }
}
