//! The static policy (Rodriguez and Buyya 2018): a trigger adds a node if the provisioning interval has passed since
//! the last change, and a separate epoch bounds removals.
//!
//! Its paper has triggers from outside (a container that fits nowhere). Here a measure above its limit is the trigger,
//! at once and without a window: the same limits as [`super::threshold`] has, so that the two differ in nothing but
//! time.

use super::{Judgement, Knobs, Observed, threshold};

pub(super) fn judge(observed: &Observed, knobs: &Knobs) -> Judgement {
    threshold::judge(observed, knobs)
}
