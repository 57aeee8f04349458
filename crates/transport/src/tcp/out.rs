//! What waits to be sent on one connection: small heads that are kept here, and bytes of registered or
//! local memory that are sent from where they are.
//!
//! A mark is a place in the order: sending stops at it until the owner of the queue has taken it, so
//! that something can be done after the bytes before it were handed to the kernel and before the next
//! ones are. The memory named here is kept in place by whoever queued it, until the queue has sent it
//! or is cleared. Its bytes carry a label, by which whoever queued them is told of those that go out next:
//! a sum taken then costs little more than fetching them, and leaves them in the cache for the socket.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

use super::raw::{self, MAX_SPANS, Span};

#[derive(Clone, Copy, Debug)]
enum Part {
    /// The next so many bytes of the heads.
    Head(usize),
    Memory(Span, u64),
    Mark,
}

#[derive(Debug, Default)]
pub(super) struct OutQueue {
    /// Heads not sent yet, behind `heads_sent` bytes that were.
    heads: Vec<u8>,
    heads_sent: usize,
    /// How many bytes were cut off the front of `heads` so far.
    heads_base: u64,
    parts: VecDeque<Part>,
    /// Bytes of the first part that were sent.
    first_sent: usize,
    unsent: usize,
    /// How many of the unsent bytes were told of.
    told: usize,
    sent: u64,
}

/// How far sending came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// So many bytes; if the socket is not full, more may be possible.
    Bytes { sent: usize, full: bool },
    /// The socket takes nothing more for now.
    Full,
    /// A mark is due: see [`OutQueue::take_mark`].
    Mark,
    /// There is nothing to send.
    Nothing,
}

/// The most bytes that are handed over in one call; so others get their turn, and what is summed before is
/// still in a core's cache.
pub(super) const CALL_BYTES: usize = 512 << 10;

impl OutQueue {
    /// Bytes not sent yet.
    pub(super) fn unsent(&self) -> usize {
        self.unsent
    }

    /// Bytes not sent yet of those that are kept here.
    pub(super) fn unsent_heads(&self) -> usize {
        self.heads.len() - self.heads_sent
    }

    /// Bytes sent so far.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Appends bytes that are kept here. Returns their place, for [`OutQueue::patch`].
    pub(super) fn push_head(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> u64 {
        let start = self.heads.len();
        write(&mut self.heads);
        let len = self.heads.len() - start;
        self.unsent += len;
        match self.parts.back_mut() {
            Some(Part::Head(last)) => *last += len,
            _ if len > 0 => self.parts.push_back(Part::Head(len)),
            _ => {}
        }
        self.heads_base + start as u64
    }

    /// Appends bytes that stay where they are.
    pub(super) fn push_memory(&mut self, span: Span, label: u64) {
        if span.len > 0 {
            self.unsent += span.len;
            self.parts.push_back(Part::Memory(span, label));
        }
    }

    pub(super) fn push_mark(&mut self) {
        self.parts.push_back(Part::Mark);
    }

    /// Takes the mark that is due.
    pub(super) fn take_mark(&mut self) {
        debug_assert!(matches!(self.parts.front(), Some(Part::Mark)));
        if let Some(Part::Mark) = self.parts.front() {
            self.parts.pop_front();
        }
    }

    /// Overwrites head bytes that were not sent yet.
    pub(super) fn patch(&mut self, place: u64, bytes: &[u8]) {
        let start = place
            .checked_sub(self.heads_base)
            .and_then(|start| usize::try_from(start).ok())
            .expect("heads behind a mark are not sent before the mark is taken");
        self.heads[start..start + bytes.len()].copy_from_slice(bytes);
    }

    /// Hands bytes to the socket, up to the next mark. `leaving` is told of bytes of memory with their label
    /// before they are offered for the first time: of each once, in order. `spans` is scratch space.
    pub(super) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        spans: &mut Vec<Span>,
        leaving: impl FnMut(u64, Span),
    ) -> io::Result<Sent> {
        let more = self.gather(spans, leaving);
        if spans.is_empty() {
            let mark = matches!(self.parts.front(), Some(Part::Mark));
            return Ok(if mark { Sent::Mark } else { Sent::Nothing });
        }
        match raw::send(socket, spans, more) {
            Ok(sent) => {
                self.advance(sent);
                let offered: usize = spans.iter().map(|span| span.len).sum();
                Ok(Sent::Bytes {
                    sent,
                    full: sent < offered,
                })
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Sent::Full),
            Err(error) => Err(error),
        }
    }

    /// Collects what one call may send. Returns whether more follows at once. If the system knew nothing of
    /// that, each call would end in a small packet of its own, which costs as much as a large one.
    fn gather(&mut self, spans: &mut Vec<Span>, mut leaving: impl FnMut(u64, Span)) -> bool {
        spans.clear();
        let mut skip = self.first_sent;
        let mut head = self.heads_sent;
        let mut bytes = 0;
        for part in &self.parts {
            if spans.len() == MAX_SPANS || bytes >= CALL_BYTES {
                break;
            }
            let span = match *part {
                Part::Mark => break,
                Part::Head(len) => {
                    let span = Span::of(&self.heads[head..head + len - skip]);
                    head += len - skip;
                    span
                }
                Part::Memory(span, label) => {
                    let span = span.part(skip, CALL_BYTES - bytes);
                    let told = self.told.saturating_sub(bytes);
                    if told < span.len {
                        leaving(label, span.part(told, usize::MAX));
                    }
                    span
                }
            };
            skip = 0;
            spans.push(span);
            bytes += span.len;
        }
        self.told = self.told.max(bytes);
        bytes < self.unsent
    }

    fn advance(&mut self, mut sent: usize) {
        self.unsent -= sent;
        self.told -= sent;
        self.sent += sent as u64;
        while sent > 0 {
            let Some(part) = self.parts.front() else {
                break;
            };
            let (len, is_head) = match *part {
                Part::Head(len) => (len, true),
                Part::Memory(span, _) => (span.len, false),
                Part::Mark => break,
            };
            let step = sent.min(len - self.first_sent);
            if is_head {
                self.heads_sent += step;
            }
            sent -= step;
            self.first_sent += step;
            if self.first_sent == len {
                self.parts.pop_front();
                self.first_sent = 0;
            }
        }
        self.reclaim();
    }

    /// Gives back the space of heads that were sent.
    fn reclaim(&mut self) {
        const KEEP: usize = 64 << 10;
        let done = self.heads_sent == self.heads.len();
        if done || self.heads_sent > KEEP {
            self.heads_base += self.heads_sent as u64;
            self.heads.drain(..self.heads_sent);
            self.heads_sent = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use proptest::prelude::*;
    use socket2::SockRef;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Head(Vec<u8>),
        Memory(Vec<u8>),
        /// A mark, and a head behind it that is filled in when the mark is due.
        Marked(Vec<u8>),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let bytes = || prop::collection::vec(any::<u8>(), 0..300);
        let step = prop_oneof![
            bytes().prop_map(Step::Head),
            bytes().prop_map(Step::Memory),
            prop::collection::vec(any::<u8>(), 1..300).prop_map(Step::Marked),
        ];
        prop::collection::vec(step, 0..40)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn bytes_come_out_in_order_and_marks_in_time(steps in steps()) {
            let mut queue = OutQueue::default();
            let mut expected = Vec::new();
            let mut patches = VecDeque::new();
            let mut memory: VecDeque<(u64, &[u8])> = VecDeque::new();
            for step in &steps {
                match step {
                    Step::Head(bytes) => {
                        queue.push_head(|out| out.extend_from_slice(bytes));
                        expected.extend_from_slice(bytes);
                    }
                    Step::Memory(bytes) => {
                        let label = memory.len() as u64;
                        memory.push_back((label, bytes));
                        queue.push_memory(Span::of(bytes), label);
                        expected.extend_from_slice(bytes);
                    }
                    Step::Marked(bytes) => {
                        queue.push_mark();
                        let before = expected.len();
                        let place = queue.push_head(|out| out.resize(out.len() + bytes.len(), 0));
                        patches.push_back((before, place, bytes));
                        expected.extend_from_slice(bytes);
                    }
                }
            }
            prop_assert_eq!(queue.unsent(), expected.len());
            let (out, mut back) = UnixStream::pair().expect("a pair");
            let mut spans = Vec::new();
            let mut sent = 0;
            loop {
                let told = queue.send(out.as_fd(), &mut spans, |label, span| {
                    memory.retain(|(_, bytes)| !bytes.is_empty());
                    let (first, bytes) = memory.pop_front().expect("as many as pushed");
                    assert_eq!((label, span), (first, Span::of(bytes)));
                });
                match told.expect("open") {
                    Sent::Bytes { sent: n, .. } => {
                        sent += n;
                        prop_assert_eq!(queue.sent(), sent as u64);
                    }
                    Sent::Mark => {
                        let (before, place, bytes) = patches.pop_front().expect("as many as pushed");
                        prop_assert_eq!(sent, before);
                        queue.take_mark();
                        queue.patch(place, bytes);
                    }
                    Sent::Full => prop_assert!(false, "so few bytes fit"),
                    Sent::Nothing => break,
                }
            }
            prop_assert!(queue.is_empty() && patches.is_empty());
            drop(out);
            let mut received = Vec::new();
            back.read_to_end(&mut received).expect("open");
            prop_assert_eq!(received, expected);
        }
    }

    #[test]
    fn bytes_that_the_socket_does_not_take_at_once_are_told_of_once() {
        let bytes: Vec<u8> = (0..3 * CALL_BYTES)
            .map(|i| (i * 7 + i / 251).to_le_bytes()[0])
            .collect();
        let (out, mut back) = UnixStream::pair().expect("a pair");
        out.set_nonblocking(true).expect("a socket");
        let little = SockRef::from(&out).set_send_buffer_size(64 << 10);
        little.expect("a socket");
        let mut queue = OutQueue::default();
        queue.push_head(|out| out.push(7));
        queue.push_memory(Span::of(&bytes), 3);
        let (mut told, mut received) = (0, Vec::new());
        let mut refused = 0;
        while !queue.is_empty() {
            let sent = queue.send(out.as_fd(), &mut Vec::new(), |label, span| {
                let rest = Span::of(&bytes).part(told, usize::MAX);
                assert_eq!((label, span.addr), (3, rest.addr));
                told += span.len;
            });
            if let Sent::Bytes { sent, full: false } = sent.expect("open") {
                assert!(sent <= CALL_BYTES);
            } else {
                refused += 1;
                let mut some = [0; 5000];
                let n = back.read(&mut some).expect("open");
                received.extend_from_slice(&some[..n]);
            }
            let ahead = (told + 1) as u64 - queue.sent();
            assert!(ahead <= CALL_BYTES as u64, "not too early");
        }
        assert!(refused > 1, "a socket takes less");
        assert_eq!(told, bytes.len());
        drop(out);
        back.read_to_end(&mut received).expect("open");
        assert_eq!(received[1..], bytes);
    }
}
