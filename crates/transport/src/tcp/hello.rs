//! The greeting of a connection: versions, identities and mutual proof, with no I/O.
//!
//! The initiator says who it is, whom it expects and draws a nonce; the owner answers with its own
//! identity, nonce and, where it holds a token, its proof; the initiator checks that and gives its own
//! proof. Frames may follow at once. The owner looks at no frame before the proof is checked, the
//! initiator sends none before it has checked the owner's. An owner that turns a peer away says why
//! and closes.
//!
//! The expected identity matters: a restarted process on the same address is another engine, and
//! nothing meant for the one before may reach it.

use layercake_protocol::auth::{Nonce, Proof, SharedToken, Side};
use layercake_protocol::ids::EngineId;
use layercake_protocol::version::{CURRENT, Version};

use crate::error::PieceError;

const MAGIC: [u8; 8] = *b"lcake\0\x01\n";

pub(crate) const CLIENT_HELLO_LEN: usize = 88;
pub(crate) const SERVER_HELLO_LEN: usize = 104;
pub(crate) const PROOF_LEN: usize = 32;

/// What the initiator says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientHello {
    pub(crate) version: Version,
    pub(crate) from: EngineId,
    pub(crate) to: EngineId,
    pub(crate) nonce: Nonce,
    pub(crate) has_token: bool,
}

/// How the owner takes a greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Welcome,
    /// The engine that the initiator expects is not here.
    OtherEngine,
    Version,
    /// One side has a token and the other has none.
    Token,
}

impl Verdict {
    const ALL: [Self; 4] = [Self::Welcome, Self::OtherEngine, Self::Version, Self::Token];

    const fn code(self) -> u8 {
        match self {
            Self::Welcome => 0,
            Self::OtherEngine => 1,
            Self::Version => 2,
            Self::Token => 3,
        }
    }
}

/// What the owner answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServerHello {
    pub(crate) version: Version,
    pub(crate) engine: EngineId,
    pub(crate) nonce: Nonce,
    pub(crate) verdict: Verdict,
    pub(crate) has_token: bool,
    /// Zero where there is no token.
    pub(crate) proof: Proof,
}

/// Bytes that are no greeting of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotAHello;

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], NotAHello> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(NotAHello)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn magic(&mut self) -> Result<(), NotAHello> {
        if self.take()? == MAGIC {
            Ok(())
        } else {
            Err(NotAHello)
        }
    }

    fn version(&mut self) -> Result<Version, NotAHello> {
        Ok(Version {
            protocol: u32::from_le_bytes(self.take()?),
            semantics: u32::from_le_bytes(self.take()?),
        })
    }

    fn engine(&mut self) -> Result<EngineId, NotAHello> {
        Ok(EngineId(u128::from_le_bytes(self.take()?)))
    }
}

fn begin(version: Version) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&version.protocol.to_le_bytes());
    out.extend_from_slice(&version.semantics.to_le_bytes());
    out
}

impl ClientHello {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = begin(self.version);
        out.extend_from_slice(&self.from.0.to_le_bytes());
        out.extend_from_slice(&self.to.0.to_le_bytes());
        out.extend_from_slice(&self.nonce);
        out.push(u8::from(self.has_token));
        out.resize(CLIENT_HELLO_LEN, 0);
        out
    }

    pub(crate) fn decode(bytes: &[u8; CLIENT_HELLO_LEN]) -> Result<Self, NotAHello> {
        let mut reader = Reader(bytes);
        reader.magic()?;
        Ok(Self {
            version: reader.version()?,
            from: reader.engine()?,
            to: reader.engine()?,
            nonce: reader.take()?,
            has_token: reader.take::<1>()?[0] & 1 != 0,
        })
    }
}

impl ServerHello {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = begin(self.version);
        out.extend_from_slice(&self.engine.0.to_le_bytes());
        out.extend_from_slice(&self.nonce);
        out.extend_from_slice(&[
            self.verdict.code(),
            u8::from(self.has_token),
            0,
            0,
            0,
            0,
            0,
            0,
        ]);
        out.extend_from_slice(&self.proof);
        out
    }

    pub(crate) fn decode(bytes: &[u8; SERVER_HELLO_LEN]) -> Result<Self, NotAHello> {
        let mut reader = Reader(bytes);
        reader.magic()?;
        let version = reader.version()?;
        let engine = reader.engine()?;
        let nonce = reader.take()?;
        let [verdict, has_token, ..] = reader.take::<8>()?;
        let verdict = Verdict::ALL
            .into_iter()
            .find(|known| known.code() == verdict)
            .ok_or(NotAHello)?;
        Ok(Self {
            version,
            engine,
            nonce,
            verdict,
            has_token: has_token & 1 != 0,
            proof: reader.take()?,
        })
    }
}

/// The owner's answer to a greeting.
pub(crate) fn answer(
    hello: &ClientHello,
    engine: EngineId,
    token: Option<&SharedToken>,
    nonce: Nonce,
) -> ServerHello {
    let verdict = if CURRENT.accept(hello.version).is_err() {
        Verdict::Version
    } else if hello.has_token != token.is_some() {
        Verdict::Token
    } else if hello.to != engine {
        Verdict::OtherEngine
    } else {
        Verdict::Welcome
    };
    let proof = match (verdict, token) {
        (Verdict::Welcome, Some(token)) => token.prove(Side::Responder, &hello.nonce, &nonce),
        _ => [0; PROOF_LEN],
    };
    ServerHello {
        version: CURRENT,
        engine,
        nonce,
        verdict,
        has_token: token.is_some(),
        proof,
    }
}

/// What the initiator makes of the answer: its proof, to be sent if there is a token, or why it
/// can't work with this peer.
pub(crate) fn conclude(
    sent: &ClientHello,
    answer: &ServerHello,
    token: Option<&SharedToken>,
) -> Result<Option<Proof>, PieceError> {
    if CURRENT.accept(answer.version).is_err() {
        return Err(PieceError::Incompatible);
    }
    match answer.verdict {
        Verdict::Welcome => {}
        Verdict::OtherEngine => return Err(PieceError::PeerGone),
        Verdict::Version => return Err(PieceError::Incompatible),
        Verdict::Token => return Err(PieceError::NotTrusted),
    }
    if answer.engine != sent.to {
        return Err(PieceError::PeerGone);
    }
    match token {
        None if answer.has_token => Err(PieceError::NotTrusted),
        None => Ok(None),
        Some(token) => {
            match token.check(Side::Responder, &sent.nonce, &answer.nonce, &answer.proof) {
                Ok(()) => Ok(Some(token.prove(
                    Side::Initiator,
                    &sent.nonce,
                    &answer.nonce,
                ))),
                Err(_) => Err(PieceError::NotTrusted),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use layercake_protocol::auth::draw_nonce;
    use proptest::prelude::*;

    use super::*;

    fn hello(to: EngineId, has_token: bool) -> ClientHello {
        ClientHello {
            version: CURRENT,
            from: EngineId(7),
            to,
            nonce: draw_nonce(),
            has_token,
        }
    }

    fn token(text: &str) -> SharedToken {
        SharedToken::new(text).expect("long enough")
    }

    #[test]
    fn both_sides_prove_the_token_and_strangers_are_turned_away() {
        let ours = token("a token for the cluster");
        let other = token("another cluster's token");
        let here = EngineId(1);
        let meet = |client: Option<&SharedToken>, server: Option<&SharedToken>| {
            let sent = hello(here, client.is_some());
            let reply = answer(&sent, here, server, draw_nonce());
            let proof = conclude(&sent, &reply, client)?;
            if let (Some(server), Some(proof)) = (server, proof) {
                server
                    .check(Side::Initiator, &sent.nonce, &reply.nonce, &proof)
                    .map_err(|_| PieceError::NotTrusted)?;
            }
            Ok(proof.is_some())
        };
        assert_eq!(meet(None, None), Ok(false));
        assert_eq!(meet(Some(&ours), Some(&ours)), Ok(true));
        assert_eq!(meet(Some(&ours), Some(&other)), Err(PieceError::NotTrusted));
        assert_eq!(meet(None, Some(&ours)), Err(PieceError::NotTrusted));
        assert_eq!(meet(Some(&ours), None), Err(PieceError::NotTrusted));
    }

    #[test]
    fn another_engine_on_the_same_address_is_a_peer_that_is_gone() {
        let sent = hello(EngineId(1), false);
        let reply = answer(&sent, EngineId(2), None, draw_nonce());
        assert_eq!(conclude(&sent, &reply, None), Err(PieceError::PeerGone));
    }

    #[test]
    fn only_neighbouring_versions_work_together() {
        let mut sent = hello(EngineId(1), false);
        sent.version.protocol = CURRENT.protocol + 1;
        assert_eq!(
            answer(&sent, EngineId(1), None, draw_nonce()).verdict,
            Verdict::Welcome
        );
        sent.version.protocol = CURRENT.protocol + 2;
        let reply = answer(&sent, EngineId(1), None, draw_nonce());
        assert_eq!(conclude(&sent, &reply, None), Err(PieceError::Incompatible));
    }

    proptest! {
        #[test]
        fn greetings_arrive_unchanged(from: u128, to: u128, nonce: [u8; 32], has_token: bool, proof: [u8; 32], verdict in 0_usize..4) {
            let client = ClientHello { version: CURRENT, from: EngineId(from), to: EngineId(to), nonce, has_token };
            let bytes = client.encode();
            prop_assert_eq!(ClientHello::decode(bytes.as_slice().try_into().expect("its length")), Ok(client));
            let server = ServerHello {
                version: CURRENT, engine: EngineId(to), nonce, verdict: Verdict::ALL[verdict], has_token, proof,
            };
            let bytes = server.encode();
            prop_assert_eq!(ServerHello::decode(bytes.as_slice().try_into().expect("its length")), Ok(server));
        }

        #[test]
        fn foreign_bytes_are_no_greeting(bytes: [u8; CLIENT_HELLO_LEN]) {
            prop_assert_eq!(ClientHello::decode(&bytes).is_ok(), bytes[..8] == MAGIC);
        }
    }
}
