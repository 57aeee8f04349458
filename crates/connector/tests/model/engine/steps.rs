//! How a step runs on all ranks, and what comes of their reports.

use std::collections::BTreeSet;

use layercake_connector::contract::{
    Absorbed, BlockId, RequestId, RequestStep, ScheduledRequest, Span, StepPlan, WorkerResults,
};

use super::{AHEAD, Engine, SIZE};
use crate::rank::Rank;
use crate::world::Draw;

impl Engine {
    /// Plans and runs a step of these requests and numbers of tokens.
    pub(super) fn run(&mut self, scheduled: &[(usize, u64)], draw: &mut Draw) {
        let parts: Vec<ScheduledRequest<'_>> = scheduled
            .iter()
            .map(|&(at, chunk)| {
                let request = &self.requests[at];
                ScheduledRequest {
                    request: &request.id,
                    table: &request.table,
                    hashes: &request.hashes,
                    prompt: request.tokens,
                    computed: request.computed,
                    scheduled: chunk,
                }
            })
            .collect();
        let preempted = std::mem::take(&mut self.preempted);
        let plan = StepPlan {
            requests: &parts,
            preempted: &preempted,
        };
        let metadata = self.planner.plan(&plan).expect("a plan");
        let world = &mut self.world;
        let whole = |part: &ScheduledRequest<'_>| usize::try_from(part.computed / SIZE);
        let before = parts
            .iter()
            .flat_map(|part| &part.table[..whole(part).expect("small")]);
        let gone: Vec<BlockId> = before.copied().filter(|_| !self.shares).collect();
        let ranks = self.ranks.iter_mut();
        let void: Vec<_> = ranks
            .map(|rank| rank.start(&metadata, &gone, world, draw))
            .collect();
        for part in &parts {
            compute(&mut self.ranks, part);
        }
        let loads = metadata.requests.iter().zip(&parts);
        let loads = loads.flat_map(|(step, part)| loaded(step, part.table));
        let loads: Vec<BlockId> = loads.collect();
        let mut failed: BTreeSet<BlockId> = void.iter().flatten().copied().collect();
        for (rank, void) in self.ranks.iter_mut().zip(void) {
            if self.apart && draw.one_in(25) {
                self.seen.left += 1;
                failed.extend(&loads);
                rank.leave(&metadata, &void, &mut self.world, draw);
                continue;
            }
            let results = rank.end(&metadata, void, &mut self.world, draw);
            self.reports[rank.number].push_back(results);
        }
        self.loading.insert(metadata.step, loads);
        self.void.insert(metadata.step, failed);
        for &(at, chunk) in scheduled {
            let request = &mut self.requests[at];
            request.computed += chunk;
            request.begun = true;
            request.last = metadata.step;
            let after = (metadata.step, request.computed);
            request.steps.push_back(after);
            let blocks = usize::try_from(request.computed.div_ceil(SIZE)).expect("small");
            let had = request.table[..blocks].to_vec();
            request.had.insert(metadata.step, had);
        }
        if self.apart {
            self.report_some(draw);
        } else {
            self.report_all();
        }
    }

    /// Ranks report apart, no rank too far behind.
    fn report_some(&mut self, draw: &mut Draw) {
        for rank in 0..self.ranks.len() {
            while !self.reports[rank].is_empty()
                && (self.reports[rank].len() > AHEAD || draw.one_in(2))
            {
                let results: Vec<_> = self.reports[rank].pop_front().into_iter().collect();
                self.report(&results);
            }
        }
    }

    pub(super) fn report_all(&mut self) {
        let results: Vec<_> = self
            .reports
            .iter_mut()
            .flat_map(|results| results.drain(..))
            .collect();
        self.report(&results);
    }

    fn report(&mut self, results: &[WorkerResults]) {
        let absorbed = self.planner.absorb(results, self.now);
        self.absorb(&absorbed);
        // Told twice: nothing more comes of it.
        let again = self.planner.absorb(results, self.now);
        let nothing = Absorbed {
            confirmed: absorbed.confirmed,
            ..Absorbed::default()
        };
        assert_eq!(again, nothing);
    }

    fn absorb(&mut self, absorbed: &Absorbed) {
        for request in &absorbed.free {
            let blocks = self.held.remove(request).expect("freed once");
            self.release(&blocks);
            self.ended += 1;
        }
        let confirmed = absorbed.confirmed;
        let mut cut = [&absorbed.recompute[..], &absorbed.failed[..]].concat();
        cut.sort_unstable();
        assert_eq!(cut, self.void_by(confirmed), "cut back, and void");
        self.confirmed = confirmed;
        self.void.retain(|step, _| *step > confirmed);
        self.loading.retain(|step, _| *step > confirmed);
        for request in &mut self.requests {
            let known = |step: &mut (u64, u64)| step.0 <= confirmed;
            while let Some((_, computed)) = request.steps.pop_front_if(known) {
                request.good = computed;
            }
            request.had.retain(|step, _| *step > confirmed);
        }
        for (id, tokens) in &absorbed.recompute {
            let request = self.requests.iter_mut().find(|request| request.id == *id);
            let request = request.expect("it runs");
            self.seen.cut_ahead += u64::from(!request.steps.is_empty());
            request.cut(*tokens);
            self.seen.cut_back += 1;
        }
        for (id, _) in &absorbed.failed {
            let at = self.requests.iter().position(|request| request.id == *id);
            self.finish(at.expect("it runs"));
        }
    }
}

impl Engine {
    /// Who computed from void blocks in steps up to this one, and the tokens before the first of these.
    fn void_by(&self, confirmed: u64) -> Vec<(RequestId, u64)> {
        let mut cut = Vec::new();
        for request in &self.requests {
            let firsts = request.had.range(..=confirmed).filter_map(|(step, had)| {
                let void = &self.void[step];
                had.iter().position(|block| void.contains(block))
            });
            if let Some(first) = firsts.min() {
                cut.push((request.id.clone(), first as u64 * SIZE));
            }
        }
        cut.sort_unstable();
        cut
    }
}

/// The blocks that a request gets from the store in a step.
fn loaded<'a>(step: &'a RequestStep, table: &'a [BlockId]) -> impl Iterator<Item = BlockId> + 'a {
    let load = step.load.iter().flat_map(Span::iter);
    let indices = load.map(|(index, _)| index).chain(0..step.restore);
    indices.map(|index| table[usize::try_from(index).expect("small")])
}

/// A block is right on every rank if all before it are on all ranks.
fn compute(ranks: &mut [Rank], part: &ScheduledRequest<'_>) {
    let first = usize::try_from(part.computed / SIZE).expect("small");
    let end = usize::try_from((part.computed + part.scheduled) / SIZE).expect("small");
    for index in first..end {
        let mut before = part.table[..index].iter().zip(part.hashes);
        let good = before.all(|(block, hash)| ranks.iter().all(|rank| rank.holds(*block, hash)));
        for rank in &mut *ranks {
            let content = good.then(|| part.hashes[index].clone());
            rank.fill(part.table[index], content);
        }
    }
}
