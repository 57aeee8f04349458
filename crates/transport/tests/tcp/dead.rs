//! Peers that are dead, and those beside them.

use super::*;

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
