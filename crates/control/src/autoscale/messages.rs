//! Texts for the policy's reasons.

use switchyard_policy::autoscale::{Outlook, Reason};
use switchyard_policy::topology::NodeId;
use switchyard_resp::units::counted;

fn seconds(ms: u64) -> String {
    format!("{} s", ms.div_ceil(1000))
}

fn percent(part: f64) -> String {
    format!("{:.0} %", part * 100.0)
}

fn minutes(ms: u64) -> String {
    counted(ms.div_ceil(60_000) as usize, "minute")
}

fn days(ms: u64) -> String {
    format!("{:.1}", ms as f64 / 86_400_000.0)
}

/// Describes an expected load. `source`: origin of the prediction.
fn outlook_text(outlook: &Outlook, source: &str) -> String {
    let Outlook { requests, nodes, from, to, startup, confidence } = outlook;
    let time = match from {
        0 => format!("in the next {}", minutes(*to)),
        from => format!("in {}", minutes(*from)),
    };
    format!(
        "{time} the {source} expects up to {requests:.0} requests/s, which need {} (a node takes {} to add; {} of the recent predictions were high enough)",
        counted(*nodes, "node"),
        seconds(*startup),
        percent(*confidence)
    )
}

/// Describes a reason as a clause.
pub(crate) fn reason_text(reason: &Reason, name: &dyn Fn(NodeId) -> String) -> String {
    match reason {
        Reason::Slow(mean, limit) => {
            format!("answers take {:.1} ms on average, and the limit is {:.1} ms", mean / 1000.0, limit / 1000.0)
        }
        Reason::Busy(cpu, limit) => {
            format!("a server uses {} of a processor on average, and the limit is {}", percent(*cpu), percent(*limit))
        }
        Reason::Full(part, limit) => {
            format!("servers use {} of their memory, and the limit is {}", percent(*part), percent(*limit))
        }
        Reason::Short(requests, nodes) => format!("{requests:.0} requests/s need {}", counted(*nodes, "node")),
        Reason::Calm(part) => {
            format!("with one node fewer every measure would be below {} of its limit", percent(*part))
        }
        Reason::Ample(requests, nodes) => format!("{requests:.0} requests/s need only {}", counted(*nodes, "node")),
        Reason::Fine => "the load is within its limits".to_owned(),
        Reason::Unmeasured => "the load is not known yet".to_owned(),
        Reason::NoCapacity => {
            "the policy model needs [autoscale] capacity (`switchyard bench capacity` measures it)".to_owned()
        }
        Reason::Minimum(nodes, true) => format!("the schedule requires at least {}", counted(*nodes, "node")),
        Reason::Minimum(nodes, false) => format!("min-nodes is {nodes}"),
        Reason::Maximum(nodes) => format!("there may be {} at most", counted(*nodes, "node")),
        Reason::Lasts(lasted, must) => format!("it has lasted {} of {}", seconds(*lasted), seconds(*must)),
        Reason::Pause(left) => format!("the last change was recent: {} of the pause are left", seconds(*left)),
        Reason::UnderWay(number) => format!("change {number} is in progress"),
        Reason::Down(node) => format!("node {} cannot be used, so none is removed", name(*node)),
        Reason::NoMemory(node) => {
            format!("the other nodes lack memory for the data of {}, or their memory is not known", name(*node))
        }
        Reason::NoneMayGo => "the autoscaler started none of the nodes, and it stops no others".to_owned(),
        Reason::Forecast(outlook) => outlook_text(outlook, "forecast"),
        Reason::Learned(outlook) => outlook_text(outlook, "decision tree"),
        Reason::NoHistory(known, needed) => {
            format!("the history has {} of {} days, so the policy acts like threshold", days(*known), days(*needed))
        }
        Reason::UnknownCapacity => {
            "the servers report no processor use, and [autoscale] capacity is not set, so the policy acts like threshold".to_owned()
        }
        Reason::Unreliable(share) => format!(
            "only {} of the recent predictions were high enough, so the policy acts like threshold",
            percent(*share)
        ),
    }
}
