//! Starting other programs, with the command shown and a failure named.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the root")
        .to_path_buf()
}

/// The cargo that runs this program.
pub(crate) fn cargo() -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(root());
    command
}

/// Runs a command, showing it; its failure is an error that names it.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    run_accepting(command, &[])
}

/// As [`run`], where some exit codes besides 0 are no failure.
pub(crate) fn run_accepting(command: &mut Command, codes: &[i32]) -> Result<()> {
    let line = show(command);
    eprintln!("+ {line}");
    let status = command
        .status()
        .with_context(|| format!("start `{line}`"))?;
    if status.success() || status.code().is_some_and(|code| codes.contains(&code)) {
        Ok(())
    } else {
        bail!("`{line}` ended with {status}")
    }
}

/// Runs a command, showing it, and returns what it prints; its failure is an error that names it.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let line = show(command);
    eprintln!("+ {line}");
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("start `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` ended with {}", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{line}` prints no UTF-8"))
}

/// Whether a program can be started at all.
pub(crate) fn available(program: &str, arguments: &[&str]) -> bool {
    Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn show(command: &Command) -> String {
    let program = Path::new(command.get_program())
        .file_name()
        .map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    command.get_args().fold(program, |line, argument| {
        format!("{line} {}", argument.to_string_lossy())
    })
}
