//! History of a fleet for the policies that look ahead: one record per minute, of at most eight weeks.
//!
//! Records are means of a minute rather than single observations: noise within a minute is no reason for a node, and
//! eight weeks take 1.3 MB. A minute without an observation is missing, and each reader decides how to fill the gap.
//!
//! A day is one document of 16 bytes per minute, so that storing a minute rewrites one day at most. Bytes rather than
//! serde, because JSON would take five times the space.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use super::{Knobs, Millis, Observed};

/// A minute, in milliseconds.
pub(super) const MINUTE: Millis = 60_000;

/// A day and a week, in minutes.
pub(super) const DAY: u64 = 24 * 60;
pub(super) const WEEK: u64 = 7 * DAY;

/// Maximum length, in minutes: eight weeks, so that a weekly season is a mean of several weeks.
const MINUTES_MAX: u64 = 8 * WEEK;

/// Maximum number of days with a record: eight weeks touch one day more.
pub const HISTORY_DAYS: u64 = 8 * 7 + 1;

/// Step back of the wall clock that is waited for, in minutes. After a larger one, later records are dropped.
const STEP_BACK: u64 = 60;

/// Duration after which a wall clock more than a day away from the last record is accepted, in milliseconds. A clock
/// that was wrong for a moment must not end the history.
const FAR_AFTER: Millis = 60 * MINUTE;

/// Version of a day's document.
const FORMAT: u8 = 1;

/// Bytes before the records: version, and the first minute.
const HEADER: usize = 9;

/// Bytes of a record.
const RECORD: usize = 16;

/// Minimum of slow minutes before they limit the capacity: half an hour is no accident.
const SLOW_MIN: usize = 30;

/// Fraction of the slow minutes that must be above the estimated capacity. Below that, load does not explain them.
const SLOW_EXPLAINED: f64 = 0.8;

/// Means of one minute.
#[derive(Clone, Copy, Debug)]
struct Minute {
    /// Requests per second of the fleet. NaN: the minute is missing.
    requests: f32,
    /// Mean response time, in microseconds.
    mean_us: f32,
    /// CPU use of all servers, in cores. NaN: unknown.
    cpu: f32,
    nodes: u16,
    /// Time to add a node as known then, in seconds.
    startup: u16,
}

impl Minute {
    const MISSING: Self = Self { requests: f32::NAN, mean_us: 0.0, cpu: f32::NAN, nodes: 0, startup: 0 };

    fn is_known(&self) -> bool {
        self.requests.is_finite() && self.requests >= 0.0 && self.nodes > 0
    }

    fn to_bytes(self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        bytes[..4].copy_from_slice(&self.requests.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.mean_us.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.cpu.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.nodes.to_le_bytes());
        bytes[14..].copy_from_slice(&self.startup.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; RECORD]) -> Self {
        let float = |at: usize| f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let number = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Self { requests: float(0), mean_us: float(4), cpu: float(8), nodes: number(12), startup: number(14) }
    }
}

/// Sums of the current minute.
#[derive(Debug, Default)]
struct OpenMinute {
    minute: u64,
    samples: u32,
    requests: f64,
    /// Response times weighted by requests.
    response: f64,
    cpu: f64,
    cpu_samples: u32,
    nodes: usize,
    startup: Millis,
}

impl OpenMinute {
    fn add(&mut self, observed: &Observed, startup: Millis) {
        (self.nodes, self.startup) = (observed.nodes.len(), startup);
        let Some(requests) = observed.requests().filter(|rate| rate.is_finite()) else { return };
        self.samples += 1;
        self.requests += requests;
        self.response += observed.mean_us().unwrap_or(0.0) * requests;
        if let Some(cpu) = observed.cpu().filter(|cpu| cpu.is_finite()) {
            self.cpu += cpu;
            self.cpu_samples += 1;
        }
    }

    fn record(&self) -> Minute {
        let mean_us = if self.requests > 0.0 { self.response / self.requests } else { 0.0 };
        let cpu = if self.cpu_samples > 0 { self.cpu / f64::from(self.cpu_samples) } else { f64::NAN };
        Minute {
            requests: (self.requests / f64::from(self.samples)) as f32,
            mean_us: mean_us as f32,
            cpu: cpu as f32,
            nodes: self.nodes.try_into().unwrap_or(u16::MAX),
            startup: (self.startup / 1000).try_into().unwrap_or(u16::MAX),
        }
    }
}

/// Records of a fleet. Minutes are numbered since 1970, UTC.
#[derive(Debug, Default)]
pub(super) struct History {
    /// Number of the first record.
    first: u64,
    minutes: VecDeque<Minute>,
    /// Number of records that are not missing.
    known: usize,
    open: OpenMinute,
    /// Time of the run since which the wall clock is far away from the records.
    far_since: Option<Millis>,
    /// Days with changes since the last [`Self::saved`].
    unsaved: BTreeSet<u64>,
}

impl History {
    /// Adds an observation. `startup`: time to add a node, as known now. Returns whether a minute has ended.
    pub(super) fn observe(&mut self, observed: &Observed, startup: Millis) -> bool {
        let minute = observed.now.wall / MINUTE;
        if !self.accept_clock(minute, observed.now.run) {
            return false;
        }
        let mut has_ended = false;
        if minute != self.open.minute {
            has_ended = self.open.samples > 0 && self.open.minute >= self.end();
            if has_ended {
                self.push(self.open.minute, self.open.record());
            }
            self.open = OpenMinute { minute, ..OpenMinute::default() };
        }
        self.open.add(observed, startup);
        has_ended
    }

    /// Whether an observation at this minute belongs into the history. Drops records that a clock in the future has
    /// left behind.
    fn accept_clock(&mut self, minute: u64, run: Millis) -> bool {
        let end = self.end();
        if self.minutes.is_empty() {
            return true;
        }
        let is_far = minute.abs_diff(end) > DAY;
        if is_far && run.saturating_sub(*self.far_since.get_or_insert(run)) < FAR_AFTER {
            return false;
        }
        self.far_since = None;
        if minute < end && end - minute <= STEP_BACK {
            return false;
        }
        if minute < end {
            self.truncate(minute);
            self.open = OpenMinute::default();
        } else if is_far {
            self.extend_to(minute);
            self.open = OpenMinute::default();
        }
        true
    }

    fn truncate(&mut self, end: u64) {
        while self.end() > end {
            if let Some(dropped) = self.minutes.pop_back() {
                self.known -= usize::from(dropped.is_known());
            }
            if self.minutes.is_empty() {
                self.first = end;
            }
        }
    }

    /// Adds missing minutes before `end`.
    fn extend_to(&mut self, end: u64) {
        if self.minutes.is_empty() || end.saturating_sub(self.end()) >= MINUTES_MAX {
            self.minutes.clear();
            (self.first, self.known) = (end, 0);
        }
        while self.end() < end {
            self.minutes.push_back(Minute::MISSING);
        }
        while self.minutes.len() as u64 > MINUTES_MAX {
            let dropped = self.minutes.pop_front();
            self.known -= usize::from(dropped.is_some_and(|minute| minute.is_known()));
            self.first += 1;
        }
    }

    /// Adds the record of a minute after the last one.
    fn push(&mut self, minute: u64, record: Minute) {
        self.extend_to(minute);
        self.minutes.push_back(record);
        self.known += usize::from(record.is_known());
        self.extend_to(minute + 1);
        self.unsaved.insert(minute / DAY);
    }

    fn end(&self) -> u64 {
        self.first + self.minutes.len() as u64
    }

    /// Minutes between the first and the last record.
    pub(super) fn range(&self) -> Range<u64> {
        self.first..self.end()
    }

    /// Duration of all records, in minutes. Excludes missing minutes.
    pub(super) fn known(&self) -> u64 {
        self.known as u64
    }

    fn get(&self, minute: u64) -> Option<&Minute> {
        let at = minute.checked_sub(self.first)?;
        self.minutes.get(at as usize).filter(|record| record.is_known())
    }

    /// Requests per second in a minute. `None`: missing.
    pub(super) fn requests(&self, minute: u64) -> Option<f64> {
        self.get(minute).map(|record| f64::from(record.requests))
    }

    /// Mean of the requests per second in these minutes. `None` if all are missing.
    pub(super) fn mean(&self, minutes: Range<u64>) -> Option<f64> {
        let (sum, count) = minutes
            .filter_map(|minute| self.requests(minute))
            .fold((0.0, 0.0), |(sum, count), rate| (sum + rate, count + 1.0));
        (count > 0.0).then(|| sum / count)
    }

    /// Number of nodes in a minute, and the time to add one as known then.
    pub(super) fn nodes(&self, minute: u64) -> Option<(f64, Millis)> {
        self.get(minute).map(|record| (f64::from(record.nodes), Millis::from(record.startup) * 1000))
    }

    /// Latest known time to add a node. `None`: never recorded.
    pub(super) fn startup(&self) -> Option<Millis> {
        let last = self.minutes.iter().rev().find(|record| record.is_known())?;
        (last.startup > 0).then(|| Millis::from(last.startup) * 1000)
    }

    /// Nodes that a minute needed, not rounded. `room`: requests per second that one node should serve. If replies were
    /// too slow under load, at least one node more than there was.
    pub(super) fn need(&self, minute: u64, room: f64, knobs: &Knobs) -> Option<f64> {
        let record = self.get(minute)?;
        let (need, nodes) = (f64::from(record.requests) / room, f64::from(record.nodes));
        let is_slow = f64::from(record.mean_us) > knobs.response_us && need > nodes / 2.0;
        Some(if is_slow { need.max(nodes + 1.0) } else { need })
    }

    /// Requests per second that one node should serve: the configured capacity, or the rate at the CPU limit. Less, if
    /// replies were too slow at lower rates. `None`: unknown.
    pub(super) fn room(&self, knobs: &Knobs) -> Option<f64> {
        let kept_free = 1.0 - knobs.headroom.clamp(0.0, 0.9);
        let configured = knobs.capacity.filter(|capacity| *capacity > 0.0).map(|capacity| capacity * kept_free);
        let known = configured.or_else(|| self.rate_at_cpu(knobs.cpu));
        let slow = self.rate_of_slow_replies(knobs.response_us).map(|rate| rate * kept_free);
        known.into_iter().chain(slow).min_by(f64::total_cmp)
    }

    /// Requests per second of a node that uses this many cores, from the last day.
    fn rate_at_cpu(&self, cores: f64) -> Option<f64> {
        let last_day = self.minutes.iter().rev().take(DAY as usize).filter(|record| record.is_known());
        let measured = last_day.filter(|record| record.cpu > 0.0);
        let (requests, cpu) = measured.fold((0.0, 0.0), |(requests, cpu), record| {
            (requests + f64::from(record.requests), cpu + f64::from(record.cpu))
        });
        (requests > 0.0 && cpu > 0.0).then(|| cores * requests / cpu)
    }

    /// Requests per second of a node that best separate minutes with slow replies from others, in the last week. `None`
    /// without slow minutes, or if load does not explain them.
    fn rate_of_slow_replies(&self, response_us: f64) -> Option<f64> {
        let last_week = self.minutes.iter().rev().take(WEEK as usize).filter(|record| record.is_known());
        let mut minutes: Vec<(f32, bool)> = last_week
            .map(|record| (record.requests / f32::from(record.nodes), f64::from(record.mean_us) > response_us))
            .collect();
        let slow = minutes.iter().filter(|(_, is_slow)| *is_slow).count();
        if slow < SLOW_MIN {
            return None;
        }
        minutes.sort_by(|one, other| one.0.total_cmp(&other.0));
        // Errors if all minutes from this one on were slow: slow ones before it, and fast ones from it on.
        let (mut slow_before, mut errors) = (0, minutes.len() - slow);
        let mut best = (usize::MAX, 0.0, 0);
        for (rate, is_slow) in minutes {
            if errors < best.0 {
                best = (errors, rate, slow_before);
            }
            (slow_before, errors) = if is_slow { (slow_before + 1, errors + 1) } else { (slow_before, errors - 1) };
        }
        let (_, rate, missed) = best;
        (missed as f64 <= slow as f64 * (1.0 - SLOW_EXPLAINED) && rate > 0.0).then_some(f64::from(rate))
    }

    /// Days with changes since the last [`Self::saved`], and their documents.
    pub(super) fn unsaved(&self) -> impl Iterator<Item = (u64, Vec<u8>)> {
        self.unsaved.iter().map(|day| (*day, self.document(*day)))
    }

    pub(super) fn saved(&mut self, day: u64) {
        self.unsaved.remove(&day);
    }

    fn document(&self, day: u64) -> Vec<u8> {
        let (from, to) = ((day * DAY).max(self.first), ((day + 1) * DAY).min(self.end()));
        let mut bytes = vec![FORMAT];
        bytes.extend_from_slice(&from.to_le_bytes());
        let records = (from..to).map(|minute| self.minutes[(minute - self.first) as usize].to_bytes());
        records.for_each(|record| bytes.extend_from_slice(&record));
        bytes
    }

    /// Restores the records of an earlier run from documents in any order. `wall`: the present wall time. Returns the
    /// number of illegible documents.
    pub(super) fn restore(documents: impl IntoIterator<Item = Vec<u8>>, wall: Millis) -> (Self, usize) {
        let (mut days, mut illegible) = (Vec::new(), 0);
        for document in documents {
            match parse(&document) {
                Some(day) => days.push(day),
                None => illegible += 1,
            }
        }
        days.sort_unstable_by_key(|(first, _)| *first);
        // A clock in the future may have left days behind. If all are in the future, the present clock is wrong.
        let is_past = |first: u64| first <= wall / MINUTE + DAY;
        if days.iter().any(|(first, _)| is_past(*first)) {
            days.retain(|(first, _)| is_past(*first));
        }
        let mut history = Self::default();
        for (first, records) in days {
            for (minute, record) in (first..).zip(records) {
                if record.is_known() && (history.minutes.is_empty() || minute >= history.end()) {
                    history.push(minute, record);
                }
            }
        }
        history.unsaved.clear();
        (history, illegible)
    }
}

/// First minute and records of a document. `None` if it is not of this form.
fn parse(document: &[u8]) -> Option<(u64, Vec<Minute>)> {
    let (header, records) = document.split_at_checked(HEADER)?;
    let (format, first) = header.split_first()?;
    let first = u64::from_le_bytes(first.try_into().ok()?);
    let (records, rest) = records.as_chunks::<RECORD>();
    let is_one_day = first <= u64::from(u32::MAX) && first % DAY + records.len() as u64 <= DAY;
    (*format == FORMAT && rest.is_empty() && is_one_day)
        .then(|| (first, records.iter().map(Minute::from_bytes).collect()))
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::super::{Node, Now};
    use super::*;
    use crate::topology::NodeId;

    /// Start of a Monday.
    pub(crate) const START: u64 = 20_773 * DAY;

    /// Observation of `nodes` equal nodes in a minute. A core serves 10,000 requests per second.
    pub(crate) fn observed(minute: u64, requests: f64, nodes: u16) -> Observed {
        let each = requests / f64::from(nodes);
        let node = |id| Node {
            id: NodeId(id),
            requests: Some(each),
            mean_us: Some(100.0 / (1.0 - (each / 10_000.0).min(0.999))),
            cpu: Some(each / 10_000.0),
            memory: Some((1 << 20, 100 << 20)),
            is_up: true,
            may_go: true,
        };
        let at = minute * MINUTE;
        Observed { now: Now { run: at, wall: at }, nodes: (0..nodes).map(node).collect() }
    }

    /// History of these minutes, from [`START`] on, with ten nodes.
    pub(crate) fn history(loads: impl IntoIterator<Item = f64>) -> History {
        let mut history = History::default();
        let mut minute = START;
        for load in loads {
            history.observe(&observed(minute, load, 10), 180_000);
            minute += 1;
        }
        history.observe(&observed(minute, 0.0, 10), 180_000);
        history
    }

    fn stored(history: &History) -> Vec<Vec<u8>> {
        history.unsaved().map(|(_, document)| document).collect()
    }

    fn same(one: &History, other: &History) -> bool {
        let bytes = |history: &History| -> Vec<[u8; RECORD]> { history.minutes.iter().map(|m| m.to_bytes()).collect() };
        one.range() == other.range() && one.known == other.known && bytes(one) == bytes(other)
    }

    #[test]
    fn records_are_means_of_a_minute() {
        let mut history = History::default();
        let at = |second: u64, load: f64| {
            let time = START * MINUTE + second * 1000;
            Observed { now: Now { run: time, wall: time }, ..observed(START, load, 2) }
        };
        for (second, load) in [(0, 1000.0), (20, 2000.0), (40, 6000.0)] {
            assert!(!history.observe(&at(second, load), 0));
        }
        assert!(history.observe(&at(60, 9000.0), 0), "the minute has ended");
        assert_eq!((history.requests(START), history.requests(START + 1)), (Some(3000.0), None));
        // Minutes without a known rate are missing.
        let mut unknown = at(120, 9000.0);
        unknown.nodes[0].requests = None;
        history.observe(&unknown, 0);
        history.observe(&at(300, 500.0), 0);
        history.observe(&at(360, 500.0), 0);
        let known = (START..START + 6).map(|minute| history.requests(minute).is_some());
        assert_eq!(known.collect::<Vec<_>>(), [true, true, false, false, false, true]);
        assert_eq!((history.known(), history.mean(START..START + 6)), (3, Some(12_500.0 / 3.0)));
    }

    #[test]
    fn the_history_has_eight_weeks_at_most() {
        let history = history((0..MINUTES_MAX + 3 * DAY).map(|minute| minute as f64));
        assert_eq!(history.range(), START + 3 * DAY..START + 3 * DAY + MINUTES_MAX);
        assert_eq!((history.known(), history.requests(START)), (MINUTES_MAX, None));
        let bytes: usize = (START / DAY..START / DAY + 60).map(|day| history.document(day).len()).sum();
        assert!(bytes < 1_300_000, "{bytes} bytes");
    }

    #[test]
    fn a_restart_keeps_all_records_whatever_the_order() {
        let before = history((0..9 * DAY).map(|minute| 100.0 + (minute % 700) as f64));
        let mut documents = stored(&before);
        documents.reverse();
        documents.push(b"not a document".to_vec());
        let wall = (START + 9 * DAY) * MINUTE;
        let (after, illegible) = History::restore(documents.clone(), wall);
        assert!(same(&before, &after) && illegible == 1, "{:?} and {:?}", before.range(), after.range());
        assert_eq!(after.startup(), Some(180_000));
        // Days of a clock in the future are left out.
        let mut future = History::default();
        future.push(START + 9000 * DAY, Minute { nodes: 1, requests: 1.0, ..Minute::MISSING });
        documents.extend(stored(&future));
        assert!(same(&before, &History::restore(documents, wall).0));
        // Nothing to write before the next change.
        assert_eq!(stored(&after), Vec::<Vec<u8>>::new());
    }

    #[test]
    fn a_wrong_wall_clock_neither_ends_nor_spoils_the_history() {
        let mut history = history((0..100).map(f64::from));
        let end = history.end();
        let mut at = |run: u64, wall: u64| {
            let now = Now { run: run * MINUTE, wall: wall * MINUTE };
            history.observe(&Observed { now, ..observed(end, 7.0, 10) }, 0);
            history.range()
        };
        // For some minutes in the year 2038, then an hour back, then right again.
        for minute in 1..30 {
            assert_eq!(at(end + minute, end + 6_000_000 + minute).end, end);
        }
        assert_eq!(at(end + 30, end - 30).end, end, "waits for the clock");
        at(end + 60, end + 60);
        assert_eq!(at(end + 61, end + 61), START..end + 61);
        // A clock that stays wrong counts in the end, and later records are dropped when it is set back.
        for minute in 62..130 {
            at(end + minute, end + 50_000 + minute);
        }
        assert_eq!(at(end + 130, end + 50_130).end, end + 50_130);
        for minute in 132..200 {
            at(end + minute, end + minute);
        }
        assert_eq!(at(end + 200, end + 200).end, end + 200);
    }

    #[test]
    fn the_capacity_follows_cpu_and_slow_replies() {
        let knobs = Knobs { cpu: 0.8, headroom: 0.2, response_us: 1000.0, ..Knobs::default() };
        let busy = |load: f64| history((0..DAY).map(|minute| load * (1.0 + (minute % 10) as f64 / 100.0)));
        // A core serves 10,000 requests per second.
        let room = busy(50_000.0).room(&knobs).expect("measured");
        assert!((room - 8000.0).abs() < 10.0, "{room}");
        assert_eq!(busy(50_000.0).room(&Knobs { capacity: Some(5000.0), ..knobs.clone() }), Some(4000.0));
        // Replies take 1 ms at 90 % of a core.
        let ramp = history((0..DAY).map(|minute| minute as f64 / DAY as f64 * 99_000.0));
        let room = ramp.room(&Knobs { capacity: Some(50_000.0), ..knobs.clone() }).expect("measured");
        assert!((room - 9000.0 * 0.8).abs() < 20.0, "{room}");
        assert_eq!(History::default().room(&knobs), None);
    }

    #[test]
    fn a_slow_minute_needs_a_node_more() {
        let knobs = Knobs { response_us: 1000.0, ..Knobs::default() };
        let history = history([20_000.0, 95_000.0]);
        assert_eq!(history.need(START, 10_000.0, &knobs), Some(2.0));
        assert_eq!(history.need(START + 1, 10_000.0, &knobs), Some(11.0));
        assert_eq!(history.need(START + 2, 10_000.0, &knobs), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_read(mut documents in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 0..5), wall: u64) {
            let count = documents.len();
            for document in documents.iter_mut().filter(|document| document.len() >= HEADER) {
                document[0] = FORMAT;
                document[5..HEADER].fill(0);
            }
            let (history, illegible) = History::restore(documents, wall);
            prop_assert!(illegible <= count && history.known() <= history.range().end - history.range().start);
        }
    }
}
