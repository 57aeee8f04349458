//! What callgrind's files say: instructions by who executed them.
//!
//! Only the instructions of the program itself are of interest here. What the C library executes is left
//! out: its copies and its allocator differ from system to system, the program's own instructions do not.

use anyhow::{Context as _, Result};

/// The instructions of the program's own code, from a file of callgrind's format with the one event `Ir`;
/// `program` is the path of the program's file.
pub(crate) fn instructions(text: &str, program: &str) -> Result<u64> {
    let mut objects = Names::default();
    let mut within = false;
    let mut sum = 0;
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix("ob=") {
            within = objects.resolve(name)? == program;
        } else if let Some(name) = line.strip_prefix("cob=") {
            // Only so that its number is known.
            objects.resolve(name)?;
        } else if line.starts_with("calls=") {
            // What the called function cost is counted where it is listed itself.
            lines.next();
        } else if line.starts_with(|first: char| "+-*".contains(first) || first.is_ascii_digit())
            && within
            && let Some(cost) = line.split(' ').nth(1)
        {
            sum += number(cost, line)?;
        }
    }
    Ok(sum)
}

fn number(text: &str, line: &str) -> Result<u64> {
    text.parse()
        .with_context(|| format!("callgrind's line {line:?} has no number where one belongs"))
}

/// Names that are written out once, `(3) name`, and are a number from then on, `(3)`.
#[derive(Default)]
struct Names<'a>(std::collections::HashMap<&'a str, &'a str>);

impl<'a> Names<'a> {
    fn resolve(&mut self, text: &'a str) -> Result<&'a str> {
        match text.split_once(' ') {
            Some((number, name)) if number.starts_with('(') => {
                self.0.insert(number, name);
                Ok(name)
            }
            _ if text.starts_with('(') => self
                .0
                .get(text)
                .copied()
                .with_context(|| format!("callgrind's name {text} was not introduced")),
            _ => Ok(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "\
version: 1
positions: line
events: Ir
summary: 1234

ob=(1) /build/guard-1
fl=(1) main.rs
fn=(1) guard::counted_by_guard
10 7
+2 1
cob=(2) /lib/libc.so.6
cfi=(2) malloc.c
cfn=(2) malloc
calls=3 100
* 300
cfn=(3) guard::work
calls=1 20
+1 50
fn=(3)
20 40
cob=(2)
cfi=(2)
cfn=(2)
calls=2 100
+1 200
cfn=(4) malloc_usable
calls=9 1
+1 9

ob=(2)
fl=(2)
fn=(2)
100 450
cfn=(2)
calls=1 100
+1 50
totals: 1234
";

    #[test]
    fn the_programs_own_instructions_are_counted() {
        let sum = instructions(FILE, "/build/guard-1").expect("a file of its format");
        assert_eq!(sum, 7 + 1 + 40);
    }

    #[test]
    fn a_name_that_was_not_introduced_is_an_error() {
        assert!(instructions("ob=(7)\n", "/build/guard-1").is_err());
    }
}
