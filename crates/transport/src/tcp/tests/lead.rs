//! Who looks after a connection on which somebody waits.

use std::net::TcpListener;
use std::os::fd::BorrowedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;

use layercake_protocol::endpoint::{Endpoint, HostId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::initiator::{answer_to, send};
use super::*;
use crate::backend::{Backend as _, Context};
use crate::job::Job;
use crate::lead::{Awaited, Lead};
use crate::tcp::TcpBackend;
use crate::tcp::hello::{CLIENT_HELLO_LEN, answer};
use crate::transfer::Transfer;

/// An owner of one connection that answers pings when it is told to.
struct Puppet {
    endpoint: Arc<Endpoint>,
    go: Sender<()>,
    thread: JoinHandle<()>,
}

impl Puppet {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let engine = EngineId::draw();
        let endpoint = Endpoint {
            engine,
            tcp: listener.local_addr().expect("bound").to_string(),
            host: HostId([0; 16]),
            shm: None,
            pid: 0,
        };
        let (go, told) = channel();
        let thread = std::thread::spawn(move || play(&listener, engine, &told));
        Self {
            endpoint: Arc::new(endpoint),
            go,
            thread,
        }
    }

    fn answers(&self) {
        self.go.send(()).expect("it plays on");
    }
}

fn play(listener: &TcpListener, engine: EngineId, told: &Receiver<()>) {
    let (mut stream, _) = listener.accept().expect("the engine connects");
    let mut hello = [0; CLIENT_HELLO_LEN];
    stream.read_exact(&mut hello).expect("a greeting");
    let hello = ClientHello::decode(&hello).expect("well-formed");
    let reply = answer(&hello, engine, None, draw_nonce());
    stream.write_all(&reply.encode()).expect("open");
    while told.recv().is_ok() {
        let mut header = [0; HEADER_LEN];
        stream.read_exact(&mut header).expect("a frame");
        let question = Header::decode(&header).expect("well-formed");
        send(&mut stream, answer_to(&question, Kind::Pong), &[]);
    }
}

/// A backend with one lane to a puppet.
struct Scene {
    context: Arc<Context>,
    backend: Arc<TcpBackend>,
    puppet: Puppet,
}

impl Scene {
    fn start() -> Self {
        let context = Context::new(EngineConfig {
            lanes: std::num::NonZero::new(1).expect("one"),
            ..config()
        });
        let backend = TcpBackend::start(&context).expect("a backend");
        Self {
            context,
            backend,
            puppet: Puppet::start(),
        }
    }

    /// Asks the puppet something.
    fn ask(&self) -> Transfer {
        let stats = Arc::clone(&self.context.stats);
        let job = Job::probe(Arc::clone(&self.puppet.endpoint), LIMIT, stats);
        self.backend.probe(Arc::clone(&job));
        Transfer::new(job)
    }

    /// Whether nobody is told of what comes in on the lane.
    fn is_aside(&self) -> bool {
        let endpoint = &self.puppet.endpoint;
        let addr = endpoint.tcp.parse().expect("an address");
        let peer = self.backend.peers.find(endpoint.engine, addr);
        let peer = peer.expect("it runs");
        let state = peer.lanes()[0].state.lock();
        state.is_aside()
    }

    /// Waits for a transfer as one does who polls futures, and leads.
    fn lead(&self, transfer: &mut Transfer) {
        let mut awaited = Awaited::default();
        let polled = awaited.poll(|| poll_once(transfer));
        assert_eq!(polled, Poll::Pending, "nothing was answered");
        let mut lead = awaited.lead(None).expect("it is under way");
        self.puppet.answers();
        follow(&mut lead);
        assert!(transfer.is_done());
    }

    fn end(self) {
        self.backend.shutdown(std::time::Instant::now() + LIMIT);
        drop(self.puppet.go);
        self.puppet.thread.join().expect("it played its part");
    }
}

fn poll_once(transfer: &mut Transfer) -> Poll<()> {
    let mut cx = std::task::Context::from_waker(Waker::noop());
    std::pin::Pin::new(transfer).poll(&mut cx).map(drop)
}

/// Leads until there is nothing to wait for.
fn follow(lead: &mut Lead) {
    while lead.turn(|socket, full| {
        assert!(!full, "so few bytes fit");
        let readable = is_readable(socket, LIMIT);
        assert!(readable, "the answer did not come to who leads");
        true
    }) {}
}

fn is_readable(socket: BorrowedFd<'_>, within: Duration) -> bool {
    let within = Timespec::try_from(within).expect("short");
    let mut sockets = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
    poll(&mut sockets, Some(&within)).expect("a socket") > 0
}

/// A scene whose lane lies aside.
fn aside() -> Scene {
    let scene = Scene::start();
    // The first one also connects, with the event loop's help.
    scene.puppet.answers();
    assert!(scene.ask().wait().is_ok());
    scene.lead(&mut scene.ask());
    assert!(scene.is_aside(), "nothing is under way");
    scene
}

#[test]
fn who_leads_takes_what_comes_in_for_others_too() {
    let scene = aside();
    let mut first = scene.ask();
    let mut awaited = Awaited::default();
    assert_eq!(awaited.poll(|| poll_once(&mut first)), Poll::Pending);
    let mut lead = awaited.lead(None).expect("it is under way");
    assert!(!scene.is_aside());
    let mut others = [scene.ask(), scene.ask()];
    for other in &mut others {
        assert_eq!(awaited.poll(|| poll_once(other)), Poll::Pending);
        assert!(awaited.lead(None).is_none(), "one leads already");
    }
    scene.puppet.answers();
    follow(&mut lead);
    assert!(first.is_done());
    drop(lead);
    assert!(!scene.is_aside(), "others wait");
    for other in others {
        scene.puppet.answers();
        assert!(other.wait().is_ok());
    }
    scene.end();
}

/// Who is woken for another reason goes on with the connection, if it still waits for the transfer.
#[test]
fn a_lead_is_kept_from_one_poll_to_the_next_as_long_as_its_transfer_is_waited_for() {
    let scene = aside();
    let mut transfer = scene.ask();
    let mut awaited = Awaited::default();
    assert_eq!(awaited.poll(|| poll_once(&mut transfer)), Poll::Pending);
    let mut lead = awaited.lead(None);
    for _ in 0..3 {
        assert!(lead.as_ref().is_some_and(|lead| !lead.is_over()));
        assert_eq!(awaited.poll(|| poll_once(&mut transfer)), Poll::Pending);
        // It is the same one: there can't be two, and the event loop was not asked.
        lead = awaited.lead(lead);
        assert!(!scene.is_aside(), "it is led");
    }
    let mut lead = lead.expect("it is under way");
    scene.puppet.answers();
    follow(&mut lead);
    assert!(lead.is_over() && transfer.is_done());
    // Over, or not asked for any more: it is let go.
    assert!(awaited.lead(Some(lead)).is_none());
    assert!(scene.is_aside());
    let mut transfer = scene.ask();
    assert_eq!(awaited.poll(|| poll_once(&mut transfer)), Poll::Pending);
    let lead = awaited.lead(None);
    awaited.poll(|| ());
    assert!(awaited.lead(lead).is_none());
    scene.puppet.answers();
    assert!(eventually(LIMIT, || transfer.is_done()));
    scene.end();
}

#[test]
fn a_lane_that_lies_aside_is_looked_after_when_somebody_does_not_lead() {
    let scene = aside();
    let looks: [fn(&mut Transfer); 4] = [
        |transfer| assert!(!transfer.is_done()),
        |transfer| assert!(transfer.poll().is_none()),
        |transfer| assert_eq!(poll_once(transfer), Poll::Pending),
        |transfer| drop(transfer.clone()),
    ];
    for look in looks {
        scene.lead(&mut scene.ask());
        assert!(scene.is_aside());
        let mut transfer = scene.ask();
        look(&mut transfer);
        assert!(!scene.is_aside());
        scene.puppet.answers();
        assert!(eventually(LIMIT, || transfer.is_done()));
    }
    scene.end();
}

#[test]
fn a_transfer_that_nobody_looks_at_is_seen_to_its_end() {
    let scene = aside();
    let transfer = scene.ask();
    scene.puppet.answers();
    assert!(eventually(LIMIT, || !scene.is_aside()), "by the event loop");
    assert!(transfer.wait().is_ok());
    scene.end();
}

#[test]
fn the_end_of_a_connection_that_lies_aside_is_noticed() {
    let scene = aside();
    let connections = || scene.context.stats.snapshot(0).tcp_connections;
    assert_eq!(connections(), 1);
    drop(scene.puppet.go);
    assert!(eventually(LIMIT, || connections() == 0));
    scene.puppet.thread.join().expect("it played its part");
    scene.backend.shutdown(std::time::Instant::now() + LIMIT);
}

// Whoever waits in whichever way, on connections that others use too, gets every byte.
#[test]
fn all_ways_of_waiting_get_along() {
    let owner = Engine::start(config()).expect("an engine");
    let engine = Engine::start(config()).expect("an engine");
    let remote = memory(&owner, 1 << 20, Access::RemoteReadWrite);
    let region = remote.region();
    let content = &pattern::fill(&remote, 3);
    let endpoint = Arc::new(owner.endpoint().clone());
    std::thread::scope(|scope| {
        for way in 0..6_u64 {
            let (engine, endpoint) = (&engine, &endpoint);
            scope.spawn(move || {
                let local = memory(engine, 32 << 10, Access::LocalOnly);
                for round in 0..50_u64 {
                    let len =
                        [64, 4096, 20_000][usize::try_from((way + round) % 3).expect("small")];
                    let offset = (round * 7919 + way * 104_729) % ((1 << 20) - len);
                    let transfer = engine.submit(Batch {
                        peer: Arc::clone(endpoint),
                        direction: Direction::Read,
                        pieces: vec![Piece {
                            local: local.slice(0, len).expect("inside"),
                            remote: RemoteSlice {
                                region: region.region,
                                capability: region.capability,
                                offset,
                                len,
                                generation: None,
                            },
                        }],
                        checksum: false,
                        deadline: None,
                    });
                    wait_by(way, &transfer);
                    let mut bytes = vec![0; usize::try_from(len).expect("small")];
                    local.copy_out(0, &mut bytes).expect("inside");
                    let start = usize::try_from(offset).expect("small");
                    let expected = &content[start..][..bytes.len()];
                    pattern::assert_same(&bytes, expected, "what was read");
                }
            });
        }
    });
}

/// Waits for a transfer in one of six ways.
fn wait_by(way: u64, transfer: &Transfer) {
    match way {
        0 | 1 => assert!(transfer.wait().is_ok()),
        2 => assert!(eventually(LIMIT, || transfer.is_done())),
        3 => {
            let runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = { runtime }.build().expect("a runtime");
            assert!(runtime.block_on(transfer.clone()).is_ok());
        }
        _ => {
            let mut awaited = Awaited::default();
            let mut transfer = transfer.clone();
            while awaited.poll(|| poll_once(&mut transfer)).is_pending() {
                if let Some(mut lead) = awaited.lead(None) {
                    // The event loop may bring it to its end, and would have to wake this thread then.
                    let slice = Duration::from_millis(1);
                    while lead.turn(|socket, _| is_readable(socket, slice)) {}
                } else {
                    assert!(transfer.wait_timeout(LIMIT).is_some());
                }
            }
        }
    }
    assert!(transfer.poll().expect("it is done").is_ok());
}
