//! The text forms of setting values: sizes and durations with units, addresses, switches, names.
//!
//! One trait serves the file, the environment, the flags and `config show`: a value is read from text
//! and shown as text that reads back as the same value.

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZero;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use layercake_transport::TransportSet;

/// A value that has a text form.
pub(crate) trait Value: Sized {
    /// Reads the text; an error says what is wrong with it and what is accepted.
    fn read(text: &str) -> Result<Self, String>;
    /// The text that reads back as this value.
    fn show(&self) -> String;
}

/// A number of bytes, written with a unit: `512B`, `90MiB`, `1.5GiB`, `2GB`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ByteSize(pub(crate) u64);

const BINARY_UNITS: [(&str, u64); 4] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
];
const DECIMAL_UNITS: [(&str, u64); 4] = [
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1000),
];

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, factor) in BINARY_UNITS {
            if self.0 >= factor && self.0.is_multiple_of(factor) {
                return write!(f, "{}{unit}", self.0 / factor);
            }
        }
        write!(f, "{}B", self.0)
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const ACCEPTED: &str = "sizes are written like 512B, 90MiB or 16GiB";
        let (number, unit) = split_unit(text);
        if unit.is_empty() {
            return Err(format!("\"{text}\" has no unit: {ACCEPTED}"));
        }
        let factor = BINARY_UNITS
            .into_iter()
            .chain(DECIMAL_UNITS)
            .chain([("B", 1)])
            .find(|(name, _)| name.eq_ignore_ascii_case(unit))
            .map(|(_, factor)| factor)
            .ok_or_else(|| format!("\"{text}\" has the unknown unit \"{unit}\": {ACCEPTED}"))?;
        let bytes = scale(number, factor)
            .ok_or_else(|| format!("\"{text}\" is not a size of at most 16 EiB: {ACCEPTED}"))?;
        u64::try_from(bytes)
            .map(Self)
            .map_err(|_| format!("\"{text}\" is larger than any address: {ACCEPTED}"))
    }
}

/// The number in front and the unit behind it.
fn split_unit(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_')
        .unwrap_or(text.len());
    (&text[..end], text[end..].trim())
}

/// `number × factor` for a decimal number, exactly where it is exact, else rounded down.
fn scale(number: &str, factor: u64) -> Option<u128> {
    let number = number.replace('_', "");
    let (whole, fraction) = number.split_once('.').unwrap_or((&number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') || fraction.len() > 9 {
        return None;
    }
    let factor = u128::from(factor);
    let digits = |text: &str| {
        if text.is_empty() {
            Ok(0)
        } else {
            text.parse::<u64>()
        }
    };
    let whole = u128::from(digits(whole).ok()?).checked_mul(factor)?;
    let tenths = 10u128.pow(u32::try_from(fraction.len()).ok()?);
    whole.checked_add(u128::from(digits(fraction).ok()?) * factor / tenths)
}

impl Value for ByteSize {
    fn read(text: &str) -> Result<Self, String> {
        text.parse()
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

const DURATION_UNITS: [(&str, u64); 6] = [
    ("h", 3_600_000_000_000),
    ("min", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1000),
    ("ns", 1),
];

impl Value for Duration {
    fn read(text: &str) -> Result<Self, String> {
        const ACCEPTED: &str = "durations are written like 250ms, 5s or 30min";
        let (number, unit) = split_unit(text);
        if unit.is_empty() {
            return Err(format!("\"{text}\" has no unit: {ACCEPTED}"));
        }
        let factor = DURATION_UNITS
            .into_iter()
            .find(|(name, _)| *name == unit)
            .map(|(_, factor)| factor)
            .ok_or_else(|| format!("\"{text}\" has the unknown unit \"{unit}\": {ACCEPTED}"))?;
        scale(number, factor)
            .and_then(|nanos| u64::try_from(nanos).ok())
            .map(Self::from_nanos)
            .ok_or_else(|| format!("\"{text}\" is not a duration of at most 500 years: {ACCEPTED}"))
    }

    fn show(&self) -> String {
        let nanos = self.as_nanos();
        for (unit, factor) in DURATION_UNITS {
            let factor = u128::from(factor);
            if nanos >= factor && nanos.is_multiple_of(factor) {
                return format!("{}{unit}", nanos / factor);
            }
        }
        "0s".to_owned()
    }
}

impl Value for bool {
    fn read(text: &str) -> Result<Self, String> {
        match text {
            "true" | "1" => Ok(true),
            "false" | "0" => Ok(false),
            _ => Err(format!("\"{text}\" is neither true nor false")),
        }
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for String {
    fn read(text: &str) -> Result<Self, String> {
        match text.trim() {
            "" => Err("it is empty".to_owned()),
            text => Ok(text.to_owned()),
        }
    }

    fn show(&self) -> String {
        self.clone()
    }
}

impl Value for PathBuf {
    fn read(text: &str) -> Result<Self, String> {
        String::read(text).map(Self::from)
    }

    fn show(&self) -> String {
        self.display().to_string()
    }
}

impl Value for SocketAddr {
    fn read(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| {
            format!("\"{text}\" is not an address: write IP:PORT, such as 127.0.0.1:0")
        })
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

/// Where a master listens: `HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MasterAddress(pub(crate) String);

impl FromStr for MasterAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const ACCEPTED: &str = "write HOST:PORT, such as 127.0.0.1:50061";
        let text = text.trim();
        match text.rsplit_once(':') {
            None => Err(format!("\"{text}\" has no port: {ACCEPTED}")),
            Some(("", _)) => Err(format!("\"{text}\" has no host: {ACCEPTED}")),
            Some((_, port)) if !port.parse::<u16>().is_ok_and(|port| port != 0) => {
                Err(format!("\"{text}\" has no usable port: {ACCEPTED}"))
            }
            Some(_) => Ok(Self(text.to_owned())),
        }
    }
}

impl Value for MasterAddress {
    fn read(text: &str) -> Result<Self, String> {
        text.parse()
    }

    fn show(&self) -> String {
        self.0.clone()
    }
}

impl Value for TransportSet {
    fn read(text: &str) -> Result<Self, String> {
        text.parse()
            .map_err(|error: layercake_transport::Error| error.to_string())
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

/// A share of a whole, above 0 and up to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ratio(pub(crate) f64);

impl Value for Ratio {
    fn read(text: &str) -> Result<Self, String> {
        match text.parse::<f64>() {
            Ok(ratio) if ratio > 0.0 && ratio <= 1.0 => Ok(Self(ratio)),
            _ => Err(format!("\"{text}\" is not a number above 0 and up to 1")),
        }
    }

    fn show(&self) -> String {
        self.0.to_string()
    }
}

macro_rules! numbers {
    ($($number:ty, $accepted:literal;)*) => {$(
        impl Value for $number {
            fn read(text: &str) -> Result<Self, String> {
                text.parse()
                    .map_err(|_| format!("\"{text}\" is not a number from {}", $accepted))
            }

            fn show(&self) -> String {
                self.to_string()
            }
        }
    )*};
}

numbers! {
    NonZero<u8>, "1 to 255";
    NonZero<u32>, "1 to 4294967295";
}

/// A value that may be left out, written as `none`.
impl<T: Value> Value for Option<T> {
    fn read(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(None),
            text => T::read(text).map(Some),
        }
    }

    fn show(&self) -> String {
        self.as_ref().map_or_else(|| "none".to_owned(), T::show)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        for (text, bytes) in [
            ("512B", 512),
            ("4KiB", 4096),
            ("90MiB", 90 << 20),
            ("1.5GiB", 3 << 29),
            ("16 GiB", 16 << 30),
            ("2GB", 2_000_000_000),
            ("1_000kB", 1_000_000),
            ("0B", 0),
        ] {
            assert_eq!(ByteSize::read(text), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn sizes_without_sense_are_refused_with_the_text_and_what_is_accepted() {
        for text in [
            "",
            "12",
            "GiB",
            "1..5GiB",
            "5 parsecs",
            "-4KiB",
            "99999999999TiB",
            "1e3B",
        ] {
            let error = ByteSize::read(text).expect_err(text);
            assert!(error.contains(text) && error.contains("90MiB"), "{error}");
        }
    }

    #[test]
    fn durations_are_read_with_their_units() {
        for (text, duration) in [
            ("250ms", Duration::from_millis(250)),
            ("5s", Duration::from_secs(5)),
            ("1.5s", Duration::from_millis(1500)),
            ("30min", Duration::from_mins(30)),
            ("2h", Duration::from_hours(2)),
            ("0s", Duration::ZERO),
        ] {
            assert_eq!(Duration::read(text), Ok(duration), "{text}");
        }
        for text in ["", "5", "five s", "5 fortnights", "5S", "99999999999999h"] {
            let error = Duration::read(text).expect_err(text);
            assert!(error.contains(text) && error.contains("30min"), "{error}");
        }
    }

    #[test]
    fn values_are_shown_as_they_are_read() {
        for text in ["1GiB", "90MiB", "1023B", "0B"] {
            assert_eq!(ByteSize::read(text).map(|v| v.show()).as_deref(), Ok(text));
        }
        for text in ["1h", "90s", "250ms", "7us", "0s"] {
            assert_eq!(Duration::read(text).map(|v| v.show()).as_deref(), Ok(text));
        }
        for text in ["none", "127.0.0.1:80"] {
            let value = Option::<SocketAddr>::read(text).map(|v| v.show());
            assert_eq!(value.as_deref(), Ok(text));
        }
        let transports = TransportSet::read("shm,tcp").map(|v| v.show());
        assert_eq!(transports.as_deref(), Ok("shm,tcp"));
    }
}
