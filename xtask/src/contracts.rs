//! Contracts and the tests that pin them: each clause of `docs/contracts/*.md` is named by a test,
//! and each name in a test is a clause.
//!
//! A clause begins a line with its name in bold, `**session-4**`; a test names it in a comment,
//! `// contract: session-4` (several, separated by commas, are fine).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::run;
use crate::tidy::tracked_files;

pub(crate) fn check() -> Result<()> {
    eprintln!("+ contract clauses and their tests");
    let files = tracked_files()?;
    let mut clauses = BTreeMap::new();
    for file in files
        .iter()
        .filter(|file| file.starts_with("docs/contracts"))
    {
        collect(file, clause_of, &mut clauses)?;
    }
    let mut pins = BTreeMap::new();
    for file in files
        .iter()
        .filter(|file| has_extension(file, "rs") && !file.starts_with("xtask"))
    {
        collect(file, pins_of, &mut pins)?;
    }
    let untested = clauses.iter().filter(|(name, _)| !pins.contains_key(*name));
    let unknown = pins.iter().filter(|(name, _)| !clauses.contains_key(*name));
    let wrong: Vec<String> = untested
        .map(|(name, place)| format!("{place}: clause {name} is named by no test"))
        .chain(
            unknown.map(|(name, place)| format!("{place}: {name} is no clause of docs/contracts")),
        )
        .collect();
    if wrong.is_empty() {
        Ok(())
    } else {
        bail!("contracts and tests disagree:\n  {}", wrong.join("\n  "))
    }
}

fn has_extension(file: &Path, extension: &str) -> bool {
    file.extension().is_some_and(|found| found == extension)
}

fn collect(
    file: &PathBuf,
    names: fn(&str) -> Vec<String>,
    into: &mut BTreeMap<String, String>,
) -> Result<()> {
    let text = std::fs::read_to_string(run::root().join(file))
        .with_context(|| format!("read {}", file.display()))?;
    for (number, line) in text.lines().enumerate() {
        for name in names(line) {
            into.entry(name)
                .or_insert_with(|| format!("{}:{}", file.display(), number + 1));
        }
    }
    Ok(())
}

fn clause_of(line: &str) -> Vec<String> {
    line.trim_start_matches("- ")
        .strip_prefix("**")
        .and_then(|rest| rest.split_once("**"))
        .map(|(name, _)| name.to_owned())
        .filter(|name| {
            name.rsplit_once('-')
                .is_some_and(|(_, n)| n.parse::<u32>().is_ok())
        })
        .into_iter()
        .collect()
}

fn pins_of(line: &str) -> Vec<String> {
    line.trim_start()
        .strip_prefix("// contract:")
        .map(|names| {
            names
                .split(',')
                .map(|name| name.trim().to_owned())
                .collect()
        })
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clauses_and_pins_are_found() {
        assert_eq!(clause_of("**session-4** End refuses gaps."), ["session-4"]);
        assert_eq!(clause_of("- **lease-12** Renewed."), ["lease-12"]);
        assert!(clause_of("**Note** no clause").is_empty());
        assert_eq!(
            pins_of("    // contract: session-4, lease-1"),
            ["session-4", "lease-1"]
        );
        assert!(pins_of("// about the contract: none").is_empty());
    }
}
