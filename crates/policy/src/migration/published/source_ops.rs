//! Limit of the client commands that the source serves while its keys move (NetMigrate, sections 4.4 and 6.2).
//!
//! The published policies bound the processor time that the source spends on clients, and leave the rest to the move.
//! The authors' source agent counts client commands: at most a fixed number per second and thread, and the others wait
//! in its queue. [`Rate`](crate::limits::Rate) is the token bucket for it. Goals and maximum rates limit the move
//! instead.

/// Presets of the limit, as shares of the commands that the source can serve.
///
/// The shares are those of the authors' testbed: 13,000, 30,000 and 300,000 commands per second for each of eight
/// threads, and a source that serves some 446,000 by itself (Table 5, no writes).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SourceShare {
    /// Moves about as fast as Rocksteady: a low share for clients.
    Short,
    /// Moves about as fast as Fulva: a medium share for clients.
    Medium,
    /// Moves about as fast as source-based protocols: no less than the source can serve.
    Long,
}

impl SourceShare {
    /// All presets, with their names.
    pub const ALL: [(Self, &'static str); 3] = [(Self::Short, "short"), (Self::Medium, "medium"), (Self::Long, "long")];

    /// Share of the source's capacity, percent.
    #[must_use]
    pub const fn percent(self) -> u64 {
        match self {
            Self::Short => 23,
            Self::Medium => 54,
            Self::Long => 100,
        }
    }

    /// Returns the limit of a source with this capacity, both in commands per second. At least 1.
    #[must_use]
    pub fn of(self, capacity: u64) -> u32 {
        let limit = u128::from(capacity) * u128::from(self.percent()) / 100;
        u32::try_from(limit).unwrap_or(u32::MAX).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::SourceShare;

    #[test]
    fn presets_are_the_shares_of_the_testbed() {
        let testbed = 446_000;
        for (share, per_thread) in [(SourceShare::Short, 13_000_u32), (SourceShare::Medium, 30_000)] {
            let published = per_thread * 8;
            assert!(share.of(testbed).abs_diff(published) < published / 50, "{share:?}: {}", share.of(testbed));
        }
        assert_eq!(SourceShare::Long.of(testbed), testbed as u32);
        assert_eq!((SourceShare::Short.of(1), SourceShare::Long.of(u64::MAX)), (1, u32::MAX));
    }
}
