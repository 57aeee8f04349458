//! The command line of `mooncake_master`: its flags, and the master that they mean.
//!
//! `layercake master` and `mooncake_master` run the same [`Master`](crate::Master); they differ in how they are
//! told their settings and in the defaults: here those are Mooncake's. [`Settings::from_args`] reads a command
//! line, [`FLAGS`] says of every flag what becomes of it, [`Quotas`] reads the file of tenants. Nothing here
//! listens or runs.

mod file;
mod flags;
mod settings;
mod values;

pub use file::{FileError, Quotas};
pub use flags::{Effect, FLAGS, Flag, Kind, find};
pub use settings::{Address, FlagError, Invocation, Settings, USAGE};
pub use values::size as parse_size;
