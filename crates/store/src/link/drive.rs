//! Waiting for a future on a thread that may block.
//!
//! The thread that waits for the master's answer reads the lane itself (see `lane::reader`), so a call
//! wakes one thread here, the one that made it, instead of the runtime's and then that one. In the same way it
//! looks after the connection that a transfer is under way on, if it waits for one, and after both if it waits for both.

use std::cell::Cell;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use layercake_protocol::ids::ClientId;
use layercake_transport::{Awaited, Lead};
use tokio::runtime::Handle;

use super::MasterLink;
use super::parker::{Awaited as Socket, Parker};
use super::shared::Status;
use super::supervise::Arrivals;

thread_local! {
    /// The member for which this thread polls a future, whose answers it will read when it has to wait.
    static DRIVEN: Cell<Option<ClientId>> = const { Cell::new(None) };
    /// Whether that future has asked for an answer since it was last polled.
    static ASKED: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread, which asks for an answer, reads the lane of this member while it waits.
pub(super) fn drives(client: ClientId) -> bool {
    let drives = DRIVEN.get() == Some(client);
    if drives {
        ASKED.set(true);
    }
    drives
}

/// Puts back what was driven before.
struct Driven(Option<ClientId>);

impl Driven {
    fn begin(client: Option<ClientId>) -> Self {
        ASKED.set(false);
        Self(DRIVEN.replace(client))
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        DRIVEN.set(self.0);
    }
}

impl MasterLink {
    /// Waits for a future on this thread, which must be none of the runtime's. As
    /// [`Handle::block_on`] does, and calls over this link cost a switch of threads less: the thread reads their
    /// answers itself.
    pub fn block_on<T>(&self, runtime: &Handle, future: impl Future<Output = T>) -> T {
        drive(Some(self), runtime, future)
    }
}

/// As [`MasterLink::block_on`], for those who wait for transfers and have no master.
pub fn block_on<T>(runtime: &Handle, future: impl Future<Output = T>) -> T {
    drive(None, runtime, future)
}

fn drive<T>(link: Option<&MasterLink>, runtime: &Handle, future: impl Future<Output = T>) -> T {
    // Who leads looks for calls whose time is over, as often as the link's own task does.
    let look_again = link.map(|link| link.shared().sweep_every());
    let Ok(parker) = Parker::take(look_again) else {
        // Without a file descriptor to spare there is still the runtime's way.
        return runtime.block_on(future);
    };
    let _entered = runtime.enter();
    let mut future = pin!(future);
    let waker = Waker::from(Arc::clone(&parker));
    let mut cx = Context::from_waker(&waker);
    let mut transfers = Awaited::default();
    let (mut lead, mut asked) = (None, false);
    loop {
        parker.reset();
        let polled = {
            let _driven = Driven::begin(link.map(MasterLink::client_id));
            transfers.poll(|| future.as_mut().poll(&mut cx))
        };
        if let Poll::Ready(done) = polled {
            drop((lead, waker));
            parker.keep();
            return done;
        }
        asked |= ASKED.get();
        lead = transfers.lead(lead);
        while !parker.is_woken() {
            wait(link, &parker, &mut lead, asked);
        }
        // Others may use the connection while the future has its turn.
        lead = lead.filter(|lead| !lead.is_over());
    }
}

/// Waits until the parker is woken, or for no reason.
fn wait(link: Option<&MasterLink>, parker: &Arc<Parker>, lead: &mut Option<Lead>, asked: bool) {
    if let Some(shared) = link.map(MasterLink::shared)
        && (asked || lead.is_none())
        && let Status::Up(connection) = shared.status()
        && let Some(lane) = connection.lane()
        && connection.is_waited_for()
    {
        let arrivals = Arrivals {
            shared,
            connection: &connection,
        };
        if lane.reader.wait(parker, &arrivals, lead) {
            return;
        }
        // Somebody has to read what this thread has asked for, and to mind its deadline.
        connection.be_swept();
        lane.reader.call_back();
    }
    match lead {
        Some(leading) => {
            if !turn(leading, parker) {
                *lead = None;
            }
        }
        None => parker.park(),
    }
}

/// Waits until the parker is woken or something comes in on a transfer's connection, or for no reason.
/// `false`: there is nothing to wait for there.
fn turn(lead: &mut Lead, parker: &Parker) -> bool {
    // What the system can't tell, a look at the socket does.
    lead.turn(|socket, room| parker.poll(Socket { socket, room }).unwrap_or(true))
}
