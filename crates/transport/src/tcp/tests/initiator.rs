//! An initiator against an owner that does not keep to the protocol.

use std::net::TcpListener;
use std::thread::JoinHandle;

use layercake_protocol::endpoint::{Endpoint, HostId};

use super::*;
use crate::tcp::frame::STATUS_OK;
use crate::tcp::hello::{CLIENT_HELLO_LEN, answer};
use crate::transfer::Transfer;

/// What a forged owner does with the first frame of a connection; gets its header.
type Forgery = fn(&mut TcpStream, &Header);

/// An owner that greets as it should and forges its first answer.
struct Forger {
    endpoint: Arc<Endpoint>,
    thread: JoinHandle<()>,
}

impl Forger {
    fn start(forge: Forgery) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let engine = EngineId::draw();
        let endpoint = Endpoint {
            engine,
            tcp: listener.local_addr().expect("bound").to_string(),
            host: HostId([0; 16]),
            shm: None,
            pid: 0,
        };
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("the engine connects");
            let mut hello = [0; CLIENT_HELLO_LEN];
            stream.read_exact(&mut hello).expect("a greeting");
            let hello = ClientHello::decode(&hello).expect("well-formed");
            let reply = answer(&hello, engine, None, draw_nonce());
            stream.write_all(&reply.encode()).expect("open");
            let mut header = [0; HEADER_LEN];
            stream.read_exact(&mut header).expect("a frame");
            let header = Header::decode(&header).expect("well-formed");
            let mut body = vec![0; header.body_len()];
            stream.read_exact(&mut body).expect("its body");
            forge(&mut stream, &header);
            // Until the engine closes: an end from this side is another case.
            let mut rest = Vec::new();
            let _reset = stream.read_to_end(&mut rest);
        });
        Self {
            endpoint: Arc::new(endpoint),
            thread,
        }
    }
}

pub(super) fn answer_to(question: &Header, kind: Kind) -> Header {
    Header {
        kind,
        flags: 0,
        count: question.count,
        regions: 0,
        seq: question.seq,
        payload: if kind == Kind::Data {
            question.payload
        } else {
            0
        },
    }
}

pub(super) fn send(stream: &mut TcpStream, header: Header, rest: &[u8]) {
    let mut bytes = Vec::new();
    header.encode(&mut bytes);
    bytes.extend_from_slice(rest);
    // The engine may have hung up on the first part of it.
    let _closed = stream.write_all(&bytes);
}

fn read_from(engine: &Engine, peer: &Arc<Endpoint>, local: &Memory, pieces: u64) -> Transfer {
    let piece = |index: u64| Piece {
        local: local.slice(index * 100, 100).expect("inside"),
        remote: RemoteSlice {
            region: RegionId(1),
            capability: Capability([0; 16]),
            offset: 0,
            len: 100,
            generation: None,
        },
    };
    engine.submit(Batch {
        peer: Arc::clone(peer),
        direction: Direction::Read,
        pieces: (0..pieces).map(piece).collect(),
        checksum: true,
        deadline: None,
    })
}

#[test]
#[expect(
    clippy::too_many_lines,
    reason = "a table of forgeries and what is made of it"
)]
fn an_owner_that_breaks_the_protocol_fails_its_own_transfers_only() {
    let forgeries: [(&str, Forgery); 9] = [
        ("an answer to another frame", |stream, question| {
            let seq = question.seq + 1;
            send(
                stream,
                Header {
                    seq,
                    ..answer_to(question, Kind::Data)
                },
                &[1; 200],
            );
        }),
        ("an answer of another kind", |stream, question| {
            send(stream, answer_to(question, Kind::Written), &[]);
        }),
        ("a pong that nobody asked for", |stream, question| {
            let pong = Header {
                kind: Kind::Pong,
                count: 0,
                payload: 0,
                ..answer_to(question, Kind::Pong)
            };
            send(stream, pong, &[]);
        }),
        ("more bytes than were asked for", |stream, question| {
            send(
                stream,
                Header {
                    payload: 201,
                    ..answer_to(question, Kind::Data)
                },
                &[1; 201],
            );
        }),
        ("fewer bytes than were asked for", |stream, question| {
            send(
                stream,
                Header {
                    payload: 199,
                    ..answer_to(question, Kind::Data)
                },
                &[1; 199],
            );
        }),
        ("results of fewer operations", |stream, question| {
            send(
                stream,
                Header {
                    count: 1,
                    ..answer_to(question, Kind::Data)
                },
                &[1; 200],
            );
        }),
        ("a status that does not exist", |stream, question| {
            let header = Header {
                flags: FLAG_STATUSES,
                payload: 100,
                ..answer_to(question, Kind::Data)
            };
            send(
                stream,
                header,
                &[[STATUS_OK, 200].as_slice(), &[1; 100]].concat(),
            );
        }),
        ("a trailer that nobody asked for", |stream, question| {
            let header = Header {
                flags: FLAG_TRAILER,
                ..answer_to(question, Kind::Data)
            };
            send(stream, header, &[1; 202]);
        }),
        ("a frame of its own", |stream, question| {
            send(
                stream,
                Header {
                    regions: 1,
                    ..answer_to(question, Kind::Write)
                },
                &[1; 200],
            );
        }),
    ];
    let engine = Engine::start(config()).expect("an engine");
    for (number, (what, forge)) in (1..).zip(forgeries) {
        let local = memory(&engine, 4096, Access::LocalOnly);
        let forger = Forger::start(forge);
        let transfer = read_from(&engine, &forger.endpoint, &local, 2);
        let outcome = transfer.wait_timeout(LIMIT).expect("ends");
        assert_eq!(outcome.first_error(), Some(PieceError::Protocol), "{what}");
        assert_eq!(engine.stats().malformed, number, "{what} is counted");
        let bytes = pattern::read(&local);
        assert!(
            bytes[200..].iter().all(|byte| *byte == 0),
            "{what}: bytes beside the destination"
        );
        forger.thread.join().expect("the engine hung up");
    }
    let owner = Engine::start(config()).expect("an engine");
    let open = memory(&owner, 4096, Access::RemoteReadWrite);
    assert_serves(&owner, &open);
}

#[test]
fn an_owner_that_hangs_up_in_the_middle_of_an_answer_is_gone() {
    let forger = Forger::start(|stream, question| {
        send(stream, answer_to(question, Kind::Data), &[1; 150]);
        stream.shutdown(std::net::Shutdown::Both).expect("open");
    });
    let engine = Engine::start(config()).expect("an engine");
    let local = memory(&engine, 4096, Access::LocalOnly);
    let outcome = read_from(&engine, &forger.endpoint, &local, 2)
        .wait_timeout(LIMIT)
        .expect("ends");
    assert_eq!(outcome.first_error(), Some(PieceError::PeerGone));
    forger.thread.join().expect("the engine hung up");
}

#[test]
fn an_owner_that_trickles_is_waited_for_as_long_as_it_moves() {
    // Each byte is progress; all of them together take longer than the progress deadline.
    let forger = Forger::start(|stream, question| {
        let mut bytes = Vec::new();
        answer_to(question, Kind::Data).encode(&mut bytes);
        bytes.extend_from_slice(&[7; 100]);
        for part in bytes.chunks(8) {
            stream.write_all(part).expect("the engine waits");
            std::thread::park_timeout(Duration::from_millis(60));
        }
    });
    let deadlines = Deadlines {
        progress: Duration::from_millis(500),
        ..Deadlines::default()
    };
    let engine = Engine::start(EngineConfig {
        deadlines,
        ..config()
    })
    .expect("an engine");
    let local = memory(&engine, 4096, Access::LocalOnly);
    let outcome = read_from(&engine, &forger.endpoint, &local, 1)
        .wait_timeout(LIMIT)
        .expect("ends");
    assert_eq!(outcome.first_error(), None);
    assert_eq!(
        outcome.pieces[0].map(|done| done.crc32c),
        Ok(Some(crc32c::crc32c(&[7; 100])))
    );
    drop(engine);
    forger.thread.join().expect("the engine hung up");
}
