//! What all handles and tasks of a link share, and how a call finds its way.
//!
//! The circuit breaker (requirement S10) is the link's status. *Up*: calls go out. *Connecting*: the
//! connection was just lost and the first attempt to renew it is under way; calls wait for its verdict.
//! *Down*: an attempt has failed; new calls fail at once, in the time that it takes to look, while the
//! supervisor goes on trying. A call that was on its way when the connection broke waits for that verdict, too, and is
//! repeated where that is harmless. While it is in doubt whether the master is alive
//! ([`Signs`](super::signs::Signs)), calls are not sent either.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::ids::{ClientId, RequestId, SegmentId, Term};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::config::LinkConfig;
use super::connection::{AskError, Connection, IfLost, Request, Response};
use super::doubts::Doubts;
use super::outbox::Outbox;
use super::types::{Life, LinkState, NodeEvent, SessionEvent};
use super::unanswered::Unanswered;
use crate::error::StoreError;

/// Commands that wait for their handler. Those that don't fit are dropped: the master repeats them.
const EVENTS: usize = 1024;

/// The shortest and the longest time between two looks at the calls that wait.
const SWEEPS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));

/// [`LinkState`] with the connection.
#[derive(Clone, Debug)]
pub(super) enum Status {
    Connecting,
    Up(Arc<Connection>),
    Down(StoreError),
    Closed,
}

impl Status {
    fn public(&self) -> LinkState {
        match self {
            Self::Connecting => LinkState::Connecting,
            Self::Up(connection) => LinkState::Up {
                term: connection.term,
                life: connection.life,
            },
            Self::Down(error) => LinkState::Down(error.clone()),
            Self::Closed => LinkState::Closed,
        }
    }
}

/// A queue of events whose receiving end is taken once.
#[derive(Debug)]
pub(super) struct Events<T> {
    sender: mpsc::Sender<T>,
    receiver: Mutex<Option<mpsc::Receiver<T>>>,
}

impl<T> Events<T> {
    fn new() -> Self {
        let (sender, receiver) = mpsc::channel(EVENTS);
        Self {
            sender,
            receiver: Mutex::new(Some(receiver)),
        }
    }

    pub(super) fn take(&self) -> Option<mpsc::Receiver<T>> {
        self.receiver.lock().take()
    }

    pub(super) fn offer(&self, event: T) {
        if self.sender.try_send(event).is_err() {
            tracing::debug!("a command of the master finds no handler; it will be repeated");
        }
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: LinkConfig,
    pub(super) master: Arc<str>,
    pub(super) client: ClientId,
    pub(super) outbox: Arc<Outbox>,
    pub(super) doubts: Doubts,
    pub(super) tracker: TaskTracker,
    pub(super) cancel: CancellationToken,
    /// What heartbeats name.
    pub(super) mounted: Mutex<Vec<SegmentId>>,
    /// Send a heartbeat now.
    pub(super) beat: Notify,
    pub(super) node_events: Events<NodeEvent>,
    pub(super) session_events: Events<SessionEvent>,
    status: watch::Sender<Status>,
    state: watch::Sender<LinkState>,
    membership: Mutex<(Term, Life)>,
    requests: AtomicU64,
    /// The master puts all tenants' keys into one key space; told with each join.
    pub(super) shares_tenants: AtomicBool,
    /// How long the master's leases are, in milliseconds; 0: it does not say. Told with each join.
    pub(super) lease_ms: AtomicU64,
}

impl Shared {
    pub(super) fn new(config: LinkConfig) -> Self {
        Self {
            master: Arc::from(config.master.as_str()),
            client: ClientId::draw(),
            outbox: Arc::default(),
            doubts: Doubts::default(),
            tracker: TaskTracker::new(),
            cancel: CancellationToken::new(),
            mounted: Mutex::default(),
            beat: Notify::new(),
            node_events: Events::new(),
            session_events: Events::new(),
            status: watch::Sender::new(Status::Connecting),
            state: watch::Sender::new(LinkState::Connecting),
            membership: Mutex::new((Term(0), Life(0))),
            requests: AtomicU64::new(0),
            shares_tenants: AtomicBool::new(false),
            lease_ms: AtomicU64::new(0),
            config,
        }
    }

    /// How often calls are looked at whose time may be over.
    pub(super) fn sweep_every(&self) -> Duration {
        let (least, most) = SWEEPS;
        (self.config.timeouts.call / 32).clamp(least, most)
    }

    pub(super) fn next_request(&self) -> RequestId {
        RequestId(self.requests.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// The life that a join begins, or goes on with.
    pub(super) fn begin_life(&self, term: Term, fresh: bool) -> Life {
        let mut membership = self.membership.lock();
        let (known, Life(life)) = *membership;
        let life = Life(life + u64::from(fresh || term != known));
        *membership = (term, life);
        life
    }

    pub(super) fn watch(&self) -> watch::Receiver<LinkState> {
        self.state.subscribe()
    }

    pub(super) fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// Returns once the link is closed, which is before its leave is sent.
    pub(super) async fn closed(&self) {
        let mut status = self.status.subscribe();
        // The sender lives in `self`, so there is nothing but the change itself to wait for.
        let _ = status
            .wait_for(|status| matches!(status, Status::Closed))
            .await;
    }

    /// Sets the status; [`Status::Closed`] is final.
    pub(super) fn set_status(&self, status: Status) {
        let public = status.public();
        let changed = self.status.send_if_modified(|current| {
            let open = !matches!(current, Status::Closed);
            if open {
                *current = status;
            }
            open
        });
        if changed {
            self.state.send_replace(public);
        }
    }

    /// A connection to send on.
    pub(super) async fn ready(&self, deadline: Instant) -> Result<Arc<Connection>, StoreError> {
        let verdict = |status: &Status| match status {
            Status::Up(connection) => Some(Ok(Arc::clone(connection))),
            Status::Closed => Some(Err(StoreError::Closed)),
            Status::Down(error) => Some(Err(error.clone())),
            Status::Connecting => None,
        };
        if let Some(verdict) = verdict(&self.status.borrow()) {
            return verdict;
        }
        let mut status = self.status.subscribe();
        let waited = timeout_at(
            deadline,
            status.wait_for(|status| verdict(status).is_some()),
        )
        .await;
        match waited {
            Ok(Ok(status)) => verdict(&status).unwrap_or(Err(StoreError::Closed)),
            Ok(Err(_)) => Err(StoreError::Closed),
            Err(_) => Err(self.unreachable("the connection was lost".to_owned())),
        }
    }

    /// Sends a request and gives the answer, and the connection that brought it.
    pub(super) async fn call(
        &self,
        request: &Request,
        within: Duration,
    ) -> Result<(Response, Arc<Connection>), StoreError> {
        let deadline = Instant::now() + within;
        let id = self.next_request();
        let mut unanswered = Unanswered::new(&self.outbox, id, request);
        let mut rejoined = false;
        loop {
            let connection = self.ready(deadline).await?;
            let patience = self.config.timeouts.call / 8;
            if !connection.signs.are_there(patience).await {
                return Err(self.unreachable("it stands still".to_owned()));
            }
            let heard = connection.signs.heard();
            let asked = connection.ask(id, request, deadline).await;
            match &asked {
                Ok(_) => unanswered.settled(),
                Err(AskError::Broken { handed_over: true }) => unanswered.broke(connection.life),
                Err(AskError::Broken { .. } | AskError::Elapsed) => {}
            }
            let again = match asked {
                Ok(Response::Error(error)) => {
                    let refusal =
                        Refusal::try_from(error).map_err(|error| self.bad_answer(error))?;
                    let again = self.out_of_step(&connection, request, &refusal)
                        && request.if_lost != IfLost::Tell
                        && !std::mem::replace(&mut rejoined, true);
                    again.then_some(()).ok_or_else(|| self.refused(refusal))
                }
                Ok(response) => return Ok((response, connection)),
                Err(AskError::Broken { handed_over }) => {
                    (request.if_lost != IfLost::Tell || !handed_over).then_some(()).ok_or_else(|| {
                        self.unreachable(
                            "the connection was lost before the answer came, the call may have taken effect"
                                .to_owned(),
                        )
                    })
                }
                Err(AskError::Elapsed) => {
                    if connection.signs.doubt(heard) {
                        self.beat.notify_one();
                    }
                    Err(StoreError::MasterTimeout {
                        master: Arc::clone(&self.master),
                        after: within,
                    })
                }
            };
            again?;
            // The status lags behind the break by a moment.
            if timeout_at(deadline, connection.ended()).await.is_err() {
                return Err(self.unreachable("the connection is ending".to_owned()));
            }
        }
    }

    /// Whether a refusal means that this side has to greet and join anew, which it then does.
    fn out_of_step(&self, connection: &Connection, request: &Request, refusal: &Refusal) -> bool {
        match refusal {
            Refusal::WrongTerm | Refusal::Unauthenticated => connection.stop.cancel(),
            // In calls about keys it is this member that is unknown.
            Refusal::UnknownMember if request.if_lost != IfLost::Tell => connection.stop.cancel(),
            // In others perhaps a segment: the heartbeat tells, and ends the stream if it is not.
            Refusal::UnknownMember => self.beat.notify_one(),
            _ => return false,
        }
        true
    }

    /// The error of a batch whose parts would be of several lives.
    pub(super) fn membership_ended(&self) -> StoreError {
        self.unreachable("the membership ended while a long batch was started".to_owned())
    }

    /// The error of an answer that is of another kind than the request's.
    pub(super) fn wrong_kind(&self) -> StoreError {
        self.bad_answer(WireError::Invalid {
            field: "response",
            detail: "another kind of answer than the request asks for".to_owned(),
        })
    }
}
