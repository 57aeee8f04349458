//! Medians and tables.

use std::time::Duration;

/// The middle value; of two, the lower one.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values
        .get(values.len().saturating_sub(1) / 2)
        .copied()
        .unwrap_or(f64::NAN)
}

/// How many bytes a second that makes, in GB/s (1e9 bytes).
pub fn gigabytes_per_second(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}

/// A table with a header, columns padded to their widest cell, numbers to the right.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column names.
    pub fn new(columns: &[&str]) -> Self {
        Self {
            rows: vec![columns.iter().map(|name| (*name).to_owned()).collect()],
        }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The table as text.
    pub fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            for (column, cell) in row.iter().enumerate() {
                let padded = if column == 0 {
                    format!("{cell:<width$}", width = widths[column])
                } else {
                    format!("  {cell:>width$}", width = widths[column])
                };
                text.push_str(&padded);
            }
            text.push('\n');
        }
        text
    }
}
