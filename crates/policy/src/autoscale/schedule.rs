//! Minimum number of nodes by weekday and time in UTC, for predictable load.
//!
//! An entry is valid until the next one of the week, so a peak needs two: `Fri 18:00 at least 6` and
//! `Sat 02:00 at least 2`. Not cron syntax, because it has start times but no durations. UTC, because `policy` has no
//! time zones, and the night of a clock change would have an hour twice.

use serde::{Deserialize, Serialize};

use super::Millis;

const DAYS: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
const MINUTES_OF_DAY: u64 = 24 * 60;
const MINUTES_OF_WEEK: u64 = 7 * MINUTES_OF_DAY;

/// Entries by minute of the week, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    lines: Vec<(u64, usize)>,
    texts: Vec<String>,
}

impl Schedule {
    /// Parses entries such as `Fri 18:00 at least 6` or `daily 08:00 at least 3`.
    ///
    /// # Errors
    /// The first invalid entry, or a time that occurs twice.
    pub fn parse(texts: &[String]) -> Result<Self, String> {
        let mut lines = Vec::new();
        for text in texts {
            let form = || {
                format!("{text:?} is not of the form \"Fri 18:00 at least 6\" or \"daily 08:00 at least 3\", in UTC")
            };
            let words: Vec<&str> = text.split_whitespace().collect();
            let [day, time, "at", "least", count] = words.as_slice() else { return Err(form()) };
            let (hour, minute) = time.split_once(':').ok_or_else(form)?;
            let number =
                |text: &str, below: u64| text.parse().ok().filter(|number: &u64| *number < below && text.len() <= 2);
            let (hour, minute) = number(hour, 24).zip(number(minute, 60)).ok_or_else(form)?;
            let count = count.parse().ok().filter(|count| (1..=10_000).contains(count)).ok_or_else(form)?;
            let days = match DAYS.iter().position(|known| known.eq_ignore_ascii_case(day)) {
                Some(day) => day as u64..day as u64 + 1,
                None if day.eq_ignore_ascii_case("daily") => 0..7,
                None => return Err(form()),
            };
            for day in days {
                let at = day * MINUTES_OF_DAY + hour * 60 + minute;
                if lines.iter().any(|(known, _)| *known == at) {
                    return Err(format!("{text:?}: another schedule line has the same time"));
                }
                lines.push((at, count));
            }
        }
        lines.sort_unstable();
        Ok(Self { lines, texts: texts.to_vec() })
    }

    /// The entries as configured.
    #[must_use]
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    /// Minimum number of nodes at this time.
    #[must_use]
    pub fn minimum(&self, now: Millis) -> Option<usize> {
        // 1970 started on a Thursday.
        let minute = (now / 60_000 + 3 * MINUTES_OF_DAY) % MINUTES_OF_WEEK;
        let line = self.lines.iter().rev().find(|(at, _)| *at <= minute);
        // Before the first entry of the week, the last entry of the previous week is valid.
        line.or(self.lines.last()).map(|(_, count)| *count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(lines: &[&str]) -> Result<Schedule, String> {
        Schedule::parse(&lines.iter().map(|&line| line.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn an_entry_is_valid_until_the_next_one() {
        let week = schedule(&["Fri 18:00 at least 6", "sat 02:00 at least 2"]).expect("a schedule");
        // 2026-11-27 is a Friday.
        let friday = 1_795_737_600_000;
        let at = |hours: u64, minutes: u64| week.minimum(friday + (hours * 60 + minutes) * 60_000);
        assert_eq!(
            (at(0, 0), at(17, 59), at(18, 0), at(25, 59), at(26, 0)),
            (Some(2), Some(2), Some(6), Some(6), Some(2))
        );
        let daily = schedule(&["daily 08:30 at least 4", "daily 20:00 at least 1"]).expect("a schedule");
        assert_eq!((daily.minimum(friday + 9 * 3_600_000), daily.minimum(friday + 21 * 3_600_000)), (Some(4), Some(1)));
        assert_eq!(Schedule::default().minimum(friday), None);
    }

    #[test]
    fn invalid_entries_are_refused() {
        for line in [
            "Fri 18 at least 6",
            "Fri 24:00 at least 6",
            "Fri 18:00 at most 6",
            "Fry 18:00 at least 6",
            "Fri 18:00 at least 0",
            "",
        ] {
            assert!(schedule(&[line]).is_err_and(|why| why.contains("Fri 18:00 at least 6")), "{line}");
        }
        assert!(
            schedule(&["daily 08:00 at least 4", "Mon 08:00 at least 2"])
                .is_err_and(|why| why.contains("the same time"))
        );
    }
}
