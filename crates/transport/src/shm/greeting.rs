//! The greeting of two engines on one host, without I/O.
//!
//! Versions, names and proofs are compared before the owner hands out anything. Each side is a small
//! state machine that takes a message and says what to do; the service sends, closes and keeps the
//! deadline. With a shared token both sides prove it, the owner first: it listens under a name that
//! anyone may claim.

use layercake_protocol::auth::{Nonce, SharedToken, Side, draw_nonce};
use layercake_protocol::ids::EngineId;
use layercake_protocol::version::{CURRENT, Version};

use super::wire::{Message, RefusedReason};
use crate::error::PieceError;

/// What an owner does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum OwnerStep {
    /// Send this and wait for more.
    Send(Message),
    /// The peer may be attached.
    Attach(EngineId),
    /// Send why, and close.
    Refuse(RefusedReason),
    /// Close: the peer does not speak this protocol.
    Broken,
}

/// The owner's side.
#[derive(Debug)]
pub(super) struct OwnerGreeting {
    me: EngineId,
    version: Version,
    token: Option<SharedToken>,
    said_hello: Option<(EngineId, Nonce, Nonce)>,
}

impl OwnerGreeting {
    pub(super) fn new(me: EngineId, token: Option<SharedToken>) -> Self {
        Self {
            me,
            version: CURRENT,
            token,
            said_hello: None,
        }
    }

    /// Takes the peer's message.
    pub(super) fn on_message(&mut self, message: &Message) -> OwnerStep {
        match (message, self.said_hello.take()) {
            (
                Message::Hello {
                    version,
                    from,
                    to,
                    nonce,
                },
                None,
            ) => self.on_hello(*version, *from, *to, nonce),
            (Message::Prove { proof }, Some((peer, theirs, ours))) => {
                let trusted = match (&self.token, proof) {
                    (None, _) => true,
                    (Some(token), Some(proof)) => {
                        token.check(Side::Initiator, &theirs, &ours, proof).is_ok()
                    }
                    (Some(_), None) => false,
                };
                if trusted {
                    OwnerStep::Attach(peer)
                } else {
                    OwnerStep::Refuse(RefusedReason::NotTrusted)
                }
            }
            _ => OwnerStep::Broken,
        }
    }

    fn on_hello(
        &mut self,
        version: Version,
        from: EngineId,
        to: EngineId,
        theirs: &Nonce,
    ) -> OwnerStep {
        if self.version.accept(version).is_err() {
            return OwnerStep::Refuse(RefusedReason::Version);
        }
        if to != self.me {
            return OwnerStep::Refuse(RefusedReason::OtherEngine);
        }
        let ours = draw_nonce();
        self.said_hello = Some((from, *theirs, ours));
        OwnerStep::Send(Message::Welcome {
            version: self.version,
            from: self.me,
            nonce: ours,
            proof: self
                .token
                .as_ref()
                .map(|token| token.prove(Side::Responder, theirs, &ours)),
        })
    }
}

/// What an initiator does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum InitiatorStep {
    /// Send this and wait for more.
    Send(Message),
    /// The owner has attached this engine; the message's descriptors are the table and the slots.
    Attached { probe_addr: u64, probe: u128 },
    /// Close: these pieces can't go there, and no other transport would change that.
    Fail(PieceError),
    /// Close: another transport may work.
    FallBack,
}

/// The initiator's side.
#[derive(Debug)]
pub(super) struct InitiatorGreeting {
    me: EngineId,
    peer: EngineId,
    version: Version,
    token: Option<SharedToken>,
    nonce: Nonce,
    welcomed: bool,
}

impl InitiatorGreeting {
    /// The greeting, and the message to send first.
    pub(super) fn new(me: EngineId, peer: EngineId, token: Option<SharedToken>) -> (Self, Message) {
        let greeting = Self {
            me,
            peer,
            version: CURRENT,
            token,
            nonce: draw_nonce(),
            welcomed: false,
        };
        let hello = greeting.hello();
        (greeting, hello)
    }

    fn hello(&self) -> Message {
        Message::Hello {
            version: self.version,
            from: self.me,
            to: self.peer,
            nonce: self.nonce,
        }
    }

    /// Takes the owner's message.
    pub(super) fn on_message(&mut self, message: &Message) -> InitiatorStep {
        match message {
            Message::Welcome {
                version,
                from,
                nonce,
                proof,
            } if !self.welcomed => {
                if self.version.accept(*version).is_err() {
                    return InitiatorStep::Fail(PieceError::Incompatible);
                }
                if *from != self.peer {
                    return InitiatorStep::Fail(PieceError::PeerGone);
                }
                let trusted = match (&self.token, proof) {
                    (None, None) => true,
                    (Some(token), Some(proof)) => token
                        .check(Side::Responder, &self.nonce, nonce, proof)
                        .is_ok(),
                    _ => false,
                };
                if !trusted {
                    return InitiatorStep::Fail(PieceError::NotTrusted);
                }
                self.welcomed = true;
                InitiatorStep::Send(Message::Prove {
                    proof: self
                        .token
                        .as_ref()
                        .map(|token| token.prove(Side::Initiator, &self.nonce, nonce)),
                })
            }
            Message::Attached { probe_addr, probe } if self.welcomed => InitiatorStep::Attached {
                probe_addr: *probe_addr,
                probe: *probe,
            },
            Message::Refused { reason, version } => match reason {
                // The engine that was meant does not listen there any more.
                RefusedReason::OtherEngine => InitiatorStep::Fail(PieceError::PeerGone),
                RefusedReason::NotTrusted => InitiatorStep::Fail(PieceError::NotTrusted),
                RefusedReason::Version => {
                    if let Err(mismatch) = self.version.accept(*version) {
                        tracing::warn!(peer = %self.peer, "{mismatch}");
                    }
                    InitiatorStep::Fail(PieceError::Incompatible)
                }
                RefusedReason::OtherUser | RefusedReason::Busy => InitiatorStep::FallBack,
            },
            _ => InitiatorStep::Fail(PieceError::Protocol),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: EngineId = EngineId(1);
    const PEER: EngineId = EngineId(2);

    fn token(text: &str) -> SharedToken {
        SharedToken::new(text).expect("long enough")
    }

    /// Lets both sides talk until one of them ends it.
    fn greet(
        mut owner: OwnerGreeting,
        mut initiator: InitiatorGreeting,
    ) -> Result<EngineId, (Option<RefusedReason>, Option<PieceError>)> {
        let mut message = initiator.hello();
        loop {
            let answer = match owner.on_message(&message) {
                OwnerStep::Send(answer) => answer,
                OwnerStep::Attach(peer) => {
                    let attached = Message::Attached {
                        probe_addr: 5,
                        probe: 6,
                    };
                    assert_eq!(
                        initiator.on_message(&attached),
                        InitiatorStep::Attached {
                            probe_addr: 5,
                            probe: 6
                        }
                    );
                    return Ok(peer);
                }
                OwnerStep::Refuse(reason) => {
                    let refused = Message::Refused {
                        reason,
                        version: owner.version,
                    };
                    return match initiator.on_message(&refused) {
                        InitiatorStep::Fail(error) => Err((Some(reason), Some(error))),
                        other => panic!("{other:?}"),
                    };
                }
                OwnerStep::Broken => panic!("both speak the protocol"),
            };
            message = match initiator.on_message(&answer) {
                InitiatorStep::Send(message) => message,
                InitiatorStep::Fail(error) => return Err((None, Some(error))),
                other => panic!("{other:?}"),
            };
        }
    }

    fn pair(
        owner_token: Option<SharedToken>,
        peer_token: Option<SharedToken>,
    ) -> (OwnerGreeting, InitiatorGreeting) {
        (
            OwnerGreeting::new(OWNER, owner_token),
            InitiatorGreeting::new(PEER, OWNER, peer_token).0,
        )
    }

    #[test]
    fn equal_tokens_attach_and_others_do_not() {
        let secret = || Some(token("the same long secret"));
        let attached = |(owner, peer)| greet(owner, peer);
        assert_eq!(attached(pair(None, None)), Ok(PEER));
        assert_eq!(attached(pair(secret(), secret())), Ok(PEER));
        let other = Some(token("quite another secret"));
        for (owner, peer) in [(secret(), other), (secret(), None), (None, secret())] {
            let (_, error) = attached(pair(owner, peer)).expect_err("not the same token");
            assert_eq!(error, Some(PieceError::NotTrusted));
        }
    }

    #[test]
    fn an_owner_asks_for_the_proof_itself() {
        let (mut owner, initiator) = pair(Some(token("the same long secret")), None);
        assert!(matches!(
            owner.on_message(&initiator.hello()),
            OwnerStep::Send(Message::Welcome { proof: Some(_), .. })
        ));
        for proof in [None, Some([0; 32])] {
            let (mut owner, initiator) = pair(Some(token("the same long secret")), None);
            owner.on_message(&initiator.hello());
            assert_eq!(
                owner.on_message(&Message::Prove { proof }),
                OwnerStep::Refuse(RefusedReason::NotTrusted)
            );
        }
    }

    #[test]
    fn neighbouring_versions_attach_and_others_are_refused() {
        let version = |protocol| Version {
            protocol,
            semantics: CURRENT.semantics,
        };
        for (owner_version, fits) in [(3, false), (4, true), (5, true), (6, true), (7, false)] {
            let (mut owner, mut peer) = pair(None, None);
            owner.version = version(owner_version);
            peer.version = version(5);
            match greet(owner, peer) {
                Ok(_) => assert!(fits),
                Err((_, error)) => {
                    assert!(!fits);
                    assert_eq!(error, Some(PieceError::Incompatible));
                }
            }
        }
    }

    #[test]
    fn another_engine_under_the_name_counts_as_gone() {
        let owner = OwnerGreeting::new(EngineId(77), None);
        let peer = InitiatorGreeting::new(PEER, OWNER, None).0;
        let refused = greet(owner, peer).expect_err("another engine");
        assert_eq!(
            refused,
            (Some(RefusedReason::OtherEngine), Some(PieceError::PeerGone))
        );
    }

    #[test]
    fn messages_out_of_turn_end_the_greeting() {
        let (mut owner, mut peer) = pair(None, None);
        let early = Message::Prove { proof: None };
        assert_eq!(owner.on_message(&early), OwnerStep::Broken);
        let (mut owner, _) = pair(None, None);
        owner.on_message(&peer.hello());
        assert_eq!(owner.on_message(&peer.hello()), OwnerStep::Broken);
        let early = Message::Attached {
            probe_addr: 0,
            probe: 0,
        };
        let broken = InitiatorStep::Fail(PieceError::Protocol);
        assert_eq!(peer.on_message(&early), broken);
    }
}
