//! What either way to the master, gRPC or lane, begins with: versions, and proofs of the token both ways.

use std::sync::Arc;

use bytes::Bytes;
use layercake_protocol::auth::{Nonce, Side, draw_nonce};
use layercake_protocol::convert::Ticket;
use layercake_protocol::error::WireError;
use layercake_protocol::version::{self, Version};
use layercake_protocol::wire;

use super::shared::Shared;
use crate::error::StoreError;

/// A greeting that this side has begun.
pub(super) struct Proofs<'a> {
    shared: &'a Shared,
    nonce: Nonce,
}

impl<'a> Proofs<'a> {
    pub(super) fn begin(shared: &'a Shared) -> Self {
        let nonce = draw_nonce();
        Self { shared, nonce }
    }

    /// What this side says first.
    pub(super) fn hello(&self) -> wire::HelloRequest {
        wire::HelloRequest {
            version: Some(version::CURRENT.into()),
            nonce: Bytes::copy_from_slice(&self.nonce),
            program: format!("{} {}", env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION")),
        }
    }

    /// Checks the master's answer to it. What this side says next, which nobody but a master that knows the
    /// token gets to see.
    pub(super) fn proof(
        &self,
        hello: wire::HelloResponse,
    ) -> Result<wire::AuthenticateRequest, StoreError> {
        let shared = self.shared;
        let master = || Arc::clone(&shared.master);
        let token = shared.config.token.as_ref();
        let theirs: Version = hello
            .version
            .ok_or_else(|| shared.bad_answer(WireError::Missing { field: "version" }))?
            .into();
        version::CURRENT
            .accept(theirs)
            .map_err(|mismatch| StoreError::Version {
                master: master(),
                mismatch,
            })?;
        let master_nonce: Nonce = hello.nonce.as_ref().try_into().map_err(|_| {
            shared.bad_answer(WireError::Invalid {
                field: "nonce",
                detail: format!("{} bytes, 32 are needed", hello.nonce.len()),
            })
        })?;
        if let Some(token) = token {
            token
                .check(Side::Responder, &self.nonce, &master_nonce, &hello.proof)
                .map_err(|_| StoreError::MasterUnproven { master: master() })?;
        } else if hello.token_required {
            return Err(StoreError::TokenRequired { master: master() });
        }
        let proof = token.map_or_else(Bytes::new, |token| {
            Bytes::copy_from_slice(&token.prove(Side::Initiator, &self.nonce, &master_nonce))
        });
        Ok(wire::AuthenticateRequest {
            client_nonce: Bytes::copy_from_slice(&self.nonce),
            master_nonce: hello.nonce,
            proof,
        })
    }

    /// The ticket that the greeting ends with.
    pub(super) fn ticket(&self, answer: &wire::AuthenticateResponse) -> Result<Ticket, StoreError> {
        answer.ticket.as_ref().try_into().map_err(|_| {
            self.shared.bad_answer(WireError::Invalid {
                field: "ticket",
                detail: format!("{} bytes, 16 are needed", answer.ticket.len()),
            })
        })
    }
}
