//! What a demo found, for people and for programs.

use serde::Serialize;

use super::messages::{Done, Finished};
use crate::output::{Table, thousands};

/// What each engine answered to all requests, in their order.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    pub(crate) alone: Vec<Done>,
    pub(crate) prefill: Vec<Done>,
    pub(crate) decode: Vec<Done>,
}

/// The last line of `layercake demo`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Report {
    pub(crate) requests: usize,
    pub(crate) prompt_tokens: usize,
    /// Tokens of prompts that the decode engine had from the pool.
    pub(crate) hit_tokens: usize,
    /// Mean time to the first token where the prompt is computed and saved, and where it is loaded.
    pub(crate) ttft_cold_s: f64,
    pub(crate) ttft_warm_s: f64,
    /// The same of the engine without a store.
    pub(crate) ttft_alone_s: f64,
    /// Both engines generated what one without a store does.
    pub(crate) tokens_equal: bool,
    /// And every bit of their logits is the same.
    pub(crate) logits_equal: bool,
    /// Requests that differ in a token or a bit.
    pub(crate) mismatches: usize,
    pub(crate) failed_requests: usize,
    /// Mean time for which a request waited for the load of each layer, in microseconds.
    pub(crate) exposed_us: Vec<f64>,
    pub(crate) saved_blocks: u64,
    pub(crate) loaded_blocks: u64,
    pub(crate) failed_loads: u64,
    pub(crate) keys_queried: u64,
    /// Blocks' objects in the pool: one for each block and rank, not for each layer.
    pub(crate) objects: u64,
    pub(crate) layers: usize,
    pub(crate) ranks: u32,
    pub(crate) layerwise: bool,
    pub(crate) seconds: f64,
}

/// What the demo was told and counted besides.
#[derive(Debug)]
pub(crate) struct Conditions {
    pub(crate) prompt_tokens: usize,
    pub(crate) objects: u64,
    pub(crate) ranks: u32,
    pub(crate) layerwise: bool,
    pub(crate) seconds: f64,
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.collect();
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

fn rounded(value: f64, steps: f64) -> f64 {
    (value * steps).round() / steps
}

impl Report {
    pub(crate) fn new(
        answers: &Answers,
        prefill: &Finished,
        decode: &Finished,
        conditions: &Conditions,
    ) -> Self {
        let first = |of: &[Done]| rounded(mean(of.iter().map(|done| done.first_token_s)), 1e6);
        let engines = [&answers.prefill, &answers.decode];
        let differs = |by: fn(&Done, &Done) -> bool| {
            let pairs = engines.map(|of| of.iter().zip(&answers.alone));
            pairs
                .into_iter()
                .flatten()
                .filter(|(a, b)| by(a, b))
                .count()
        };
        let tokens = differs(|a, b| a.tokens != b.tokens);
        let logits = differs(|a, b| a.logits != b.logits);
        let layers = answers
            .decode
            .first()
            .map_or(0, |done| done.exposed_us.len());
        let exposed = |layer: usize| {
            let waits = answers.decode.iter();
            mean(waits.filter_map(|done| done.exposed_us.get(layer).copied()))
        };
        let all = answers.alone.iter().chain(engines.into_iter().flatten());
        Self {
            requests: answers.decode.len(),
            prompt_tokens: conditions.prompt_tokens,
            hit_tokens: answers.decode.iter().map(|done| done.loaded_tokens).sum(),
            ttft_cold_s: first(&answers.prefill),
            ttft_warm_s: first(&answers.decode),
            ttft_alone_s: first(&answers.alone),
            tokens_equal: tokens == 0,
            logits_equal: logits == 0,
            mismatches: differs(|a, b| a.tokens != b.tokens || a.logits != b.logits),
            failed_requests: all.filter(|done| done.failed).count(),
            exposed_us: (0..layers)
                .map(|layer| rounded(exposed(layer), 10.0))
                .collect(),
            saved_blocks: prefill.saved_blocks,
            loaded_blocks: decode.loaded_blocks,
            failed_loads: decode.failed_loads,
            keys_queried: decode.keys_queried,
            objects: conditions.objects,
            layers,
            ranks: conditions.ranks,
            layerwise: conditions.layerwise,
            seconds: rounded(conditions.seconds, 1e3),
        }
    }

    /// Why the demo as a whole is a failure; none if it is not. Times are the machine's matter, too.
    pub(crate) fn faults(&self, ignore_times: bool) -> Vec<String> {
        let mut faults = Vec::new();
        if self.mismatches > 0 {
            faults.push(format!("{} results are wrong", self.mismatches));
        }
        if self.failed_requests > 0 {
            faults.push(format!("{} requests failed", self.failed_requests));
        }
        if self.failed_loads > 0 {
            faults.push(format!("{} blocks were not loaded", self.failed_loads));
        }
        if self.hit_tokens == 0 {
            faults.push("nothing was served from the pool".to_owned());
        }
        if !ignore_times && self.ttft_warm_s >= self.ttft_cold_s {
            faults.push(format!(
                "loading takes no less time than computing: {:.1} ms to the first token, and {:.1} ms (--ignore-times, on a machine that others use)",
                self.ttft_warm_s * 1e3,
                self.ttft_cold_s * 1e3
            ));
        }
        faults
    }

    /// The tables that people see.
    pub(crate) fn tables(&self) -> String {
        let mut table = Table::new(&["", ""]).right(1);
        let mut row = |name: &str, value: String| table.row([name.to_owned(), value]);
        let count = |value: usize| thousands(value as u64);
        let millis = |seconds: f64| format!("{:.1} ms", seconds * 1e3);
        row("requests", count(self.requests));
        row("tokens of prompts", count(self.prompt_tokens));
        row("  served from the pool", count(self.hit_tokens));
        row(
            "time to the first token, computed",
            millis(self.ttft_cold_s),
        );
        row("  loaded", millis(self.ttft_warm_s));
        row("  without a store", millis(self.ttft_alone_s));
        let yes = |equal| if equal { "yes" } else { "NO" }.to_owned();
        row("tokens are equal", yes(self.tokens_equal));
        row("logits are equal, to the bit", yes(self.logits_equal));
        row("blocks saved, in all ranks", thousands(self.saved_blocks));
        row("  loaded", thousands(self.loaded_blocks));
        row("objects in the pool", thousands(self.objects));
        row("keys asked for", thousands(self.keys_queried));
        row("time", format!("{:.1} s", self.seconds));
        let mut layers = Table::new(&["layer", "waited for its load, a request"]).right(1);
        for (layer, waited) in self.exposed_us.iter().enumerate() {
            layers.row([layer.to_string(), format!("{waited:.0} µs")]);
        }
        format!("{table}\n{layers}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(change: impl FnOnce(&mut Answers)) -> Report {
        let done = Done {
            tokens: vec![1, 2],
            logits: vec![[7; 32]; 2],
            first_token_s: 0.5,
            loaded_tokens: 16,
            exposed_us: vec![10.0, 20.0],
            ..Done::default()
        };
        let warm = Done {
            first_token_s: 0.25,
            ..done.clone()
        };
        let all = vec![done; 2];
        let mut answers = Answers {
            alone: all.clone(),
            prefill: all,
            decode: vec![warm; 2],
        };
        change(&mut answers);
        let conditions = Conditions {
            prompt_tokens: 40,
            objects: 4,
            ranks: 1,
            layerwise: true,
            seconds: 1.0,
        };
        let counts = Finished::default();
        Report::new(&answers, &counts, &counts, &conditions)
    }

    #[test]
    fn a_load_that_failed_is_a_fault_though_it_was_computed_again() {
        let mut report = report(|_| ());
        report.failed_loads = 3;
        assert_eq!(report.faults(false), ["3 blocks were not loaded"]);
    }

    #[test]
    fn a_load_that_takes_as_long_as_computing_is_a_fault_where_times_count() {
        let slow = report(|answers| {
            answers
                .decode
                .iter_mut()
                .for_each(|d| d.first_token_s = 0.5);
        });
        let faults = slow.faults(false);
        assert!(
            faults.len() == 1 && faults[0].contains("500.0 ms"),
            "{faults:?}"
        );
        assert_eq!(slow.faults(true), [""; 0]);
    }

    #[test]
    fn one_wrong_bit_in_one_engine_is_a_fault() {
        let good = report(|_| ());
        assert!(good.tokens_equal && good.logits_equal && good.faults(false).is_empty());
        assert_eq!((good.hit_tokens, good.mismatches), (32, 0));
        assert_eq!(good.exposed_us, [10.0, 20.0]);
        let bit = report(|answers| answers.decode[1].logits[0][31] ^= 1);
        assert!(bit.tokens_equal && !bit.logits_equal);
        assert_eq!(bit.faults(false), ["1 results are wrong"]);
        let token = report(|answers| answers.prefill[0].tokens[1] = 9);
        assert!(!token.tokens_equal && token.mismatches == 1);
        assert!(token.tables().contains("NO"));
        let cold = report(|answers| answers.decode.iter_mut().for_each(|d| d.loaded_tokens = 0));
        assert_eq!(cold.faults(false), ["nothing was served from the pool"]);
        let failed = report(|answers| answers.alone[0].failed = true);
        assert_eq!(failed.faults(false), ["1 requests failed"]);
    }
}
