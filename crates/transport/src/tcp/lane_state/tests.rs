use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use super::super::work::tests::job;
use super::super::work::{Run, WorkQueue};
use super::*;
use crate::job::{Job, PieceSet};

/// A lane with one frame of so many bytes queued.
fn with_a_frame(bytes: &[u8]) -> (LaneState, Arc<Job>) {
    let job = job(&[bytes.len() as u64], Duration::from_hours(1));
    let mut queue = WorkQueue::default();
    queue.push(Run::new(job.clone(), PieceSet::All));
    let mut state = LaneState::new();
    let Next::Send(mut frame) = queue.next(Instant::now(), &mut state.wire, Vec::new()) else {
        panic!("there is work");
    };
    frame.ops[0].local = Span::of(bytes);
    state.enqueue(frame, Instant::now());
    (state, job)
}

/// The owner says that the first frame is written.
fn take_answer(state: &mut LaneState, settled: &mut Settled) -> Result<(), FrameError> {
    let (mut peer, here) = UnixStream::pair().expect("a pair");
    let written = Header {
        kind: Kind::Written,
        flags: 0,
        count: 1,
        regions: 0,
        seq: 0,
        payload: 0,
    };
    let mut bytes = Vec::new();
    written.encode(&mut bytes);
    peer.write_all(&bytes).expect("open");
    let received = state.inbuf.receive(here.as_fd(), &mut Vec::new(), 0);
    assert!(matches!(received, Ok(Received::Bytes { .. })));
    state.take_answers(settled)
}

/// Sends once, and takes that out of the socket.
fn send_once(state: &mut LaneState) {
    let (out, mut back) = UnixStream::pair().expect("a pair");
    let sent = state.out.send(out.as_fd(), &mut Vec::new(), |_, _| {});
    assert!(matches!(sent, Ok(Sent::Bytes { .. })), "{sent:?}");
    drop(out);
    back.read_to_end(&mut Vec::new()).expect("open");
}

#[test]
fn an_answer_to_what_was_not_sent_breaks_the_protocol() {
    let bytes = vec![7; 2 * CALL_BYTES];
    for calls in 0..=1 {
        let (mut state, job) = with_a_frame(&bytes);
        (0..calls).for_each(|_| send_once(&mut state));
        let [sent, end] = [state.out.sent(), state.frames[0].end];
        assert!(sent < end && (sent > 0) == (calls > 0), "in the middle");

        let mut settled = Settled::default();
        assert_eq!(
            take_answer(&mut state, &mut settled),
            Err(FrameError::EarlyAnswer { seq: 0 })
        );
        assert!(settled.answered.is_empty() && !job.is_done());
        // It gets its result when nothing names its bytes any more.
        assert!(!state.out.is_empty());
        assert_eq!(state.frames.len(), 1);
    }
}

#[test]
fn an_answer_behind_the_last_byte_is_one() {
    let bytes = vec![7; 2 * CALL_BYTES];
    let (mut state, _job) = with_a_frame(&bytes);
    while !state.out.is_empty() {
        send_once(&mut state);
    }
    let mut settled = Settled::default();
    assert_eq!(take_answer(&mut state, &mut settled), Ok(()));
    assert_eq!(settled.answered.len(), 1);
    assert!(state.frames.is_empty() && state.in_flight == 0);
}
