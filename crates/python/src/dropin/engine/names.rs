//! What peers are called, and where they are.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_transport::{Direction, PieceError};
use parking_lot::RwLock;
use tokio::sync::OnceCell;

use super::directory::{Directory, DirectoryError};
use super::notify::Notify;
use crate::peers::{Move, PeerEngine, PeerError};
use crate::runtime::Close;

/// How long a peer that the server does not know is taken for an address without asking again.
const UNLISTED: Duration = Duration::from_secs(10);

/// An engine that reaches its peers by name.
pub(super) struct Named {
    pub(super) engine: Arc<PeerEngine>,
    pub(super) names: Names,
}

impl Named {
    /// Moves, and returns when all of it is there.
    pub(super) async fn transfer(
        &self,
        peer: &str,
        direction: Direction,
        moves: &[Move],
    ) -> Result<(), PeerError> {
        let address = self.names.address(peer).await;
        let result = self.engine.transfer(&address, direction, moves, None).await;
        self.checked(peer, result.map(drop))
    }

    /// Returns when the peer has the message.
    pub(super) async fn notify(&self, peer: &str, notify: Notify) -> Result<(), PeerError> {
        let address = self.names.address(peer).await;
        let Notify { name, msg } = notify;
        let sent = self.engine.notify(&address, name, msg.into_bytes()).await;
        self.checked(peer, sent)
    }

    /// Returns when the peer has been reached, now or before.
    pub(super) async fn reach(&self, peer: &str) -> Result<(), PeerError> {
        let address = self.names.address(peer).await;
        let reached = self.engine.reach(&address).await;
        self.checked(peer, reached)
    }

    /// Asks the peer what it registered first.
    pub(super) async fn probe(&self, peer: &str) -> Result<Option<u64>, PeerError> {
        let address = self.names.address(peer).await;
        let first = self.engine.probe(&address).await;
        self.checked(peer, first)
    }

    /// Has the next call ask for a peer's address anew, if it may have moved.
    fn checked<T>(&self, peer: &str, result: Result<T, PeerError>) -> Result<T, PeerError> {
        result.inspect_err(|error| {
            if may_have_moved(error) {
                self.names.forget(peer);
            }
        })
    }

    /// Ends the engine, and its entry at the server, by this time. Repeating it waits for the first call.
    pub(super) async fn close(&self, until: Instant) {
        let leaving = tokio::time::timeout_at(until.into(), self.names.leave());
        let (left, ()) = tokio::join!(leaving, self.engine.close(until));
        if left.is_err() {
            tracing::debug!("the engine's entry stays: the metadata server did not answer in time");
        }
    }
}

impl Close for Named {
    fn close_by(&self, until: Instant) {
        self.engine.handle().block_on(self.close(until));
    }

    fn is_needed_by_others(&self) -> bool {
        // A store may move its bytes with this engine.
        true
    }
}

/// Whether the peer is not where it was looked for. An engine that was started anew shows no memory there.
fn may_have_moved(error: &PeerError) -> bool {
    match error {
        PeerError::Address { .. }
        | PeerError::Unreachable { .. }
        | PeerError::NotAPeer { .. }
        | PeerError::UnknownMemory { .. } => true,
        PeerError::Pieces { first, .. } => matches!(
            first,
            PieceError::PeerGone | PieceError::Unreachable | PieceError::Stalled
        ),
        _ => false,
    }
}

/// The names of peers: their addresses, or names at a metadata server.
#[derive(Debug, Default)]
pub(super) struct Names {
    listed: Option<Listed>,
    /// What the server told.
    known: RwLock<HashMap<String, Known>>,
    /// Whether the engine's entry is gone.
    left: OnceCell<()>,
}

/// What a server said about a peer.
#[derive(Clone, Debug)]
enum Known {
    At(String),
    /// Nothing, at that time.
    Unlisted(Instant),
}

/// This engine's entry at a metadata server.
#[derive(Clone, Debug)]
struct Listed {
    directory: Directory,
    name: String,
    address: String,
}

impl Names {
    /// With this engine listed under `name`, at `address`.
    pub(super) async fn listed(
        directory: Directory,
        name: &str,
        address: &str,
    ) -> Result<Self, DirectoryError> {
        directory.put(name, address).await?;
        Ok(Self {
            listed: Some(Listed {
                directory,
                name: name.to_owned(),
                address: address.to_owned(),
            }),
            known: RwLock::default(),
            left: OnceCell::new(),
        })
    }

    /// The address under which this engine is listed.
    pub(super) fn own(&self) -> Option<&str> {
        self.listed.as_ref().map(|listed| &*listed.address)
    }

    /// The name under which it is.
    pub(super) fn own_name(&self) -> Option<&str> {
        self.listed.as_ref().map(|listed| &*listed.name)
    }

    /// Where a peer is. A name that the server does not know may be an address itself.
    async fn address<'a>(&self, peer: &'a str) -> Cow<'a, str> {
        let Some(listed) = &self.listed else {
            return peer.into();
        };
        match self.known.read().get(peer) {
            Some(Known::At(address)) => return address.clone().into(),
            Some(Known::Unlisted(then)) if then.elapsed() < UNLISTED => return peer.into(),
            _ => {}
        }
        let (known, address) = match listed.directory.get(peer).await {
            Ok(Some(address)) => (Known::At(address.clone()), address.into()),
            Ok(None) => (Known::Unlisted(Instant::now()), peer.into()),
            Err(error) => {
                tracing::warn!(peer, %error, "a peer was not looked up");
                (Known::Unlisted(Instant::now()), peer.into())
            }
        };
        self.known.write().insert(peer.to_owned(), known);
        address
    }

    fn forget(&self, peer: &str) {
        if self.listed.is_some() {
            self.known.write().remove(peer);
        }
    }

    /// Takes this engine off the list, unless another one has its name by now. Once; repeating it waits for
    /// the first call.
    async fn leave(&self) {
        let leaving = async {
            if let Some(listed) = &self.listed
                && let Err(error) = listed.withdraw().await
            {
                tracing::debug!(%error, "the engine's entry stays");
            }
        };
        self.left.get_or_init(|| leaving).await;
    }
}

impl Listed {
    async fn withdraw(&self) -> Result<(), DirectoryError> {
        if self.directory.get(&self.name).await?.as_ref() == Some(&self.address) {
            self.directory.delete(&self.name).await?;
        }
        Ok(())
    }
}
