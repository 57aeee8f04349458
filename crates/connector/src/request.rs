//! The life of one request as the scheduler side sees it (C2). Pure: time comes in as a number.
//!
//! ```text
//! waiting ─ look_up ─▶ looking up ─ answer, or too late ─▶ matched ─ allocate ─▶ allocated
//!    ▲                                                                             │ schedule
//!    └──── preempt (next attempt) ──────────── running ◀───────────────────────────┘
//!                                                 │ load failed: cut back (next attempt), or failed
//!                                                 ▼ finish
//!                        draining (saves under way) ─ every rank reported, or too late ─▶ ended
//! ```
//!
//! Whatever comes in another state than it belongs to is ignored or refused, never acted upon: a late
//! answer to an old question, a second report of one rank, a result of an attempt that is over. A
//! request ends once.

use std::collections::BTreeSet;
use std::time::Duration;

use layercake_protocol::ids::Epoch;

use crate::options::FailurePolicy;

/// One question of one request. Another number of tokens or hashes, or another attempt, is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QuestionId(pub u64);

/// Numbers the questions of all requests: one that comes later under the name of an earlier one
/// is not answered by what was asked for that.
#[derive(Debug, Default)]
pub struct Questions(u64);

impl Questions {
    fn draw(&mut self) -> QuestionId {
        self.0 += 1;
        QuestionId(self.0)
    }
}

/// What a question came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hit {
    /// Blocks from the first on.
    pub blocks: usize,
    /// Epoch under which they were touched.
    pub epoch: Epoch,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The engine ended it, and no save reads its blocks.
    Finished,
    /// As `Finished`, after a load failed under the policy `fail`.
    Failed,
    /// Not every rank has said in time that its saves are over.
    Overdue,
}

/// Limits of a request's waits.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Of a look-up.
    pub lookup: Duration,
    /// So long after its question an answer is too old to act upon.
    pub answer: Duration,
    /// Of the saves behind the end.
    pub drain: Duration,
}

/// Where a look-up stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Ask this; the answer is awaited.
    Ask(QuestionId),
    /// The answer is awaited.
    Wait,
    /// The answer.
    Known(Hit),
    /// The answer did not come in time.
    TooLate,
    /// This request loads nothing now: it computes, or has ended.
    Never,
}

/// What a failed load means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Cut it back and compute again.
    Recompute,
    /// It has failed.
    Fail,
    /// It was told before, or the result is about something that is over.
    Nothing,
}

/// What was asked, to tell one question from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    tokens: u64,
    hashes: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Waiting,
    LookingUp {
        asked: Asked,
        since: Duration,
    },
    Matched {
        asked: Asked,
        hit: Hit,
        at: Duration,
        late: bool,
    },
    Allocated {
        external: u64,
    },
    Running,
    Draining {
        since: Duration,
        left: BTreeSet<u32>,
    },
    Ended(End),
}

/// The state of a request.
#[derive(Clone, Debug)]
pub struct RequestMachine {
    phase: Phase,
    attempt: u32,
    question: Option<QuestionId>,
    /// A load failed: no further one, so that a block that can't be read is not tried for ever.
    computes: bool,
    failed: bool,
    limits: Limits,
}

impl RequestMachine {
    /// A request that has not been asked for.
    pub fn new(limits: Limits) -> Self {
        Self {
            phase: Phase::Waiting,
            attempt: 0,
            question: None,
            computes: false,
            failed: false,
            limits,
        }
    }

    /// How often it has started over.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// How it ended, if it has.
    pub fn end(&self) -> Option<End> {
        match self.phase {
            Phase::Ended(end) => Some(end),
            _ => None,
        }
    }

    /// Whether the engine has ended it.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Draining { .. } | Phase::Ended(_))
    }

    /// The tokens that were allocated and wait for their load.
    pub fn allocated(&self) -> Option<u64> {
        match self.phase {
            Phase::Allocated { external } => Some(external),
            _ => None,
        }
    }

    /// Whether a load has failed, so that it computes everything from there on.
    pub fn computes(&self) -> bool {
        self.computes
    }

    /// How much is known about its prefix.
    pub fn look_up(
        &mut self,
        tokens: u64,
        hashes: usize,
        now: Duration,
        questions: &mut Questions,
    ) -> Progress {
        let now_asked = Asked { tokens, hashes };
        if self.is_over() || self.computes || self.phase == Phase::Running {
            return Progress::Never;
        }
        match &self.phase {
            Phase::LookingUp { asked, since } if *asked == now_asked => {
                if now.saturating_sub(*since) < self.limits.lookup {
                    return Progress::Wait;
                }
                self.phase = Phase::Matched {
                    asked: now_asked,
                    hit: Hit::default(),
                    at: now,
                    late: true,
                };
                Progress::TooLate
            }
            Phase::Matched {
                asked,
                hit,
                at,
                late,
            } if *asked == now_asked && now.saturating_sub(*at) < self.limits.answer => {
                if *late {
                    Progress::TooLate
                } else {
                    Progress::Known(*hit)
                }
            }
            _ => {
                let question = questions.draw();
                self.question = Some(question);
                self.phase = Phase::LookingUp {
                    asked: now_asked,
                    since: now,
                };
                Progress::Ask(question)
            }
        }
    }

    /// An answer. `false`: nobody asks that any more, or not in time for anybody to act upon it. Its age counts from
    /// the question, since no lease that it tells of began before.
    pub fn answer(&mut self, question: QuestionId, hit: Hit, now: Duration) -> bool {
        let Phase::LookingUp { asked, since } = self.phase else {
            return false;
        };
        if Some(question) != self.question {
            return false;
        }
        let late = now.saturating_sub(since) >= self.limits.answer;
        self.phase = Phase::Matched {
            asked,
            hit: if late { Hit::default() } else { hit },
            at: if late { now } else { since },
            late,
        };
        !late
    }

    /// Blocks are allocated, `external` tokens are to be loaded. `false`: not now, or more than the
    /// answer allows.
    pub fn allocate(&mut self, external: u64, allowed: u64) -> bool {
        let known = matches!(self.phase, Phase::Matched { .. });
        if self.is_over() || external > allowed || (external > 0 && !known) {
            return false;
        }
        if !matches!(self.phase, Phase::Running) {
            self.phase = Phase::Allocated { external };
        }
        true
    }

    /// It is part of a step. `false`: it has ended.
    pub fn schedule(&mut self) -> bool {
        if self.is_over() {
            return false;
        }
        self.phase = Phase::Running;
        true
    }

    /// It lost its blocks: the next attempt begins. `false`: it has ended.
    pub fn preempt(&mut self) -> bool {
        if self.is_over() {
            return false;
        }
        self.attempt += 1;
        self.phase = Phase::Waiting;
        true
    }

    /// A load of this attempt failed.
    pub fn load_failed(&mut self, policy: FailurePolicy) -> Verdict {
        if self.is_over() || self.failed {
            return Verdict::Nothing;
        }
        self.computes = true;
        match policy {
            FailurePolicy::Recompute => {
                self.attempt += 1;
                Verdict::Recompute
            }
            FailurePolicy::Fail => {
                self.failed = true;
                Verdict::Fail
            }
        }
    }

    /// The engine ends it. `saves` says on how many ranks saves may be under way. Whether it has ended
    /// now; `None` if the engine has said so before.
    pub fn finish(&mut self, saves: u32, now: Duration) -> Option<bool> {
        if self.is_over() {
            return None;
        }
        if saves == 0 {
            self.phase = Phase::Ended(self.good_end());
            return Some(true);
        }
        self.phase = Phase::Draining {
            since: now,
            left: (0..saves).collect(),
        };
        Some(false)
    }

    /// A rank's saves are over. The end, if this was the last.
    pub fn drained(&mut self, rank: u32) -> Option<End> {
        let end = self.good_end();
        let Phase::Draining { left, .. } = &mut self.phase else {
            return None;
        };
        if !left.remove(&rank) || !left.is_empty() {
            return None;
        }
        self.phase = Phase::Ended(end);
        Some(end)
    }

    /// Time has passed. The end, if that was the end of patience.
    pub fn expire(&mut self, now: Duration) -> Option<End> {
        let Phase::Draining { since, .. } = self.phase else {
            return None;
        };
        if now.saturating_sub(since) < self.limits.drain {
            return None;
        }
        self.phase = Phase::Ended(End::Overdue);
        Some(End::Overdue)
    }

    fn good_end(&self) -> End {
        if self.failed {
            End::Failed
        } else {
            End::Finished
        }
    }
}

#[cfg(test)]
mod tests;
