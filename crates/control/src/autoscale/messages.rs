//! Texts for the policy's reasons.

use switchyard_policy::autoscale::Reason;
use switchyard_policy::topology::NodeId;
use switchyard_resp::units::counted;

fn seconds(ms: u64) -> String {
    format!("{} s", ms.div_ceil(1000))
}

fn percent(part: f64) -> String {
    format!("{:.0} %", part * 100.0)
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
    }
}
