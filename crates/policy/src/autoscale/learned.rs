//! The learned policy (Rahman et al. 2018, in the auto-scaling report): a decision tree predicts the number of nodes that
//! the next start-up time needs.
//!
//! **Label.** The nodes that the start-up time after a past minute needed. Hindsight knows it exactly. The paper's labels
//! are decisions of another policy, which a model can only imitate.
//!
//! **Features** of the paper: start-up time, utilisation, and the mean growth and decline during the same start-up time of
//! the last seven days. In addition: recent growth, deviation from yesterday, time of day, day of the week.
//!
//! One node is added per change, so a rise that needs several must be known several changes earlier: there is a tree for
//! one, two, four and eight start-up times. A node is added now if the nodes needed after k changes exceed the present
//! number by k.
//!
//! A tree learns the label as a multiple of the present load. So it also applies to loads that never occurred, where a
//! tree of absolute numbers would return the largest known one. In place of reduced-error pruning, the depth is chosen
//! by the error on the last days, which the tree was not grown on. The margin is measured on these days as well.
//!
//! Not an incremental tree: growing one from all records takes a fraction of a second, so a record has the same weight
//! whenever it arrived, and a restart needs no stored tree.

use smartcore::linalg::basic::matrix::DenseMatrix;
use smartcore::tree::decision_tree_regressor::{DecisionTreeRegressor, DecisionTreeRegressorParameters};

use super::advice::{Present, Step};
use super::forecast::{COVERED, quantile};
use super::history::{DAY, History, MINUTE, WEEK};
use super::{Knobs, Millis, Outlook};

/// Numbers of successive changes, each with a tree.
const SUCCESSIVE: [u64; 4] = [1, 2, 4, 8];

/// Number of features.
const FEATURES: usize = 11;

/// Minutes whose mean is the present load.
const RECENT: u64 = 5;

/// Minutes before the first row: the features of a week, and of an hour.
const BEFORE: u64 = WEEK + 70;

/// Maximum number of rows, and the minimum of rows to grow a tree and to judge it.
const ROWS_MAX: u64 = 4096;
const ROWS_MIN: usize = 200;
const JUDGED_MIN: usize = 50;

/// Minimum interval of rows, in minutes: nearer ones are nearly equal.
const ROWS_EVERY: u64 = 5;

/// Part of the rows that judges depths and margin: at most a week.
const JUDGED: u64 = 4;

/// Minimum number of the last seven days with known growth.
const DAYS_MIN: usize = 3;

/// Depths to choose from.
const DEPTHS: [u16; 4] = [3, 5, 7, 9];

/// Minimum number of rows per leaf, so that no leaf is one anomaly.
const LEAF_MIN: usize = 20;

/// Seed of the library's random source, so that equal histories have equal trees.
const SEED: u64 = 1;

/// Fraction of the need that must be free after a removal, so that an addition does not follow.
const SPARE: f64 = 0.1;

type Regressor = DecisionTreeRegressor<f64, f64, DenseMatrix<f64>, Vec<f64>>;

/// Minutes in which this number of successive additions ends: each has the start-up time and the pause before it, and the
/// first one may be decided a minute later.
pub(super) fn window(startup: Millis, knobs: &Knobs, changes: u64) -> u64 {
    ((startup + knobs.up_cooldown) * changes).div_ceil(MINUTE) + 1
}

/// Features of a minute, and the logarithm of the label relative to the present load.
struct Row {
    minute: u64,
    features: [f64; FEATURES],
    label: f64,
}

/// Need of nodes before this number of successive changes can end, not rounded, with the margin.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    changes: u64,
    pub(super) nodes: f64,
}

/// A trained tree.
#[derive(Debug)]
struct Tree {
    changes: u64,
    regressor: Regressor,
    /// Margin above the predicted logarithm.
    margin: f64,
}

/// Trained trees, by ascending number of changes.
#[derive(Debug)]
pub(super) struct Trees(Vec<Tree>);

impl Trees {
    /// Grows the trees. `None` if too few minutes are known. `has_hindsight`: false for an injected bug.
    pub(super) fn fit(history: &History, room: f64, knobs: &Knobs, has_hindsight: bool) -> Option<Self> {
        let fit = |changes| Tree::fit(&Labels { history, room, knobs, changes, has_hindsight });
        SUCCESSIVE.into_iter().map(fit).collect::<Option<_>>().map(Self)
    }

    /// Needs by ascending number of changes. Without recent telemetry, those of the same minute a week ago. `None` if that
    /// is unknown as well.
    pub(super) fn predict(&self, present: &Present<'_>) -> Option<Vec<Need>> {
        let need = |tree: &Tree| {
            let window = window(present.startup, present.knobs, tree.changes);
            let at = |minute: u64| features(present.history, minute, present.startup, window, present.room);
            let (load, features) = at(present.minute()).or_else(|| at(present.minute().checked_sub(WEEK)?))?;
            let growth = *predict(&tree.regressor, vec![features.to_vec()])?.first()?;
            Some(Need { changes: tree.changes, nodes: load / present.room * (growth + tree.margin).exp() })
        };
        self.0.iter().map(need).collect()
    }
}

impl Tree {
    fn fit(labels: &Labels<'_>) -> Option<Self> {
        let (start, end) = (labels.history.range().start + BEFORE, labels.history.range().end);
        let length = end.checked_sub(start)?;
        let every = (length / ROWS_MAX + 1).max(ROWS_EVERY) as usize;
        let rows: Vec<Row> = (start..end).step_by(every).filter_map(|minute| labels.row(minute)).collect();
        let judged_from = end - (length / JUDGED).min(WEEK);
        let (grown, judged) = rows.split_at(rows.partition_point(|row| row.minute < judged_from));
        if grown.len() < ROWS_MIN || judged.len() < JUDGED_MIN {
            return None;
        }
        let errors = |depth: u16| -> Option<(u16, Vec<f64>)> {
            let predicted = predict(&grow(grown, depth)?, judged.iter().map(|row| row.features.to_vec()).collect())?;
            Some((depth, judged.iter().zip(predicted).map(|(row, predicted)| row.label - predicted).collect()))
        };
        let squares = |errors: &[f64]| errors.iter().map(|error| error * error).sum::<f64>();
        let tried = DEPTHS.into_iter().filter_map(errors);
        let (depth, errors) = tried.min_by(|one, other| squares(&one.1).total_cmp(&squares(&other.1)))?;
        let margin = quantile(errors, COVERED).max(0.0);
        Some(Self { changes: labels.changes, regressor: grow(&rows, depth)?, margin })
    }
}

/// Returns the step for these needs, and its outlook.
pub(super) fn advise(needs: &[Need], present: &Present<'_>) -> (Step, Outlook) {
    let count = present.count();
    let is_short = |need: &&Need| present.nodes_for(need.nodes) as u64 > count as u64 + need.changes - 1;
    // A removal takes the time of one change.
    let is_spare = |need: &Need| {
        (present.nodes_for(need.nodes * (1.0 + SPARE)) as u64) < count as u64 + need.changes.saturating_sub(2)
    };
    let short = needs.iter().find(is_short);
    let now = present.minute();
    let has_telemetry = present.history.mean(now.saturating_sub(RECENT)..now).is_some();
    let step = match short {
        Some(_) => Step::Add,
        None if has_telemetry && needs.iter().all(is_spare) => Step::Remove,
        None => Step::Stay,
    };
    let shown = short.or(needs.first()).copied().unwrap_or(Need { changes: 1, nodes: 0.0 });
    let outlook = Outlook {
        requests: shown.nodes * present.room,
        nodes: present.nodes_for(shown.nodes),
        to: window(present.startup, present.knobs, shown.changes) * MINUTE,
        ..present.outlook()
    };
    (step, outlook)
}

/// Source of rows for one tree.
struct Labels<'a> {
    history: &'a History,
    room: f64,
    knobs: &'a Knobs,
    changes: u64,
    has_hindsight: bool,
}

impl Labels<'_> {
    /// Row of a minute. `None` if too little is known.
    fn row(&self, minute: u64) -> Option<Row> {
        let startup = latest_nodes(self.history, minute)?.1;
        let window = window(startup, self.knobs, self.changes);
        let (load, features) = features(self.history, minute, startup, window, self.room)?;
        if minute + window > self.history.range().end {
            return None;
        }
        let window = if self.has_hindsight { window } else { 1 };
        let need = |minute| self.history.need(minute, self.room, self.knobs);
        let needs: Vec<f64> = (minute..minute + window).filter_map(need).collect();
        let need = needs.iter().copied().max_by(f64::total_cmp).filter(|need| *need > 0.0)?;
        let is_known = needs.len() as u64 * 2 >= window;
        is_known.then(|| Row { minute, features, label: (need * self.room / load).ln() })
    }
}

fn grow(rows: &[Row], depth: u16) -> Option<Regressor> {
    let features = DenseMatrix::from_2d_vec(&rows.iter().map(|row| row.features.to_vec()).collect()).ok()?;
    let labels: Vec<f64> = rows.iter().map(|row| row.label).collect();
    let parameters = DecisionTreeRegressorParameters {
        max_depth: Some(depth),
        min_samples_leaf: LEAF_MIN,
        min_samples_split: 2 * LEAF_MIN,
        seed: Some(SEED),
    };
    Regressor::fit(&features, &labels, parameters).ok()
}

fn predict(regressor: &Regressor, features: Vec<Vec<f64>>) -> Option<Vec<f64>> {
    regressor.predict(&DenseMatrix::from_2d_vec(&features).ok()?).ok()
}

/// Number of nodes just before a minute, and the start-up time known then.
fn latest_nodes(history: &History, minute: u64) -> Option<(f64, Millis)> {
    (minute.saturating_sub(RECENT)..minute).rev().find_map(|minute| history.nodes(minute))
}

/// Present load before a minute, in requests per second, and the features. `None` if too little is known.
fn features(history: &History, minute: u64, startup: Millis, window: u64, room: f64) -> Option<(f64, [f64; FEATURES])> {
    let before = |ago: u64| {
        let end = minute.checked_sub(ago)?;
        history.mean(end.saturating_sub(RECENT)..end).filter(|load| *load > 0.0)
    };
    let load = before(0)?;
    let since = |ago: u64| before(ago).map_or(0.0, |earlier| (load / earlier).ln());
    // Growth in the window after the same minute of an earlier day.
    let growth = |day: u64| Some((before((day * DAY).checked_sub(window)?)? / before(day * DAY)?).ln());
    let days: Vec<f64> = (1..=7).filter_map(growth).collect();
    if days.len() < DAYS_MIN {
        return None;
    }
    let mean = |growth: &dyn Fn(f64) -> f64| days.iter().map(|day| growth(*day)).sum::<f64>() / days.len() as f64;
    let last = history.requests(minute - 1).filter(|last| *last > 0.0).unwrap_or(load);
    let (nodes, _) = latest_nodes(history, minute)?;
    Some((
        load,
        [
            startup as f64 / MINUTE as f64,
            load / (room * nodes),
            mean(&|growth| growth.max(0.0)),
            mean(&|growth| (-growth).max(0.0)),
            growth(7).unwrap_or_else(|| mean(&|growth| growth)),
            since(2 * RECENT),
            since(60),
            (last / load).ln(),
            since(DAY),
            (minute % DAY) as f64,
            (minute / DAY % 7) as f64,
        ],
    ))
}

#[cfg(test)]
mod tests {
    use super::super::forecast::tests::seasonal;
    use super::super::history::tests::{START, history};
    use super::*;

    const ROOM: f64 = 8000.0;

    fn rows(history: &History, knobs: &Knobs, changes: u64) -> Vec<Row> {
        let labels = Labels { history, room: ROOM, knobs, changes, has_hindsight: true };
        history.range().filter_map(|minute| labels.row(minute)).collect()
    }

    #[test]
    fn labels_are_the_nodes_that_the_next_start_up_needed() {
        // A step to the double load, two weeks after the start. The start-up takes three minutes, and the pause one.
        let step = START + 2 * WEEK;
        let knobs = Knobs { up_cooldown: MINUTE, ..Knobs::default() };
        let history = history((START..step + 60).map(|minute| if minute < step { 8000.0 } else { 16_000.0 }));
        for (changes, minutes) in [(1, 5), (2, 9)] {
            assert_eq!(window(180_000, &knobs, changes), minutes);
            let labels: Vec<(u64, f64)> =
                rows(&history, &knobs, changes).iter().map(|row| (row.minute, row.label.exp())).collect();
            let label =
                |minute: u64| labels.iter().find(|(at, _)| *at == minute).map(|(_, label)| (label * 10.0).round());
            let before = [label(step - minutes), label(step - minutes + 1), label(step - 1)];
            assert_eq!(before, [Some(10.0), Some(20.0), Some(20.0)]);
            // Afterwards the present load contains the step.
            assert_eq!(label(step + 10), Some(10.0));
            assert_eq!(label(step + 58), None, "not known yet");
        }
    }

    #[test]
    fn a_tree_predicts_growth_that_the_present_load_does_not_show() {
        let knobs = Knobs { up_cooldown: 20 * MINUTE, ..Knobs::default() };
        let weeks = 4;
        let past = history((START..START + weeks * WEEK).map(seasonal));
        let Trees(trees) = Trees::fit(&past, ROOM, &knobs, true).expect("four weeks");
        let next = history((START..START + (weeks + 1) * WEEK).map(seasonal));
        for tree in trees {
            let mut unseen = rows(&next, &knobs, tree.changes);
            unseen.retain(|row| row.minute >= START + weeks * WEEK);
            let predicted = predict(&tree.regressor, unseen.iter().map(|row| row.features.to_vec()).collect());
            let predicted = predicted.expect("predicted");
            let error = |guess: &dyn Fn(usize) -> f64| {
                let squares = unseen.iter().enumerate().map(|(at, row)| (row.label - guess(at)).powi(2));
                (squares.sum::<f64>() / unseen.len() as f64).sqrt()
            };
            // The best constant factor is the rival.
            let mean = unseen.iter().map(|row| row.label).sum::<f64>() / unseen.len() as f64;
            let (ours, constant) = (error(&|at| predicted[at]), error(&|_| mean));
            assert!(ours < constant * 0.8, "{} changes: error {ours}, of a constant factor {constant}", tree.changes);
            let enough = unseen.iter().zip(&predicted).filter(|(row, growth)| row.label <= **growth + tree.margin);
            let share = enough.count() as f64 / unseen.len() as f64;
            assert!(share > 0.8 && share < 0.999, "{} changes: {share} of the predictions are enough", tree.changes);
        }
    }

    #[test]
    fn equal_histories_have_equal_trees() {
        let known = history((START..START + 3 * WEEK).map(seasonal));
        let fit = |history: &History| Trees::fit(history, ROOM, &Knobs::default(), true);
        let (Trees(one), Trees(other)) = (fit(&known).expect("three weeks"), fit(&known).expect("three weeks"));
        let is_equal = |(one, other): (&Tree, &Tree)| one.regressor == other.regressor && one.margin == other.margin;
        assert!(one.len() == SUCCESSIVE.len() && one.iter().zip(&other).all(is_equal));
        assert!(fit(&history((START..START + WEEK).map(seasonal))).is_none());
    }
}
