//! Bugs that tests can inject into the planner, one at a time, to show that they would detect them.

/// A bug of the planner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(feature = "planted-bugs"), allow(unreachable_pub))]
pub enum Bug {
    /// A target may end fuller than the node that it relieves.
    WorseThanBefore,
    /// A way that leaves nodes over their limits counts as one that relieves them.
    InfeasibleTakenForFeasible,
    /// A node is over its limit as soon as it exceeds its goal: no hysteresis.
    Oscillation,
    /// Keys and slots that moved recently move again.
    ForgottenCooldown,
    /// An old measurement is used as the current load.
    StaleObservation,
}

pub(super) type InjectedBug = crate::injected::InjectedBug<Bug>;
