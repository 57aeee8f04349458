//! What the link says to a stranger, and to a master that does not fit.

use std::io::Write as _;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::time::{Duration, Instant};

use layercake_protocol::auth::SharedToken;
use layercake_protocol::version::{CURRENT, Version};
use layercake_store::StoreError;
use layercake_store::link::{LinkCarrier, LinkState, MasterLink};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::config;
use crate::fake::{FakeMaster, Nature};

fn token(text: &str) -> SharedToken {
    SharedToken::new(text).expect("long enough")
}

const SECRET: &str = "a secret that all members share";

async fn refused(nature: Nature, ours: Option<SharedToken>) -> (StoreError, FakeMaster) {
    let master = FakeMaster::new(nature);
    let served = master.serve();
    let mut config = config(served.address);
    config.token = ours;
    let error = MasterLink::connect(config)
        .await
        .expect_err("must be refused");
    assert!(
        error.to_string().contains(&served.address.to_string()),
        "{error}"
    );
    (error, master)
}

#[tokio::test]
async fn both_sides_prove_the_token() {
    let master = FakeMaster::new(Nature {
        token: Some(token(SECRET)),
        ..Nature::default()
    });
    let served = master.serve();
    let mut config = config(served.address);
    config.token = Some(token(SECRET));
    let link = MasterLink::connect(config)
        .await
        .expect("the tokens are equal");
    assert!(matches!(link.state(), LinkState::Up { .. }));
}

#[tokio::test]
async fn a_master_without_lanes_and_one_that_only_claims_them_are_served_over_grpc() {
    for claims_lanes in [false, true] {
        let master = FakeMaster::new(Nature {
            claims_lanes,
            ..Nature::default()
        });
        let served = master.serve();
        let link = MasterLink::connect(config(served.address))
            .await
            .expect("there is gRPC");
        assert!(matches!(link.state(), LinkState::Up { .. }) && !link.uses_lane());
        assert_eq!(master.members(), 1);
    }
}

#[tokio::test]
async fn a_socket_that_leads_to_no_master_costs_the_way_over_it_and_no_more() {
    // What is said by who listens there; `None`: nothing, and the connection stays open.
    let answers = [
        Some(&b""[..]),
        Some(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        None,
    ];
    let claims = |name: &str| {
        FakeMaster::new(Nature {
            claims_lanes: true,
            claims_socket: Some(name.to_owned()),
            ..Nature::default()
        })
    };
    let is_served = async |master: FakeMaster| {
        let served = master.serve();
        let link = MasterLink::connect(config(served.address)).await;
        let link = link.expect("there is gRPC");
        assert_eq!(link.carrier(), Some(LinkCarrier::Grpc));
        assert_eq!(master.members(), 1);
    };
    for (n, answer) in answers.into_iter().enumerate() {
        let name = format!("layercake-test-{}-{n}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("short enough");
        let listener = UnixListener::bind_addr(&address).expect("nobody else has it");
        let listens = std::thread::spawn(move || {
            let (mut connection, _) = listener.accept().expect("it is called");
            if let Some(answer) = answer {
                connection.write_all(answer).expect("it is open");
                return;
            }
            // Until the other side gives it up.
            drop(std::io::copy(&mut connection, &mut std::io::sink()));
        });
        is_served(claims(&name)).await;
        listens.join().expect("it was called");
    }
    is_served(claims("layercake-test-nobody")).await;
    // A name that is none.
    is_served(claims(&format!("layercake-{}", "x".repeat(200)))).await;
    // Somebody else's, who is left alone.
    let name = format!("test-{}-somebody", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("short enough");
    let listener = UnixListener::bind_addr(&address).expect("nobody else has it");
    listener.set_nonblocking(true).expect("a socket");
    is_served(claims(&name)).await;
    assert!(listener.accept().is_err(), "it was called");
}

#[tokio::test]
async fn a_master_that_cannot_prove_the_token_is_refused_before_it_learns_anything() {
    for theirs in [None, Some(token("a secret, but another one"))] {
        let nature = Nature {
            token: theirs,
            ..Nature::default()
        };
        let (error, master) = refused(nature, Some(token(SECRET))).await;
        assert!(
            matches!(error, StoreError::MasterUnproven { .. }),
            "{error}"
        );
        assert!(!error.is_retryable());
        assert_eq!(master.greetings(), (1, 0), "it got a nonce, and no proof");
    }
}

#[tokio::test]
async fn a_caller_that_cannot_prove_the_token_is_told_so() {
    let nature = Nature {
        token: Some(token(SECRET)),
        ..Nature::default()
    };
    let (error, _) = refused(nature.clone(), None).await;
    assert!(matches!(error, StoreError::TokenRequired { .. }), "{error}");
    let nature = Nature {
        turns_away: true,
        ..nature
    };
    let (error, _) = refused(nature, Some(token(SECRET))).await;
    assert!(matches!(error, StoreError::WrongToken { .. }), "{error}");
}

#[tokio::test]
async fn a_version_that_does_not_fit_is_refused_naming_both() {
    let theirs = Version {
        protocol: CURRENT.protocol + 2,
        semantics: CURRENT.semantics,
    };
    let nature = Nature {
        version: theirs,
        ..Nature::default()
    };
    let (error, master) = refused(nature, None).await;
    let text = error.to_string();
    assert!(
        text.contains(&theirs.to_string()) && text.contains(&CURRENT.to_string()),
        "{text}"
    );
    assert!(!error.is_retryable());
    assert_eq!(master.greetings().1, 0);
    // A neighbour of this one works. (The first has none before it.)
    let nature = Nature {
        version: Version {
            protocol: CURRENT.protocol + 1,
            semantics: CURRENT.semantics,
        },
        ..Nature::default()
    };
    let served = FakeMaster::new(nature).serve();
    assert!(MasterLink::connect(config(served.address)).await.is_ok());
}

/// Serves connections: reads a little, says something, perhaps hangs up, reads on to the end.
async fn say(text: &'static [u8], hang_up: bool) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut some = [0; 1024];
            let _ = stream.read(&mut some).await;
            let _ = stream.write_all(text).await;
            if hang_up {
                let _ = stream.shutdown().await;
            }
            while stream.read(&mut some).await.is_ok_and(|n| n > 0) {}
        }
    });
    address
}

#[tokio::test]
async fn another_service_on_the_port_is_named_for_what_it_is() {
    for hang_up in [false, true] {
        let address = say(b"HTTP/1.1 505 HTTP Version Not Supported\r\n\r\n", hang_up).await;
        let error = MasterLink::connect(config(address))
            .await
            .expect_err("no master");
        let text = error.to_string();
        assert!(matches!(error, StoreError::NotAMaster { .. }), "{text}");
        assert!(
            text.contains("HTTP/1.1 505") && text.contains(&address.to_string()),
            "{text}"
        );
        assert!(!text.contains('\n'), "one line: {text}");
    }
}

#[tokio::test]
async fn another_grpc_service_is_no_master() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_routes(tonic::service::Routes::default())
            .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener)),
    );
    let error = MasterLink::connect(config(address))
        .await
        .expect_err("no master");
    assert!(matches!(error, StoreError::NotAMaster { .. }), "{error}");
}

#[tokio::test]
async fn who_accepts_and_stays_silent_is_given_up_at_the_connect_deadline() {
    let address = say(b"", false).await;
    let mut config = config(address);
    config.timeouts.connect = Duration::from_millis(200);
    let start = Instant::now();
    let error = MasterLink::connect(config)
        .await
        .expect_err("nobody answers");
    assert!(
        matches!(error, StoreError::MasterUnreachable { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("greeting"), "{error}");
    let took = start.elapsed();
    assert!(took < super::config(address).timeouts.connect, "{took:?}");
}

#[tokio::test]
async fn nobody_on_the_port_is_unreachable_at_once() {
    let port = FakeMaster::default().serve().kill();
    let error = MasterLink::connect(config(port.address()))
        .await
        .expect_err("nobody is there");
    assert!(
        matches!(error, StoreError::MasterUnreachable { .. }),
        "{error}"
    );
    assert!(error.is_retryable());
}

#[tokio::test]
async fn a_master_that_comes_back_with_another_token_is_what_calls_answer_with() {
    let master = FakeMaster::new(Nature {
        token: Some(token(SECRET)),
        ..Nature::default()
    });
    let served = master.serve();
    let address = served.address;
    let mut config = config(address);
    config.token = Some(token(SECRET));
    let link = MasterLink::connect(config)
        .await
        .expect("the tokens are equal");
    let port = served.kill();
    let other = FakeMaster::new(Nature {
        token: Some(token("not the same secret any more")),
        term: 2,
        ..Nature::default()
    });
    let _served = other.serve_at(port);
    super::state(&link, "refused for its token", |state| {
        matches!(state, LinkState::Down(StoreError::MasterUnproven { .. }))
    })
    .await;
    let error = link.put_end(&[]).await;
    assert!(error.is_ok(), "an empty batch asks nobody");
    let error = link.remove_matching("", false).await.expect_err("no trust");
    assert!(
        matches!(error, StoreError::MasterUnproven { .. }),
        "{error}"
    );
}
