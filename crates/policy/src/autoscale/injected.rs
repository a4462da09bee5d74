//! Bugs that tests can inject into the autoscaler, to show that they would detect them.

/// A bug of the autoscaler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(feature = "planted-bugs"), allow(unreachable_pub))]
pub enum Bug {
    /// A judgement need not last.
    DelayForgotten,
    /// `predictive` plans as if a node could be added or removed within a minute.
    ChangesTakeNoTime,
    /// `learned` takes the need of the present minute for that of the start-up time after it.
    LabelsWithoutHindsight,
}

pub(super) type InjectedBug = crate::injected::InjectedBug<Bug>;
