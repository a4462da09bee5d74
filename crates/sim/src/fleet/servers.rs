//! Nodes, routers and cache nodes as queues: what arrives in a slice, waits, is served, or is lost.
//!
//! Fluid queues rather than single requests: at millions of requests per second only their rates matter to the policies.
//! Within a slice, waiting follows M/M/1; from slice to slice, the backlog is carried over.

/// Result of a slice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Served {
    /// Requests served.
    pub(super) served: f64,
    /// Requests lost.
    pub(super) lost: f64,
    /// Part of the time in which the server was busy.
    pub(super) busy: f64,
    /// Mean time of a request at the server, in microseconds.
    pub(super) mean_us: f64,
}

/// A queue with a service rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Queue {
    /// Requests served per second.
    rate: f64,
    /// Longest wait, in seconds.
    longest: f64,
    backlog: f64,
}

impl Queue {
    pub(super) fn new(rate: f64, longest: f64) -> Self {
        Self { rate, longest, backlog: 0.0 }
    }

    /// Serves the waiting and the arriving requests for `seconds`. `taken`: part of the time that other work takes.
    pub(super) fn serve(&mut self, arriving: f64, seconds: f64, taken: f64) -> Served {
        let rate = self.rate * (1.0 - taken.clamp(0.0, 0.95));
        let most = rate * seconds;
        let offered = self.backlog + arriving;
        let served = offered.min(most);
        let waiting = offered - served;
        let lost = (waiting - rate * self.longest).max(0.0);
        let before = self.backlog;
        self.backlog = waiting - lost;
        let busy = served / most;
        let service = 1.0 / rate;
        let random = if busy < 1.0 { (busy / (1.0 - busy) * service).min(self.longest) } else { self.longest };
        let queued = f64::midpoint(before, self.backlog) / rate;
        Served { served, lost, busy, mean_us: (service + random.max(queued)) * 1e6 }
    }
}

/// Router or cache nodes: many alike servers that share the load evenly, without a queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tier {
    /// Cost that all can bear per second.
    capacity: f64,
}

impl Tier {
    pub(super) fn new(capacity: f64) -> Self {
        Self { capacity }
    }

    /// Returns the part of the requests that is served, given their cost per second.
    pub(super) fn part(self, cost: f64) -> f64 {
        if cost > self.capacity { self.capacity / cost } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_keeps_its_backlog_and_loses_the_rest() {
        let mut queue = Queue::new(1000.0, 0.1);
        let calm = queue.serve(500.0, 1.0, 0.0);
        assert_eq!((calm.served, calm.lost, calm.busy), (500.0, 0.0, 0.5));
        assert!((calm.mean_us - 2000.0).abs() < 1e-6, "M/M/1: {}", calm.mean_us);
        let full = queue.serve(1500.0, 1.0, 0.0);
        assert_eq!((full.served, full.lost, full.busy), (1000.0, 400.0, 1.0));
        let after = queue.serve(0.0, 1.0, 0.0);
        assert_eq!((after.served, after.lost), (100.0, 0.0), "the backlog of a tenth of a second");
        let slowed = queue.serve(1500.0, 1.0, 0.5);
        assert_eq!((slowed.served, slowed.lost), (500.0, 950.0));
    }

    #[test]
    fn no_request_disappears() {
        let mut queue = Queue::new(300.0, 0.5);
        let arriving = [0.0, 50.0, 900.0, 10.0, 4.0, 301.0, 299.0, 0.0, 0.0, 0.0];
        let results = arriving.map(|arriving| queue.serve(arriving, 1.0, 0.0));
        let all: f64 = results.iter().map(|result| result.served + result.lost).sum();
        assert!((all - arriving.iter().sum::<f64>()).abs() < 1e-9);
    }

    #[test]
    fn a_tier_serves_the_part_that_it_can_bear() {
        assert_eq!([Tier::new(10.0).part(5.0), Tier::new(10.0).part(40.0)], [1.0, 0.25]);
    }
}
