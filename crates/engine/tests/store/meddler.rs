//! A link to the master that loses, delays or reorders single messages of one kind.
//!
//! It stands between engines and the master and understands their framed lane. What is none is passed
//! on as it is. One message of the kind meets the fault.

use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use layercake_protocol::lane::MAGIC;
use layercake_protocol::wire::client_frame::Request;
use layercake_protocol::wire::{ClientFrame, MasterFrame};
use parking_lot::Mutex;
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// A kind of message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    LookUp,
    Start,
    End,
}

/// What befalls a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The master never sees the request.
    LoseRequest,
    /// The master does what it says, and nobody hears of it.
    LoseAnswer,
    /// The connection breaks instead of bringing the answer.
    Cut,
    /// The answer takes so long.
    Delay(Duration),
    /// The request comes after the next one of this link, whenever that is.
    ReorderRequest,
    /// The answer does.
    ReorderAnswer,
}

impl Fault {
    fn is_of_request(self) -> bool {
        matches!(self, Self::LoseRequest | Self::ReorderRequest)
    }
}

/// What happens where.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) kind: Kind,
    pub(crate) fault: Fault,
    /// How many messages of the kind are spared first.
    pub(crate) spared: usize,
}

#[derive(Debug)]
struct State {
    plan: Plan,
    seen: AtomicUsize,
    struck: AtomicUsize,
    overtaken: AtomicUsize,
    /// The request that met the fault.
    victim: Mutex<Option<Request>>,
    repeated: AtomicUsize,
    reconnected: AtomicUsize,
}

impl State {
    /// Whether the fault strikes this message of the kind: one does it.
    fn strikes(&self) -> bool {
        self.seen.fetch_add(1, Ordering::Relaxed) == self.plan.spared
    }

    fn strike(&self) {
        self.struck.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes a request that is the struck one again.
    fn compare(&self, request: Option<&Request>) {
        let victim = self.victim.lock();
        if victim.is_some() && victim.as_ref() == request {
            self.repeated.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Meddler {
    pub(crate) address: SocketAddr,
    state: Arc<State>,
    task: JoinHandle<()>,
}

impl Meddler {
    pub(crate) fn start(runtime: &Runtime, master: SocketAddr, plan: Plan) -> Self {
        let state = Arc::new(State {
            plan,
            seen: AtomicUsize::new(0),
            struck: AtomicUsize::new(0),
            overtaken: AtomicUsize::new(0),
            victim: Mutex::default(),
            repeated: AtomicUsize::new(0),
            reconnected: AtomicUsize::new(0),
        });
        let listening = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)));
        let listener = runtime.block_on(listening).expect("any port of loopback");
        let address = listener.local_addr().expect("it is bound");
        let shared = Arc::clone(&state);
        let task = runtime.spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, master, Arc::clone(&shared)));
            }
        });
        Self {
            address,
            state,
            task,
        }
    }

    /// How many messages met the fault.
    pub(crate) fn struck(&self) -> usize {
        self.state.struck.load(Ordering::Relaxed)
    }

    /// How many came after one that was sent later.
    pub(crate) fn overtaken(&self) -> usize {
        self.state.overtaken.load(Ordering::Relaxed)
    }

    /// How often what met the fault was asked again.
    pub(crate) fn repeated(&self) -> usize {
        self.state.repeated.load(Ordering::Relaxed)
    }

    /// How many lanes were opened afterwards.
    pub(crate) fn reconnected(&self) -> usize {
        self.state.reconnected.load(Ordering::Relaxed)
    }
}

impl Drop for Meddler {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One connection, to its end on either side.
async fn carry(client: TcpStream, master: SocketAddr, state: Arc<State>) {
    let Ok(master) = TcpStream::connect(master).await else {
        return;
    };
    for stream in [&client, &master] {
        drop(stream.set_nodelay(true));
    }
    let (mut from_client, client) = client.into_split();
    let (from_master, mut master) = master.into_split();
    let mut head = [0; MAGIC.len()];
    let begun = async {
        from_client.read_exact(&mut head).await?;
        master.write_all(&head).await
    };
    if begun.await.is_err() {
        return;
    }
    if head != MAGIC {
        let (mut client, mut from_master) = (client, from_master);
        tokio::select! {
            _ = tokio::io::copy(&mut from_client, &mut master) => {}
            _ = tokio::io::copy(&mut from_master, &mut client) => {}
        }
        return;
    }
    if state.struck.load(Ordering::Relaxed) > 0 {
        state.reconnected.fetch_add(1, Ordering::Relaxed);
    }
    let lane = Lane {
        state,
        marked: Mutex::default(),
        cut: Notify::new(),
    };
    tokio::select! {
        _ = lane.requests(from_client, Exit::new(master)) => {}
        _ = lane.answers(from_master, Exit::new(client)) => {}
        () = lane.cut.notified() => {}
    }
}

/// Frames on their way out; one may wait for the next to pass.
struct Exit {
    into: OwnedWriteHalf,
    held: Option<Vec<u8>>,
}

impl Exit {
    fn new(into: OwnedWriteHalf) -> Self {
        Self { into, held: None }
    }

    async fn send(&mut self, frame: &[u8], state: &State) -> io::Result<()> {
        self.into.write_all(frame).await?;
        if let Some(held) = self.held.take() {
            state.overtaken.fetch_add(1, Ordering::Relaxed);
            self.into.write_all(&held).await?;
        }
        Ok(())
    }
}

struct Lane {
    state: Arc<State>,
    /// Requests whose answers meet the fault.
    marked: Mutex<HashSet<u64>>,
    cut: Notify,
}

impl Lane {
    async fn requests(&self, mut from: OwnedReadHalf, mut master: Exit) -> io::Result<()> {
        let plan = self.state.plan;
        // The greeting.
        for _ in 0..2 {
            master.send(&frame(&mut from).await?, &self.state).await?;
        }
        loop {
            let frame = frame(&mut from).await?;
            let sent = ClientFrame::decode(&frame[HEAD..]).map_err(io::Error::other)?;
            self.state.compare(sent.request.as_ref());
            let is_struck = kind(sent.request.as_ref()) == Some(plan.kind) && self.state.strikes();
            if is_struck {
                self.state.victim.lock().clone_from(&sent.request);
            }
            if is_struck && plan.fault.is_of_request() {
                self.state.strike();
                if plan.fault == Fault::ReorderRequest {
                    master.held = Some(frame);
                }
                continue;
            }
            if is_struck {
                let context = sent.context.unwrap_or_default();
                self.marked.lock().insert(context.request_id);
            }
            master.send(&frame, &self.state).await?;
        }
    }

    async fn answers(&self, mut from: OwnedReadHalf, mut client: Exit) -> io::Result<()> {
        for _ in 0..2 {
            client.send(&frame(&mut from).await?, &self.state).await?;
        }
        loop {
            let frame = frame(&mut from).await?;
            let answer = MasterFrame::decode(&frame[HEAD..]).map_err(io::Error::other)?;
            if !self.marked.lock().remove(&answer.request_id) {
                client.send(&frame, &self.state).await?;
                continue;
            }
            self.state.strike();
            match self.state.plan.fault {
                Fault::Cut => self.cut.notify_one(),
                Fault::Delay(pause) => {
                    tokio::time::sleep(pause).await;
                    client.send(&frame, &self.state).await?;
                }
                Fault::ReorderAnswer => client.held = Some(frame),
                Fault::LoseAnswer | Fault::LoseRequest | Fault::ReorderRequest => {}
            }
        }
    }
}

const HEAD: usize = 4;

/// The next frame, with its head.
async fn frame(from: &mut OwnedReadHalf) -> io::Result<Vec<u8>> {
    let mut head = [0; HEAD];
    from.read_exact(&mut head).await?;
    let len = u32::from_le_bytes(head) as usize;
    let mut frame = vec![0; HEAD + len];
    frame[..HEAD].copy_from_slice(&head);
    from.read_exact(&mut frame[HEAD..]).await?;
    Ok(frame)
}

fn kind(request: Option<&Request>) -> Option<Kind> {
    match request? {
        Request::Exists(_) => Some(Kind::LookUp),
        Request::GetStart(_) | Request::PutStart(_) => Some(Kind::Start),
        Request::GetEnd(_) | Request::PutEnd(_) => Some(Kind::End),
        _ => None,
    }
}
