use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use socket2::SockRef;

use super::super::conn::MAX_UNSENT_HEADS;
use super::super::frame::HEADER_LEN;
use super::super::socket;
use super::super::work::tests::job;
use super::super::work::{Run, WorkQueue};
use super::*;
use crate::config::EngineConfig;
use crate::job::{Job, PieceSet};
use crate::testing::eventually;

const LIMIT: Duration = Duration::from_secs(20);

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

/// A lane that is up with one write queued, its far end, which takes little by itself, and the bytes.
fn writing(len: usize) -> (LaneState, TcpStream, Vec<u8>) {
    let listener = socket::listen(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
    let little = SockRef::from(&listener).set_recv_buffer_size(16 << 10);
    little.expect("a socket");
    let here = socket::connect(listener.local_addr().expect("bound")).expect("loopback connects");
    let mut far = None;
    assert!(eventually(LIMIT, || {
        far = far.take().or_else(|| listener.accept().ok());
        far.is_some() && socket::connected(&here).expect("somebody listens")
    }));
    let (far, _) = far.expect("accepted");

    let bytes = vec![7; len];
    let (mut state, _job) = with_a_frame(&bytes);
    let stream = Arc::new(here);
    state.link = Link::Up { stream };
    state.readable = true;
    (state, far, bytes)
}

/// What the system holds of what was sent.
fn waiting(state: &LaneState) -> u64 {
    let stream = state.link.up().expect("it is up");
    raw::unacknowledged(stream.as_fd()).expect("a socket that tells")
}

fn send_out(state: &mut LaneState) {
    let stream = Arc::clone(state.link.up().expect("it is up"));
    let sent = state.out.send(stream.as_fd(), &mut Vec::new(), |_, _| {});
    assert!(!matches!(sent.expect("open"), Sent::Mark));
}

// contract: transport-8
#[test]
fn a_peer_that_takes_bytes_slowly_makes_progress_though_all_of_them_were_sent() {
    const PROGRESS: Duration = Duration::from_secs(2);
    const NOT_QUITE: Duration = Duration::from_millis(1999);
    let (mut state, mut far, _bytes) = writing(160 << 10);
    let end = state.frames[0].end;
    send_out(&mut state);
    assert!(state.out.is_empty(), "the system has all of it");
    let begun = Instant::now();
    state.last_progress = begun;

    let mut left = usize::try_from(end).expect("small");
    let mut last = begun;
    while state.taken < end {
        let now = last + NOT_QUITE;
        let before = state.taken;
        let mut some = [0; 16_000];
        assert!(eventually(LIMIT, || {
            let room = some.len().min(left);
            left -= far.read(&mut some[..room]).expect("open");
            end - waiting(&state) > before
        }));
        assert_eq!(state.overdue(now, PROGRESS), None, "{left} bytes to go");
        last = now;
    }
    assert!(last - begun > 2 * PROGRESS, "it took a while");

    // Now it has everything, and owes an answer.
    assert!(eventually(LIMIT, || waiting(&state) == 0));
    assert_eq!(state.overdue(last, PROGRESS), None);
    let later = last + PROGRESS;
    assert_eq!(state.overdue(later, PROGRESS), Some(PieceError::Stalled));
}

#[test]
fn an_owners_pings_are_bounded_and_no_progress() {
    let context = Context::new(EngineConfig::default());
    let (mut state, mut far, _bytes) = writing(8);
    far.set_nonblocking(true).expect("a socket");
    send_out(&mut state);
    assert!(state.out.is_empty() && state.frames.len() == 1);
    assert!(eventually(LIMIT, || waiting(&state) == 0));
    let then = Instant::now();
    state.see_what_is_taken(then);
    assert_eq!(state.last_progress, then);

    let mut ping = Vec::new();
    let header = Header {
        kind: Kind::Ping,
        flags: 0,
        count: 0,
        regions: 0,
        seq: 3,
        payload: 0,
    };
    header.encode(&mut ping);
    assert_eq!(ping.len(), HEADER_LEN);
    let later = then + Duration::from_secs(1);
    let mut settled = Settled::default();
    let mut listen = |state: &mut LaneState| {
        state.readable = true;
        let received = state.receive(&context, later, &mut settled);
        received.expect("pings are no breach")
    };
    let many = ping.repeat(10_000);
    // The beginning of one may be something else.
    let mut at = HEADER_LEN - 1;
    far.write_all(&ping[..at]).expect("open");
    assert!(eventually(LIMIT, || listen(&mut state) == at));
    assert_eq!(state.last_progress, later);
    state.last_progress = then;
    let (mut asked, mut idle) = (0, 0);
    // It is heard no more when the sockets are full, too.
    while idle < 100 {
        if let Ok(sent) = far.write(&many[at..]) {
            asked += sent;
            at = (at + sent) % many.len();
            idle = 0;
        } else {
            idle += 1;
        }
        while listen(&mut state) > 0 {}
        let waits = state.out.unsent_heads();
        assert!(waits <= 2 * MAX_UNSENT_HEADS, "{waits} bytes wait");
        assert!(asked < 256 << 20, "it is listened to for ever");
    }
    assert!(state.out.unsent_heads() > MAX_UNSENT_HEADS);
    assert_eq!(state.last_progress, then);

    // It takes them: it is listened to again, and that is no progress either.
    let mut pongs = vec![0; 1 << 20];
    let mut heard = 0;
    assert!(eventually(LIMIT, || {
        while far.read(&mut pongs).is_ok_and(|read| read > 0) {}
        send_out(&mut state);
        state.see_what_is_taken(later);
        heard += listen(&mut state);
        heard > 0
    }));
    assert_eq!(state.last_progress, then);
}
