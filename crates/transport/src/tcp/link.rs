//! A lane's connection from "none" to "up": connecting, greeting, proving.

use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Instant;

use layercake_protocol::auth::draw_nonce;
use layercake_protocol::ids::EngineId;
use layercake_protocol::version::CURRENT;

use super::hello::{self, ClientHello, SERVER_HELLO_LEN, ServerHello};
use super::inbuf::{InBuf, Received};
use super::out::{OutQueue, Sent};
use super::raw::Span;
use super::socket;
use crate::backend::Context;
use crate::error::PieceError;

#[derive(Debug)]
pub(super) enum Link {
    Down,
    Connecting {
        stream: TcpStream,
        until: Instant,
    },
    Greeting {
        stream: TcpStream,
        until: Instant,
        hello: ClientHello,
    },
    /// Shared with a thread that waits for it to become readable.
    Up {
        stream: Arc<TcpStream>,
    },
}

impl Link {
    /// Begins to connect. `watch` registers the socket with an event loop.
    pub(super) fn begin(
        addr: SocketAddr,
        until: Instant,
        watch: impl FnOnce(&TcpStream) -> std::io::Result<()>,
    ) -> Result<Self, PieceError> {
        let begun = socket::connect(addr).and_then(|stream| watch(&stream).map(|()| stream));
        begun
            .map(|stream| Self::Connecting { stream, until })
            .map_err(|error| {
                tracing::debug!(%addr, %error, "connecting failed");
                PieceError::Unreachable
            })
    }

    /// When connecting and greeting must be over, as long as they are not.
    pub(super) fn until(&self) -> Option<Instant> {
        match self {
            Self::Connecting { until, .. } | Self::Greeting { until, .. } => Some(*until),
            Self::Down | Self::Up { .. } => None,
        }
    }

    pub(super) fn is_down(&self) -> bool {
        matches!(self, Self::Down)
    }

    /// The socket of a connection that is up.
    pub(super) fn up(&self) -> Option<&Arc<TcpStream>> {
        match self {
            Self::Up { stream } => Some(stream),
            _ => None,
        }
    }

    /// Ends the connection, whatever state it is in. No byte comes in by it any more.
    pub(super) fn close(&mut self) {
        match std::mem::replace(self, Self::Down) {
            Self::Down => {}
            Self::Connecting { stream, .. } | Self::Greeting { stream, .. } => {
                socket::abort(&stream);
            }
            Self::Up { stream } => socket::abort(&stream),
        }
    }

    /// The socket of a connection that is not up yet.
    fn take(&mut self) -> Option<TcpStream> {
        match std::mem::replace(self, Self::Down) {
            Self::Connecting { stream, .. } | Self::Greeting { stream, .. } => Some(stream),
            other @ (Self::Down | Self::Up { .. }) => {
                *self = other;
                None
            }
        }
    }

    /// Goes as far as it can go now. Returns whether the connection is up. On an error the caller
    /// closes it.
    pub(super) fn advance(
        &mut self,
        expected: EngineId,
        context: &Context,
        out: &mut OutQueue,
        inbuf: &mut InBuf,
        spans: &mut Vec<Span>,
    ) -> Result<bool, PieceError> {
        if let Self::Connecting { stream, until } = self {
            match socket::connected(stream) {
                Ok(true) => socket::unpace_on_host(stream),
                Ok(false) => return Ok(false),
                Err(error) => {
                    tracing::debug!(%error, "connecting failed");
                    return Err(PieceError::Unreachable);
                }
            }
            let hello = ClientHello {
                version: CURRENT,
                from: context.engine,
                to: expected,
                nonce: draw_nonce(),
                has_token: context.config.token.is_some(),
            };
            out.push_head(|out| out.extend_from_slice(&hello.encode()));
            let until = *until;
            if let Some(stream) = self.take() {
                *self = Self::Greeting {
                    stream,
                    until,
                    hello,
                };
            }
        }
        if let Self::Greeting { stream, hello, .. } = self {
            if !greet(stream, hello, context, out, inbuf, spans)? {
                return Ok(false);
            }
            if let Some(stream) = self.take() {
                *self = Self::Up {
                    stream: Arc::new(stream),
                };
            }
        }
        Ok(self.up().is_some())
    }
}

/// Sends the greeting, and takes the answer if it is there.
fn greet(
    stream: &TcpStream,
    hello: &ClientHello,
    context: &Context,
    out: &mut OutQueue,
    inbuf: &mut InBuf,
    spans: &mut Vec<Span>,
) -> Result<bool, PieceError> {
    let lost = |error: std::io::Error| {
        tracing::debug!(%error, "a connection ended while greeting");
        PieceError::Unreachable
    };
    while matches!(
        out.send(stream.as_fd(), spans, |_, _| {}).map_err(lost)?,
        Sent::Bytes { full: false, .. }
    ) {}
    loop {
        if let Some(bytes) = inbuf.available().first_chunk::<SERVER_HELLO_LEN>() {
            let Ok(answer) = ServerHello::decode(bytes) else {
                context.stats.add_malformed();
                return Err(PieceError::Protocol);
            };
            inbuf.consume(SERVER_HELLO_LEN);
            let proof = hello::conclude(hello, &answer, context.config.token.as_ref());
            if proof == Err(PieceError::NotTrusted) {
                context.stats.add_untrusted();
            }
            if let Some(proof) = proof? {
                out.push_head(|out| out.extend_from_slice(&proof));
            }
            return Ok(true);
        }
        spans.clear();
        match inbuf
            .receive(stream.as_fd(), spans, SERVER_HELLO_LEN)
            .map_err(lost)?
        {
            Received::Bytes { .. } => {}
            Received::Empty => return Ok(false),
            Received::End => return Err(PieceError::Unreachable),
        }
    }
}
