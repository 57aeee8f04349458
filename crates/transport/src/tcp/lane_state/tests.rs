use std::io::Write as _;
use std::os::unix::net::UnixStream;

use super::super::work::tests::job;
use super::super::work::{Run, WorkQueue};
use super::*;
use crate::job::PieceSet;

#[test]
fn an_answer_to_what_was_not_sent_breaks_the_protocol() {
    let job = job(&[4096], Duration::from_hours(1));
    let mut queue = WorkQueue::default();
    queue.push(Run::new(job.clone(), PieceSet::All));
    let mut state = LaneState::new();
    let Next::Send(frame) = queue.next(Instant::now(), &mut state.wire, Vec::new()) else {
        panic!("there is work");
    };
    state.enqueue(frame, Instant::now());

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

    let mut settled = Settled::default();
    assert_eq!(
        state.take_answers(&mut settled),
        Err(FrameError::EarlyAnswer { seq: 0 })
    );
    assert!(settled.answered.is_empty() && !job.is_done());
    // It gets its result when nothing names its bytes any more.
    assert!(!state.out.is_empty());
    assert_eq!(state.frames.len(), 1);
}
