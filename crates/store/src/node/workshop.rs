//! The thread that makes and unmakes the memory of segments.
//!
//! Allocating touches every page, which takes seconds for a large segment; unregistering waits for
//! transfers. Both block, so both happen here, one after the other, and the results go back by channel.
//! The thread ends when its handle is dropped, after the job at hand.

use std::sync::mpsc;
use std::time::Duration;

use layercake_transport::{Access, AllocateOptions, Engine, Error, Memory};
use tokio::sync::{mpsc as results, oneshot};

use super::SegmentSpec;
use super::thread::Thread;
use crate::error::StoreError;

/// How long one attempt to unregister waits for transfers before it is looked whether to go on.
const WAIT: Duration = Duration::from_secs(1);

/// Something to do.
pub(super) enum Job {
    /// Memory for a slot; what it had before is given back first.
    Make {
        slot: usize,
        spec: SegmentSpec,
        old: Option<Memory>,
    },
    /// Memory that is not needed any more.
    Release {
        memory: Memory,
        deadline: Duration,
        reply: oneshot::Sender<Result<(), Error>>,
    },
}

/// What came of [`Job::Make`].
pub(super) type Made = (usize, Result<Memory, Error>);

/// The thread's handle.
pub(super) struct Workshop {
    jobs: mpsc::Sender<Job>,
    thread: Thread,
}

impl Workshop {
    pub(super) fn start(engine: Engine, made: results::Sender<Made>) -> Result<Self, StoreError> {
        // Bounded by the slots: each has one job at a time.
        let (jobs, arrived) = mpsc::channel();
        let thread = Thread::start("layercake-segment", move || work(&engine, &arrived, &made))?;
        Ok(Self { jobs, thread })
    }

    pub(super) fn submit(&self, job: Job) {
        if self.jobs.send(job).is_err() {
            tracing::error!("the thread that makes segments has ended");
        }
    }

    /// Ends the thread, and gives it for waiting.
    pub(super) fn stop(self) -> Thread {
        self.thread
    }
}

fn work(engine: &Engine, jobs: &mpsc::Receiver<Job>, made: &results::Sender<Made>) {
    while let Ok(job) = jobs.recv() {
        match job {
            Job::Make { slot, spec, old } => {
                if let Some(old) = old
                    && !give_back(&old, made)
                {
                    continue;
                }
                let memory = engine.allocate(
                    spec.len,
                    AllocateOptions {
                        access: Access::RemoteReadWrite,
                        generation_tags: true,
                        pretouch: true,
                        huge_pages: spec.huge_pages,
                    },
                );
                if made.blocking_send((slot, memory)).is_err() {
                    tracing::debug!("nobody waits for this segment any more");
                }
            }
            Job::Release {
                memory,
                deadline,
                reply,
            } => {
                // Who does not wait any more does not need the answer.
                let _ = reply.send(memory.unregister(deadline));
            }
        }
    }
}

/// Waits until nothing moves in the memory any more, for as long as somebody wants new memory.
fn give_back(memory: &Memory, made: &results::Sender<Made>) -> bool {
    while let Err(error) = memory.unregister(WAIT) {
        if made.is_closed() {
            return false;
        }
        tracing::debug!(%error, "a lost segment is still in use");
    }
    true
}
