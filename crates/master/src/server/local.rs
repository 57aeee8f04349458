//! Lanes from this host: a unix socket beside the listener.
//!
//! A round trip over it costs less than one over loopback, and its end is seen at once. It has a random name in
//! the abstract namespace, so it is there for those in the same network namespace, leaves no file behind, and is found by
//! those who were told: members that were let in over gRPC from this host. Everybody on the host can list such
//! names, and they have no permissions, so the name is no secret that anything rests on: who comes is greeted as over TCP, token
//! and all. Only lanes are answered here; gRPC is not.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net;
use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::lane::LOCAL_LANE;
use prometheus_client::metrics::gauge::Gauge;
use rand::RngExt as _;
use tokio::net::unix::UCred;
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;

use super::entrance::First;
use super::half_watched::HalfWatched;
use super::severable::Severable;
use crate::service::greeting::Peer;
use crate::service::{Core, lane};

/// The pause after a connection could not be taken, for want of file descriptors perhaps.
const PAUSE: Duration = Duration::from_millis(100);

/// A socket that is bound, and its name.
#[derive(Debug)]
pub(super) struct LocalListener {
    listener: UnixListener,
    name: String,
}

impl LocalListener {
    /// To be called on a runtime.
    pub(super) fn bind() -> io::Result<Self> {
        let name = format!("{LOCAL_LANE}{:032x}", rand::rng().random::<u128>());
        let address = net::SocketAddr::from_abstract_name(&name)?;
        let listener = net::UnixListener::bind_addr(&address)?;
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        Ok(Self { listener, name })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Takes connections until the master closes down or is cut off.
    pub(super) async fn serve(self, core: Arc<Core>, sever: CancellationToken, open: Gauge) {
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = core.closing.cancelled() => return,
                () = sever.cancelled() => return,
            };
            match accepted {
                Ok((io, _)) => {
                    let peer = peer(&io);
                    match HalfWatched::new(io) {
                        Ok(io) => {
                            let io = Severable::new(io, sever.clone(), open.clone());
                            core.work.spawn(greet(Arc::clone(&core), io, peer));
                        }
                        Err(error) => tracing::warn!(%peer, %error, "a connection was let go"),
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection from this host could not be taken");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}

/// Serves a lane. What is none is let go.
async fn greet(core: Arc<Core>, mut io: Severable<HalfWatched>, peer: Peer) {
    let first = tokio::select! {
        first = First::read(&mut io) => first,
        () = core.closing.cancelled() => return,
    };
    if first.is_some_and(|first| first.is_lane()) {
        lane::serve(core, io, peer).await;
    }
}

fn peer(io: &UnixStream) -> Peer {
    let peer = io.peer_cred().ok();
    Peer::Local {
        process: peer.as_ref().and_then(UCred::pid).filter(|pid| *pid != 0),
        user: peer.as_ref().map(UCred::uid),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use prometheus_client::registry::Registry;
    use tokio::sync::oneshot;

    use super::*;
    use crate::config::MasterConfig;
    use crate::server::Master;

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn what_is_no_lane_is_let_go_and_nobody_is_left_behind() {
        let config = MasterConfig {
            listen: ([127, 0, 0, 1], 0).into(),
            ..MasterConfig::default()
        };
        let master = Master::bind(config, &mut Registry::default()).await;
        let master = master.expect("loopback, any port");
        let name = master.local.as_ref().expect("a socket").name().to_owned();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = tokio::spawn(master.serve(async { drop(stopped.await) }));
        let called = tokio::task::spawn_blocking(move || {
            let address = net::SocketAddr::from_abstract_name(&name).expect("a name");
            let call = || net::UnixStream::connect_addr(&address);
            let mut stranger = call().expect("it listens");
            stranger
                .write_all(b"PRI * HTTP/2.0\r\n")
                .expect("it is open");
            // The rest may still be unread then.
            let end = stranger.read(&mut [0; 8]);
            assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
            let mute = call().expect("it listens");
            drop(stop);
            (mute, address)
        });
        let (mut mute, address) = called.await.expect("no panic");
        assert!(
            serving.await.expect("no panic").is_ok(),
            "it waited for one who says nothing"
        );
        assert!(net::UnixStream::connect_addr(&address).is_err());
        let end = mute.read(&mut [0; 8]);
        assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    }
}
