//! What peers are called, and where they are.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use layercake_transport::Direction;
use parking_lot::RwLock;

use super::directory::{Directory, DirectoryError};
use super::notify::Notify;
use crate::peers::{Move, PeerEngine, PeerError};

/// An engine that reaches its peers by name.
#[derive(Clone)]
pub(super) struct Named {
    pub(super) engine: Arc<PeerEngine>,
    pub(super) names: Arc<Names>,
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

    /// Has the next call ask for a peer's address anew, if this one failed.
    fn checked<T>(&self, peer: &str, result: Result<T, PeerError>) -> Result<T, PeerError> {
        result.inspect_err(|_| self.names.forget(peer))
    }
}

/// The names of peers: their addresses, or names at a metadata server.
#[derive(Debug, Default)]
pub(super) struct Names {
    listed: Option<Listed>,
    /// Addresses that the server told.
    known: RwLock<HashMap<String, String>>,
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
        })
    }

    /// Where a peer is. A name that the server does not know may be an address itself.
    async fn address<'a>(&self, peer: &'a str) -> Cow<'a, str> {
        let Some(listed) = &self.listed else {
            return peer.into();
        };
        if let Some(address) = self.known.read().get(peer) {
            return address.clone().into();
        }
        match listed.directory.get(peer).await {
            Ok(Some(address)) => {
                let mut known = self.known.write();
                known.insert(peer.to_owned(), address.clone());
                address.into()
            }
            Ok(None) => peer.into(),
            Err(error) => {
                tracing::warn!(peer, %error, "a peer was not looked up");
                peer.into()
            }
        }
    }

    fn forget(&self, peer: &str) {
        if self.listed.is_some() {
            self.known.write().remove(peer);
        }
    }

    /// Takes this engine off the list, unless another one has its name by now.
    pub(super) async fn leave(&self) {
        if let Some(listed) = &self.listed
            && let Err(error) = listed.withdraw().await
        {
            tracing::debug!(%error, "the engine's entry stays");
        }
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
