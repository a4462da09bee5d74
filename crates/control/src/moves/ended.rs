//! The stored form of ended moves: the document `moves-ended`.

use serde::{Deserialize, Serialize};

use crate::admin::MoveReport;

/// Name of the document.
pub(super) const ENDED: &str = "moves-ended";

/// A report as stored: its activity is stored as `doing`, and the admin API has `activity`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct EndedMove {
    doing: String,
    #[serde(flatten)]
    report: MoveReport,
}

impl From<MoveReport> for EndedMove {
    fn from(mut report: MoveReport) -> Self {
        // Empty, so that it is not written a second time.
        Self { doing: std::mem::take(&mut report.activity), report }
    }
}

impl From<EndedMove> for MoveReport {
    fn from(EndedMove { doing, report }: EndedMove) -> Self {
        Self { activity: doing, ..report }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::MoveState;

    #[test]
    fn stored_moves_keep_the_name_of_their_activity() {
        let report =
            MoveReport { id: 3, state: MoveState::Stopped, activity: "aborted".to_owned(), ..MoveReport::default() };
        let stored = serde_json::to_value(EndedMove::from(report.clone())).expect("a document");
        assert_eq!((&stored["doing"], stored.get("activity")), (&"aborted".into(), None));
        let read: EndedMove = serde_json::from_value(stored).expect("the same");
        assert_eq!(MoveReport::from(read), report);
        let sent = serde_json::to_value(&report).expect("a report");
        assert_eq!((&sent["activity"], sent.get("doing")), (&"aborted".into(), None));
    }
}
