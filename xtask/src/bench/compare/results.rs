//! The figures of a comparison, as they are kept in a file.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use serde::{Deserialize, Serialize};

/// Figures whose greater value is the better one.
const MORE_IS_BETTER: [&str; 1] = ["GBps"];

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Results {
    /// What the figures hold for, in the order in which it is told.
    pub(crate) conditions: Vec<(String, String)>,
    /// GB/s of the machine itself.
    pub(crate) machine: BTreeMap<String, f64>,
    pub(crate) runs: Vec<Run>,
}

/// One scenario on one provider, once.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Run {
    pub(crate) provider: String,
    pub(crate) scenario: String,
    pub(crate) round: u32,
    pub(crate) outcome: Outcome,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Outcome {
    Failed { error: String },
    Rows(BTreeMap<String, Row>),
}

/// The figures of one kind of work, by unit of it.
#[derive(Serialize, Deserialize)]
pub(crate) struct Row {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) unit: Option<String>,
    #[serde(flatten)]
    pub(crate) figures: BTreeMap<String, f64>,
}

impl Results {
    pub(crate) fn new(conditions: Vec<(String, String)>) -> Self {
        Self {
            conditions,
            machine: BTreeMap::new(),
            runs: Vec::new(),
        }
    }

    /// Readable differences: a line per run, four digits per figure.
    pub(crate) fn to_json(&self) -> Result<String> {
        let mut text = String::from("{\n\"conditions\": ");
        text.push_str(&serde_json::to_string(&self.conditions)?);
        text.push_str(",\n\"machine\": ");
        text.push_str(&serde_json::to_string(&rounded(&self.machine))?);
        text.push_str(",\n\"runs\": [\n");
        let lines = self.runs.iter().map(|run| {
            let outcome = match &run.outcome {
                Outcome::Failed { error } => Outcome::Failed {
                    error: error.clone(),
                },
                Outcome::Rows(rows) => Outcome::Rows(
                    rows.iter()
                        .map(|(name, row)| {
                            let figures = rounded(&row.figures);
                            let unit = row.unit.clone();
                            (name.clone(), Row { unit, figures })
                        })
                        .collect(),
                ),
            };
            let run = Run {
                provider: run.provider.clone(),
                scenario: run.scenario.clone(),
                round: run.round,
                outcome,
            };
            Ok(serde_json::to_string(&run)?)
        });
        text.push_str(&lines.collect::<Result<Vec<_>>>()?.join(",\n"));
        text.push_str("\n]\n}\n");
        Ok(text)
    }

    /// Who was measured, in the order of the first round.
    pub(crate) fn providers(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for run in self.runs.iter().filter(|run| run.round == 0) {
            if !names.contains(&run.provider.as_str()) {
                names.push(&run.provider);
            }
        }
        names
    }

    /// What was run, each name once.
    pub(crate) fn scenarios(&self) -> BTreeSet<&str> {
        self.runs.iter().map(|run| run.scenario.as_str()).collect()
    }

    /// What one of the work is called.
    pub(crate) fn unit(&self, at: Place<'_>) -> &str {
        let rows = self.runs.iter().filter(|run| run.scenario == at.scenario);
        let mut rows = rows.filter_map(|run| match &run.outcome {
            Outcome::Rows(rows) => rows.get(at.row)?.unit.as_deref(),
            Outcome::Failed { .. } => None,
        });
        rows.next().unwrap_or("call")
    }

    /// The figure in every round in which there is one.
    fn rounds(&self, provider: &str, at: Place<'_>) -> BTreeMap<u32, f64> {
        self.runs
            .iter()
            .filter(|run| run.provider == provider && run.scenario == at.scenario)
            .filter_map(|run| match &run.outcome {
                Outcome::Rows(rows) => {
                    Some((run.round, *rows.get(at.row)?.figures.get(at.figure)?))
                }
                Outcome::Failed { .. } => None,
            })
            .collect()
    }

    /// The middle one of all rounds.
    pub(crate) fn median(&self, provider: &str, at: Place<'_>) -> Option<f64> {
        median(self.rounds(provider, at).into_values().collect())
    }

    /// How many times better `provider` is than `peer`: the middle one of the rounds that both have.
    pub(crate) fn ratio(&self, provider: &str, peer: &str, at: Place<'_>) -> Option<f64> {
        let theirs = self.rounds(peer, at);
        let ratios = self.rounds(provider, at).into_iter();
        let ratios = ratios.filter_map(|(round, ours)| {
            let theirs = *theirs.get(&round)?;
            let ratio = if MORE_IS_BETTER.contains(&at.figure) {
                ours / theirs
            } else {
                theirs / ours
            };
            (ratio > 0.0 && ratio.is_finite()).then_some(ratio)
        });
        median(ratios.collect())
    }

    /// Why a provider has no figures of a scenario.
    pub(crate) fn failure(&self, provider: &str, scenario: &str) -> Option<&str> {
        self.runs.iter().find_map(|run| match &run.outcome {
            Outcome::Failed { error } if run.provider == provider && run.scenario == scenario => {
                Some(error.as_str())
            }
            _ => None,
        })
    }
}

/// Which figure of which work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub(crate) scenario: &'a str,
    pub(crate) row: &'a str,
    pub(crate) figure: &'a str,
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len().checked_sub(1)? / 2;
    values.get(middle).copied()
}

fn rounded(figures: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    let figures = figures.iter();
    figures
        .map(|(name, figure)| {
            let text = format!("{figure:.3e}");
            (name.clone(), text.parse().unwrap_or(*figure))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{"conditions": [["processor", "any"]], "machine": {"copies": 9.0}, "runs": [
        {"provider": "A", "scenario": "s", "round": 0, "outcome": {"put": {"unit": "key", "us": 10.0, "GBps": 4.0}}},
        {"provider": "B", "scenario": "s", "round": 0, "outcome": {"put": {"unit": "key", "us": 30.0, "GBps": 1.0}}},
        {"provider": "B", "scenario": "s", "round": 1, "outcome": {"error": "it crashed"}},
        {"provider": "A", "scenario": "s", "round": 1, "outcome": {"put": {"unit": "key", "us": 12.34567, "GBps": 3.0}}}
    ]}"#;

    fn at(figure: &str) -> Place<'_> {
        Place {
            scenario: "s",
            row: "put",
            figure,
        }
    }

    #[test]
    fn only_rounds_that_both_have_count_and_better_is_above_one() {
        let results: Results = serde_json::from_str(FILE).expect("the format");
        assert_eq!(results.providers(), ["A", "B"]);
        assert_eq!(results.ratio("A", "B", at("us")), Some(3.0));
        assert_eq!(results.ratio("A", "B", at("GBps")), Some(4.0));
        assert_eq!(results.median("B", at("us")), Some(30.0));
        assert_eq!(results.median("A", at("GBps")), Some(3.0));
        assert_eq!(results.failure("B", "s"), Some("it crashed"));
        assert_eq!(results.failure("A", "s"), None);
    }

    #[test]
    fn what_is_written_is_read_again_with_four_digits() {
        let results: Results = serde_json::from_str(FILE).expect("the format");
        let text = results.to_json().expect("writes");
        let again: Results = serde_json::from_str(&text).expect("the format");
        assert!(text.contains("\"us\":12.35"), "{text}");
        assert_eq!(again.conditions, results.conditions);
        assert_eq!(again.to_json().expect("writes"), text);
    }
}
