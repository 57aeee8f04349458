//! A sample workload shaped like a chat service.
//!
//! Conversations arrive at random. Each begins with one of a few shared system prompts, some far more
//! popular than others, and grows turn by turn: a turn's prompt is all that came before, the model's
//! answers included, and some new text. So prompts share long prefixes within a conversation and
//! short ones across conversations, which is what a KV cache lives from. The same seed makes the same
//! trace, byte for byte.
//!
//! A block is [`BLOCK_TOKENS`] tokens. A full block keeps its id in all later turns; the last, partly
//! filled one gets an id of its own each time, as its content changes with the next turn.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::Write;

use anyhow::Result;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// Tokens of one block.
const BLOCK_TOKENS: u64 = 512;

/// What a workload is made by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    pub(crate) seed: u64,
    pub(crate) requests: u64,
    /// Different system prompts.
    pub(crate) system_prompts: u64,
}

impl Default for Workload {
    fn default() -> Self {
        Self {
            seed: 1,
            requests: 1000,
            system_prompts: 12,
        }
    }
}

/// Mean time between two new conversations, in milliseconds.
const ARRIVAL_MS: f64 = 900.0;
/// Mean time between an answer and the next turn, in milliseconds.
const THINK_MS: f64 = 25_000.0;
/// The longest prompt, in tokens.
const MOST_TOKENS: u64 = 64 * BLOCK_TOKENS;

struct Conversation {
    /// Ids of the blocks that are full by now.
    blocks: Vec<u64>,
    tokens: u64,
    turns_left: u32,
}

/// Draws from an exponential distribution.
fn exponential(rng: &mut StdRng, mean: f64) -> f64 {
    -mean * (1.0 - rng.random::<f64>()).ln()
}

fn whole(value: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a drawn duration or length: positive and far below the limit"
    )]
    let whole = value.max(0.0) as u64;
    whole
}

impl Workload {
    /// Writes the trace, one request a line, in the order of arrival.
    pub(crate) fn write(&self, out: &mut impl Write) -> Result<()> {
        let mut rng = StdRng::seed_from_u64(self.seed);
        let mut next_id = 0;
        let prompts: Vec<Vec<u64>> = (0..self.system_prompts.max(1))
            .map(|_| fresh(&mut next_id, rng.random_range(1..=10)))
            .collect();
        // The next turn of each conversation by time; the number keeps equal times in order.
        let mut due: BinaryHeap<(Reverse<u64>, Reverse<u64>)> = BinaryHeap::new();
        let mut open: Vec<Option<Conversation>> = Vec::new();
        let mut arrival = 0.0;
        let mut written = 0;
        while written < self.requests {
            let turn_is_next = due.peek().is_some_and(|(at, _)| at.0 <= whole(arrival));
            let (now, number) = if turn_is_next {
                let Some((at, number)) = due.pop() else { break };
                (at.0, number.0)
            } else {
                let now = whole(arrival);
                arrival += exponential(&mut rng, ARRIVAL_MS);
                open.push(Some(begin(&mut rng, &prompts)));
                (now, open.len() as u64 - 1)
            };
            let place = usize::try_from(number).ok().and_then(|at| open.get_mut(at));
            let Some(place) = place else { continue };
            let Some(conversation) = place else { continue };
            let output = 20 + whole(exponential(&mut rng, 260.0)).min(2000);
            conversation.grow(
                30 + whole(exponential(&mut rng, 700.0)).min(8000),
                &mut next_id,
            );
            write_line(out, now, conversation, output, &mut next_id)?;
            written += 1;
            conversation.grow(output, &mut next_id);
            conversation.turns_left -= 1;
            if conversation.turns_left == 0 || conversation.tokens > MOST_TOKENS {
                *place = None;
            } else {
                let pause = 1000.0 + exponential(&mut rng, THINK_MS);
                due.push((Reverse(now + whole(pause)), Reverse(number)));
            }
        }
        Ok(())
    }
}

fn begin(rng: &mut StdRng, prompts: &[Vec<u64>]) -> Conversation {
    // The square of a uniform number: the first prompts are the popular ones.
    let popular = rng.random::<f64>().powi(2) * prompts.len() as f64;
    let blocks = prompts
        .get(usize::try_from(whole(popular)).unwrap_or(0))
        .or(prompts.first())
        .cloned()
        .unwrap_or_default();
    Conversation {
        tokens: blocks.len() as u64 * BLOCK_TOKENS,
        blocks,
        turns_left: 1 + u32::try_from(whole(exponential(rng, 4.0)))
            .unwrap_or(0)
            .min(30),
    }
}

fn fresh(next_id: &mut u64, count: u64) -> Vec<u64> {
    let first = *next_id;
    *next_id += count;
    (first..*next_id).collect()
}

impl Conversation {
    /// Adds tokens: blocks that fill up get their lasting ids.
    fn grow(&mut self, tokens: u64, next_id: &mut u64) {
        self.tokens += tokens;
        let full = self.tokens / BLOCK_TOKENS;
        let more = full.saturating_sub(self.blocks.len() as u64);
        self.blocks.extend(fresh(next_id, more));
    }
}

fn write_line(
    out: &mut impl Write,
    now: u64,
    conversation: &Conversation,
    output: u64,
    next_id: &mut u64,
) -> Result<()> {
    let mut ids = conversation.blocks.clone();
    if !conversation.tokens.is_multiple_of(BLOCK_TOKENS) {
        ids.extend(fresh(next_id, 1));
    }
    let line = serde_json::json!({
        "timestamp": now,
        "input_length": conversation.tokens,
        "output_length": output,
        "hash_ids": ids,
    });
    writeln!(out, "{line}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::trace::Trace;
    use super::*;

    fn text(workload: Workload) -> Vec<u8> {
        let mut out = Vec::new();
        workload.write(&mut out).expect("memory takes it");
        out
    }

    #[test]
    fn a_seed_makes_one_trace_and_another_seed_another() {
        let workload = Workload {
            requests: 200,
            ..Workload::default()
        };
        assert_eq!(text(workload), text(workload));
        assert_ne!(
            text(workload),
            text(Workload {
                seed: 2,
                ..workload
            })
        );
    }

    #[test]
    fn ids_are_prefixes_in_arrival_order_and_many_are_shared() {
        let text = text(Workload {
            requests: 1500,
            ..Workload::default()
        });
        let trace = Trace::read(&text[..], true).expect("every line is a request");
        assert_eq!(trace.len(), 1500);
        let mut before: HashMap<u64, Option<u64>> = HashMap::new();
        let mut at = std::time::Duration::ZERO;
        for request in 0..trace.len() {
            assert!(
                trace.at(request) >= at,
                "request {request} comes after the one before"
            );
            at = trace.at(request);
            let mut previous = None;
            for &id in trace.ids(request) {
                let known = *before.entry(id).or_insert(previous);
                assert_eq!(known, previous, "block {id} always follows the same block");
                previous = Some(id);
            }
        }
        let shared = 1.0 - trace.distinct_blocks() as f64 / trace.blocks() as f64;
        assert!(
            (0.4..0.95).contains(&shared),
            "{shared} of the blocks came before"
        );
    }
}
