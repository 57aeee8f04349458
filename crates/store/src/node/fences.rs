//! Keeping late writers out (requirement S7, architecture decision 6).
//!
//! The master names places whose writer was given up. Raising their tags turns away every write that
//! begins later; a copy that had begun before may still be under way. So the host waits for the copies
//! of that writer's engine to end: usually they have, and the answer is at once that no late write can
//! land. A writer that stands still in the middle of a copy is reported as attached first, and as gone
//! when its copy ends or its process does.
//!
//! What had begun when the tags were raised is remembered in a mark, one for the fences of an engine
//! that came together, and the same mark is asked about until it is over: copies that begin later see
//! the tags and delay nothing. Waiting blocks, so it has a thread of its own.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use layercake_protocol::command::Fence;
use layercake_protocol::ids::EngineId;
use layercake_transport::{Engine, Memory, QuietMark};

use super::thread::Thread;
use crate::error::StoreError;
use crate::link::{CommandId, MasterLink};

/// How long the copies of a writer are waited for before the master is told that they go on.
const FIRST_WAIT: Duration = Duration::from_millis(100);
/// How often it is asked after that whether they have ended.
const PAUSE: Duration = Duration::from_millis(20);
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
        let answer = move |command, attached| answers.fence_done(command, attached);
        let keeper = Keeper::new(engine, answer, counts);
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

/// Who knows what writers have under way.
trait Quiet {
    /// What writers had under way at one moment.
    type Mark;

    /// What this writer, or any, has under way now.
    fn mark(&self, writer: Option<EngineId>) -> Self::Mark;

    /// Waits until that is over; says whether it is.
    fn wait_over(&self, mark: &Self::Mark, wait: Duration) -> bool;
}

impl Quiet for Engine {
    type Mark = QuietMark;

    fn mark(&self, writer: Option<EngineId>) -> QuietMark {
        self.quiet_mark(writer)
    }

    fn wait_over(&self, mark: &QuietMark, wait: Duration) -> bool {
        Self::wait_over(self, mark, wait)
    }
}

/// What the thread knows. `answer` tells the master.
struct Keeper<Q: Quiet, A> {
    quiet: Q,
    answer: A,
    counts: Arc<FenceCounts>,
    /// Fences that were answered with "attached", in the order in which they came.
    waiting: Vec<Waiting<Q::Mark>>,
    /// The commands of all of them.
    commands: HashSet<CommandId>,
}

/// Fences of one writer that came together.
struct Waiting<M> {
    writer: Option<EngineId>,
    /// What the writer had under way when their tags were raised.
    mark: M,
    commands: Vec<CommandId>,
}

impl<Q, A> Keeper<Q, A>
where
    Q: Quiet,
    A: Fn(CommandId, bool),
{
    fn new(quiet: Q, answer: A, counts: Arc<FenceCounts>) -> Self {
        Self {
            quiet,
            answer,
            counts,
            waiting: Vec::new(),
            commands: HashSet::new(),
        }
    }

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
        let mut by_writer: BTreeMap<Option<EngineId>, Vec<CommandId>> = BTreeMap::new();
        for Raised { command, engine } in new {
            if self.commands.contains(&command) {
                // The master repeats it. Its tags are raised and its mark is taken.
                (self.answer)(command, true);
            } else {
                by_writer.entry(engine).or_default().push(command);
            }
        }
        for (writer, commands) in by_writer {
            let mark = self.quiet.mark(writer);
            // Whoever stands still already is not waited for again.
            let stands_still = self.waiting.iter().any(|other| other.writer == writer);
            let wait = if stands_still {
                Duration::ZERO
            } else {
                FIRST_WAIT
            };
            let over = self.quiet.wait_over(&mark, wait);
            for command in &commands {
                (self.answer)(*command, !over);
            }
            if over {
                self.done(commands.len());
            } else {
                self.commands.extend(&commands);
                self.waiting.push(Waiting {
                    writer,
                    mark,
                    commands,
                });
            }
        }
        self.count();
    }

    fn look_again(&mut self) {
        let over =
            |fences: &mut Waiting<Q::Mark>| self.quiet.wait_over(&fences.mark, Duration::ZERO);
        let over: Vec<_> = self.waiting.extract_if(.., over).collect();
        for fences in over {
            self.done(fences.commands.len());
            for command in fences.commands {
                self.commands.remove(&command);
                (self.answer)(command, false);
            }
        }
        self.count();
    }

    fn done(&self, fences: usize) {
        self.counts.done.fetch_add(fences as u64, Ordering::Relaxed);
    }

    fn count(&self) {
        let waiting = self.commands.len() as u64;
        self.counts.waiting.store(waiting, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use layercake_protocol::ids::Term;

    use super::*;

    const BUSY: Option<EngineId> = Some(EngineId(1));
    const CALM: Option<EngineId> = Some(EngineId(2));

    /// One writer that always has something under way: a mark is over when what had begun then has
    /// ended. `wait_over` never has the luck to see nothing under way.
    #[derive(Default)]
    struct Traffic {
        begun: Cell<u64>,
        ended: Cell<u64>,
    }

    impl Quiet for &Traffic {
        type Mark = u64;

        fn mark(&self, writer: Option<EngineId>) -> u64 {
            if writer == BUSY { self.begun.get() } else { 0 }
        }

        fn wait_over(&self, mark: &u64, _wait: Duration) -> bool {
            *mark <= self.ended.get()
        }
    }

    impl Traffic {
        fn begin(&self) {
            self.begun.set(self.begun.get() + 1);
        }

        fn end(&self) {
            self.ended.set(self.ended.get() + 1);
        }
    }

    fn raised(id: u64, engine: Option<EngineId>) -> Raised {
        Raised {
            command: CommandId { term: Term(1), id },
            engine,
        }
    }

    #[test]
    fn a_writer_in_the_middle_of_a_copy_is_attached_until_the_copy_ends() {
        let traffic = Traffic::default();
        let answers = RefCell::new(Vec::new());
        let answer = |command: CommandId, attached| {
            answers.borrow_mut().push((command.id, attached));
        };
        let taken = || {
            let mut taken = answers.take();
            taken.sort_unstable();
            taken
        };
        let mut keeper = Keeper::new(&traffic, answer, Arc::default());
        traffic.begin();
        keeper.take_new([raised(1, BUSY), raised(2, CALM), raised(3, BUSY)].into_iter());
        assert_eq!(taken(), [(1, true), (2, false), (3, true)]);
        assert_eq!(keeper.counts.waiting.load(Ordering::Relaxed), 2);
        // The master repeats one, and nothing has changed.
        keeper.take_new(std::iter::once(raised(1, BUSY)));
        keeper.look_again();
        assert_eq!(taken(), [(1, true)]);
        traffic.end();
        keeper.look_again();
        assert_eq!(taken(), [(1, false), (3, false)], "once each");
        keeper.look_again();
        assert!(taken().is_empty());
        assert_eq!(keeper.counts.waiting.load(Ordering::Relaxed), 0);
        assert_eq!(keeper.counts.done.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn a_writer_that_never_pauses_holds_no_fence_longer_than_its_copy_lasts() {
        let traffic = Traffic::default();
        let answers = RefCell::new(Vec::new());
        let answer = |command: CommandId, attached| {
            answers.borrow_mut().push((command.id, attached));
        };
        let mut keeper = Keeper::new(&traffic, answer, Arc::default());
        traffic.begin();
        for id in 0..20 {
            keeper.take_new(std::iter::once(raised(id, BUSY)));
            // Repeated while the next copy is under way already: that is none of its business.
            traffic.begin();
            keeper.take_new(std::iter::once(raised(id, BUSY)));
            assert_eq!(answers.take(), [(id, true), (id, true)]);
            traffic.end();
            keeper.look_again();
            assert_eq!(answers.take(), [(id, false)]);
        }
        assert_eq!(keeper.counts.waiting.load(Ordering::Relaxed), 0);
    }
}
