//! Figures of two providers beside each other: of every test the numbers that both told, as medians of its runs. Where a run
//! lists rounds, each counts by itself.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::Value;

/// The numbers of each test's fields, by test, field and provider.
#[derive(Debug, Default)]
pub(crate) struct SideBySide(BTreeMap<(String, String), BTreeMap<&'static str, Vec<f64>>>);

impl SideBySide {
    /// Takes a line that a provider's run printed; what is no result is left out.
    pub(crate) fn add(&mut self, provider: &'static str, line: &str) {
        let Ok(Value::Object(fields)) = serde_json::from_str(line) else {
            return;
        };
        let Some(test) = fields.get("test").and_then(Value::as_str) else {
            return;
        };
        for (field, value) in &fields {
            self.take(provider, test, field, value);
            for round in value.as_array().into_iter().flatten() {
                for (inner, value) in round.as_object().into_iter().flatten() {
                    self.take(provider, test, &format!("{field}.{inner}"), value);
                }
            }
        }
    }

    fn take(&mut self, provider: &'static str, test: &str, field: &str, value: &Value) {
        if let Some(number) = value.as_f64() {
            let of_field = self.0.entry((test.to_owned(), field.to_owned()));
            let of_provider = of_field.or_default().entry(provider).or_default();
            of_provider.push(number);
        }
    }

    /// A table of these providers' medians.
    pub(crate) fn table(&self, providers: [&'static str; 2]) -> String {
        let [left, right] = providers;
        let mut table = format!(
            "{:<20} {:<34} {left:>12} {right:>12}\n",
            "test", "median of"
        );
        for ((test, field), of_field) in &self.0 {
            let [Some(a), Some(b)] = providers.map(|provider| of_field.get(provider)) else {
                continue;
            };
            let (a, b) = (median(a), median(b));
            // A string takes whatever is written to it.
            let _ = writeln!(table, "{test:<20} {field:<34} {a:>12} {b:>12}");
        }
        table
    }
}

/// Rounded to four digits after the point; of an even number of values the lower of the two in the middle.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.get(sorted.len().saturating_sub(1) / 2);
    middle.map_or(f64::NAN, |value| (value * 1e4).round() / 1e4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_what_both_told_stand_beside_each_other() {
        let mut both = SideBySide::default();
        for seconds in [0.5, 0.123_46, 0.3] {
            let line = format!(r#"{{"test": "store", "warm_s": {seconds}, "ok": true}}"#);
            both.add("mooncake", &line);
        }
        both.add(
            "layercake",
            r#"{"test": "store", "warm_s": 0.25, "own": 1}"#,
        );
        both.add("layercake", "not a result");
        let rounds = r#"{"test": "p2p", "rounds": [{"s": 3}, {"s": 1}, {"s": 2, "why": "no"}]}"#;
        both.add("mooncake", rounds);
        both.add("layercake", rounds);
        let table = both.table(["mooncake", "layercake"]);
        let rows: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        let expected = [
            ["p2p", "rounds.s", "2", "2"],
            ["store", "warm_s", "0.3", "0.25"],
        ];
        assert_eq!(rows[1..], expected);
    }
}
