//! The static policy (Rodriguez and Buyya 2018): a trigger adds a node if the provisioning interval has passed since
//! the last change, and a separate epoch bounds removals.
//!
//! The paper's triggers are external (a container that does not fit). Here a measure above its limit triggers
//! immediately. The limits equal those of [`super::threshold`], so that the two policies differ only in time.

use super::{Judgement, Knobs, Observed, threshold};

pub(super) fn judge(observed: &Observed, knobs: &Knobs) -> Judgement {
    threshold::judge(observed, knobs)
}
