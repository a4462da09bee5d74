//! Number formats for the command line and for tables.

use std::time::Duration;

use switchyard_resp::units::{TIME_FORM, parse_time};

/// Parses a time on the command line, in the syntax of the configuration.
pub fn time_flag(text: &str) -> Result<Duration, String> {
    parse_time(text).ok_or_else(|| format!("must be {TIME_FORM}"))
}

/// `1234567` as `1,234,567`.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Milliseconds with up to three digits of precision.
pub fn millis(time: Duration) -> String {
    let ms = time.as_secs_f64() * 1000.0;
    match ms {
        ms if ms < 1.0 => format!("{ms:.3} ms"),
        ms if ms < 10.0 => format!("{ms:.2} ms"),
        ms => format!("{ms:.1} ms"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        let shown: Vec<_> = [0, 12, 123, 1234, 1_234_567].map(thousands).to_vec();
        assert_eq!(shown, ["0", "12", "123", "1,234", "1,234,567"]);
        let shown: Vec<_> = [12, 1_234, 12_345].map(|us| millis(Duration::from_micros(us))).to_vec();
        assert_eq!(shown, ["0.012 ms", "1.23 ms", "12.3 ms"]);
    }
}
