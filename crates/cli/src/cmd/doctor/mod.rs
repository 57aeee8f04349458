//! `layercake doctor`: what becomes of an existing Mooncake deployment's configuration (requirement O9).
//!
//! Looked at are the keys of a JSON configuration file, the environment's `MC_*` and `MOONCAKE_*`
//! variables, and flags of `mooncake_master` behind `--`. Each gets a verdict: used, no effect, replaced by
//! something else, or refused with what to do. None is left out: what no table knows is refused as unknown.
//! The verdicts are those of the drop-in `layercake-mooncake`; this command starts nothing.

mod keys;
mod variables;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use layercake_master::mooncake::{Effect, FLAGS, Flag, Settings};
use serde::Serialize;
use serde_json::Value;

use crate::config::suggest;
use crate::output::{self, Table};

/// Options of `layercake doctor`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// A Mooncake configuration in JSON, as `MOONCAKE_CONFIG_PATH` names it
    #[arg(long, value_name = "FILE")]
    mooncake_config: Option<PathBuf>,
    /// List everything that is known, not only what is set
    #[arg(long)]
    all: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// Flags of `mooncake_master`, behind `--`
    #[arg(last = true, value_name = "FLAGS")]
    master_flags: Vec<String>,
}

/// What becomes of one setting.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    /// It does what the text says.
    Used(String),
    /// It changes nothing, because of what the text says.
    NoEffect(String),
    /// It changes nothing; the text says what does the same.
    Replaced(String),
    /// The drop-in can't do that; the text says what to change.
    Refused(String),
}

impl Verdict {
    fn name(&self) -> &'static str {
        match self {
            Self::Used(_) => "used",
            Self::NoEffect(_) => "no effect",
            Self::Replaced(_) => "replaced",
            Self::Refused(_) => "refused",
        }
    }

    fn text(&self) -> &str {
        match self {
            Self::Used(text)
            | Self::NoEffect(text)
            | Self::Replaced(text)
            | Self::Refused(text) => text,
        }
    }

    /// The verdict on a name that no table has.
    fn unknown<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Self {
        let near = suggest::nearest(name, known);
        let hint = near.map_or_else(String::new, |near| format!(": did you mean {near}?"));
        Self::Refused(format!("unknown{hint}"))
    }
}

/// Where a setting stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Place {
    File,
    Environment,
    Flag,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::File => "file",
            Self::Environment => "environment",
            Self::Flag => "flag",
        })
    }
}

/// One line of the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    place: Place,
    name: String,
    /// As it is set; `None`: it is not.
    value: Option<String>,
    verdict: Verdict,
}

#[derive(Serialize)]
struct Shown<'a> {
    place: Place,
    name: &'a str,
    value: Option<&'a str>,
    verdict: &'static str,
    meaning: &'a str,
}

/// Judges what it is given; fails if something of it is refused.
pub(crate) fn execute(options: &Options) -> Result<()> {
    let file = options.mooncake_config.as_ref().map(read).transpose()?;
    let environment: BTreeMap<String, String> = std::env::vars_os()
        .filter_map(|(name, value)| {
            let name = name.into_string().ok()?;
            let ours = name.starts_with("MC_") || name.starts_with("MOONCAKE_");
            ours.then(|| (name, value.to_string_lossy().into_owned()))
        })
        .collect();
    let mut findings = keys::judge(file.unwrap_or_default());
    findings.extend(variables::judge(&environment));
    findings.extend(flags(&options.master_flags));
    if options.all {
        findings.extend(unset(&findings));
    }
    if findings.is_empty() {
        bail!(
            "nothing to look at: give --mooncake-config FILE, flags of mooncake_master behind --, or --all"
        );
    }
    show(&findings, options.json)?;
    let refused = findings.iter().filter(|finding| {
        finding.value.is_some() && matches!(finding.verdict, Verdict::Refused(_))
    });
    match refused.count() {
        0 => Ok(()),
        1 => bail!("1 setting is refused: see above"),
        many => bail!("{many} settings are refused: see above"),
    }
}

fn read(path: &PathBuf) -> Result<serde_json::Map<String, Value>> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("can't read {}", path.display()))?;
    let value =
        serde_json::from_str(&text).with_context(|| format!("{} is no JSON", path.display()))?;
    match value {
        Value::Object(map) => Ok(map),
        _ => bail!("{} holds no JSON object", path.display()),
    }
}

fn show(findings: &[Finding], json: bool) -> Result<()> {
    if json {
        let shown: Vec<_> = findings
            .iter()
            .map(|finding| Shown {
                place: finding.place,
                name: &finding.name,
                value: finding.value.as_deref(),
                verdict: finding.verdict.name(),
                meaning: finding.verdict.text(),
            })
            .collect();
        return output::print_json(&serde_json::json!({ "settings": shown }));
    }
    let mut table = Table::new(&["from", "setting", "value", "verdict", "meaning"]);
    for finding in findings {
        table.row([
            finding.place.to_string(),
            finding.name.clone(),
            finding
                .value
                .clone()
                .unwrap_or_else(|| "(not set)".to_owned()),
            finding.verdict.name().to_owned(),
            finding.verdict.text().to_owned(),
        ]);
    }
    output::print(table)
}

/// What is known and not among the findings.
fn unset(findings: &[Finding]) -> Vec<Finding> {
    let known = keys::known().chain(variables::known()).chain(
        FLAGS
            .iter()
            .map(|flag| (Place::Flag, flag.name, of_flag(flag))),
    );
    known
        .filter(|(place, name, _)| {
            let mut set = findings.iter();
            !set.any(|finding| finding.place == *place && finding.name == *name)
        })
        .map(|(place, name, verdict)| Finding {
            place,
            name: name.to_owned(),
            value: None,
            verdict,
        })
        .collect()
}

fn of_flag(flag: &Flag) -> Verdict {
    match flag.effect {
        Effect::Used(text) => Verdict::Used(text.to_owned()),
        Effect::Ignored(text) => Verdict::NoEffect(text.to_owned()),
        Effect::Only(values, text) => {
            let accepted = values.iter().map(|value| format!("\"{value}\""));
            let accepted: Vec<_> = accepted.collect();
            Verdict::Refused(format!("but for {}: {text}", accepted.join(", ")))
        }
    }
}

/// The verdicts on flags of `mooncake_master`, one by one, and on all together.
fn flags(words: &[String]) -> Vec<Finding> {
    let finding = |name: &str, value: &str, verdict| Finding {
        place: Place::Flag,
        name: name.to_owned(),
        value: Some(value.to_owned()),
        verdict,
    };
    let mut findings = Vec::new();
    match Settings::split(words) {
        Ok(given) => {
            for (flag, value) in given {
                let verdict = match (flag.check(&value), flag.effect) {
                    (Err(refusal), _) => Verdict::Refused(refusal),
                    (Ok(()), Effect::Only(..)) => {
                        Verdict::NoEffect("it asks for nothing, which is all there is".to_owned())
                    }
                    (Ok(()), _) => of_flag(flag),
                };
                findings.push(finding(flag.name, &value, verdict));
            }
        }
        Err(error) => {
            findings.push(finding(
                "(all)",
                &words.join(" "),
                Verdict::Refused(error.to_string()),
            ));
            return findings;
        }
    }
    let each = |finding: &Finding| !matches!(finding.verdict, Verdict::Refused(_));
    if findings.iter().all(each)
        && let Err(error) = Settings::from_args(words)
    {
        findings.push(finding(
            "(all)",
            &words.join(" "),
            Verdict::Refused(error.to_string()),
        ));
    }
    findings
}

#[cfg(test)]
mod tests;
