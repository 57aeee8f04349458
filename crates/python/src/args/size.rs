//! Sizes and durations, as people write them.

use std::time::Duration;

use pyo3::Borrowed;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyString};

use super::ints::int;
use super::wrong_type;
use crate::errors::Kind;

const UNITS: [(&str, u32); 9] = [
    ("TiB", 40),
    ("GiB", 30),
    ("MiB", 20),
    ("KiB", 10),
    ("B", 0),
    ("T", 40),
    ("G", 30),
    ("M", 20),
    ("K", 10),
];

/// A number of bytes: an int, or a text such as `"90MiB"` or `"16GiB"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl<'py> FromPyObject<'_, 'py> for Size {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Ok(text) = obj.cast::<PyString>() else {
            return int(&obj).map(Self);
        };
        let text = text.to_string_lossy();
        parse(&text).map(Self).ok_or_else(|| {
            Kind::InvalidArgument.err(format!(
                "{text:?} is no size: whole numbers with a unit are accepted, such as \"512B\", \"90MiB\" or \"16GiB\""
            ))
        })
    }
}

fn parse(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = (text[..digits].parse::<u64>().ok()?, text[digits..].trim());
    let (_, shift) = UNITS.iter().find(|(name, _)| *name == unit)?;
    number.checked_mul(1_u64.checked_shl(*shift)?)
}

/// A time in seconds: a float or an int, not negative.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Seconds(pub(crate) Duration);

impl<'py> FromPyObject<'_, 'py> for Seconds {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        const ACCEPTED: &str = "a number of seconds, 0 or more,";
        let seconds = match obj.cast::<PyFloat>() {
            Ok(float) => float.value(),
            Err(_) => int(&obj).map_err(|_| wrong_type(&obj, ACCEPTED))? as f64,
        };
        Duration::try_from_secs_f64(seconds)
            .map(Self)
            .map_err(|_| PyTypeError::new_err(format!("{ACCEPTED} is needed, not {seconds}")))
    }
}
