//! Serving the master like a process: on a runtime of its own, at an address that stays its own when it
//! is killed.

use std::net::SocketAddr;
use std::time::Duration;

use layercake_protocol::wire::master_server::MasterServer;
use tokio_stream::wrappers::TcpListenerStream;

use super::FakeMaster;
use crate::port::Port;

/// A master that is being served.
pub(crate) struct Served {
    pub address: SocketAddr,
    port: Option<Port>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Served {
    /// Ends it like SIGKILL. Nobody else gets its port while what this returns is there.
    pub(crate) fn kill(mut self) -> Port {
        let runtime = self.runtime.take().expect("it is served");
        // On a thread of its own, since it waits: nothing listens when this returns.
        std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_mins(1)))
            .join()
            .expect("it ends");
        self.port.take().expect("it is served")
    }

    /// Stops it like SIGSTOP until the guard is dropped.
    pub(crate) fn freeze(&self) -> std::sync::mpsc::Sender<()> {
        let (guard, thaw) = std::sync::mpsc::channel::<()>();
        let (stands, still) = std::sync::mpsc::channel::<()>();
        let runtime = self.runtime.as_ref().expect("it is served");
        runtime.spawn(async move {
            drop(stands);
            let _ = thaw.recv();
        });
        let _ = still.recv();
        guard
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl FakeMaster {
    /// Serves on a port of its own.
    pub(crate) fn serve(&self) -> Served {
        self.serve_at(Port::reserve())
    }

    /// Serves on this port, which another master may have had before.
    pub(crate) fn serve_at(&self, port: Port) -> Served {
        // One thread, so that blocking it freezes everything.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let listener = {
            let _within = runtime.enter();
            port.listen()
        };
        let service = MasterServer::new(self.clone()).max_decoding_message_size(64 << 20);
        runtime.spawn(async move {
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await
                .expect("it serves");
        });
        Served {
            address: port.address(),
            port: Some(port),
            runtime: Some(runtime),
        }
    }
}
