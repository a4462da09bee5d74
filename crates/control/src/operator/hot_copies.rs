//! Reports and orders about hot copies.

use std::collections::BTreeMap;

use switchyard_router::{HotCopiesStatus, Router};

use super::Operator;
use crate::admin::{HotCopiesOrder, HotCopiesReport, HotCopiesResult, OperationError};

impl Operator {
    fn hot_copies_status(&self) -> Result<HotCopiesStatus, OperationError> {
        self.running.with(Router::hot_copies).ok_or_else(unavailable)
    }

    pub(super) fn hot_copies(&self) -> Result<HotCopiesReport, OperationError> {
        let status = self.hot_copies_status()?;
        let state = state(&status);
        let HotCopiesStatus { hits, fills, discarded, invalidations, copies, bytes, keys, refused, .. } = status;
        let discarded: BTreeMap<String, u64> =
            discarded.into_iter().map(|(why, count)| (why.name().to_owned(), count)).collect();
        Ok(HotCopiesReport { state, keys, copies, bytes, hits, fills, discarded, invalidations, refused })
    }

    /// Evicts copies, or suspends and resumes hot copies. Evictions are effective at every worker on return, because
    /// each hit checks a shared number. The next read may fill a copy again.
    ///
    /// An eviction by prefix evicts all keys. Each worker holds a part of the matching keys and would have to be
    /// queried; evicting everything costs one read per key and worker, and misses none.
    pub(super) fn steer_hot_copies(&self, order: &HotCopiesOrder) -> Result<HotCopiesResult, OperationError> {
        let done = self.running.with(|router| match order {
            HotCopiesOrder::EvictKey(key) => {
                router.evict_hot_copies(Some(key));
                "all present copies of this key are invalid"
            }
            HotCopiesOrder::EvictPrefix(_) => {
                router.evict_hot_copies(None);
                "all present copies are invalid: of all keys, including the prefix"
            }
            HotCopiesOrder::EvictAll => {
                router.evict_hot_copies(None);
                "all present copies are invalid, of all keys"
            }
            HotCopiesOrder::Suspend(true) => match router.suspend_hot_copies(true) {
                true => "no worker answers from copies until they are switched on or the router restarts",
                false => "they were switched off already",
            },
            HotCopiesOrder::Suspend(false) => match router.suspend_hot_copies(false) {
                true => "copies are used again",
                false => "they were not switched off",
            },
        });
        let mut message = done.ok_or_else(unavailable)?.to_owned();
        let status = self.hot_copies_status()?;
        if !status.is_on && *order == HotCopiesOrder::Suspend(false) {
            message.push_str("; but the configuration has hot-copies.mode = \"off\", so there are none");
        }
        Ok(HotCopiesResult { message, state: state(&status) })
    }
}

fn unavailable() -> OperationError {
    OperationError::Unavailable("the router is starting or stopping".to_owned())
}

fn state(status: &HotCopiesStatus) -> String {
    match (status.is_on, status.is_suspended) {
        (false, _) => "off",
        (true, true) => "suspended",
        (true, false) => "on",
    }
    .to_owned()
}
