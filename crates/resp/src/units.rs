//! Values with units, in the syntax of `redis.conf`, so that settings can be copied from there.
//!
//! Sizes are exactly those of redis.conf: `1k` is 1000 bytes and `1kb` is 1024, in any case. Times need a unit
//! (`250ms`, `10s`), because Redis reads a bare number as seconds in some settings and as milliseconds in others.

use std::time::Duration;

/// Syntax of a size, for error messages.
pub const SIZE_FORM: &str =
    "a size: bytes, or a number with k, m, g (powers of 1000) or kb, mb, gb (powers of 1024), such as \"64mb\"";

/// Syntax of a rate, for error messages.
pub const RATE_FORM: &str = "a rate: a number with its unit per second, such as \"20mb\"";

/// Syntax of a time, for error messages.
pub const TIME_FORM: &str = "a time with its unit: ms, s, m, h or d, such as \"250ms\" or \"10s\"";

/// Units of sizes, largest first within each kind, so that [`format_size`] finds the shortest exact form.
const SIZES: [(&str, u64); 7] =
    [("gb", 1 << 30), ("mb", 1 << 20), ("kb", 1 << 10), ("g", 1_000_000_000), ("m", 1_000_000), ("k", 1_000), ("b", 1)];

/// Units of times in milliseconds, largest first.
const TIMES: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// Splits digits from the unit after them; a space between is allowed.
fn split(text: &str) -> Option<(u64, String)> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number = text[..digits].parse().ok()?;
    Some((number, text[digits..].trim().to_ascii_lowercase()))
}

/// Parses bytes, such as `1gb`, `64mb`, `512`, `1k`.
pub fn parse_size(text: &str) -> Option<u64> {
    let (number, unit) = split(text)?;
    if unit.is_empty() {
        return Some(number);
    }
    let (_, bytes) = SIZES.iter().find(|(name, _)| *name == unit)?;
    number.checked_mul(*bytes)
}

/// Parses bytes per second, such as `20mb`. Requires a unit, because a bare number is nearly always an error. `0` needs
/// none.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    let has_unit = text.trim().ends_with(|last: char| last.is_ascii_alphabetic());
    match parse_size(text) {
        Some(bytes) if has_unit || bytes == 0 => Ok(bytes),
        Some(_) => {
            Err(format!("{text:?} has no unit: write {0}mb for {0} MiB per second, or {0}b for {0} bytes", text.trim()))
        }
        None => Err(format!("{text:?} is not a rate: a number with its unit per second, such as 500kb or 20mb")),
    }
}

/// Parses a time, such as `10s`, `250ms`, `5m`; a bare `0` needs no unit.
pub fn parse_time(text: &str) -> Option<Duration> {
    let (number, unit) = split(text)?;
    if unit.is_empty() {
        return (number == 0).then_some(Duration::ZERO);
    }
    let (_, millis) = TIMES.iter().find(|(name, _)| *name == unit)?;
    Some(Duration::from_millis(number.checked_mul(*millis)?))
}

/// Shortest exact form of a size: binary units first, because limits are nearly always powers of two.
pub fn format_size(bytes: u64) -> String {
    match SIZES.iter().find(|(unit, size)| *unit != "b" && bytes >= *size && bytes.is_multiple_of(*size)) {
        Some((unit, size)) => format!("{}{unit}", bytes / size),
        None => bytes.to_string(),
    }
}

/// A number with its noun: `1 key`, `2 keys`.
pub fn counted(number: impl TryInto<u64>, thing: &str) -> String {
    let number = number.try_into().unwrap_or(u64::MAX);
    format!("{number} {}", plural(number, thing))
}

/// Singular or plural of a noun for this number.
pub fn plural(number: u64, thing: &str) -> String {
    format!("{thing}{}", if number == 1 { "" } else { "s" })
}

/// Rounded size for messages, in decimal units.
pub fn describe_size(bytes: u64) -> String {
    format_rate(bytes as f64).replace("/s", "")
}

/// Shortest exact form of a time, in whole milliseconds.
pub fn format_time(time: Duration) -> String {
    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    match TIMES.iter().find(|(_, unit)| millis >= *unit && millis.is_multiple_of(*unit)) {
        Some((name, unit)) => format!("{}{name}", millis / unit),
        None => "0s".to_owned(),
    }
}

/// Rounded rate for messages, in decimal units as usual for networks: `2.5 MB/s`.
pub fn format_rate(bytes_per_second: f64) -> String {
    match bytes_per_second {
        rate if rate >= 1e9 => format!("{:.1} GB/s", rate / 1e9),
        rate if rate >= 1e6 => format!("{:.1} MB/s", rate / 1e6),
        rate if rate >= 1e3 => format!("{:.1} kB/s", rate / 1e3),
        rate => format!("{:.0} B/s", rate.max(0.0)),
    }
}

/// Rounded time for tables: at most two units (`2d 3h`, `41s`).
pub fn describe_time(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0 => format!("{}ms", time.as_millis()),
        1..60 => format!("{seconds}s"),
        60..3600 => format!("{}m {}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h {}m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d {}h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_redis_conf() {
        // The table at the top of redis.conf.
        for (text, bytes) in [
            ("1k", 1000),
            ("1kb", 1024),
            ("1m", 1_000_000),
            ("1mb", 1024 * 1024),
            ("1g", 1_000_000_000),
            ("1gb", 1024 * 1024 * 1024),
            ("1GB", 1 << 30),
            ("1Gb", 1 << 30),
            ("1gB", 1 << 30),
            ("17", 17),
            ("17b", 17),
            ("64 mb", 64 << 20),
        ] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
    }

    #[test]
    fn wrong_sizes_are_refused() {
        for text in ["", "mb", "-1", "1.5gb", "1tb", "1 kb b", "99999999999gb", "１kb", "0x10", "+1"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }

    #[test]
    fn rates_need_a_unit() {
        for (text, bytes) in [("20mb", 20 << 20), ("20b", 20), ("1k", 1000), ("0", 0), (" 5 MB ", 5 << 20)] {
            assert_eq!(parse_rate(text), Ok(bytes), "{text}");
        }
        let refused = parse_rate("20").expect_err("of what?");
        assert!(refused.contains("20mb") && refused.contains("20b"), "{refused}");
        assert!(parse_rate("fast").is_err() && parse_rate("").is_err());
    }

    #[test]
    fn times_need_a_unit() {
        for (text, millis) in
            [("250ms", 250), ("10s", 10_000), ("5m", 300_000), ("1h", 3_600_000), ("2D", 172_800_000), ("0", 0)]
        {
            assert_eq!(parse_time(text), Some(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "10", "s", "1.5s", "-1s", "1y", "1m30s", "99999999999999999d"] {
            assert_eq!(parse_time(text), None, "{text}");
        }
    }

    #[test]
    fn formatted_values_parse_to_themselves() {
        for bytes in [0, 1, 999, 1000, 1024, 1536, 1 << 20, 256 << 20, 512 << 20, 3 << 30, 5_000_000, u64::MAX] {
            assert_eq!(parse_size(&format_size(bytes)), Some(bytes), "{bytes}");
        }
        for millis in [0, 1, 250, 1000, 1500, 60_000, 90_000, 3_600_000, 86_400_000] {
            let time = Duration::from_millis(millis);
            assert_eq!(parse_time(&format_time(time)), Some(time), "{millis}");
        }
        assert_eq!(format_size(1 << 20), "1mb");
        assert_eq!(format_size(1_000_000), "1m");
        assert_eq!(format_time(Duration::from_millis(1500)), "1500ms");
        assert_eq!(describe_time(Duration::from_secs(93_700)), "1d 2h");
        assert_eq!([12.0, 1234.0, 2.5e6, 3e9].map(format_rate), ["12 B/s", "1.2 kB/s", "2.5 MB/s", "3.0 GB/s"]);
    }
}
