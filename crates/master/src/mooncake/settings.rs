//! From a command line to settings.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use super::file::{self, FileError, Quotas};
use super::flags::{self, Effect, FLAGS, Kind};
use super::values;
use crate::state::{StateConfig, Strategy, Tenancy};

/// What `--help` says before its table.
pub const USAGE: &str = "usage: mooncake_master [--flag=value ...]\n\n\
    Runs the store's metadata service, with the flags of Mooncake's command.\n";

/// A command line that can't be carried out. The message says what to change.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FlagError {
    /// There is no such flag.
    #[error("unknown flag --{name}{hint}; --help lists all flags")]
    Unknown {
        /// As it was given.
        name: String,
        /// A flag that may have been meant.
        hint: Hint,
    },
    /// A word that belongs to no flag.
    #[error("unexpected word \"{word}\": write --flag=value")]
    Word {
        /// The word.
        word: String,
    },
    /// A flag without its value.
    #[error("--{name} needs a value: write --{name}=VALUE")]
    NoValue {
        /// The flag.
        name: &'static str,
    },
    /// A value that is not accepted.
    #[error("--{name}=\"{value}\": {accepted}")]
    Value {
        /// The flag.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is accepted, or what to do instead.
        accepted: String,
    },
    /// Flags that contradict each other, or need each other.
    #[error("{0}")]
    Together(String),
    /// A file that flags name can't be used.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Another flag's name to propose, or none.
#[derive(Debug)]
pub struct Hint(Option<&'static str>);

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(name) => write!(f, ", did you mean --{name}?"),
            None => Ok(()),
        }
    }
}

/// A host's name or address, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// As it was given.
    pub host: String,
    /// The port.
    pub port: u16,
}

/// What a command line asks for.
#[derive(Clone, Debug)]
pub enum Invocation {
    /// Run a master.
    Run(Box<Settings>),
    /// Show what there is to set: this text.
    Help(String),
    /// Show the version.
    Version,
}

/// Settings of the command. The defaults are Mooncake's.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where clients connect to.
    pub rpc: Address,
    /// Where metrics and administration are served over HTTP.
    pub http: Address,
    /// Where the metadata server listens, if it is on.
    pub metadata: Option<Address>,
    /// Rules of the object table.
    pub state: StateConfig,
    /// The file that the quotas of tenants came from, if there are any.
    pub quota_file: Option<PathBuf>,
}

/// The values of flags by name, the last of each.
type Given = BTreeMap<&'static str, String>;

impl Settings {
    /// The flags of a command line with their values, as they are given: what they mean is not looked at.
    pub fn split(args: &[String]) -> Result<Vec<(&'static flags::Flag, String)>, FlagError> {
        let Split::Flags(given) = split(args)? else {
            return Ok(Vec::new());
        };
        let found = given
            .into_iter()
            .filter_map(|(name, value)| Some((flags::find(name)?, value)));
        Ok(found.collect())
    }

    /// Reads a command line, without the program's name, and the files that it names.
    pub fn from_args(args: &[String]) -> Result<Invocation, FlagError> {
        let given = match split(args)? {
            Split::Help => return Ok(Invocation::Help(help())),
            Split::Version => return Ok(Invocation::Version),
            Split::Flags(given) => given,
        };
        let mut all = Given::new();
        if let Some(path) = given.get("config_path").filter(|path| !path.is_empty()) {
            all = from_file(Path::new(path))?;
        }
        all.extend(given);
        Ok(Invocation::Run(Box::new(Self::from_values(&all)?)))
    }

    fn from_values(given: &Given) -> Result<Self, FlagError> {
        let read = Reader { given };
        for (name, value) in given {
            let flag = flags::find(name).expect("only flags of the table are taken");
            flag.check(value).map_err(|accepted| FlagError::Value {
                name: flag.name,
                value: value.clone(),
                accepted,
            })?;
        }
        let rpc_port = match read.port("rpc_port", 0)? {
            0 => read.port("port", 50051)?,
            port => port,
        };
        let defaults = StateConfig::default();
        let quota_file = read.quota_file()?;
        let state = StateConfig {
            lease: read.time("default_kv_lease_ttl", defaults.lease),
            high_watermark: read.fraction("eviction_high_watermark_ratio", defaults.high_watermark),
            eviction_ratio: read.fraction("eviction_ratio", defaults.eviction_ratio),
            client_ttl: read.seconds("client_ttl", defaults.client_ttl),
            discard_after: read.seconds("put_start_discard_timeout_sec", defaults.discard_after),
            release_after: read.seconds("put_start_release_timeout_sec", defaults.release_after),
            soft_pin_ttl: read.time("default_kv_soft_pin_ttl", defaults.soft_pin_ttl),
            max_soft_pin_ttl: read.time("max_kv_soft_pin_ttl", Duration::from_hours(24)),
            evict_soft_pinned: read.switch("allow_evict_soft_pinned_objects", true),
            strategy: read.strategy()?,
            tenancy: quota_file.as_deref().map_or(Ok(Tenancy::Shared), |path| {
                Quotas::read(path).map(|quotas| Tenancy::Strict(quotas.tenants))
            })?,
            ..defaults
        };
        // The names of settings are not those of flags.
        state.validate().map_err(|error| {
            let name = flag_of(error.setting);
            FlagError::Value {
                name,
                value: read.text(name, &error.value).to_owned(),
                accepted: format!("{} is accepted", error.accepted),
            }
        })?;
        let metadata = read.switch("enable_http_metadata_server", false);
        let metadata = metadata
            .then(|| {
                read.address(
                    "http_metadata_server_host",
                    "http_metadata_server_port",
                    8080,
                )
            })
            .transpose()?;
        Ok(Self {
            rpc: Address {
                host: read.text("rpc_address", "0.0.0.0").to_owned(),
                port: rpc_port,
            },
            http: read.address("metrics_host", "metrics_port", 9003)?,
            metadata,
            state,
            quota_file,
        })
    }
}

/// Reads values that their flags' own checks have passed.
struct Reader<'a> {
    given: &'a Given,
}

impl Reader<'_> {
    fn text<'a>(&'a self, name: &str, default: &'a str) -> &'a str {
        self.given.get(name).map_or(default, String::as_str)
    }

    fn read<T>(&self, name: &str, default: T, read: impl Fn(&str) -> Option<T>) -> T {
        let value = self.given.get(name).map(String::as_str);
        value.and_then(read).unwrap_or(default)
    }

    fn switch(&self, name: &str, default: bool) -> bool {
        self.read(name, default, flags::switch)
    }

    fn fraction(&self, name: &str, default: f64) -> f64 {
        self.read(name, default, |text| text.parse().ok())
    }

    fn time(&self, name: &str, default: Duration) -> Duration {
        self.read(name, default, values::time)
    }

    fn seconds(&self, name: &str, default: Duration) -> Duration {
        self.read(name, default, |text| {
            text.parse().ok().map(Duration::from_secs)
        })
    }

    fn port(&self, name: &'static str, default: u16) -> Result<u16, FlagError> {
        let Some(value) = self.given.get(name) else {
            return Ok(default);
        };
        value
            .parse()
            .map_err(|_| self.refuse(name, "a port from 0 to 65535 is accepted"))
    }

    fn address(
        &self,
        host: &'static str,
        port: &'static str,
        default: u16,
    ) -> Result<Address, FlagError> {
        Ok(Address {
            host: self.text(host, "0.0.0.0").to_owned(),
            port: self.port(port, default)?,
        })
    }

    fn strategy(&self) -> Result<Strategy, FlagError> {
        const NAME: &str = "allocation_strategy";
        match self.given.get(NAME).map(String::as_str) {
            None => Ok(Strategy::RoomierOfTwo),
            Some("random") => Ok(Strategy::Random),
            Some("free_ratio_first") => Ok(Strategy::Roomiest),
            Some("local_first") => Ok(Strategy::LocalFirst),
            Some("cxl" | "ssd_free_ratio_first") => Err(self.refuse(
                NAME,
                "segments are host memory only: use random, free_ratio_first or local_first",
            )),
            Some(_) => Err(self.refuse(
                NAME,
                "random, free_ratio_first and local_first are accepted",
            )),
        }
    }

    /// The file of tenants and quotas, where quotas rule.
    fn quota_file(&self) -> Result<Option<PathBuf>, FlagError> {
        const FILE: &str = "tenant_quota_connector_uri";
        if !self.switch("enable_multi_tenants", false) {
            return Ok(None);
        }
        let uri = self.text(FILE, "");
        let path = uri.strip_prefix("file://").unwrap_or(uri);
        if path.is_empty() {
            return Err(FlagError::Together(format!(
                "--enable_multi_tenants needs --{FILE}=FILE, which lists the tenants and their quotas"
            )));
        }
        Ok(Some(path.into()))
    }

    fn refuse(&self, name: &'static str, accepted: &str) -> FlagError {
        FlagError::Value {
            name,
            value: self.text(name, "").to_owned(),
            accepted: accepted.to_owned(),
        }
    }
}

/// The flag behind a setting of the object table.
fn flag_of(setting: &str) -> &'static str {
    match setting {
        "lease" => "default_kv_lease_ttl",
        "high_watermark" => "eviction_high_watermark_ratio",
        "client_ttl" => "client_ttl",
        "discard_after" => "put_start_discard_timeout_sec",
        "release_after" => "put_start_release_timeout_sec",
        "soft_pin_ttl" => "default_kv_soft_pin_ttl",
        "max_soft_pin_ttl" => "max_kv_soft_pin_ttl",
        // All others of those that flags set.
        _ => "eviction_ratio",
    }
}

enum Split {
    Help,
    Version,
    Flags(Given),
}

/// Cuts a command line into flags and values: `--name=value`, `--name value`, with one dash or two.
fn split(args: &[String]) -> Result<Split, FlagError> {
    let mut given = Given::new();
    let mut words = args.iter();
    while let Some(word) = words.next() {
        let Some(body) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')) else {
            return Err(FlagError::Word { word: word.clone() });
        };
        let (name, value) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (body, None),
        };
        match name {
            "help" | "helpfull" | "helpshort" | "helpmatch" | "helpon" | "helppackage"
            | "helpxml" | "h" => return Ok(Split::Help),
            "version" => return Ok(Split::Version),
            _ => {}
        }
        let (flag, value) = match (flags::find(name), value) {
            (Some(flag), Some(value)) => (flag, value),
            (Some(flag), None) if flag.kind == Kind::Switch => (flag, "true".to_owned()),
            (Some(flag), None) => match words.next() {
                Some(value) => (flag, value.clone()),
                None => return Err(FlagError::NoValue { name: flag.name }),
            },
            (None, None) => (switched_off(name)?, "false".to_owned()),
            (None, Some(_)) => return Err(unknown(name)),
        };
        given.insert(flag.name, value);
    }
    Ok(Split::Flags(given))
}

/// The switch that `--noNAME` turns off.
fn switched_off(name: &str) -> Result<&'static flags::Flag, FlagError> {
    name.strip_prefix("no")
        .and_then(flags::find)
        .filter(|flag| flag.kind == Kind::Switch)
        .ok_or_else(|| unknown(name))
}

fn unknown(name: &str) -> FlagError {
    let near = FLAGS
        .iter()
        .map(|flag| (edits(name, flag.name), flag.name))
        .filter(|(edits, _)| *edits <= (name.len() / 3).clamp(1, 4))
        .min();
    FlagError::Unknown {
        name: name.to_owned(),
        hint: Hint(near.map(|(_, name)| name)),
    }
}

/// Insertions, deletions and replacements between two words.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.chars().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.chars().count()]
}

/// The flags in a configuration file.
fn from_file(path: &Path) -> Result<Given, FlagError> {
    let mut given = Given::new();
    for (name, value) in file::flags(path)? {
        let flag = flags::find(&name).ok_or_else(|| FileError::Content {
            path: path.to_owned(),
            detail: unknown(&name).to_string(),
        })?;
        given.insert(flag.name, value);
    }
    Ok(given)
}

/// Which flags a part of the help is about, and what it says of them.
type About = fn(Effect) -> Option<&'static str>;

const PARTS: [(&str, About); 3] = [
    ("Used", |effect| match effect {
        Effect::Used(text) => Some(text),
        _ => None,
    }),
    ("Accepted without effect", |effect| match effect {
        Effect::Ignored(text) => Some(text),
        _ => None,
    }),
    (
        "Only accepted without asking for anything",
        |effect| match effect {
            Effect::Only(_, text) => Some(text),
            _ => None,
        },
    ),
];

fn help() -> String {
    let mut text = USAGE.to_owned();
    for (title, about) in PARTS {
        let _ = write!(text, "\n{title}:\n");
        for flag in FLAGS {
            if let Some(about) = about(flag.effect) {
                let _ = writeln!(text, "  --{}\n        {about}", flag.name);
            }
        }
    }
    text
}

#[cfg(test)]
mod tests;
