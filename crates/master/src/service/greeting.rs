//! The steps by which a connection is let in, counted and logged: the same over gRPC and on a lane.

use std::fmt;
use std::net::SocketAddr;

use layercake_protocol::error::Refusal;
use layercake_protocol::wire;
use tokio::time::Instant;

use super::Core;
use crate::metrics::Method;

/// Who is at the other end of a connection, as far as the system says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// Somebody at an address.
    At(SocketAddr),
    /// A process on this host.
    Local {
        /// `None`: in a namespace that this side does not see.
        process: Option<i32>,
        user: Option<u32>,
    },
    Unknown,
}

impl From<Option<SocketAddr>> for Peer {
    fn from(address: Option<SocketAddr>) -> Self {
        address.map_or(Self::Unknown, Self::At)
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At(address) => address.fmt(f),
            Self::Local { process, user } => {
                match process {
                    Some(process) => write!(f, "process {process}")?,
                    None => f.write_str("a process")?,
                }
                if let Some(user) = user {
                    write!(f, " of user {user}")?;
                }
                f.write_str(" on this host")
            }
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

impl Core {
    /// Versions, and this side's proof.
    pub(super) fn hello(
        &self,
        peer: Peer,
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
        peer: Peer,
        request: &wire::AuthenticateRequest,
    ) -> Result<wire::AuthenticateResponse, Refusal> {
        let begun = Instant::now();
        let answer = self.door.authenticate(self.now(), request);
        self.greeted(Method::Authenticate, begun, peer, "", &answer);
        answer
    }

    /// Where a caller at `remote` finds the socket for its host, if that is this one and there is a socket. It called
    /// this master's `local` address.
    pub(super) fn local_lane_for(
        &self,
        remote: SocketAddr,
        local: SocketAddr,
    ) -> Option<wire::LocalLane> {
        let name = self.local_lane.get()?;
        let (here, there) = (local.ip().to_canonical(), remote.ip().to_canonical());
        // One host calls itself from the address that it calls, or from another one of its loopback.
        let same_host = here == there || (here.is_loopback() && there.is_loopback());
        same_host.then(|| wire::LocalLane {
            name: name.clone(),
            reached_at: SocketAddr::new(here, local.port()).to_string(),
        })
    }

    fn greeted<T>(
        &self,
        method: Method,
        begun: Instant,
        peer: Peer,
        program: &str,
        answer: &Result<T, Refusal>,
    ) {
        let refusal = answer.as_ref().err();
        // One line for many: the log tells how many it was not told of.
        if let Some(refusal) = refusal
            && let Some(connections) = self.door.turned_away(self.now())
        {
            tracing::warn!(connections, %peer, program, %refusal, "connections were turned away");
        }
        self.metrics.answered(method, refusal, begun.elapsed());
    }
}
