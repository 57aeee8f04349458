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

/// The most bytes of memory that are handed over in one call; so others get their turn, and what is summed
/// before is still in a core's cache. Heads go with them uncounted: a frame of a multiple of this takes no
/// call more for its head, whose last would be of few bytes.
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
        let (mut bytes, mut memory) = (0, 0);
        for part in &self.parts {
            if spans.len() == MAX_SPANS || memory >= CALL_BYTES {
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
                    let span = span.part(skip, CALL_BYTES - memory);
                    memory += span.len;
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
            prop_assert!(memory.iter().all(|(_, bytes)| bytes.is_empty()), "all was told of");
            drop(out);
            let mut received = Vec::new();
            back.read_to_end(&mut received).expect("open");
            prop_assert_eq!(received, expected);
        }
    }

    /// Bytes that go out in each call to a socket that takes all, and whether it says that more follows.
    fn calls(queue: &mut OutQueue) -> Vec<(usize, bool)> {
        let (mut calls, mut spans) = (Vec::new(), Vec::new());
        while !queue.is_empty() {
            let more = queue.gather(&mut spans, |_, _| {});
            let bytes = spans.iter().map(|span| span.len).sum();
            if bytes > 0 {
                calls.push((bytes, more));
                queue.advance(bytes);
            } else {
                queue.take_mark();
            }
        }
        calls
    }

    #[test]
    fn a_frame_takes_no_call_more_for_its_head() {
        let payload = vec![0; 2 * CALL_BYTES];
        let mut queue = OutQueue::default();
        let push_frame = |queue: &mut OutQueue, label| {
            queue.push_head(|out| out.resize(out.len() + 80, 0));
            queue.push_memory(Span::of(&payload), label);
        };
        push_frame(&mut queue, 0);
        let whole = CALL_BYTES + 80;
        assert_eq!(calls(&mut queue), [(whole, true), (CALL_BYTES, false)]);
        push_frame(&mut queue, 0);
        push_frame(&mut queue, 1);
        let first = [(whole, true), (CALL_BYTES, true)];
        let last = [(whole, true), (CALL_BYTES, false)];
        assert_eq!(calls(&mut queue), [first, last].concat());
        // Of answers to reads, each is looked at once more when it was sent.
        push_frame(&mut queue, 0);
        queue.push_mark();
        push_frame(&mut queue, 1);
        queue.push_mark();
        assert_eq!(calls(&mut queue), [first, last].concat());
    }

    #[test]
    fn bytes_that_the_socket_does_not_take_at_once_are_told_of_once() {
        // Of few bytes and of many, of odd lengths, with a head before two of three.
        let lens = (0..150).map(|n: usize| 1 + n * 7919 % 20_011);
        let lens: Vec<usize> = lens.chain([CALL_BYTES + 12_345, 1, 3]).collect();
        let total: usize = lens.iter().sum();
        let bytes: Vec<u8> = (0..total)
            .map(|i| (i * 7 + i / 251).to_le_bytes()[0])
            .collect();
        let (out, mut back) = UnixStream::pair().expect("a pair");
        out.set_nonblocking(true).expect("a socket");
        let little = SockRef::from(&out).set_send_buffer_size(64 << 10);
        little.expect("a socket");
        let mut queue = OutQueue::default();
        let (mut rest, mut expected, mut sums) = (&bytes[..], Vec::new(), Vec::new());
        for (label, len) in (0..).zip(&lens) {
            if label % 3 > 0 {
                let head = vec![0xaa; 1 + label % 80];
                queue.push_head(|out| out.extend_from_slice(&head));
                expected.extend(head);
            }
            let (span, behind) = rest.split_at(*len);
            queue.push_memory(Span::of(span), label as u64);
            expected.extend_from_slice(span);
            sums.push(crc32c::crc32c(span));
            rest = behind;
        }
        let (mut told, mut told_sums) = (0, vec![0; lens.len()]);
        let mut received = Vec::new();
        let mut refused = 0;
        while !queue.is_empty() {
            let sent = queue.send(out.as_fd(), &mut Vec::new(), |label, span| {
                let sum = &mut told_sums[usize::try_from(label).expect("small")];
                *sum = raw::checksum(*sum, span);
                told += span.len;
            });
            if !matches!(sent.expect("open"), Sent::Bytes { full: false, .. }) {
                refused += 1;
                let mut some = [0; 5000];
                let n = back.read(&mut some).expect("open");
                received.extend_from_slice(&some[..n]);
            }
            let unsent = queue.unsent() - queue.unsent_heads();
            assert!(told + unsent <= total + CALL_BYTES, "not too early");
        }
        assert!(refused > 1, "a socket takes less");
        assert_eq!((told, told_sums), (total, sums));
        drop(out);
        back.read_to_end(&mut received).expect("open");
        assert_eq!(received, expected);
    }
}
