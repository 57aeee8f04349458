//! Files that the command reads: flags, and tenants with their quotas.
//!
//! Both are YAML; JSON is YAML too.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use layercake_protocol::key::Tenant;
use serde::Deserialize;
use thiserror::Error;

use super::values;

/// The largest file that is read: quotas are lists made by people.
const LARGEST: u64 = 16 << 20;

/// A file that can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FileError {
    /// It can't be read.
    #[error("can't read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It can't be written.
    #[error("can't write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// What is in it makes no sense.
    #[error("{}: {detail}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What, and what is accepted.
        detail: String,
    },
}

/// A value in a file of flags.
#[derive(Deserialize)]
#[serde(untagged)]
enum Scalar {
    Switch(bool),
    Number(i64),
    Fraction(f64),
    Text(String),
}

impl Scalar {
    fn into_text(self) -> String {
        match self {
            Self::Switch(value) => value.to_string(),
            Self::Number(value) => value.to_string(),
            Self::Fraction(value) => value.to_string(),
            Self::Text(value) => value,
        }
    }
}

/// The flags in a file, as they stand there.
pub(super) fn flags(path: &Path) -> Result<BTreeMap<String, String>, FileError> {
    let values: BTreeMap<String, Scalar> = parse(path, &read(path)?)?;
    let values = values.into_iter();
    Ok(values
        .map(|(name, value)| (name, value.into_text()))
        .collect())
}

/// Tenants and the bytes that each may fill.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quotas {
    /// Quota in bytes by tenant.
    pub tenants: BTreeMap<Tenant, u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct QuotaFile {
    version: u64,
    #[serde(default)]
    tenants: Vec<TenantEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantEntry {
    name: String,
    quota: Scalar,
}

impl Quotas {
    /// What a quota may be, in bytes.
    pub const ACCEPTED: RangeInclusive<u64> = 1..=i64::MAX.unsigned_abs();

    /// Writes a file that [`read`](Self::read) reads, in place of the one that is there.
    pub fn write(&self, path: &Path) -> Result<(), FileError> {
        let list = if self.tenants.is_empty() { " []" } else { "" };
        let mut text = format!("version: 1\n\ntenants:{list}\n");
        for (tenant, quota) in &self.tenants {
            text.push_str("  - name: ");
            quote(tenant.as_str(), &mut text);
            let _ = writeln!(text, "\n    quota: {quota}");
        }
        let beside = path.with_extension("new");
        std::fs::write(&beside, text)
            .and_then(|()| std::fs::rename(&beside, path))
            .map_err(|source| FileError::Write {
                path: path.to_owned(),
                source,
            })
    }

    /// Reads a file of `version: 1` with a list `tenants` of `name` and `quota`.
    pub fn read(path: &Path) -> Result<Self, FileError> {
        let refuse = |detail: String| FileError::Content {
            path: path.to_owned(),
            detail,
        };
        let file: QuotaFile = parse(path, &read(path)?)?;
        if file.version != 1 {
            return Err(refuse(format!(
                "version: {}: version 1 is understood",
                file.version
            )));
        }
        let mut tenants = BTreeMap::new();
        for entry in file.tenants {
            let name = Tenant::new(&entry.name)
                .map_err(|error| refuse(format!("tenant \"{}\": {error}", entry.name)))?;
            let text = entry.quota.into_text();
            let quota = values::size(&text).ok_or_else(|| {
                refuse(format!("quota of \"{name}\": \"{text}\": {}", values::SIZE))
            })?;
            if !Self::ACCEPTED.contains(&quota) {
                return Err(refuse(format!(
                    "quota of \"{name}\": \"{text}\": 1 byte to 2^63 - 1 bytes are accepted"
                )));
            }
            if tenants.insert(name, quota).is_some() {
                return Err(refuse(format!("tenant \"{}\" is listed twice", entry.name)));
            }
        }
        Ok(Self { tenants })
    }
}

/// A text between double quotes, as YAML and JSON write it.
fn quote(text: &str, into: &mut String) {
    into.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => into.extend(['\\', c]),
            c if u32::from(c) < 0x20 || c == '\u{7f}' => {
                let _ = write!(into, "\\u{:04x}", u32::from(c));
            }
            c => into.push(c),
        }
    }
    into.push('"');
}

fn read(path: &Path) -> Result<String, FileError> {
    let failed = |source| FileError::Read {
        path: path.to_owned(),
        source,
    };
    let len = std::fs::metadata(path).map_err(failed)?.len();
    if len > LARGEST {
        return Err(FileError::Content {
            path: path.to_owned(),
            detail: format!("{len} bytes, {LARGEST} at most are read"),
        });
    }
    std::fs::read_to_string(path).map_err(failed)
}

fn parse<T: serde::de::DeserializeOwned>(path: &Path, text: &str) -> Result<T, FileError> {
    serde_saphyr::from_str(text).map_err(|error| FileError::Content {
        path: path.to_owned(),
        // The parser draws the place with several lines.
        detail: error
            .to_string()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" "),
    })
}
