//! How results are shown: aligned tables for people, one JSON object for programs.

use std::fmt;
use std::io::{self, Write as _};

use anyhow::{Context as _, Result};
use serde::Serialize;

/// Writes to standard output. A reader that went away (`| head`) is no error.
pub(crate) fn print(text: impl fmt::Display) -> Result<()> {
    let mut out = io::stdout().lock();
    let written = writeln!(out, "{text}").and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("can't write to standard output"),
    }
}

/// Writes one JSON object on a line of its own.
pub(crate) fn print_json(value: &impl Serialize) -> Result<()> {
    print(serde_json::to_string(value).context("can't write the result as JSON")?)
}

/// An error and its causes as one line. A cause that the line ends with already is not repeated: some errors
/// tell theirs in their own words.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if line.is_empty() {
            line = cause;
        } else if !line.ends_with(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line.replace('\n', "; ")
}

/// A table with a heading and columns as wide as they need.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    heading: Vec<String>,
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns; without a heading if all are empty.
    pub(crate) fn new(heading: &[&str]) -> Self {
        Self {
            heading: heading.iter().map(|&name| name.to_owned()).collect(),
            right: vec![false; heading.len()],
            rows: Vec::new(),
        }
    }

    /// Aligns a column to the right.
    #[must_use]
    pub(crate) fn right(mut self, column: usize) -> Self {
        self.right[column] = true;
        self
    }

    /// Adds a row, one text a column.
    pub(crate) fn row(&mut self, row: impl IntoIterator<Item = String>) {
        // What a stranger put into a key must not steer the terminal.
        let clean = |text: String| text.replace(|c: char| c.is_control(), "\u{FFFD}");
        self.rows.push(row.into_iter().map(clean).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headed = self.heading.iter().any(|name| !name.is_empty());
        let lines: Vec<&Vec<String>> = headed
            .then_some(&self.heading)
            .into_iter()
            .chain(&self.rows)
            .collect();
        let mut widths = vec![0; self.heading.len()];
        for line in &lines {
            for (width, cell) in widths.iter_mut().zip(line.iter()) {
                *width = cell.chars().count().max(*width);
            }
        }
        for line in lines {
            let cells: Vec<String> = line
                .iter()
                .zip(widths.iter().zip(&self.right))
                .map(|(cell, (&width, right))| {
                    if *right {
                        format!("{cell:>width$}")
                    } else {
                        format!("{cell:<width$}")
                    }
                })
                .collect();
            writeln!(f, "{}", cells.join("  ").trim_end())?;
        }
        Ok(())
    }
}

/// A byte count in the largest unit that leaves a number from 1 on.
pub(crate) fn bytes(count: u64) -> String {
    let mut value = count as f64;
    for unit in ["B", "KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 || unit == "TiB" {
            let digits = usize::from(unit != "B" && value < 100.0);
            return format!("{value:.digits$} {unit}");
        }
        value /= 1024.0;
    }
    format!("{count} B")
}

/// A number of bytes per second, in the units of [`bytes`].
pub(crate) fn rate(bytes_per_second: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate is positive; saturates"
    )]
    let whole = bytes_per_second.round() as u64;
    format!("{}/s", bytes(whole))
}

/// A count with its thousands apart.
pub(crate) fn thousands(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_aligned_and_free_of_control_characters() {
        let mut table = Table::new(&["key", "size"]).right(1);
        table.row(["a".into(), "10".into()]);
        table.row(["long\u{1b}[31m".into(), "7".into()]);
        assert_eq!(
            table.to_string(),
            "key        size\na            10\nlong\u{FFFD}[31m     7\n"
        );
    }

    #[test]
    fn numbers_are_shown_for_people() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(999), "999");
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(3 << 30), "3.0 GiB");
        assert_eq!(rate(2.5 * f64::from(1 << 30)), "2.5 GiB/s");
        assert_eq!(rate(0.0), "0 B/s");
    }

    #[test]
    fn a_cause_is_told_once() {
        let cause = || io::Error::other("in use");
        let told = anyhow::Error::new(cause()).context("can't listen: in use");
        assert_eq!(one_line(&told), "can't listen: in use");
        let apart = anyhow::Error::new(cause())
            .context("can't listen")
            .context("node");
        assert_eq!(one_line(&apart), "node: can't listen: in use");
        let lines = anyhow::Error::msg("one\ntwo");
        assert_eq!(one_line(&lines), "one; two");
    }
}
