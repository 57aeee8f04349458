//! Configuration: defaults, then a Mooncake configuration if `MOONCAKE_CONFIG_PATH` names one, then one TOML
//! or JSON file, then `LAYERCAKE_*` variables, then flags.
//!
//! Every setting stands once in a table (see [`programs`]) that gives its default, its form and its
//! meaning; the file's keys, the variables' names, the flags, their help and `config show` are made
//! from it. A value keeps where it came from. Whatever no table knows is refused by name, with the
//! nearest known name, and so is a value that can't be read; contradictions are refused by the
//! program's own check. The layering itself is pure: the process's file, environment and arguments
//! are read at the edge, in [`Sources::load`].

pub(crate) mod flags;
mod mooncake;
pub(crate) mod programs;
pub(crate) mod suggest;
pub(crate) mod value;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};

pub(crate) use flags::Flags;
use mooncake::MooncakeFile;
pub(crate) use value::{ByteSize, MasterAddress, Ratio, Value};

/// Prefix of the variables that this program reads.
pub(crate) const ENV_PREFIX: &str = "LAYERCAKE_";

/// The variable that names the configuration file.
pub(crate) const ENV_CONFIG: &str = "LAYERCAKE_CONFIG";

/// One setting of one table.
#[derive(Debug)]
pub(crate) struct Setting {
    /// The file's section; empty: the top level.
    pub(crate) section: &'static str,
    /// The key in its section; the flag's name with `-` for `_`.
    pub(crate) name: &'static str,
    /// The variable, where its name is not made of section and name.
    pub(crate) env: Option<&'static str>,
    /// Text of the default.
    pub(crate) default: &'static str,
    /// One line for people.
    pub(crate) help: &'static str,
    /// A flag without a value means `true`.
    pub(crate) switch: bool,
    /// Only read from the environment, never shown.
    pub(crate) secret: bool,
    /// Reads the text and shows it in its normal form.
    pub(crate) check: fn(&str) -> Result<String, String>,
}

impl Setting {
    /// The variable's name.
    pub(crate) fn env_name(&self) -> String {
        self.env.map_or_else(
            || {
                let separator = if self.section.is_empty() { "" } else { "_" };
                format!("{ENV_PREFIX}{}{separator}{}", self.section, self.name).to_uppercase()
            },
            str::to_owned,
        )
    }

    /// The name with its section.
    pub(crate) fn path(&self) -> String {
        let separator = if self.section.is_empty() { "" } else { "." };
        format!("{}{separator}{}", self.section, self.name)
    }

    /// The flag without its dashes.
    pub(crate) fn flag_name(&self) -> String {
        self.name.replace('_', "-")
    }
}

/// A group of settings with one type that holds their values.
pub(crate) trait Settings: Sized {
    /// The group's table.
    const TABLE: &'static [Setting];
    /// Takes the group's values.
    fn take(resolved: &Resolved) -> Result<Self>;
}

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Default,
    File(PathBuf),
    Environment(String),
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Flag(name) => write!(f, "flag --{name}"),
        }
    }
}

/// One effective value.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) setting: &'static Setting,
    pub(crate) text: String,
    pub(crate) origin: Origin,
}

/// The effective values of a program's groups.
#[derive(Clone, Debug)]
pub(crate) struct Resolved {
    pub(crate) entries: Vec<Entry>,
}

impl Resolved {
    fn entry(&self, section: &str, name: &str) -> Result<&Entry> {
        self.entries
            .iter()
            .find(|entry| entry.setting.section == section && entry.setting.name == name)
            .ok_or_else(|| anyhow!("this program has no setting {section}.{name}"))
    }

    /// The value of one setting.
    pub(crate) fn value<T: Value>(&self, section: &str, name: &str) -> Result<T> {
        let entry = self.entry(section, name)?;
        T::read(&entry.text).map_err(|reason| refused(entry.setting, &entry.origin, &reason))
    }

    /// Where one value came from.
    #[cfg(test)]
    pub(crate) fn origin(&self, section: &str, name: &str) -> Result<&Origin> {
        Ok(&self.entry(section, name)?.origin)
    }
}

/// The file and the environment, before they are read as settings.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sources {
    file: Option<(PathBuf, toml::Table)>,
    environment: BTreeMap<String, String>,
    /// A Mooncake configuration, read when settings are resolved: not every tool has any.
    mooncake: Option<PathBuf>,
    /// The protocol "rdma" may stand for "tcp".
    force_tcp: bool,
}

impl Sources {
    /// Reads this process's variables, and the file that `--config` or else `LAYERCAKE_CONFIG` names.
    pub(crate) fn load(config: Option<&Path>) -> Result<Self> {
        let mut environment = BTreeMap::new();
        for (name, value) in std::env::vars_os() {
            let Some(name) = name.to_str().filter(|name| name.starts_with(ENV_PREFIX)) else {
                continue;
            };
            let value = value
                .into_string()
                .map_err(|_| anyhow!("environment variable {name} is not UTF-8"))?;
            environment.insert(name.to_owned(), value);
        }
        let path = config
            .map(Path::to_owned)
            .or_else(|| environment.get(ENV_CONFIG).map(PathBuf::from));
        let file = match path {
            None => None,
            Some(path) => {
                let text = std::fs::read_to_string(&path).with_context(|| {
                    format!("can't read the configuration file {}", path.display())
                })?;
                Some((path, text))
            }
        };
        let sources = Self::new(file, environment)?;
        Ok(Self {
            mooncake: std::env::var_os(mooncake::ENV_MOONCAKE)
                .filter(|path| !path.is_empty())
                .map(PathBuf::from),
            force_tcp: std::env::var(mooncake::ENV_FORCE_TCP)
                .is_ok_and(|text| mooncake::is_on(&text)),
            ..sources
        })
    }

    /// Takes the text of a file and variables that begin with [`ENV_PREFIX`].
    pub(crate) fn new(
        file: Option<(PathBuf, String)>,
        environment: BTreeMap<String, String>,
    ) -> Result<Self> {
        let file = match file {
            None => None,
            Some((path, text)) => {
                let json = path
                    .extension()
                    .is_some_and(|extension| extension == "json");
                let table = if json {
                    serde_json::from_str::<toml::Table>(&text)
                        .map_err(|error| anyhow!("{}: {error}", path.display()))?
                } else {
                    text.parse::<toml::Table>().map_err(|error| {
                        let start = error.span().map_or(0, |span| span.start.min(text.len()));
                        let line = text.get(..start).unwrap_or_default().matches('\n').count() + 1;
                        let reason = error.message().replace('\n', ", ");
                        anyhow!("{}: line {line}: {reason}", path.display())
                    })?
                };
                Some((path, table))
            }
        };
        Ok(Self {
            file,
            environment,
            ..Self::default()
        })
    }

    /// Refuses the protocol that a Mooncake configuration names, if that is not there.
    pub(crate) fn check_mooncake_protocol(&self) -> Result<()> {
        match &self.mooncake {
            Some(path) => MooncakeFile::read(path)?.check_protocol(self.force_tcp),
            None => Ok(()),
        }
    }

    /// The effective values of `groups`, flags last. Settings of other programs may be in the file and
    /// in the environment, as one of each serves all programs.
    pub(crate) fn resolve(
        &self,
        groups: &[&'static [Setting]],
        flags: &[(&'static Setting, String)],
    ) -> Result<Resolved> {
        self.refuse_unknown_keys()?;
        self.refuse_unknown_variables()?;
        let mooncake = self
            .mooncake
            .as_deref()
            .map(MooncakeFile::read)
            .transpose()?;
        let mut entries = Vec::new();
        for setting in groups.iter().copied().flatten() {
            let (text, origin) = match flags.iter().find(|(flag, _)| flag.path() == setting.path())
            {
                Some((_, text)) => (text.clone(), Origin::Flag(setting.flag_name())),
                None => self.layered(setting, mooncake.as_ref())?,
            };
            let text =
                (setting.check)(&text).map_err(|reason| refused(setting, &origin, &reason))?;
            entries.push(Entry {
                setting,
                text,
                origin,
            });
        }
        Ok(Resolved { entries })
    }

    /// The value that environment, file or default give.
    fn layered(
        &self,
        setting: &Setting,
        mooncake: Option<&MooncakeFile>,
    ) -> Result<(String, Origin)> {
        let variable = setting.env_name();
        if let Some(text) = self.environment.get(&variable) {
            return Ok((text.clone(), Origin::Environment(variable)));
        }
        if let Some((path, table)) = &self.file {
            let found = match setting.section {
                "" => table.get(setting.name),
                section => table
                    .get(section)
                    .and_then(|section| section.get(setting.name)),
            };
            if let Some(value) = found {
                let origin = Origin::File(path.clone());
                let text = scalar(value)
                    .ok_or_else(|| refused(setting, &origin, "a single value is expected"))?;
                return Ok((text, origin));
            }
        }
        if let Some(file) = mooncake
            && let Some(text) = file.value(&setting.path())
        {
            return Ok((text.to_owned(), Origin::File(file.path.clone())));
        }
        Ok((setting.default.to_owned(), Origin::Default))
    }

    fn refuse_unknown_keys(&self) -> Result<()> {
        let Some((path, table)) = &self.file else {
            return Ok(());
        };
        let refuse = |name: &str| -> Result<()> {
            let paths: Vec<String> = programs::all()
                .filter(|setting| !setting.secret)
                .map(Setting::path)
                .collect();
            if paths.iter().any(|known| known == name) {
                return Ok(());
            }
            if programs::all().any(|setting| setting.secret && setting.path() == name) {
                bail!(
                    "{}: a secret does not belong in the configuration file: name a file that holds it with `token_file` instead of `{name}`",
                    path.display()
                );
            }
            // A right name in the wrong section is as likely as a slip of the pen.
            let section = name.rsplit_once('.').map_or("", |(section, _)| section);
            let last = name.rsplit('.').next().unwrap_or(name);
            let (here, elsewhere): (Vec<_>, Vec<_>) =
                programs::all().partition(|setting| setting.section == section);
            let by_name = |settings: &[&Setting]| {
                let name = suggest::nearest(last, settings.iter().map(|setting| setting.name))?;
                settings
                    .iter()
                    .find(|setting| setting.name == name)
                    .map(|setting| setting.path())
            };
            let near = by_name(&here).or_else(|| by_name(&elsewhere));
            bail!(
                "{}: unknown setting `{name}`{}",
                path.display(),
                did_you_mean(near.as_deref())
            );
        };
        for (name, value) in table {
            let is_section = programs::all().any(|setting| setting.section == name);
            match value {
                toml::Value::Table(section) if is_section => {
                    for key in section.keys() {
                        refuse(&format!("{name}.{key}"))?;
                    }
                }
                toml::Value::Table(_) => {
                    let sections = programs::all().map(|setting| setting.section);
                    let near = suggest::nearest(name, sections);
                    bail!(
                        "{}: unknown section `[{name}]`{}",
                        path.display(),
                        did_you_mean(near)
                    );
                }
                _ if is_section => {
                    bail!("{}: `{name}` is a section: write [{name}]", path.display())
                }
                _ => refuse(name)?,
            }
        }
        Ok(())
    }

    fn refuse_unknown_variables(&self) -> Result<()> {
        let known: Vec<String> = programs::all()
            .map(Setting::env_name)
            .chain([ENV_CONFIG.to_owned()])
            .collect();
        for name in self.environment.keys() {
            if !known.contains(name) {
                let near = suggest::nearest(name, known.iter().map(String::as_str));
                bail!("unknown environment variable {name}{}", did_you_mean(near));
            }
        }
        Ok(())
    }
}

fn did_you_mean(near: Option<&str>) -> String {
    near.map_or_else(String::new, |near| format!(": did you mean `{near}`?"))
}

fn refused(setting: &Setting, origin: &Origin, reason: &str) -> anyhow::Error {
    anyhow!("setting `{}` ({origin}): {reason}", setting.path())
}

/// The text of a value that is not a collection.
fn scalar(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(truth) => Some(truth.to_string()),
        toml::Value::Datetime(_) | toml::Value::Array(_) | toml::Value::Table(_) => None,
    }
}

#[cfg(test)]
mod docs_tests;
#[cfg(test)]
mod tests;
