//! Request traces: one JSON object a line.
//!
//! A line has `timestamp` (milliseconds from the trace's start), `input_length`, `output_length`
//! (tokens) and `hash_ids`, one id per block of the prompt; equal ids are equal prefixes. Further
//! fields are ignored. A line that is none of this is named by its number and skipped, or refused
//! where the caller wants it strict; blank lines don't count.
//!
//! The whole trace is held in memory, eight bytes a block: the number of distinct blocks must be known
//! before the first request, and the file may be a pipe.

use std::collections::HashSet;
use std::io::{BufRead, Read as _};
use std::ops::Range;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

/// The longest line that is read, in bytes: about three million blocks.
const MAX_LINE: u64 = 32 << 20;

/// How many bad lines are kept as samples.
const SAMPLES: usize = 3;

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    #[serde(rename = "input_length")]
    _input_length: u64,
    #[serde(rename = "output_length")]
    _output_length: u64,
    hash_ids: Vec<u64>,
}

/// One request.
#[derive(Clone, Debug)]
struct Place {
    at: Duration,
    blocks: Range<usize>,
}

/// A line that is no request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BadLine {
    /// Counted from 1.
    pub(crate) number: u64,
    pub(crate) reason: String,
}

/// A trace in its order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trace {
    requests: Vec<Place>,
    ids: Vec<u64>,
    distinct: usize,
    skipped: u64,
    samples: Vec<BadLine>,
}

impl Trace {
    /// Reads a trace to its end. With `strict` the first bad line is an error.
    pub(crate) fn read(mut input: impl BufRead, strict: bool) -> Result<Self> {
        let mut trace = Self::default();
        let mut distinct = HashSet::<u64>::new();
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            let taken = input
                .by_ref()
                .take(MAX_LINE)
                .read_until(b'\n', &mut line)
                .with_context(|| format!("line {number} can't be read"))?;
            if taken == 0 {
                break;
            }
            if line.len() as u64 == MAX_LINE && !line.ends_with(b"\n") {
                bail!("line {number} is longer than {} MiB", MAX_LINE >> 20);
            }
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            match parse(line.trim_ascii_end()) {
                Ok(request) => {
                    distinct.extend(&request.hash_ids);
                    trace.push(&request);
                }
                Err(reason) if strict => bail!("line {number} is no request: {reason}"),
                Err(reason) => {
                    trace.skipped += 1;
                    if trace.samples.len() < SAMPLES {
                        trace.samples.push(BadLine { number, reason });
                    }
                }
            }
        }
        trace.distinct = distinct.len();
        if trace.requests.is_empty() {
            match trace.samples.first() {
                None => bail!("the trace is empty"),
                Some(bad) => bail!(
                    "the trace has no request in {} lines: line {}: {}",
                    trace.skipped,
                    bad.number,
                    bad.reason
                ),
            }
        }
        Ok(trace)
    }

    fn push(&mut self, line: &Line) {
        let first = self.ids.len();
        self.ids.extend_from_slice(&line.hash_ids);
        self.requests.push(Place {
            at: Duration::from_secs_f64(line.timestamp / 1000.0),
            blocks: first..self.ids.len(),
        });
    }

    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Block ids of all requests, repeated ones included.
    pub(crate) fn blocks(&self) -> u64 {
        self.ids.len() as u64
    }

    pub(crate) fn distinct_blocks(&self) -> u64 {
        self.distinct as u64
    }

    /// The block ids of a request.
    pub(crate) fn ids(&self, request: usize) -> &[u64] {
        &self.ids[self.requests[request].blocks.clone()]
    }

    /// Blocks of the longest request.
    pub(crate) fn most_blocks(&self) -> u64 {
        let lens = self.requests.iter().map(|place| place.blocks.len());
        lens.max().unwrap_or(0) as u64
    }

    /// When a request came, from the trace's start.
    pub(crate) fn at(&self, request: usize) -> Duration {
        self.requests[request].at
    }

    /// Lines that were no request.
    pub(crate) fn skipped(&self) -> u64 {
        self.skipped
    }

    /// One line about the bad lines, if there were any.
    pub(crate) fn complaint(&self) -> Option<String> {
        let samples: Vec<String> = self
            .samples
            .iter()
            .map(|bad| format!("line {}: {}", bad.number, bad.reason))
            .collect();
        match self.skipped {
            0 => None,
            1 => Some(format!(
                "1 line of the trace is no request and was skipped: {}",
                samples[0]
            )),
            n => Some(format!(
                "{n} lines of the trace are no requests and were skipped, first {}",
                samples.join("; ")
            )),
        }
    }
}

fn parse(line: &[u8]) -> Result<Line, String> {
    let request: Line = serde_json::from_slice(line).map_err(|error| {
        if error.is_eof() {
            return format!("it is cut off after {} bytes", line.len());
        }
        // The position in "at line 1 column 7" is in this line, not in the file.
        let text = error.to_string();
        match text.rsplit_once(" at line ") {
            Some((reason, _)) if error.column() > 0 => {
                format!("{reason} at column {}", error.column())
            }
            Some((reason, _)) => reason.to_owned(),
            None => text,
        }
    })?;
    // A month of milliseconds and more; beyond, arithmetic on times would not be safe.
    if !(0.0..=1e13).contains(&request.timestamp) {
        return Err(format!(
            "timestamp {} is not a time in milliseconds",
            request.timestamp
        ));
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str =
        r#"{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}"#;

    fn read(text: &str) -> Result<Trace> {
        Trace::read(text.as_bytes(), false)
    }

    #[test]
    fn requests_are_read_in_order_with_their_blocks_counted() {
        let second = r#"{"timestamp": 2000.5, "input_length": 1, "output_length": 1, "hash_ids": [0, 8, 9], "more": 1}"#;
        let trace = read(&format!("{GOOD}\n\n{second}")).expect("both are good");
        assert_eq!(
            (trace.len(), trace.blocks(), trace.distinct_blocks()),
            (2, 5, 4)
        );
        assert_eq!(trace.ids(0), [0, 7]);
        assert_eq!(trace.ids(1), [0, 8, 9]);
        assert_eq!(trace.at(0), Duration::from_millis(1500));
        assert_eq!(trace.at(1), Duration::from_micros(2_000_500));
        assert_eq!((trace.skipped(), trace.complaint()), (0, None));
    }

    #[test]
    fn a_bad_line_is_named_by_number_and_skipped_or_refused() {
        for bad in [
            "nonsense",
            "{}",
            "[]",
            r#"{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}"#,
            r#"{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1.5]}"#,
            r#"{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": []}"#,
            r#"{"timestamp": 1e300, "input_length": 1, "output_length": 1, "hash_ids": []}"#,
            r#"{"timestamp": 1, "input_length": 1, "output_length": 1}"#,
            r#"{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1"#,
        ] {
            let text = format!("{GOOD}\n{bad}\n{GOOD}\n");
            let trace = read(&text).expect("the good lines are left");
            assert_eq!((trace.len(), trace.skipped()), (2, 1), "{bad}");
            let complaint = trace.complaint().expect("one line was bad");
            assert!(complaint.contains("line 2"), "{complaint}");
            let error = Trace::read(text.as_bytes(), true).expect_err("strict");
            assert!(error.to_string().contains("line 2"), "{error}");
        }
    }

    #[test]
    fn a_line_that_is_cut_off_is_called_that() {
        for cut in [1, 20, GOOD.len() / 2, GOOD.len() - 1] {
            for end in ["", "\n", "\r\n"] {
                let text = format!("{GOOD}\n{}{end}", &GOOD[..cut]);
                let complaint = read(&text).expect("one good line").complaint();
                let complaint = complaint.expect("one line was bad");
                let left = GOOD[..cut].trim_end().len();
                let cut_off = format!("line 2: it is cut off after {left} bytes");
                assert!(complaint.ends_with(&cut_off), "{complaint}");
            }
        }
        let trace = read(&format!("{GOOD}\r\n{GOOD}")).expect("both are good");
        assert_eq!((trace.len(), trace.skipped()), (2, 0));
    }

    #[test]
    fn bytes_that_are_no_text_are_a_bad_line() {
        let mut bytes = GOOD.as_bytes().to_vec();
        bytes.extend(b"\n\xFF\xFE\n");
        let trace = Trace::read(&bytes[..], false).expect("one good line");
        assert_eq!((trace.len(), trace.skipped()), (1, 1));
    }

    #[test]
    fn many_bad_lines_are_one_complaint_with_samples() {
        let text = format!("{GOOD}\n{}", "bad\n".repeat(1000));
        let complaint = read(&text)
            .expect("one good line")
            .complaint()
            .expect("bad lines");
        assert!(
            complaint.starts_with("1000 lines") && complaint.len() < 300,
            "{complaint}"
        );
    }

    #[test]
    fn a_trace_without_requests_is_an_error() {
        assert!(read("").expect_err("empty").to_string().contains("empty"));
        assert!(
            read("\n\n")
                .expect_err("blank")
                .to_string()
                .contains("empty")
        );
        let error = read("bad\n").expect_err("no request").to_string();
        assert!(error.contains("line 1"), "{error}");
    }
}
