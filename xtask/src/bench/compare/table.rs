//! The figures as text, for the terminal.

use std::fmt::Write as _;

use super::figures::{GROUPS, show};
use super::providers::{MOONCAKE, OURS};
use super::results::{Outcome, Results};

/// All groups, one below the other.
pub(crate) fn render(results: &Results) -> String {
    let providers = results.providers();
    // Ours; held to TCP if that is all there is.
    let first = providers.first().copied().unwrap_or(OURS);
    let mut text = String::new();
    for group in GROUPS {
        let mut rows = Vec::new();
        for line in group.lines {
            let figures = providers.iter().map(|provider| {
                let median = results.median(provider, line.place());
                median.map_or_else(|| "-".to_owned(), show)
            });
            let figures: Vec<String> = figures.collect();
            if figures.iter().all(|figure| figure == "-") {
                continue;
            }
            let times = |figure: &'static str| {
                let ratio = results.ratio(first, MOONCAKE, line.of(figure));
                ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}"))
            };
            let better = times(line.place().figure);
            let cheaper = group
                .cost
                .map_or_else(String::new, |(figure, _)| times(figure));
            let mut row = vec![line.label.to_owned()];
            row.extend(figures);
            row.extend([better, cheaper]);
            rows.push(row);
        }
        if rows.is_empty() {
            continue;
        }
        let mut header = vec![format!("{} {}", group.title, group.unit)];
        header.extend(providers.iter().map(|name| (*name).to_owned()));
        header.push("× better".to_owned());
        header.push(group.cost.map_or("", |_| "× cheaper").to_owned());
        rows.insert(0, header);
        write_columns(&mut text, &rows);
        text.push('\n');
    }
    for run in &results.runs {
        if let Outcome::Failed { error } = &run.outcome {
            // A string takes whatever is written to it.
            let _written = writeln!(text, "{} failed {}: {error}", run.provider, run.scenario);
        }
    }
    let machine = results.machine.iter();
    let machine =
        machine.map(|(name, figure)| format!("{} {}", name.replace('_', " "), show(*figure)));
    let _written = writeln!(
        text,
        "machine, GB/s: {}",
        machine.collect::<Vec<_>>().join(", ")
    );
    text
}

fn write_columns(text: &mut String, rows: &[Vec<String>]) {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for row in rows {
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let _written = if column == 0 {
                write!(text, "{cell:<width$}")
            } else {
                write!(text, "  {cell:>width$}")
            };
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
}
