//! Flags made from settings tables.

use std::marker::PhantomData;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use super::{Setting, Settings};

/// The flags of one group of settings that were given on the command line.
#[derive(Debug)]
pub(crate) struct Flags<S> {
    pub(crate) given: Vec<(&'static Setting, String)>,
    group: PhantomData<S>,
}

impl<S> Clone for Flags<S> {
    fn clone(&self) -> Self {
        Self {
            given: self.given.clone(),
            group: PhantomData,
        }
    }
}

impl<S: Settings> Args for Flags<S> {
    fn augment_args(command: Command) -> Command {
        S::TABLE
            .iter()
            .filter(|setting| !setting.secret)
            .fold(command, |command, setting| command.arg(arg(setting)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn arg(setting: &'static Setting) -> Arg {
    let default = match setting.default {
        _ if setting.switch => String::new(),
        default => format!(", default: {default}"),
    };
    let arg = Arg::new(setting.name)
        .long(setting.flag_name())
        .help(format!(
            "{} [env: {}{default}]",
            setting.help,
            setting.env_name()
        ))
        .action(ArgAction::Set);
    if setting.switch {
        arg.num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true")
            .hide_possible_values(true)
            .value_name("true|false")
    } else {
        arg.value_name(setting.name.to_uppercase())
    }
}

impl<S: Settings> FromArgMatches for Flags<S> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = S::TABLE
            .iter()
            .filter(|setting| !setting.secret)
            .filter_map(|setting| Some((setting, matches.get_one::<String>(setting.name)?.clone())))
            .collect();
        Ok(Self {
            given,
            group: PhantomData,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
