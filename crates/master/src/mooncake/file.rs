//! Files that the command reads: flags, and tenants with their quotas.
//!
//! Both are YAML; JSON is YAML too.

use std::collections::BTreeMap;
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
            if tenants.insert(name, quota).is_some() {
                return Err(refuse(format!("tenant \"{}\" is listed twice", entry.name)));
            }
        }
        Ok(Self { tenants })
    }
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
