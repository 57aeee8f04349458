//! What comes before the first frame: the peer's hello, and its proof where a token is set.

use layercake_protocol::auth::{Nonce, Side, draw_nonce};

use super::super::frame::HEADER_LEN;
use super::super::hello::{self, CLIENT_HELLO_LEN, ClientHello, PROOF_LEN, Verdict};
use super::{Closed, Conn};

#[derive(Debug)]
pub(super) enum Stage {
    Hello,
    /// The peer's proof is due.
    Proof {
        initiator: Nonce,
        responder: Nonce,
    },
    Open,
    /// Turned away; the answer that says so is still to be sent.
    Leaving(Verdict),
}

impl Conn {
    fn is_welcome(&mut self) {
        self.guest.has_greeted();
        self.stage = Stage::Open;
    }

    pub(super) fn hello(&mut self) -> Result<bool, Closed> {
        let Some(bytes) = self.inbuf.available().first_chunk::<CLIENT_HELLO_LEN>() else {
            return Ok(false);
        };
        let hello = ClientHello::decode(bytes).map_err(|_| Closed::NotAHello)?;
        self.inbuf.consume(CLIENT_HELLO_LEN);
        let token = self.context.config.token.as_ref();
        let answer = hello::answer(&hello, self.context.engine, token, draw_nonce());
        self.out
            .push_head(|out| out.extend_from_slice(&answer.encode()));
        self.needed = HEADER_LEN;
        match (answer.verdict, token) {
            (Verdict::Welcome, None) => self.is_welcome(),
            (Verdict::Welcome, Some(_)) => {
                self.needed = PROOF_LEN;
                self.stage = Stage::Proof {
                    initiator: hello.nonce,
                    responder: answer.nonce,
                };
            }
            (verdict, _) => self.stage = Stage::Leaving(verdict),
        }
        Ok(true)
    }

    pub(super) fn proof(&mut self, initiator: &Nonce, responder: &Nonce) -> Result<bool, Closed> {
        let Some(proof) = self.inbuf.available().get(..PROOF_LEN) else {
            return Ok(false);
        };
        let token = self.context.config.token.as_ref();
        let proven = token.is_some_and(|token| {
            token
                .check(Side::Initiator, initiator, responder, proof)
                .is_ok()
        });
        if !proven {
            return Err(Closed::Untrusted);
        }
        self.inbuf.consume(PROOF_LEN);
        self.needed = HEADER_LEN;
        self.is_welcome();
        Ok(true)
    }
}
