//! Received bytes that are not consumed yet: greetings, headers and bodies.
//!
//! Payload goes straight to its place, except for what comes in together with a header: reading a
//! little ahead saves a call per frame. How much is up to the caller; it is a few KiB at most.

use std::io;
use std::os::fd::BorrowedFd;

use super::frame::{HEADER_LEN, MAX_BODY};
use super::raw::{self, Span};

#[derive(Debug)]
pub(super) struct InBuf {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

/// How a call to the socket went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// So many bytes went to the places that were given, before any into the buffer. If it is short,
    /// the socket had no more.
    Bytes {
        placed: usize,
        buffered: usize,
        short: bool,
    },
    /// There is nothing for now.
    Empty,
    /// The peer sends nothing more.
    End,
}

/// A header and its body, and payload up to this, come in one call.
const AHEAD: usize = 8 << 10;

/// What is read ahead behind a long payload: the next header, and little that must be copied.
const AHEAD_BEHIND_PAYLOAD: usize = 256;

/// Payload from this length on counts as long.
const LONG_PAYLOAD: usize = 16 << 10;

impl InBuf {
    pub(super) fn new() -> Self {
        Self {
            bytes: vec![0; HEADER_LEN + MAX_BODY + AHEAD].into_boxed_slice(),
            start: 0,
            end: 0,
        }
    }

    pub(super) fn available(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub(super) fn consume(&mut self, n: usize) {
        debug_assert!(n <= self.end - self.start);
        self.start += n;
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Copies buffered bytes to a place; returns how many there were.
    pub(super) fn take_into(&mut self, to: Span) -> usize {
        let n = self.available().len().min(to.len);
        if n > 0 {
            raw::place(&self.available()[..n], to.part(0, n));
            self.consume(n);
        }
        n
    }

    /// Receives into these places first, then into the buffer: the bytes until `needed` are buffered,
    /// and a little ahead. `spans` is extended while it is used.
    pub(super) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        spans: &mut Vec<Span>,
        needed: usize,
    ) -> io::Result<Received> {
        let payload: usize = spans.iter().map(|span| span.len).sum();
        let ahead = if payload >= LONG_PAYLOAD {
            AHEAD_BEHIND_PAYLOAD
        } else {
            AHEAD
        };
        let want = needed.saturating_sub(self.end - self.start).max(ahead);
        if self.bytes.len() - self.end < want {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let room = want.min(self.bytes.len() - self.end);
        spans.push(Span::of_mut(&mut self.bytes[self.end..self.end + room]));
        match raw::receive(socket, spans) {
            Ok(0) => Ok(Received::End),
            Ok(n) => {
                let placed = n.min(payload);
                self.end += n - placed;
                Ok(Received::Bytes {
                    placed,
                    buffered: n - placed,
                    short: n < payload + room,
                })
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Received::Empty),
            Err(error) => Err(error),
        }
    }
}
