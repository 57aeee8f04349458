//! An owner against peers that don't keep to the protocol: raw sockets that forge frames. The other
//! way round is in `initiator`.

mod initiator;
mod late;
mod lead;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::auth::{SharedToken, draw_nonce};
use layercake_protocol::ids::{Capability, EngineId, RegionId};
use layercake_protocol::version::CURRENT;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::frame::{
    FLAG_STATUSES, FLAG_TRAILER, HEADER_LEN, Header, Kind, MAX_PAYLOAD_ACCEPTED, WireOp,
    WireRegion, decode_status,
};
use super::hello::{ClientHello, SERVER_HELLO_LEN, ServerHello, Verdict, conclude};
use crate::batch::{Batch, Direction, Piece, RemoteSlice};
use crate::config::{Deadlines, EngineConfig, TransportKind, TransportSet};
use crate::engine::Engine;
use crate::error::{PieceError, Refusal};
use crate::memory::{Access, AllocateOptions, Memory};
use crate::testing::{eventually, pattern};

const LIMIT: Duration = Duration::from_secs(20);

fn config() -> EngineConfig {
    EngineConfig {
        transports: TransportSet::only(TransportKind::Tcp),
        ..EngineConfig::default()
    }
}

fn memory(engine: &Engine, len: u64, access: Access) -> Memory {
    let options = AllocateOptions {
        access,
        generation_tags: true,
        ..AllocateOptions::default()
    };
    engine.allocate(len, options).expect("some memory")
}

/// A client that says what it likes.
struct Raw {
    stream: TcpStream,
    seq: u64,
}

/// How the owner answered.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Statuses(Vec<Result<(), Refusal>>),
    Closed,
}

impl Raw {
    fn connect(owner: &Engine) -> Self {
        let stream = TcpStream::connect(&owner.endpoint().tcp).expect("it listens");
        stream.set_read_timeout(Some(LIMIT)).expect("a socket");
        Self { stream, seq: 0 }
    }

    fn hello(owner: &Engine, token: bool) -> ClientHello {
        let to = owner.endpoint().engine;
        ClientHello {
            version: CURRENT,
            from: EngineId(1),
            to,
            nonce: draw_nonce(),
            has_token: token,
        }
    }

    /// Connects and greets as it should be.
    fn open(owner: &Engine) -> Self {
        let mut raw = Self::connect(owner);
        let answer = raw.greet(&Self::hello(owner, false));
        assert_eq!(answer.verdict, Verdict::Welcome);
        raw
    }

    fn greet(&mut self, hello: &ClientHello) -> ServerHello {
        self.send(&hello.encode());
        let mut answer = [0; SERVER_HELLO_LEN];
        self.stream.read_exact(&mut answer).expect("an answer");
        ServerHello::decode(&answer).expect("well-formed")
    }

    fn send(&mut self, bytes: &[u8]) {
        // The owner may have closed already; what it makes of it is seen when reading.
        let _closed = self.stream.write_all(bytes);
    }

    /// A whole frame, as forged.
    fn frame(&mut self, kind: Kind, region: WireRegion, op: WireOp, payload: &[u8]) {
        let asked = if kind == Kind::Write {
            payload.len() as u64
        } else {
            op.len.min(4096)
        };
        self.head(kind, region, op, u32::try_from(asked).expect("small"));
        self.send(payload);
    }

    /// What comes before a frame's payload.
    fn head(&mut self, kind: Kind, region: WireRegion, op: WireOp, payload: u32) {
        let mut bytes = Vec::new();
        Header {
            kind,
            flags: 0,
            count: 1,
            regions: 1,
            seq: self.seq,
            payload,
        }
        .encode(&mut bytes);
        region.encode(&mut bytes);
        op.encode(&mut bytes);
        self.seq += 1;
        self.send(&bytes);
    }

    fn answer(&mut self) -> Answer {
        let mut header = [0; HEADER_LEN];
        if !self.read(&mut header) {
            return Answer::Closed;
        }
        let header = Header::decode(&header).expect("the owner keeps to the protocol");
        assert_eq!(header.seq, self.seq - 1);
        let mut statuses = vec![0; usize::from(header.count)];
        if header.flags & FLAG_STATUSES != 0 {
            assert!(self.read(&mut statuses), "the body follows");
        }
        let mut rest = vec![0; header.payload as usize];
        assert!(self.read(&mut rest), "the payload follows");
        if header.flags & FLAG_TRAILER != 0 {
            assert!(self.read(&mut statuses), "the trailer follows");
        }
        let status = |status: &u8| decode_status(*status).expect("a known status");
        Answer::Statuses(statuses.iter().map(status).collect())
    }

    fn read(&mut self, bytes: &mut [u8]) -> bool {
        match self.stream.read_exact(bytes) {
            Ok(()) => true,
            Err(error) => {
                let timed_out = matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
                assert!(!timed_out, "neither answered nor closed");
                false
            }
        }
    }

    fn is_closed(&mut self) -> bool {
        self.answer() == Answer::Closed
    }
}

/// That an engine which keeps to the protocol is served as ever.
fn assert_serves(owner: &Engine, memory: &Memory) {
    let client = Engine::start(config()).expect("an engine");
    let bytes = pattern::bytes(77, 4096);
    let local = client
        .register(bytes.clone().into(), Access::LocalOnly)
        .expect("a buffer");
    let region = memory.region();
    let run = |direction| {
        let remote = RemoteSlice {
            region: region.region,
            capability: region.capability,
            offset: 0,
            len: 4096,
            generation: None,
        };
        let local = local.slice(0, 4096).expect("inside");
        let pieces = vec![Piece { local, remote }];
        let peer = Arc::new(owner.endpoint().clone());
        let batch = Batch {
            peer,
            direction,
            pieces,
            checksum: false,
            deadline: None,
        };
        assert_eq!(client.submit(batch).wait().first_error(), None);
    };
    run(Direction::Write);
    local.copy_in(0, &[0; 4096]).expect("inside");
    run(Direction::Read);
    pattern::assert_same(&pattern::read(&local), &bytes, "what was written");
}

// contract: transport-5, transport-11
#[test]
#[expect(
    clippy::too_many_lines,
    reason = "a table of forgeries and what is made of it"
)]
fn dev_08_a_peer_touches_nothing_that_it_was_not_given() {
    let owner = Engine::start(config()).expect("an engine");
    let open = memory(&owner, 64 << 10, Access::RemoteReadWrite);
    let private = memory(&owner, 64 << 10, Access::LocalOnly);
    let gone = memory(&owner, 64 << 10, Access::RemoteReadWrite);
    let before = [&open, &private, &gone].map(|memory| pattern::fill(memory, memory.id().0));
    gone.unregister(LIMIT).expect("nobody uses it");
    let named = |memory: &Memory| {
        let region = memory.region();
        WireRegion {
            region: region.region,
            capability: region.capability,
        }
    };
    let at = |offset: u64, len: u64| WireOp {
        region: 0,
        offset,
        len,
        generation: None,
    };
    let payload = vec![0xEE; 16];
    let end = open.len();
    let forged = [
        (
            "an address as a region",
            WireRegion {
                region: RegionId(open.addr() as u64),
                ..named(&open)
            },
            at(0, 16),
            Refusal::UnknownRegion,
        ),
        (
            "an address as an offset",
            named(&open),
            at(private.addr() as u64, 16),
            Refusal::OutOfBounds,
        ),
        (
            "the last bytes and some beyond",
            named(&open),
            at(end - 8, 16),
            Refusal::OutOfBounds,
        ),
        (
            "an offset that wraps around",
            named(&open),
            at(u64::MAX - 7, 16),
            Refusal::OutOfBounds,
        ),
        (
            "memory that is not for peers",
            named(&private),
            at(0, 16),
            Refusal::AccessDenied,
        ),
        (
            "memory that was unregistered",
            named(&gone),
            at(0, 16),
            Refusal::UnknownRegion,
        ),
        (
            "a guessed capability",
            WireRegion {
                capability: Capability::draw(),
                ..named(&open)
            },
            at(0, 16),
            Refusal::BadCapability,
        ),
    ];
    let mut counted = 0;
    let security = || owner.stats().security_refusals;
    for (what, region, op, refusal) in &forged {
        for kind in [Kind::Read, Kind::Write] {
            let mut raw = Raw::open(&owner);
            raw.frame(
                kind,
                *region,
                *op,
                if kind == Kind::Write { &payload } else { &[] },
            );
            assert_eq!(
                raw.answer(),
                Answer::Statuses(vec![Err(*refusal)]),
                "{kind:?} of {what}"
            );
            counted += 1;
            assert_eq!(security(), counted, "{kind:?} of {what} is counted once");
            // The connection lives, and what is allowed is still done on it.
            raw.frame(Kind::Read, named(&open), at(0, 16), &[]);
            assert_eq!(raw.answer(), Answer::Statuses(vec![Ok(())]));
        }
    }
    // Lengths that no operation can have: of nothing, and of half the address space.
    for len in [0, 1 << 63, u64::MAX] {
        let mut raw = Raw::open(&owner);
        raw.frame(Kind::Read, named(&open), at(0, len), &[]);
        let refusal = if len == 0 {
            Refusal::BadLength
        } else {
            Refusal::OutOfBounds
        };
        assert_eq!(
            raw.answer(),
            Answer::Statuses(vec![Err(refusal)]),
            "a read of {len} bytes"
        );
        counted += 1;
        assert_eq!(security(), counted);
    }
    let mut raw = Raw::open(&owner);
    raw.frame(Kind::Write, named(&open), at(0, 0), &[]);
    assert_eq!(
        raw.answer(),
        Answer::Statuses(vec![Err(Refusal::BadLength)]),
        "a write of no bytes"
    );
    assert_eq!(security(), counted + 1);
    // A write of 2^63 bytes can't be answered: nobody knows where the next frame begins.
    let malformed = owner.stats().malformed;
    let mut raw = Raw::open(&owner);
    raw.frame(Kind::Write, named(&open), at(0, 1 << 63), &payload);
    assert!(raw.is_closed());
    assert!(eventually(LIMIT, || owner.stats().malformed == malformed + 1));
    for (memory, before) in [&open, &private, &gone].into_iter().zip(&before) {
        pattern::assert_same(&pattern::read(memory), before, "memory of the owner");
    }
    assert_serves(&owner, &open);
}

#[test]
fn dev_08_bytes_that_are_no_frames_close_their_connection_and_nothing_else() {
    let owner = Engine::start(config()).expect("an engine");
    let open = memory(&owner, 1 << 20, Access::RemoteReadWrite);
    let before = pattern::fill(&open, 1);
    let mut random = SmallRng::seed_from_u64(8);
    for round in 0..64 {
        let mut raw = if round % 2 == 0 {
            Raw::open(&owner)
        } else {
            Raw::connect(&owner)
        };
        let mut bytes = vec![0; random.random_range(1..4096)];
        random.fill(bytes.as_mut_slice());
        if round % 4 == 0 {
            // Near misses: a header whose kind is right.
            bytes[0] = random.random_range(1..=6);
            bytes[1] = 0;
        }
        raw.send(&bytes);
        drop(raw);
    }
    let mut raw = Raw::open(&owner);
    let mut header = Vec::new();
    let too_long = MAX_PAYLOAD_ACCEPTED + 1;
    Header {
        kind: Kind::Write,
        flags: 0,
        count: 1,
        regions: 1,
        seq: 0,
        payload: too_long,
    }
    .encode(&mut header);
    raw.send(&header);
    assert!(
        raw.is_closed(),
        "a payload that is too long is not waited for"
    );
    assert!(owner.stats().malformed > 0);
    pattern::assert_same(&pattern::read(&open), &before, "memory of the owner");
    assert_serves(&owner, &open);
    let left = || owner.stats().tcp_connections;
    assert!(
        eventually(LIMIT, || left() == 0),
        "{} connections are left",
        left()
    );
}

// contract: transport-12
#[test]
fn without_the_token_no_byte_moves() {
    let token = SharedToken::new("the secret of this cluster").expect("long enough");
    let owner = Engine::start(EngineConfig {
        token: Some(token),
        ..config()
    })
    .expect("an engine");
    let open = memory(&owner, 4096, Access::RemoteReadWrite);
    let before = pattern::fill(&open, 1);
    let region = open.region();
    let region = WireRegion {
        region: region.region,
        capability: region.capability,
    };
    let op = WireOp {
        region: 0,
        offset: 0,
        len: 16,
        generation: None,
    };

    let mut none = Raw::connect(&owner);
    assert_eq!(
        none.greet(&Raw::hello(&owner, false)).verdict,
        Verdict::Token
    );
    none.frame(Kind::Write, region, op, &[0xEE; 16]);
    assert!(none.is_closed());

    let mut wrong = Raw::connect(&owner);
    let hello = Raw::hello(&owner, true);
    let answer = wrong.greet(&hello);
    assert_eq!(answer.verdict, Verdict::Welcome);
    let guess = SharedToken::new("a guess at the secret").expect("long enough");
    assert_eq!(
        conclude(&hello, &answer, Some(&guess)),
        Err(PieceError::NotTrusted),
        "nor is the owner believed"
    );
    wrong.send(&[0x55; 32]);
    wrong.frame(Kind::Write, region, op, &[0xEE; 16]);
    assert!(wrong.is_closed());

    // The owner's own proof sent back to it proves nothing.
    let mut mirror = Raw::connect(&owner);
    let proof = mirror.greet(&Raw::hello(&owner, true)).proof;
    mirror.send(&proof);
    mirror.frame(Kind::Write, region, op, &[0xEE; 16]);
    assert!(mirror.is_closed());

    assert!(eventually(LIMIT, || owner.stats().untrusted == 3));
    pattern::assert_same(&pattern::read(&open), &before, "memory of the owner");
}
