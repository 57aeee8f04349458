//! Mutual proof of a shared token (requirement O6), the same for control and data connections.
//!
//! Each side draws a nonce, both nonces go over the wire, and each side proves that it knows the
//! token by a keyed hash over both nonces and its own role. The token itself never travels. A proof
//! is bound to its connection by the nonces and to its direction by the role, so it can be neither
//! replayed nor reflected. It authenticates the peers, it does not encrypt the bytes.

use std::fmt;

use rand::RngExt as _;
use thiserror::Error;

use crate::ids::constant_time_eq;

/// A number that one side draws for one connection.
pub type Nonce = [u8; 32];

/// What shows that a side knows the token.
pub type Proof = [u8; 32];

/// Draws the nonce of a new connection.
pub fn draw_nonce() -> Nonce {
    rand::rng().random()
}

/// Which side of a connection a proof comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that connected.
    Initiator,
    /// The side that listened.
    Responder,
}

/// A secret that all members of a cluster share.
#[derive(Clone, PartialEq, Eq)]
pub struct SharedToken {
    key: [u8; 32],
}

/// Why a token can't be used or a peer was turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AuthError {
    /// The token is too short to be a secret.
    #[error(
        "the shared token has {len} bytes, at least {} are needed",
        SharedToken::MIN_LEN
    )]
    TokenTooShort {
        /// Its length in bytes.
        len: usize,
    },
    /// The peer's proof does not fit this side's token.
    #[error("the peer's proof does not match the shared token: both sides need the same one")]
    WrongProof,
}

impl SharedToken {
    /// The shortest token that is accepted, in bytes.
    pub const MIN_LEN: usize = 16;

    /// Makes the token from its text, which is trimmed of white space at both ends.
    pub fn new(text: &str) -> Result<Self, AuthError> {
        let text = text.trim();
        if text.len() < Self::MIN_LEN {
            return Err(AuthError::TokenTooShort { len: text.len() });
        }
        Ok(Self {
            key: blake3::derive_key("layercake v1 shared token", text.as_bytes()),
        })
    }

    /// The proof that `side` gives on the connection with these nonces.
    pub fn prove(&self, side: Side, initiator: &Nonce, responder: &Nonce) -> Proof {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(match side {
            Side::Initiator => b"initiator",
            Side::Responder => b"responder",
        });
        hasher.update(initiator).update(responder);
        *hasher.finalize().as_bytes()
    }

    /// Checks the proof that `side` gave.
    pub fn check(
        &self,
        side: Side,
        initiator: &Nonce,
        responder: &Nonce,
        proof: &[u8],
    ) -> Result<(), AuthError> {
        if constant_time_eq(&self.prove(side, initiator, responder), proof) {
            Ok(())
        } else {
            Err(AuthError::WrongProof)
        }
    }
}

impl fmt::Debug for SharedToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedToken(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_fits_its_token_side_and_connection_only() {
        let token = SharedToken::new("correct horse battery").expect("long enough");
        let other = SharedToken::new("another long secret").expect("long enough");
        let (i, r) = (draw_nonce(), draw_nonce());
        let proof = token.prove(Side::Initiator, &i, &r);
        assert_eq!(token.check(Side::Initiator, &i, &r, &proof), Ok(()));
        for wrong in [
            token.check(Side::Responder, &i, &r, &proof),
            token.check(Side::Initiator, &r, &i, &proof),
            token.check(Side::Initiator, &i, &r, &proof[..31]),
            other.check(Side::Initiator, &i, &r, &proof),
        ] {
            assert_eq!(wrong, Err(AuthError::WrongProof));
        }
        assert_eq!(format!("{token:?}"), "SharedToken(…)");
    }

    #[test]
    fn a_short_token_is_refused() {
        assert_eq!(
            SharedToken::new("  short  "),
            Err(AuthError::TokenTooShort { len: 5 })
        );
    }
}
