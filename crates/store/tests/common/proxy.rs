//! A TCP connection that can be held up or cut at a chosen moment.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What happens to bytes of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// They go through.
    Open,
    /// They stay where they are.
    Held,
}

/// Forwards connections to a master.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    up: watch::Sender<Flow>,
    down: watch::Sender<Flow>,
    /// Raised to end all connections.
    cuts: Arc<watch::Sender<u64>>,
    task: JoinHandle<()>,
}

impl Proxy {
    pub(crate) async fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("loopback, any port");
        let address = listener.local_addr().expect("bound");
        let (up, up_flow) = watch::channel(Flow::Open);
        let (down, down_flow) = watch::channel(Flow::Open);
        let cuts = Arc::new(watch::channel(0).0);
        let cut = Arc::clone(&cuts);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(master) = TcpStream::connect(to).await else {
                    continue;
                };
                drop(client.set_nodelay(true));
                drop(master.set_nodelay(true));
                let (client_read, client_write) = client.into_split();
                let (master_read, master_write) = master.into_split();
                for (from, into, flow) in [
                    (client_read, master_write, up_flow.clone()),
                    (master_read, client_write, down_flow.clone()),
                ] {
                    let mut cut = cut.subscribe();
                    tokio::spawn(async move {
                        tokio::select! {
                            // First: what is held at a cut must not slip through.
                            biased;
                            _ = cut.changed() => {}
                            () = forward(from, into, flow) => {}
                        }
                    });
                }
            }
        });
        Self {
            address,
            up,
            down,
            cuts,
            task,
        }
    }

    /// From the clients to the master.
    pub(crate) fn up(&self, flow: Flow) {
        self.up.send_replace(flow);
    }

    /// From the master to the clients.
    pub(crate) fn down(&self, flow: Flow) {
        self.down.send_replace(flow);
    }

    /// Ends all connections; what is held is lost. New ones are open.
    pub(crate) fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
        self.up(Flow::Open);
        self.down(Flow::Open);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
        self.task.abort();
    }
}

async fn forward(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut into: tokio::net::tcp::OwnedWriteHalf,
    mut flow: watch::Receiver<Flow>,
) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let Ok(len @ 1..) = from.read(&mut bytes).await else {
            return;
        };
        if flow.wait_for(|flow| *flow == Flow::Open).await.is_err()
            || into.write_all(&bytes[..len]).await.is_err()
        {
            return;
        }
    }
}
