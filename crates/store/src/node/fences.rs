//! Keeping late writers out (requirement S7, architecture decision 6).
//!
//! The master names places whose writer was given up. Raising their tags turns away every write that
//! begins later; a copy that had begun before may still be under way. So the host waits for the copies
//! of that writer's engine to end: usually they have, and the answer is at once that no late write can
//! land. A writer that stands still in the middle of a copy is reported as attached first, and as gone
//! when its copy ends or its process does.
//!
//! Waiting blocks, so it has a thread of its own, which groups what is pending by engine: since all
//! tags are raised before, one wait covers all fences of an engine.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use layercake_protocol::command::Fence;
use layercake_protocol::ids::EngineId;
use layercake_transport::{Engine, Memory};

use super::thread::Thread;
use crate::error::StoreError;
use crate::link::{CommandId, MasterLink};

/// How long the copies of a writer are waited for before the master is told that they go on.
const FIRST_WAIT: Duration = Duration::from_millis(100);
/// How long they are waited for in each round after that: new fences wait as long at most, for each
/// writer that stands still.
const NEXT_WAIT: Duration = Duration::from_millis(5);
/// The pause between rounds.
const PAUSE: Duration = Duration::from_millis(50);
/// Fences that wait for the thread. What does not fit is dropped: the master repeats it.
const QUEUE: usize = 4096;

/// A fence whose tags are raised.
struct Raised {
    command: CommandId,
    engine: Option<EngineId>,
}

/// Counters of the fences.
#[derive(Debug, Default)]
pub(super) struct FenceCounts {
    /// Answered: no late write can land.
    pub(super) done: AtomicU64,
    /// Waiting for their writer.
    pub(super) waiting: AtomicU64,
}

/// The thread's handle. Dropping it ends the thread within a round.
pub(super) struct Fences {
    raised: mpsc::SyncSender<Raised>,
    link: MasterLink,
    thread: Thread,
}

impl Fences {
    pub(super) fn start(
        engine: Engine,
        link: MasterLink,
        counts: Arc<FenceCounts>,
    ) -> Result<Self, StoreError> {
        let (raised, arrived) = mpsc::sync_channel(QUEUE);
        let answers = link.clone();
        let keeper = Keeper {
            quiet: move |writer, wait| engine.wait_quiet(writer, wait),
            answer: move |command, attached| answers.fence_done(command, attached),
            counts,
            waiting: BTreeMap::new(),
        };
        let thread = Thread::start("layercake-fence", move || keeper.run(&arrived))?;
        Ok(Self {
            raised,
            link,
            thread,
        })
    }

    /// Carries out a fence on a segment. `memory` is `None` if the host does not have it any more:
    /// then nothing can be written there.
    pub(super) fn keep_out(&self, command: CommandId, fence: &Fence, memory: Option<&Memory>) {
        let Some(memory) = memory else {
            self.link.fence_done(command, false);
            return;
        };
        for place in &fence.places {
            if let Err(error) = memory.fence(place.offset, place.len, place.generation) {
                // Such a place can't be written to either.
                tracing::warn!(segment = %fence.segment, ?place, %error, "no such place to fence");
            }
        }
        let engine = fence.engine;
        if self.raised.try_send(Raised { command, engine }).is_err() {
            tracing::debug!(?command, "too many fences at once, it will be repeated");
        }
    }

    /// Ends the thread, and gives it for waiting.
    pub(super) fn stop(self) -> Thread {
        self.thread
    }
}

/// What the thread knows. `quiet` waits until the copies of a writer that had begun are over, and says
/// whether that came about; `answer` tells the master.
struct Keeper<Q, A> {
    quiet: Q,
    answer: A,
    counts: Arc<FenceCounts>,
    /// Fences that were answered with "attached", by engine.
    waiting: BTreeMap<Option<EngineId>, HashSet<CommandId>>,
}

impl<Q, A> Keeper<Q, A>
where
    Q: Fn(Option<EngineId>, Duration) -> bool,
    A: Fn(CommandId, bool),
{
    fn run(mut self, arrived: &mpsc::Receiver<Raised>) {
        loop {
            let first = if self.waiting.is_empty() {
                arrived
                    .recv()
                    .map_err(|_| mpsc::RecvTimeoutError::Disconnected)
            } else {
                arrived.recv_timeout(PAUSE)
            };
            match first {
                Ok(first) => self.take_new(std::iter::once(first).chain(arrived.try_iter())),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
            self.look_again();
        }
    }

    fn take_new(&mut self, new: impl Iterator<Item = Raised>) {
        let mut by_engine: BTreeMap<Option<EngineId>, Vec<CommandId>> = BTreeMap::new();
        for Raised { command, engine } in new {
            by_engine.entry(engine).or_default().push(command);
        }
        for (engine, commands) in by_engine {
            // Whoever stands still already is not waited for again.
            let wait = if self.waiting.contains_key(&engine) {
                NEXT_WAIT
            } else {
                FIRST_WAIT
            };
            let quiet = (self.quiet)(engine, wait);
            for command in commands {
                (self.answer)(command, !quiet);
                if quiet {
                    self.counts.done.fetch_add(1, Ordering::Relaxed);
                } else {
                    // A repeated command is answered again, and waits once.
                    self.waiting.entry(engine).or_default().insert(command);
                }
            }
        }
        self.count();
    }

    fn look_again(&mut self) {
        let (quiet, answer, counts) = (&self.quiet, &self.answer, &self.counts);
        self.waiting.retain(|writer, commands| {
            let quiet = quiet(*writer, NEXT_WAIT);
            if quiet {
                for command in commands.iter() {
                    answer(*command, false);
                    counts.done.fetch_add(1, Ordering::Relaxed);
                }
            }
            !quiet
        });
        self.count();
    }

    fn count(&self) {
        let waiting: usize = self.waiting.values().map(HashSet::len).sum();
        self.counts.waiting.store(waiting as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use layercake_protocol::ids::Term;

    use super::*;

    const BUSY: Option<EngineId> = Some(EngineId(1));
    const CALM: Option<EngineId> = Some(EngineId(2));

    fn command(id: u64) -> CommandId {
        CommandId { term: Term(1), id }
    }

    fn raised(id: u64, engine: Option<EngineId>) -> Raised {
        Raised {
            command: command(id),
            engine,
        }
    }

    #[test]
    fn a_writer_in_the_middle_of_a_copy_is_attached_until_the_copy_ends() {
        let copying = Cell::new(true);
        let answers = RefCell::new(Vec::new());
        let mut keeper = Keeper {
            quiet: |engine, _| engine != BUSY || !copying.get(),
            answer: |command: CommandId, attached| {
                answers.borrow_mut().push((command.id, attached));
            },
            counts: Arc::default(),
            waiting: BTreeMap::new(),
        };
        keeper.take_new([raised(1, BUSY), raised(2, CALM), raised(3, BUSY)].into_iter());
        answers.borrow_mut().sort_unstable();
        assert_eq!(answers.take(), [(1, true), (2, false), (3, true)]);
        assert_eq!(keeper.counts.waiting.load(Ordering::Relaxed), 2);
        // The master repeats one, and nothing has changed.
        keeper.take_new(std::iter::once(raised(1, BUSY)));
        keeper.look_again();
        assert_eq!(answers.take(), [(1, true)]);
        copying.set(false);
        keeper.look_again();
        answers.borrow_mut().sort_unstable();
        assert_eq!(answers.take(), [(1, false), (3, false)], "once each");
        keeper.look_again();
        assert!(answers.take().is_empty());
        assert_eq!(keeper.counts.waiting.load(Ordering::Relaxed), 0);
        assert_eq!(keeper.counts.done.load(Ordering::Relaxed), 3);
    }
}
