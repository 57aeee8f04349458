//! Connections at made-up times.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;

use layercake_protocol::ids::{EngineId, Generation};
use layercake_protocol::version::CURRENT;

use super::super::frame::{WireOp, WireRegion};
use super::super::guests::Guests;
use super::super::hello::{ClientHello, SERVER_HELLO_LEN};
use super::*;
use crate::config::EngineConfig;
use crate::memory::{Access, AllocateOptions, Memory};
use crate::testing::eventually;

const LIMIT: Duration = Duration::from_secs(20);
const LEN: u64 = 1 << 20;

struct Scene {
    context: Arc<Context>,
    memory: Memory,
    conn: Conn,
    peer: TcpStream,
    scratch: Scratch,
    seq: u64,
}

impl Scene {
    /// A connection that was accepted at `now`; the peer has said hello.
    fn new(now: Instant) -> Self {
        let context = Context::new(EngineConfig::default());
        let options = AllocateOptions {
            access: Access::RemoteReadWrite,
            generation_tags: true,
            ..AllocateOptions::default()
        };
        let entry = context.registry.allocate(LEN, options).expect("allocated");
        let memory = Memory::new(entry, Arc::clone(&context.registry));
        let listener = TcpListener::bind("127.0.0.1:0").expect("listens");
        let to = listener.local_addr().expect("it is bound");
        let mut peer = TcpStream::connect(to).expect("connects");
        let hello = ClientHello {
            version: CURRENT,
            from: EngineId(1),
            to: context.engine,
            nonce: layercake_protocol::auth::draw_nonce(),
            has_token: false,
        };
        peer.write_all(&hello.encode()).expect("sent");
        let (stream, from) = listener.accept().expect("accepts");
        socket::configure(&stream).expect("a socket");
        let guest = Guests::new(&context.config).admit().expect("there is room");
        Self {
            conn: Conn::new(stream, from, guest, Arc::clone(&context), now),
            context,
            memory,
            peer,
            scratch: Scratch::new(),
            seq: 0,
        }
    }

    /// Sends a frame of one operation from the region's start; of a write, the head only.
    fn send_head(&mut self, kind: Kind, len: u32, generation: Option<Generation>) {
        let region = self.memory.region();
        let mut head = Vec::new();
        Header {
            kind,
            flags: 0,
            count: 1,
            regions: 1,
            seq: self.seq,
            payload: len,
        }
        .encode(&mut head);
        WireRegion {
            region: region.region,
            capability: region.capability,
        }
        .encode(&mut head);
        WireOp {
            region: 0,
            offset: 0,
            len: u64::from(len),
            generation,
        }
        .encode(&mut head);
        self.seq += 1;
        self.peer.write_all(&head).expect("sent");
    }

    /// As the event loop does when it was told of everything.
    fn run(&mut self, now: Instant) -> Result<bool, Closed> {
        self.conn.note(Readiness {
            readable: true,
            writable: true,
            closed: false,
        });
        self.conn.run(now, &mut self.scratch)
    }

    /// Runs until the peer is seen to make progress at `now`.
    fn see_progress(&mut self, now: Instant) {
        let seen = eventually(LIMIT, || {
            self.run(now).expect("the connection is open");
            self.conn.last_progress == now
        });
        assert!(seen, "nothing moves");
    }

    fn is_overdue(&self, now: Instant) -> bool {
        self.conn.is_overdue(now, &self.context.config.deadlines)
    }
}

#[test]
fn a_write_that_trickles_is_given_up_when_a_transfer_would_be() {
    let begun = Instant::now();
    let mut scene = Scene::new(begun);
    let Deadlines {
        progress, transfer, ..
    } = scene.context.config.deadlines;
    scene.send_head(Kind::Write, 4096, Some(Generation(1)));
    scene.see_progress(begun);
    assert!(eventually(LIMIT, || {
        scene.run(begun).expect("the connection is open");
        scene.conn.writing.is_some()
    }));
    let mut now = begun;
    while now < begun + transfer + progress {
        assert!(!scene.is_overdue(now), "after {:?}", now - begun);
        scene.peer.write_all(&[7]).expect("sent");
        now += progress / 2;
        scene.see_progress(now);
    }
    assert!(scene.is_overdue(now), "though a byte has just come");
}

#[test]
fn frames_that_come_one_after_the_other_are_not_one_that_trickles() {
    let begun = Instant::now();
    let mut scene = Scene::new(begun);
    let Deadlines {
        progress, transfer, ..
    } = scene.context.config.deadlines;
    let mut now = begun;
    while now < begun + 2 * transfer {
        scene.send_head(Kind::Write, 64, None);
        scene.peer.write_all(&[7; 32]).expect("sent");
        now += progress / 2;
        scene.see_progress(now);
        assert!(!scene.is_overdue(now));
        scene.peer.write_all(&[7; 32]).expect("sent");
        now += progress / 2;
        scene.see_progress(now);
        assert!(!scene.is_overdue(now));
    }
}

#[test]
fn an_answer_that_is_taken_in_a_trickle_is_given_up_when_a_transfer_would_be() {
    let begun = Instant::now();
    let mut scene = Scene::new(begun);
    let Deadlines {
        progress, transfer, ..
    } = scene.context.config.deadlines;
    let mut hello = [0; SERVER_HELLO_LEN];
    scene.see_progress(begun);
    scene.peer.read_exact(&mut hello).expect("welcome");
    // More than sockets hold.
    for _ in 0..48 {
        scene.send_head(Kind::Read, u32::try_from(LEN).expect("small"), None);
    }
    assert!(eventually(LIMIT, || {
        scene.run(begun).expect("the connection is open");
        scene.conn.replies.len() > 32 && !scene.conn.writable
    }));
    // From here on the peer takes no whole answer within a transfer's time.
    let mut now = begun;
    let mut answer = vec![0; 64 << 10];
    while now < begun + transfer + progress {
        assert!(!scene.is_overdue(now), "after {:?}", now - begun);
        now += progress / 2;
        while scene.conn.last_progress < now {
            scene.peer.read_exact(&mut answer).expect("there is more");
            scene.run(now).expect("the connection is open");
        }
    }
    assert!(!scene.conn.replies.is_empty());
    assert!(scene.is_overdue(now), "though bytes have just gone");
}

#[test]
fn what_a_peer_left_behind_is_not_carried_out_after_a_gap() {
    for gone in [true, false] {
        let now = Instant::now();
        // As if this process had stood still since the connection was accepted.
        let accepted = now.checked_sub(2 * GAP).expect("the clock runs for longer");
        let mut scene = Scene::new(accepted);
        scene.send_head(Kind::Write, 64, Some(Generation(3)));
        scene.peer.write_all(&[7; 64]).expect("sent");
        let tagged = |scene: &Scene| scene.memory.tags(0, 1).expect("tags") == [Generation(3)];
        if gone {
            scene
                .peer
                .shutdown(std::net::Shutdown::Write)
                .expect("open");
            assert!(eventually(LIMIT, || socket::has_hung_up(
                &scene.conn.stream
            )));
            // The hang-up's event was not seen.
            let closed = scene.run(now).expect_err("it is not listened to");
            assert!(matches!(closed, Closed::ByPeer), "{closed}");
            assert!(!tagged(&scene), "a late write");
        } else {
            assert!(eventually(LIMIT, || {
                scene.run(now).expect("the connection is open");
                tagged(&scene)
            }));
        }
    }
}

/// What waits for the peer is bounded, whatever it asks for.
#[test]
fn a_peer_that_takes_no_answers_is_not_listened_to_for_ever() {
    for pending in [false, true] {
        let begun = Instant::now();
        let mut scene = Scene::new(begun);
        let mut hello = [0; SERVER_HELLO_LEN];
        scene.see_progress(begun);
        scene.peer.read_exact(&mut hello).expect("welcome");
        if pending {
            // More than sockets hold: an answer to a read waits from here on.
            for _ in 0..48 {
                scene.send_head(Kind::Read, u32::try_from(LEN).expect("small"), None);
            }
            assert!(eventually(LIMIT, || {
                scene.run(begun).expect("the connection is open");
                scene.conn.replies.len() > 32 && !scene.conn.writable
            }));
        }
        let mut ping = Vec::new();
        Header {
            kind: Kind::Ping,
            flags: 0,
            count: 0,
            regions: 0,
            seq: 0,
            payload: 0,
        }
        .encode(&mut ping);
        let pings = ping.repeat((1 << 20) / ping.len());
        scene.peer.set_nonblocking(true).expect("a socket");
        let mut asked = 0;
        let (mut at, mut idle) = (0, 0);
        // It is heard no more when the sockets are full, too.
        while idle < 100 {
            match scene.peer.write(&pings[at..]) {
                Ok(sent) => {
                    asked += sent;
                    at = (at + sent) % pings.len();
                    idle = 0;
                }
                Err(error) => {
                    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                    idle += 1;
                }
            }
            while scene.run(begun).expect("the connection is open") {}
            let waiting = scene.conn.out.unsent_heads();
            assert!(waiting <= 2 * MAX_UNSENT_HEADS, "{waiting} bytes wait");
            assert!(asked < 256 << 20, "it is listened to for ever");
        }
        // And again when it takes them.
        let before = scene.conn.out.unsent_heads();
        assert!(before > MAX_UNSENT_HEADS / 2, "{before}");
        let mut answers = vec![0; 1 << 20];
        assert!(eventually(LIMIT, || {
            while scene.peer.read(&mut answers).is_ok_and(|read| read > 0) {}
            scene.run(begun).expect("the connection is open");
            scene.conn.out.is_empty() && scene.conn.inbuf.available().len() < ping.len()
        }));
    }
}
