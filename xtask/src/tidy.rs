//! Small rules that no other tool checks.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::run;

/// A file beyond this many lines has more than one reason to change.
const MAX_LINES: usize = 700;

pub(crate) fn check() -> Result<()> {
    eprintln!("+ tidiness");
    let mut wrong = Vec::new();
    for file in tracked_files()? {
        if file.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let text = std::fs::read_to_string(run::root().join(&file))
            .with_context(|| format!("read {}", file.display()))?;
        let lines = text.lines().count();
        if lines > MAX_LINES {
            wrong.push(format!(
                "{}: {lines} lines, {MAX_LINES} at most",
                file.display()
            ));
        }
        if is_library(&file) && !text.trim_start().starts_with("//!") {
            wrong.push(format!("{}: no module header (`//!`)", file.display()));
        }
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        bail!("not tidy:\n  {}", wrong.join("\n  "))
    }
}

/// Whether a file is a module of a library or program, its unit tests apart.
fn is_library(file: &Path) -> bool {
    let has = |name: &str| file.components().any(|part| part.as_os_str() == name);
    file.starts_with("crates") && has("src") && !has("tests.rs") && !has("tests")
}

/// What git tracks, and new files it does not ignore, relative to the root.
pub(crate) fn tracked_files() -> Result<Vec<PathBuf>> {
    let output = Command::new("git")
        .current_dir(run::root())
        .args([
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "-z",
        ])
        .output()
        .context("start `git ls-files`")?;
    if !output.status.success() {
        bail!("`git ls-files` ended with {}", output.status);
    }
    let listing = String::from_utf8(output.stdout).context("a file's name is not UTF-8")?;
    Ok(listing
        .split('\0')
        .filter(|name| !name.is_empty())
        .map(PathBuf::from)
        .filter(|file| run::root().join(file).is_file())
        .collect())
}
