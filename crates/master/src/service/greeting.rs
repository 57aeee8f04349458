//! The steps by which a connection is let in, counted and logged: the same over gRPC and on a lane.

use std::net::SocketAddr;

use layercake_protocol::error::Refusal;
use layercake_protocol::wire;
use tokio::time::Instant;

use super::Core;
use crate::metrics::Method;

impl Core {
    /// Versions, and this side's proof.
    pub(super) fn hello(
        &self,
        peer: Option<SocketAddr>,
        hello: &wire::HelloRequest,
    ) -> Result<wire::HelloResponse, Refusal> {
        let begun = Instant::now();
        let answer = self.door.hello(self.now(), hello);
        self.greeted(Method::Hello, begun, peer, &hello.program, &answer);
        answer
    }

    /// The other side's proof, and its ticket.
    pub(super) fn authenticate(
        &self,
        peer: Option<SocketAddr>,
        request: &wire::AuthenticateRequest,
    ) -> Result<wire::AuthenticateResponse, Refusal> {
        let begun = Instant::now();
        let answer = self.door.authenticate(self.now(), request);
        self.greeted(Method::Authenticate, begun, peer, "", &answer);
        answer
    }

    fn greeted<T>(
        &self,
        method: Method,
        begun: Instant,
        peer: Option<SocketAddr>,
        program: &str,
        answer: &Result<T, Refusal>,
    ) {
        let refusal = answer.as_ref().err();
        // One line for many: the log tells how many it was not told of.
        if let Some(refusal) = refusal
            && let Some(connections) = self.door.turned_away(self.now())
        {
            tracing::warn!(connections, ?peer, program, %refusal, "connections were turned away");
        }
        self.metrics.answered(method, refusal, begun.elapsed());
    }
}
