//! The thread that makes and unmakes the memory of segments.
//!
//! Allocating touches every page, which takes seconds for a large segment, so it happens here, one
//! after the other, and the results go back by channel. Memory is given back when nothing moves in it
//! any more. That is asked from time to time and never waited for: memory that a peer holds, one that
//! stands still in the middle of a copy say, delays nothing but what was to follow it.
//!
//! The thread ends when its handle is dropped, after the job at hand. Memory that is still in use then
//! stays withdrawn, and the engine frees it when it can.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use layercake_transport::{Access, AllocateOptions, Engine, Error, Memory};
use tokio::sync::{mpsc as results, oneshot};

use super::SegmentSpec;
use super::thread::Thread;
use crate::error::StoreError;

/// How often it is asked whether memory is still in use.
const PAUSE: Duration = Duration::from_millis(5);

/// After so long it is said that memory is still in use.
const REMARKABLE: Duration = Duration::from_secs(30);

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
        until: Instant,
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
    let bring = |slot, spec| {
        if made.blocking_send((slot, allocate(engine, spec))).is_err() {
            tracing::debug!("nobody waits for this segment any more");
        }
    };
    let mut leaving = Leaving(Vec::new());
    loop {
        let job = if leaving.0.is_empty() {
            jobs.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            jobs.recv_timeout(PAUSE)
        };
        match job {
            Ok(Job::Make { slot, spec, old }) => match old {
                Some(old) => leaving.add(old, Then::Make { slot, spec }),
                None => bring(slot, spec),
            },
            Ok(Job::Release {
                memory,
                until,
                reply,
            }) => leaving.add(memory, Then::Tell { until, reply }),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        for (slot, spec) in leaving.look(Instant::now()) {
            if !made.is_closed() {
                bring(slot, spec);
            }
        }
    }
}

fn allocate(engine: &Engine, spec: SegmentSpec) -> Result<Memory, Error> {
    engine.allocate(
        spec.len,
        AllocateOptions {
            access: Access::RemoteReadWrite,
            generation_tags: true,
            pretouch: true,
            huge_pages: spec.huge_pages,
        },
    )
}

/// Something that is unregistered: memory, or what a test takes for it.
trait Unregister {
    fn try_unregister(&self) -> Result<(), Error>;
}

impl Unregister for Memory {
    fn try_unregister(&self) -> Result<(), Error> {
        self.unregister(Duration::ZERO)
    }
}

/// Memory that is being given back.
struct Leaving<M>(Vec<Leaver<M>>);

struct Leaver<M> {
    memory: M,
    since: Instant,
    remarked: bool,
    then: Then,
}

/// What follows when memory was given back.
enum Then {
    /// New memory for its slot, however long that takes.
    Make { slot: usize, spec: SegmentSpec },
    /// An answer, at `until` at the latest.
    Tell {
        until: Instant,
        reply: oneshot::Sender<Result<(), Error>>,
    },
}

impl<M: Unregister> Leaving<M> {
    fn add(&mut self, memory: M, then: Then) {
        self.0.push(Leaver {
            memory,
            since: Instant::now(),
            remarked: false,
            then,
        });
    }

    /// Asks about all of it, and says which slots get new memory now.
    fn look(&mut self, now: Instant) -> Vec<(usize, SegmentSpec)> {
        let mut free = Vec::new();
        for mut leaver in std::mem::take(&mut self.0) {
            let tried = leaver.memory.try_unregister();
            let waited = now.saturating_duration_since(leaver.since);
            let late = matches!(&leaver.then, Then::Tell { until, .. } if now >= *until);
            if let Err(error) = &tried
                && !late
            {
                if waited >= REMARKABLE && !leaver.remarked {
                    tracing::warn!(%error, ?waited, "a lost segment is still in use");
                    leaver.remarked = true;
                }
                self.0.push(leaver);
                continue;
            }
            match leaver.then {
                Then::Make { slot, spec } => free.push((slot, spec)),
                Then::Tell { reply, .. } => {
                    let told = tried.map_err(|error| after(error, waited));
                    // Who does not wait any more does not need the answer.
                    let _ = reply.send(told);
                }
            }
        }
        free
    }
}

/// The error of the last attempt, with the time of all of them.
fn after(error: Error, waited: Duration) -> Error {
    match error {
        Error::StillInFlight { region, .. } => Error::StillInFlight { region, waited },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use layercake_protocol::ids::RegionId;

    use super::*;

    #[derive(Clone, Default)]
    struct Used(Rc<Cell<bool>>);

    impl Unregister for Used {
        fn try_unregister(&self) -> Result<(), Error> {
            if self.0.get() {
                Err(Error::StillInFlight {
                    region: RegionId(1),
                    waited: Duration::ZERO,
                })
            } else {
                Ok(())
            }
        }
    }

    fn make(slot: usize) -> Then {
        let spec = SegmentSpec {
            len: 4096,
            huge_pages: false,
        };
        Then::Make { slot, spec }
    }

    fn tell(within: Duration) -> (Then, oneshot::Receiver<Result<(), Error>>) {
        let (reply, told) = oneshot::channel();
        let until = Instant::now() + within;
        (Then::Tell { until, reply }, told)
    }

    #[test]
    fn memory_that_stays_in_use_holds_up_nothing_else() {
        const LONG: Duration = Duration::from_hours(1);
        let used = Used(Rc::new(Cell::new(true)));
        let mut leaving = Leaving(Vec::new());
        let slots = |free: Vec<(usize, SegmentSpec)>| -> Vec<usize> {
            free.into_iter().map(|(slot, _)| slot).collect()
        };
        leaving.add(used.clone(), make(0));
        let (then, mut told) = tell(LONG);
        leaving.add(used.clone(), then);
        leaving.add(Used::default(), make(1));
        let (then, mut others) = tell(LONG);
        leaving.add(Used::default(), then);
        let now = Instant::now();
        assert_eq!(slots(leaving.look(now)), [1]);
        assert!(matches!(others.try_recv(), Ok(Ok(()))));
        assert_eq!(slots(leaving.look(now)), []);
        assert!(told.try_recv().is_err(), "neither free nor late");

        // Late: who waits is told, and who needs the place waits on.
        assert_eq!(slots(leaving.look(now + 2 * LONG)), []);
        let Ok(Err(Error::StillInFlight { waited, .. })) = told.try_recv() else {
            panic!("it says what is in use");
        };
        assert!(waited >= LONG);
        used.0.set(false);
        assert_eq!(slots(leaving.look(now)), [0]);
        assert!(leaving.0.is_empty());
    }
}
