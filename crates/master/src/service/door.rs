//! Who is let in: versions, mutual proof of the shared token, and the tickets that stand for it.
//!
//! A connection says hello with a nonce of its own and gets the master's nonce and proof; it answers
//! with its own proof and gets a ticket, which it shows with every call after that. A nonce is good
//! for one answer and a short time. Without a token the same steps are taken, so that versions are
//! always exchanged, and the proof is not looked at.
//!
//! Both tables are bounded and short locks guard them; a stream shows its ticket once, when it is
//! opened. Tickets are 128 random bits, so looking one up tells nothing about others.

use std::time::Duration;

use layercake_protocol::auth::{Nonce, SharedToken, Side, draw_nonce};
use layercake_protocol::convert::{Ticket, decode_ticket};
use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::ids::Term;
use layercake_protocol::version::{self, Version};
use layercake_protocol::wire;
use parking_lot::Mutex;
use rand::RngExt as _;
use tonic::metadata::MetadataMap;

use super::expiring::Expiring;
use crate::config::Limits;
use crate::state::Moment;

/// How long a connection may take from hello to its proof.
const CHALLENGE_LIFE: Duration = Duration::from_secs(10);

/// How often the log tells of connections that were turned away: a client that keeps trying must not
/// fill it.
const WARN_EVERY: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Door {
    token: Option<SharedToken>,
    term: Term,
    /// The master's nonce of each hello, with the caller's.
    challenges: Mutex<Expiring<Nonce, Nonce>>,
    tickets: Mutex<Expiring<Ticket, ()>>,
    turned_away: Mutex<TurnedAway>,
}

/// Connections that were turned away since the log last told.
#[derive(Debug, Default)]
struct TurnedAway {
    count: u64,
    told: Option<Moment>,
}

fn nonce(field: &'static str, bytes: &[u8]) -> Result<Nonce, WireError> {
    bytes.try_into().map_err(|_| WireError::Invalid {
        field,
        detail: format!("{} bytes, 32 are needed", bytes.len()),
    })
}

impl Door {
    pub(crate) fn new(token: Option<SharedToken>, term: Term, limits: &Limits) -> Self {
        Self {
            token,
            term,
            challenges: Mutex::new(Expiring::new(limits.challenges, CHALLENGE_LIFE)),
            tickets: Mutex::new(Expiring::new(limits.tickets, limits.ticket_unused)),
            turned_away: Mutex::default(),
        }
    }

    /// Compares versions and opens the exchange of proofs.
    pub(crate) fn hello(
        &self,
        now: Moment,
        hello: &wire::HelloRequest,
    ) -> Result<wire::HelloResponse, Refusal> {
        let theirs: Version = hello
            .version
            .ok_or(WireError::Missing { field: "version" })?
            .into();
        version::CURRENT
            .accept(theirs)
            .map_err(|mismatch| Refusal::Version {
                detail: mismatch.to_string(),
            })?;
        let client_nonce = nonce("nonce", &hello.nonce)?;
        let master_nonce = draw_nonce();
        self.challenges
            .lock()
            .insert(now, master_nonce, client_nonce);
        let proof = self.token.as_ref().map_or_else(Vec::new, |token| {
            token
                .prove(Side::Responder, &client_nonce, &master_nonce)
                .to_vec()
        });
        Ok(wire::HelloResponse {
            version: Some(version::CURRENT.into()),
            nonce: master_nonce.to_vec().into(),
            proof: proof.into(),
            token_required: self.token.is_some(),
            term: self.term.0,
            lane: true,
        })
    }

    /// Checks the caller's proof and gives a ticket for it.
    pub(crate) fn authenticate(
        &self,
        now: Moment,
        request: &wire::AuthenticateRequest,
    ) -> Result<wire::AuthenticateResponse, Refusal> {
        let client_nonce = nonce("client_nonce", &request.client_nonce)?;
        let master_nonce = nonce("master_nonce", &request.master_nonce)?;
        let greeted = self.challenges.lock().take(now, &master_nonce);
        if greeted != Some(client_nonce) {
            return Err(Refusal::Unauthenticated);
        }
        if let Some(token) = &self.token {
            token
                .check(
                    Side::Initiator,
                    &client_nonce,
                    &master_nonce,
                    &request.proof,
                )
                .map_err(|_| Refusal::Unauthenticated)?;
        }
        let ticket: Ticket = rand::rng().random();
        self.tickets.lock().insert(now, ticket, ());
        Ok(wire::AuthenticateResponse {
            ticket: ticket.to_vec().into(),
            local_lane: None,
        })
    }

    /// A connection was turned away. How many there were since the log last told, if it is time to tell.
    pub(crate) fn turned_away(&self, now: Moment) -> Option<u64> {
        let mut turned_away = self.turned_away.lock();
        turned_away.count += 1;
        if turned_away
            .told
            .is_some_and(|told| now.since(told) < WARN_EVERY)
        {
            return None;
        }
        turned_away.told = Some(now);
        Some(std::mem::take(&mut turned_away.count))
    }

    /// Lets a call in that shows a ticket.
    pub(crate) fn admit(&self, now: Moment, metadata: &MetadataMap) -> Result<(), Refusal> {
        let ticket = decode_ticket(metadata)?.ok_or(Refusal::Unauthenticated)?;
        if self.tickets.lock().touch(now, &ticket) {
            Ok(())
        } else {
            Err(Refusal::Unauthenticated)
        }
    }
}

#[cfg(test)]
mod tests {
    use layercake_protocol::convert::{TICKET_METADATA, encode_ticket};

    use super::*;

    const NOW: Moment = Moment::START;

    fn token(text: &str) -> SharedToken {
        SharedToken::new(text).expect("long enough")
    }

    fn door(token: Option<SharedToken>) -> Door {
        Door::new(token, Term(3), &Limits::default())
    }

    fn hello(version: Version) -> wire::HelloRequest {
        wire::HelloRequest {
            version: Some(version.into()),
            nonce: draw_nonce().to_vec().into(),
            program: "test".into(),
        }
    }

    /// What a client that has `token` answers.
    fn answer(
        token: Option<&SharedToken>,
        hello: &wire::HelloRequest,
        response: &wire::HelloResponse,
    ) -> wire::AuthenticateRequest {
        let nonces = (
            nonce("", &hello.nonce).expect("a nonce"),
            nonce("", &response.nonce).expect("a nonce"),
        );
        wire::AuthenticateRequest {
            client_nonce: hello.nonce.clone(),
            master_nonce: response.nonce.clone(),
            proof: token
                .map_or_else(Vec::new, |token| {
                    token.prove(Side::Initiator, &nonces.0, &nonces.1).to_vec()
                })
                .into(),
        }
    }

    fn shown(ticket: &[u8]) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        let ticket = ticket.try_into().expect("16 bytes");
        metadata.insert(TICKET_METADATA, encode_ticket(ticket));
        metadata
    }

    #[test]
    fn both_sides_prove_the_token_and_the_ticket_opens_the_door() {
        let token = token("the cluster's token");
        let door = door(Some(token.clone()));
        let hello = hello(version::CURRENT);
        let response = door.hello(NOW, &hello).expect("same version");
        assert!(response.token_required);
        assert_eq!(response.term, 3);
        token
            .check(
                Side::Responder,
                &nonce("", &hello.nonce).expect("a nonce"),
                &nonce("", &response.nonce).expect("a nonce"),
                &response.proof,
            )
            .expect("the master proves that it knows the token");
        let answer = answer(Some(&token), &hello, &response);
        let ticket = door.authenticate(NOW, &answer).expect("the right proof");
        assert_eq!(door.admit(NOW, &shown(&ticket.ticket)), Ok(()));
        assert_eq!(
            door.authenticate(NOW, &answer),
            Err(Refusal::Unauthenticated),
            "a nonce is good for one answer"
        );
    }

    #[test]
    fn a_wrong_or_missing_proof_gets_no_ticket() {
        let door = door(Some(token("the cluster's token")));
        let other = token("some other long token");
        for token in [Some(&other), None] {
            let hello = hello(version::CURRENT);
            let response = door.hello(NOW, &hello).expect("same version");
            let answer = answer(token, &hello, &response);
            assert_eq!(
                door.authenticate(NOW, &answer),
                Err(Refusal::Unauthenticated)
            );
        }
    }

    #[test]
    fn an_answer_must_come_in_time_and_from_the_one_that_said_hello() {
        let door = door(None);
        let first = hello(version::CURRENT);
        let response = door.hello(NOW, &first).expect("same version");
        let other = answer(None, &hello(version::CURRENT), &response);
        assert_eq!(
            door.authenticate(NOW, &other),
            Err(Refusal::Unauthenticated)
        );
        let response = door.hello(NOW, &first).expect("same version");
        let late = NOW + CHALLENGE_LIFE * 2;
        assert_eq!(
            door.authenticate(late, &answer(None, &first, &response)),
            Err(Refusal::Unauthenticated)
        );
    }

    #[test]
    fn without_a_token_versions_are_compared_all_the_same() {
        let door = door(None);
        let theirs = Version {
            protocol: 99,
            semantics: 1,
        };
        let Err(Refusal::Version { detail }) = door.hello(NOW, &hello(theirs)) else {
            panic!("version 99 must be refused");
        };
        assert!(detail.contains("99.1") && detail.contains(&version::CURRENT.to_string()));
        let hello = hello(version::CURRENT);
        let response = door.hello(NOW, &hello).expect("same version");
        assert!(response.proof.is_empty() && !response.token_required);
        assert!(
            door.authenticate(NOW, &answer(None, &hello, &response))
                .is_ok()
        );
    }

    #[test]
    fn the_log_tells_of_many_turned_away_in_one_line() {
        let door = door(None);
        assert_eq!(door.turned_away(NOW), Some(1));
        for _ in 0..99 {
            assert_eq!(door.turned_away(NOW), None);
        }
        assert_eq!(door.turned_away(NOW + WARN_EVERY), Some(100));
    }

    #[test]
    fn unknown_and_forgotten_tickets_are_refused() {
        let door = door(None);
        assert_eq!(
            door.admit(NOW, &MetadataMap::new()),
            Err(Refusal::Unauthenticated)
        );
        assert_eq!(
            door.admit(NOW, &shown(&[7; 16])),
            Err(Refusal::Unauthenticated)
        );
        let hello = hello(version::CURRENT);
        let response = door.hello(NOW, &hello).expect("same version");
        let ticket = door
            .authenticate(NOW, &answer(None, &hello, &response))
            .expect("no token to prove");
        let later = NOW + Limits::default().ticket_unused * 2;
        assert_eq!(
            door.admit(later, &shown(&ticket.ticket)),
            Err(Refusal::Unauthenticated)
        );
    }
}
