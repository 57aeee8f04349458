//! What is particular to tcp: peers that are dead, restarted or not trusted, and what is left of them.

mod shm_support;

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::auth::SharedToken;
use layercake_protocol::ids::{Capability, EngineId, RegionId};
use layercake_transport::{
    Access, AllocateOptions, Deadlines, Direction, Endpoint, Engine, EngineConfig, Error, HostId,
    Memory, Outcome, PieceError, Transfer, TransportKind, TransportSet,
};

use layercake_transport::testing::pattern::bytes as pattern;
use shm_support::{LIMIT, Remote, eventually, submit, transfer};

fn config() -> EngineConfig {
    EngineConfig {
        transports: TransportSet::only(TransportKind::Tcp),
        ..EngineConfig::default()
    }
}

fn start(config: EngineConfig) -> Engine {
    Engine::start(config).expect("an engine")
}

fn shared(engine: &Engine, len: u64) -> (Memory, Remote) {
    let options = AllocateOptions {
        access: Access::RemoteReadWrite,
        ..AllocateOptions::default()
    };
    let memory = engine.allocate(len, options).expect("some memory");
    let remote = Remote::of(engine, &memory);
    (memory, remote)
}

/// A region of an engine that nobody answers for.
fn nobody(addr: SocketAddr) -> Remote {
    let endpoint = Endpoint {
        engine: EngineId::draw(),
        tcp: addr.to_string(),
        host: HostId([0; 16]),
        shm: None,
        pid: 0,
    };
    Remote {
        endpoint: Arc::new(endpoint),
        region: RegionId(1),
        capability: Capability::draw(),
        len: 1 << 30,
    }
}

fn write(engine: &Engine, local: &Memory, to: &Remote, len: u64) -> Transfer {
    let local = local.slice(0, len).expect("inside");
    submit(
        engine,
        to,
        Direction::Write,
        vec![(local, to.slice(0, len))],
    )
}

fn error_of(outcome: &Outcome) -> Option<PieceError> {
    outcome.first_error()
}

/// Peers that are dead in different ways: one whose host drops what is sent to it, one that accepts
/// and never says a word. The sockets keep them as they are.
struct Dead {
    dropping: SocketAddr,
    silent: SocketAddr,
    _sockets: (socket2::Socket, TcpListener, Vec<TcpStream>),
}

fn dead_peers() -> Dead {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let full =
        socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    let any: SocketAddr = "127.0.0.1:0".parse().expect("an address");
    full.bind(&any.into()).expect("a port");
    full.listen(0).expect("listens");
    let dropping = full
        .local_addr()
        .expect("bound")
        .as_socket()
        .expect("an internet address");
    // Once its queue is full the system drops further attempts, as a black hole would.
    let mut waiting = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&dropping, Duration::from_millis(300)) {
        waiting.push(stream);
        assert!(waiting.len() < 100, "the queue does not fill");
    }
    let silent_addr = silent.local_addr().expect("bound");
    Dead {
        dropping,
        silent: silent_addr,
        _sockets: (full, silent, waiting),
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .expect("a system with /proc")
        .count()
}

// contract: transport-9
#[test]
fn dev_09_a_dead_peer_delays_no_transfer_to_another() {
    let dead = dead_peers();
    // So long that no transfer to X ends before those to Y have: Y would wait for it, if it waited.
    let patient = Deadlines {
        connect: LIMIT,
        transfer: LIMIT,
        progress: LIMIT,
    };
    // One thread, so that X and Y share everything that peers can share.
    let io_threads = std::num::NonZero::<u8>::MIN;
    let engine = start(EngineConfig {
        deadlines: patient,
        io_threads,
        ..config()
    });
    let (local, _) = shared(&engine, 1 << 20);
    let owner = start(config());
    let (memory, y) = shared(&owner, 1 << 20);
    let xs = [nobody(dead.dropping), nobody(dead.silent)];
    let mut pending = Vec::new();
    for round in 0..1000_u64 {
        if round % 10 == 0 {
            let size = if round % 20 == 0 { 64 } else { 1 << 20 };
            pending.extend(xs.iter().map(|x| write(&engine, &local, x, size)));
        }
        let size = 1 + usize::try_from(round * 997 % (1 << 20)).expect("small");
        if round % 50 == 0 {
            let bytes = pattern(round, size);
            local.copy_in(0, &bytes).expect("inside");
            let outcome = write(&engine, &local, &y, size as u64)
                .wait_timeout(LIMIT)
                .expect("Y answers");
            assert_eq!(error_of(&outcome), None);
            let mut there = vec![0; size];
            memory.copy_out(0, &mut there).expect("inside");
            assert!(there == bytes, "Y holds what was written");
        } else {
            let outcome = write(&engine, &local, &y, 4096)
                .wait_timeout(LIMIT)
                .expect("Y answers");
            assert_eq!(error_of(&outcome), None);
        }
    }
    assert!(
        pending.iter().all(|transfer| !transfer.is_done()),
        "X is still being waited for"
    );
    engine.shutdown(LIMIT);
    for transfer in pending {
        let outcome = transfer.wait_timeout(LIMIT).expect("ends with the engine");
        assert_eq!(error_of(&outcome), Some(PieceError::ShutDown));
    }
}

// contract: transport-9
#[test]
fn dev_09_transfers_to_a_dead_peer_fail_in_time_and_leave_nothing() {
    let dead = dead_peers();
    let short = Duration::from_millis(60);
    let deadlines = Deadlines {
        connect: short,
        ..Deadlines::default()
    };
    let engine = start(EngineConfig {
        deadlines,
        ..config()
    });
    let (local, _) = shared(&engine, 4096);
    let mut files = None;
    for round in 0..30 {
        // Engines that never come back: each one is a peer of its own.
        let mut transfers = Vec::new();
        for addr in [dead.dropping, dead.silent] {
            for _ in 0..10 {
                transfers.push(write(&engine, &local, &nobody(addr), 4096));
            }
        }
        for transfer in transfers {
            let outcome = transfer.wait_timeout(LIMIT).expect("fails in time");
            assert_eq!(error_of(&outcome), Some(PieceError::Unreachable));
        }
        eventually("nothing is left of them", || engine.stats().tcp_peers == 0);
        let open = open_files();
        if round == 5 {
            files = Some(open);
        }
        if let Some(before) = files {
            // Other tests of this process open and close some of their own.
            assert!(open < before + 100, "{before} files became {open}");
        }
    }
}

#[test]
fn a_port_that_nobody_listens_on_is_unreachable_at_once() {
    let free = TcpListener::bind("127.0.0.1:0")
        .and_then(|it| it.local_addr())
        .expect("a port");
    let patient = Deadlines {
        connect: LIMIT * 10,
        ..Deadlines::default()
    };
    let engine = start(EngineConfig {
        deadlines: patient,
        ..config()
    });
    let (local, _) = shared(&engine, 4096);
    let outcome = write(&engine, &local, &nobody(free), 64)
        .wait_timeout(LIMIT)
        .expect("refused");
    assert_eq!(error_of(&outcome), Some(PieceError::Unreachable));
}

// contract: transport-10
#[test]
fn an_engine_that_was_started_anew_on_the_same_address_is_another_peer() {
    let engine = start(config());
    let (local, _) = shared(&engine, 4096);
    let first = start(config());
    let (_kept, old) = shared(&first, 4096);
    let listen: SocketAddr = first.endpoint().tcp.parse().expect("numeric");
    assert_eq!(error_of(&write(&engine, &local, &old, 64).wait()), None);
    first.shutdown(LIMIT);
    let second = start(EngineConfig { listen, ..config() });
    let (memory, new) = shared(&second, 4096);
    assert_eq!(old.region, new.region, "its regions have the same names");
    for _ in 0..3 {
        let outcome = write(&engine, &local, &old, 64)
            .wait_timeout(LIMIT)
            .expect("ends");
        assert_eq!(error_of(&outcome), Some(PieceError::PeerGone));
    }
    let mut bytes = vec![1; 64];
    memory.copy_out(0, &mut bytes).expect("inside");
    assert_eq!(
        bytes, [0; 64],
        "nothing that was meant for the old one reached the new one"
    );
    local.copy_in(0, &pattern(5, 64)).expect("inside");
    assert_eq!(
        error_of(&write(&engine, &local, &new, 64).wait()),
        None,
        "the new one is served"
    );
    memory.copy_out(0, &mut bytes).expect("inside");
    assert_eq!(bytes, pattern(5, 64));
}

#[test]
fn only_holders_of_the_same_token_work_together() {
    let token = |text: &str| SharedToken::new(text).ok();
    let ours = token("a token of this cluster");
    let owner = start(EngineConfig {
        token: ours.clone(),
        ..config()
    });
    let (_kept, remote) = shared(&owner, 4096);
    for (held, expected) in [
        (ours, None),
        (
            token("a token of another cluster"),
            Some(PieceError::NotTrusted),
        ),
        (None, Some(PieceError::NotTrusted)),
    ] {
        let engine = start(EngineConfig {
            token: held,
            ..config()
        });
        let (local, _) = shared(&engine, 4096);
        let outcome = write(&engine, &local, &remote, 64)
            .wait_timeout(LIMIT)
            .expect("ends");
        assert_eq!(error_of(&outcome), expected);
        let probe = engine
            .probe(&remote.endpoint, LIMIT)
            .wait_timeout(LIMIT)
            .expect("ends");
        assert_eq!(error_of(&probe), expected);
    }
}

#[test]
fn a_probe_tells_whether_the_peer_is_there() {
    let engine = start(config());
    let owner = start(config());
    let (_kept, remote) = shared(&owner, 4096);
    let probe = || {
        engine
            .probe(&remote.endpoint, LIMIT)
            .wait_timeout(LIMIT)
            .expect("ends")
    };
    assert_eq!(error_of(&probe()), None);
    owner.shutdown(LIMIT);
    assert!(matches!(
        error_of(&probe()),
        Some(PieceError::Unreachable | PieceError::PeerGone)
    ));
}

#[test]
fn both_sides_may_begin_at_the_same_moment() {
    for _ in 0..50 {
        let engines = [start(config()), start(config())];
        let sides: Vec<_> = engines.iter().map(|engine| shared(engine, 4096)).collect();
        let barrier = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for side in 0..2 {
                let (engines, sides, barrier) = (&engines, &sides, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    let write = write(&engines[side], &sides[side].0, &sides[1 - side].1, 64);
                    assert_eq!(error_of(&write.wait_timeout(LIMIT).expect("ends")), None);
                });
            }
        });
    }
}

#[test]
fn many_engines_start_at_once_on_ports_of_their_own() {
    let engines: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..32).map(|_| scope.spawn(|| start(config()))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("started"))
            .collect()
    });
    let ports: std::collections::HashSet<_> = engines
        .iter()
        .map(|engine| &engine.endpoint().tcp)
        .collect();
    assert_eq!(ports.len(), engines.len());
}

#[test]
fn a_port_in_use_is_named() {
    let first = start(config());
    let listen = first.endpoint().tcp.parse().expect("numeric");
    match Engine::start(EngineConfig { listen, ..config() }) {
        Err(error @ Error::Listen { .. }) => {
            assert!(error.to_string().contains(&first.endpoint().tcp), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_other_address_family_works_too() {
    let listen = "[::1]:0".parse().expect("an address");
    let owner = start(EngineConfig { listen, ..config() });
    let (memory, remote) = shared(&owner, 100_000);
    assert!(
        remote.endpoint.tcp.starts_with("[::1]:"),
        "{}",
        remote.endpoint.tcp
    );
    let engine = start(config());
    let (local, _) = shared(&engine, 100_000);
    local.copy_in(0, &pattern(1, 100_000)).expect("inside");
    let pieces = vec![(
        local.slice(0, 100_000).expect("inside"),
        remote.slice(0, 100_000),
    )];
    assert!(transfer(&engine, &remote, Direction::Write, pieces).is_ok());
    let mut bytes = vec![0; 100_000];
    memory.copy_out(0, &mut bytes).expect("inside");
    assert!(bytes == pattern(1, 100_000));
}

/// Stands between engines and an owner, and can cut or hold what passes.
struct Proxy {
    addr: SocketAddr,
    held: Arc<std::sync::atomic::AtomicBool>,
    streams: Arc<std::sync::Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    fn start(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let proxy = Self {
            addr: listener.local_addr().expect("bound"),
            held: Arc::default(),
            streams: Arc::default(),
        };
        let target = target.to_owned();
        let (held, streams) = (Arc::clone(&proxy.held), Arc::clone(&proxy.streams));
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(&target) else {
                    continue;
                };
                let both = [(&near, &far), (&far, &near)];
                for (from, to) in both {
                    let (from, to) = (
                        from.try_clone().expect("open"),
                        to.try_clone().expect("open"),
                    );
                    let held = Arc::clone(&held);
                    std::thread::spawn(move || pass(from, to, &held));
                }
                streams.lock().expect("no panic").extend([near, far]);
            }
        });
        proxy
    }

    fn cut(&self) {
        for stream in self.streams.lock().expect("no panic").drain(..) {
            // It may have ended by itself.
            let _ended = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    fn hold(&self, held: bool) {
        self.held.store(held, std::sync::atomic::Ordering::SeqCst);
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, held: &std::sync::atomic::AtomicBool) {
    use std::io::{Read as _, Write as _};
    let mut bytes = vec![0; 16 << 10];
    while let Ok(n) = from.read(&mut bytes) {
        while held.load(std::sync::atomic::Ordering::SeqCst) {
            std::thread::park_timeout(Duration::from_millis(1));
        }
        if n == 0 || to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _ended = to.shutdown(std::net::Shutdown::Both);
}

#[test]
fn a_connection_that_was_cut_is_made_anew() {
    let progress = Duration::from_millis(400);
    let deadlines = Deadlines {
        progress,
        ..Deadlines::default()
    };
    let engine = start(EngineConfig {
        deadlines,
        ..config()
    });
    let (local, _kept) = shared(&engine, 8 << 20);
    let owner = start(config());
    let (memory, mut remote) = shared(&owner, 8 << 20);
    let proxy = Proxy::start(&owner.endpoint().tcp);
    let tcp = proxy.addr.to_string();
    remote.endpoint = Arc::new(Endpoint {
        tcp,
        ..Endpoint::clone(&remote.endpoint)
    });
    let write = |len| {
        write(&engine, &local, &remote, len)
            .wait_timeout(LIMIT)
            .expect("ends")
    };
    assert_eq!(error_of(&write(8 << 20)), None);
    for round in 0..10 {
        // While nothing is in flight: nobody notices.
        proxy.cut();
        eventually("the engine has noticed", || {
            engine.stats().tcp_connections == 0
        });
        local.copy_in(0, &pattern(round, 4096)).expect("inside");
        assert_eq!(error_of(&write(4096)), None, "after a cut while idle");
        let mut bytes = vec![0; 4096];
        memory.copy_out(0, &mut bytes).expect("inside");
        assert!(bytes == pattern(round, 4096));
        // While something is: it fails, and the next one succeeds.
        proxy.hold(true);
        let caught = submit(
            &engine,
            &remote,
            Direction::Write,
            vec![(
                local.slice(0, 8 << 20).expect("inside"),
                remote.slice(0, 8 << 20),
            )],
        );
        assert!(!caught.is_done());
        proxy.cut();
        proxy.hold(false);
        let caught = caught.wait_timeout(LIMIT).expect("ends");
        assert!(
            matches!(error_of(&caught), None | Some(PieceError::PeerGone)),
            "{:?}",
            error_of(&caught)
        );
        eventually("it is served again", || write(4096).is_ok());
    }
    proxy.hold(true);
    let silent = write(4096);
    assert_eq!(
        error_of(&silent),
        Some(PieceError::Stalled),
        "packets that vanish"
    );
    proxy.hold(false);
    proxy.cut();
    eventually("it is served again", || write(4096).is_ok());
}
