//! Values of flags as text.

use std::time::Duration;

/// What is accepted as a time.
pub(super) const TIME: &str = "milliseconds, or a number with one of the units ms, s, m and h, such as 200ms or 1.5s, is accepted";

/// Reads a time; the unit is milliseconds if none is written.
pub(super) fn time(text: &str) -> Option<Duration> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let millis = match unit.trim() {
        "" | "ms" => 1.0,
        "s" => 1e3,
        "m" => 60e3,
        "h" => 3600e3,
        _ => return None,
    };
    let number: f64 = number.parse().ok()?;
    Duration::try_from_secs_f64(number * millis / 1e3).ok()
}

/// What is accepted as a size.
pub(super) const SIZE: &str = "bytes, or a number with one of the units B, KB, MB, GB and TB (powers of 1024), such as 4MB, is accepted";

/// Reads a size as Mooncake writes it: bytes, or a number with a unit such as MB or GB, which are powers of
/// 1024 there.
pub fn size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return None,
    };
    if let Ok(number) = number.parse::<u64>() {
        return number.checked_mul(1 << shift);
    }
    let bytes = number.parse::<f64>().ok()? * f64::from(shift).exp2();
    // Of a fraction of a byte nobody speaks.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "inside of the type's bounds, as was just checked"
    )]
    (bytes.is_finite() && (0.0..9e18).contains(&bytes)).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_milliseconds_as_their_unit_or_another() {
        for (text, millis) in [
            ("200", 200),
            ("200ms", 200),
            ("0.2s", 200),
            ("5s", 5000),
            ("30m", 1_800_000),
            ("1h", 3_600_000),
            ("0", 0),
        ] {
            assert_eq!(time(text), Some(Duration::from_millis(millis)), "{text}");
        }
        for text in [
            "",
            "s",
            "-5",
            "5 days",
            "1..5s",
            "1e3s",
            "99999999999999999999999h",
        ] {
            assert_eq!(time(text), None, "{text}");
        }
    }

    #[test]
    fn sizes_count_in_powers_of_1024() {
        for (text, bytes) in [
            ("4MB", 4 << 20),
            ("4 MiB", 4 << 20),
            ("1.5gb", 3 << 29),
            ("17", 17),
            ("2TB", 2 << 40),
            ("0", 0),
        ] {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for text in ["", "MB", "-1", "1..2MB", "4 apples", "99999999999TB"] {
            assert_eq!(size(text), None, "{text}");
        }
    }
}
