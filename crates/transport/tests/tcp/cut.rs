//! Connections that break or stand still on their way.

use std::io::{Read as _, Write as _};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// Stands between engines and an owner, and can cut or hold what passes.
struct Proxy {
    addr: SocketAddr,
    held: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
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
                let clones =
                    |stream: &TcpStream| [(); 2].map(|()| stream.try_clone().expect("open"));
                let ([from_near, to_near], [from_far, to_far]) = (clones(&near), clones(&far));
                // Whoever sees bytes pass can cut what they pass through.
                streams.lock().expect("no panic").extend([near, far]);
                for (from, to) in [(from_near, to_far), (from_far, to_near)] {
                    let held = Arc::clone(&held);
                    std::thread::spawn(move || pass(from, to, &held));
                }
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
        self.held.store(held, Ordering::SeqCst);
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, held: &AtomicBool) {
    let mut bytes = vec![0; 16 << 10];
    while let Ok(n) = from.read(&mut bytes) {
        while held.load(Ordering::SeqCst) {
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
        // While nothing is in flight: nobody notices. A lane may still have been on its way to the proxy.
        eventually("the engine has noticed", || {
            proxy.cut();
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
