//! Driving the workers through the trace.
//!
//! One loop: give out what is due, take what the processes say, until every request is answered. A
//! node that dies, by our hand or another's, is part of the experiment; a worker that dies costs its
//! requests; a master that dies ends the run.

use std::future::pending;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use indicatif::ProgressBar;
use tokio::time::{Instant, sleep_until, timeout};

use super::cluster::{Event, ProcessId, Processes};
use super::embedded::Embedded;
use super::messages::{Done, FromWorker, Measured, Request, ToWorker};
use super::plot::Sample;
use super::report::Totals;
use super::trace::Trace;
use super::workers::Workers;

/// Longest time for a worker to answer anything while it has requests: far above all deadlines of
/// one request's operations.
const ANSWER_WITHIN: Duration = Duration::from_mins(3);

/// What a run is told.
pub(crate) struct Run<'a> {
    pub(crate) trace: &'a Trace,
    /// 0: no pacing.
    pub(crate) speed: f64,
    pub(crate) kill_node_after: Option<u64>,
    /// The node that was killed because it was asked for.
    pub(crate) killed: Option<ProcessId>,
    pub(crate) embedded: Option<&'a Embedded>,
    pub(crate) processes: &'a mut Processes,
    pub(crate) workers: Workers,
    pub(crate) bar: &'a ProgressBar,
}

/// What a run finds.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) totals: Totals,
    pub(crate) measured: Measured,
    pub(crate) samples: Vec<Sample>,
    pub(crate) elapsed: Duration,
    /// A node was killed or died.
    pub(crate) lost_nodes: u64,
}

impl Run<'_> {
    /// Replays the whole trace, and takes the workers' measurements.
    pub(crate) async fn drive(mut self) -> Result<Outcome> {
        let mut outcome = Outcome::default();
        let started = Instant::now();
        let total = self.trace.len();
        let mut next = 0;
        while outcome.totals.requests < total as u64 {
            while next < total && self.due(next, started) <= Instant::now() {
                let ids = self.trace.ids(next);
                let Some(worker) = self.workers.assign(next, ids.len() as u64) else {
                    break;
                };
                let request = Request {
                    index: next,
                    ids: ids.to_vec(),
                };
                self.tell(worker, &ToWorker::Request(request), started, &mut outcome)
                    .await?;
                next += 1;
            }
            let now = Instant::now();
            let due = (next < total)
                .then(|| self.due(next, started))
                .filter(|due| *due > now);
            let pause = due.map_or(Duration::ZERO, |due| due - now);
            tokio::select! {
                event = timeout(ANSWER_WITHIN + pause, self.processes.event()) => {
                    let event = event.context("no worker answers any more")??;
                    self.handle(event, started, &mut outcome).await?;
                }
                () = at(due) => {}
            }
            self.kill_node_when_due(outcome.totals.requests).await?;
        }
        outcome.elapsed = started.elapsed();
        self.collect(&mut outcome).await?;
        Ok(outcome)
    }

    /// When a request is to be given out.
    fn due(&self, request: usize, started: Instant) -> Instant {
        if self.speed > 0.0 {
            started + self.trace.at(request).div_f64(self.speed)
        } else {
            started
        }
    }

    async fn tell(
        &mut self,
        worker: ProcessId,
        message: &ToWorker,
        started: Instant,
        outcome: &mut Outcome,
    ) -> Result<()> {
        let line = serde_json::to_string(message).context("can't write a message as JSON")?;
        if let Err(error) = self.processes.tell(worker, &line).await {
            tracing::debug!(%error, "a worker is gone");
            self.lost_worker(worker, started, outcome).await?;
        }
        Ok(())
    }

    async fn handle(
        &mut self,
        event: Event,
        started: Instant,
        outcome: &mut Outcome,
    ) -> Result<()> {
        match event {
            Event::Line(from, line) if self.workers.contains(from) => {
                let message = serde_json::from_str(&line);
                let name = self.processes.name(from);
                match message.with_context(|| format!("{name} said \"{line}\""))? {
                    FromWorker::Done(done) => {
                        let index = done.index;
                        self.workers.answered(from, index).with_context(|| {
                            format!("{name} answered request {index}, which it did not have")
                        })?;
                        self.add(&done, started, outcome);
                        Ok(())
                    }
                    FromWorker::Failed(reason) => bail!("{name}: {reason}"),
                    FromWorker::Ready | FromWorker::Finished(_) => {
                        bail!("{name} said \"{line}\" out of turn")
                    }
                }
            }
            // A worker that was given up, or a node, may still have had something to say.
            Event::Line(..) => Ok(()),
            Event::Closed(from) => self.closed(from, started, outcome).await,
        }
    }

    async fn closed(
        &mut self,
        from: ProcessId,
        started: Instant,
        outcome: &mut Outcome,
    ) -> Result<()> {
        if self.workers.contains(from) {
            return self.lost_worker(from, started, outcome).await;
        }
        let Some(embedded) = self.embedded else {
            return Ok(());
        };
        if from == embedded.master {
            return Err(self.processes.post_mortem(from).await);
        }
        if embedded.nodes.contains(&from) {
            outcome.lost_nodes += 1;
            if self.killed != Some(from) {
                let error = self.processes.post_mortem(from).await;
                self.bar.suspend(|| eprintln!("{error}"));
            }
        }
        Ok(())
    }

    /// A worker is gone: its requests count as failed, the others go on.
    async fn lost_worker(
        &mut self,
        worker: ProcessId,
        started: Instant,
        outcome: &mut Outcome,
    ) -> Result<()> {
        if !self.workers.contains(worker) {
            return Ok(());
        }
        let error = self.processes.post_mortem(worker).await;
        let lost = self.workers.bury(worker, &error.to_string());
        if self.workers.is_empty() {
            return Err(error);
        }
        self.bar.suspend(|| eprintln!("{error}"));
        for done in lost {
            self.add(&done, started, outcome);
        }
        Ok(())
    }

    async fn kill_node_when_due(&mut self, finished: u64) -> Result<()> {
        if self.kill_node_after.is_some_and(|after| finished >= after) {
            self.kill_node_after = None;
            let embedded = self
                .embedded
                .context("only an embedded cluster's nodes can be killed")?;
            self.killed = Some(embedded.kill_last_node(self.processes).await?);
        }
        Ok(())
    }

    fn add(&self, done: &Done, started: Instant, outcome: &mut Outcome) {
        outcome.totals.add(done);
        outcome.samples.push(Sample {
            at: self.trace.at(done.index),
            finished: started.elapsed(),
            blocks: done.blocks,
            hit_blocks: done.hit_blocks,
            bytes_saved: done.bytes_saved,
            bytes_loaded: done.bytes_loaded,
        });
        self.bar.inc(1);
        let sum = &outcome.totals.sum;
        let ratio = sum.hit_blocks as f64 / sum.blocks.max(1) as f64;
        self.bar.set_message(format!("{:.1} % hits", ratio * 100.0));
    }

    /// Asks every worker for its measurements, and waits until it has ended.
    async fn collect(&mut self, outcome: &mut Outcome) -> Result<()> {
        let workers: Vec<_> = self.workers.processes().collect();
        let line =
            serde_json::to_string(&ToWorker::Finish).context("can't write a message as JSON")?;
        for worker in &workers {
            self.processes.tell(*worker, &line).await?;
        }
        // A worker ends after its measurements, often before the next one has told its own.
        while !self.workers.is_empty() {
            let event = timeout(ANSWER_WITHIN, self.processes.event()).await;
            match event.context("a worker does not finish")?? {
                Event::Line(from, line) if self.workers.contains(from) => {
                    let name = self.processes.name(from);
                    match serde_json::from_str(&line)
                        .with_context(|| format!("{name} said \"{line}\""))?
                    {
                        FromWorker::Finished(measured) => outcome.measured.merge(&measured),
                        FromWorker::Failed(reason) => bail!("{name}: {reason}"),
                        FromWorker::Ready | FromWorker::Done(_) => {
                            bail!("{name} said \"{line}\" out of turn")
                        }
                    }
                    self.workers.finished(from);
                }
                Event::Closed(from) if self.workers.contains(from) => {
                    return Err(self.processes.post_mortem(from).await);
                }
                Event::Line(..) => {}
                Event::Closed(from) => self.closed(from, Instant::now(), outcome).await?,
            }
        }
        self.processes.end(&workers).await;
        Ok(())
    }
}

async fn at(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => pending().await,
    }
}
