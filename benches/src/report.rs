//! Results for people and for programs: a table, or a line of JSON with the same figures.

use serde_json::{Map, Value};

use crate::table::Table;

/// A title, columns with their names, and rows of figures.
#[derive(Debug)]
pub struct Report {
    title: String,
    columns: Vec<&'static str>,
    rows: Vec<Vec<Value>>,
}

impl Report {
    /// A report without rows.
    pub fn new(title: impl Into<String>, columns: &[&'static str]) -> Self {
        Self {
            title: title.into(),
            columns: columns.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row: a value for each column, or null where there is none.
    pub fn row(&mut self, row: Vec<Value>) {
        self.rows.push(row);
    }

    /// Prints the table, or with `json` one line.
    pub fn print(&self, json: bool) {
        if json {
            println!("{}", self.to_json());
        } else {
            println!("{}\n{}", self.title, self.to_table());
        }
    }

    fn to_json(&self) -> Value {
        let columns = self.columns.iter().map(|column| (*column).to_owned());
        let rows = self.rows.iter().map(|row| {
            let row: Map<_, _> = columns.clone().zip(row.iter().cloned()).collect();
            Value::Object(row)
        });
        serde_json::json!({ "title": self.title, "rows": rows.collect::<Vec<_>>() })
    }

    fn to_table(&self) -> String {
        let mut table = Table::new(&self.columns);
        for row in &self.rows {
            let cells = row.iter().map(|value| match value {
                Value::String(text) => text.clone(),
                Value::Null => "-".to_owned(),
                other => other.to_string(),
            });
            table.row(cells.collect());
        }
        table.render()
    }
}

/// A figure with so many digits behind the point.
pub fn rounded(value: f64, digits: i32) -> Value {
    let scale = 10_f64.powi(digits);
    Value::from((value * scale).round() / scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_and_a_line_of_json_say_the_same() {
        let mut report = Report::new("latency", &["objects", "load", "us"]);
        report.row(vec![7.into(), "none".into(), rounded(1.2345, 2)]);
        report.row(vec![8.into(), "all".into(), Value::Null]);
        let expected = serde_json::json!({
            "title": "latency",
            "rows": [
                {"objects": 7, "load": "none", "us": 1.23},
                {"objects": 8, "load": "all", "us": null},
            ],
        });
        assert_eq!(report.to_json(), expected);
        let table = "objects  load    us\n7        none  1.23\n8         all     -\n";
        assert_eq!(report.to_table(), table);
    }
}
