//! Bugs of a planner that can be planted, one at a time, so that its tests show that they would find them.

/// A bug of the planner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(feature = "planted-bugs"), allow(unreachable_pub))]
pub enum Bug {
    /// A target may end fuller than the node that it relieves.
    WorseThanBefore,
    /// A way that leaves nodes over their limits is taken for one that relieves them.
    InfeasibleTakenForFeasible,
    /// A node is over its limit as soon as it is above its goal: no hysteresis.
    Oscillation,
    /// Keys and slots that moved lately move again.
    ForgottenCooldown,
    /// An older look is taken for the load.
    StaleObservation,
}

pub(super) type InjectedBug = crate::planted::InjectedBug<Bug>;
