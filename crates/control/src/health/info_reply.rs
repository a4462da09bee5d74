//! Parses a node's replies to polls: its INFO and settings.

use std::fmt;

use switchyard_policy::data_loss::Holdings;
use switchyard_resp::reply;
use switchyard_router::WriteRefusal;

use crate::loads::{ServerLoad, field};

/// Commands of a poll, in this order.
pub(super) const COMMANDS: [&[&str]; 5] = [
    &["PING"],
    &["INFO"],
    &["CONFIG", "GET", "save"],
    &["CONFIG", "GET", "stop-writes-on-bgsave-error"],
    &["CONFIG", "GET", "min-replicas-to-write"],
];

/// Reason why a node refuses writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) code: WriteRefusal,
    pub(super) why: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.code.code(), self.why)
    }
}

/// Parsed replies.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct InfoReply {
    /// Whether the node executes a slow script, and answers nothing else.
    pub(super) is_busy: bool,
    /// `None` if the node refuses INFO.
    pub(super) info: Option<Info>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Info {
    /// Complete text.
    pub(super) text: String,
    pub(super) run_id: String,
    /// Number of keys.
    pub(super) holdings: Holdings,
    /// Whether the node persists its keys on disk. `None` if unknown.
    pub(super) persists: Option<bool>,
    pub(super) load: ServerLoad,
    pub(super) refuses: Option<Refusal>,
}

/// Parses the replies to [`COMMANDS`].
pub(super) fn read(answers: &[Vec<u8>]) -> InfoReply {
    let is_busy = answers.first().is_some_and(|pong| pong.starts_with(b"-BUSY"));
    let text = |answer: &[u8]| String::from_utf8_lossy(reply::text(answer).unwrap_or_default()).into_owned();
    let info = answers.get(1).filter(|answer| !reply::is_error(answer)).map(|answer| text(answer));
    // A setting that the node does not return is unknown, and never counts as a reason for refused writes.
    let setting = |at: usize| {
        let answer = answers.get(at).filter(|answer| !reply::is_error(answer))?;
        Some(text(reply::elements(answer).nth(1)?))
    };
    let settings = Settings { save: setting(2), stops_writes: setting(3), replicas_min: setting(4) };
    InfoReply { is_busy, info: info.and_then(|info| settings.read(&info)) }
}

/// Settings needed to interpret INFO.
#[derive(Default)]
struct Settings {
    save: Option<String>,
    stops_writes: Option<String>,
    replicas_min: Option<String>,
}

impl Settings {
    fn read(&self, info: &str) -> Option<Info> {
        let saves = self.save.as_ref().map(|save| !save.is_empty());
        let holdings = Holdings::of_info(info);
        Some(Info {
            text: info.to_owned(),
            run_id: field(info, "run_id")?.to_owned(),
            holdings,
            persists: if field(info, "aof_enabled") == Some("1") { Some(true) } else { saves },
            load: ServerLoad::parse(info, holdings.keys),
            refuses: self.refusal(info),
        })
    }

    /// First reason that applies, in the server's own order.
    fn refusal(&self, info: &str) -> Option<Refusal> {
        let number = |name| field(info, name)?.parse::<u64>().ok();
        let is = |name, value| field(info, name) == Some(value);
        let refusal = |code, why: String| Some(Refusal { code, why });
        if is("role", "slave") {
            return refusal(WriteRefusal::Readonly, "it is a replica".to_owned());
        }
        let saves = self.save.as_ref().is_some_and(|save| !save.is_empty());
        if saves && is("rdb_last_bgsave_status", "err") && self.stops_writes.as_deref() == Some("yes") {
            return refusal(
                WriteRefusal::Misconf,
                "it cannot save its data to disk (rdb_last_bgsave_status:err)".to_owned(),
            );
        }
        if is("aof_enabled", "1") && is("aof_last_write_status", "err") {
            return refusal(
                WriteRefusal::Misconf,
                "it cannot write its append-only file (aof_last_write_status:err)".to_owned(),
            );
        }
        let replicas =
            self.replicas_min.as_ref().and_then(|min| min.parse::<u64>().ok()).zip(number("min_slaves_good_slaves"));
        if let Some((min, good)) = replicas.filter(|(min, good)| good < min) {
            return refusal(
                WriteRefusal::Noreplicas,
                format!("it has {good} of the {min} replicas that it must have (min-replicas-to-write)"),
            );
        }
        let used = number("used_memory")?.saturating_sub(number("mem_not_counted_for_evict").unwrap_or(0));
        let max = number("maxmemory").filter(|max| *max > 0)?;
        if used > max && is("maxmemory_policy", "noeviction") {
            return refusal(
                WriteRefusal::Oom,
                format!("it uses {used} bytes of {max} (maxmemory), and evicts nothing"),
            );
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Vec<u8> {
        format!("${}\r\n{text}\r\n", text.len()).into_bytes()
    }

    fn setting(name: &str, value: &str) -> Vec<u8> {
        [b"*2\r\n".to_vec(), bulk(name), bulk(value)].concat()
    }

    fn refusal(info: &str) -> Option<String> {
        let settings =
            Settings { save: Some("60 1".into()), stops_writes: Some("yes".into()), replicas_min: Some("1".into()) };
        settings.refusal(info).map(|refusal| refusal.to_string())
    }

    #[test]
    fn answers_are_read() {
        let info = "# Server\r\nrun_id:ab\r\n# Persistence\r\naof_enabled:0\r\n# Keyspace\r\ndb0:keys=3,expires=0\r\ndb2:keys=4,expires=0\r\n";
        let none = b"-NOPERM no\r\n".to_vec();
        let said = read(&[b"+PONG\r\n".to_vec(), bulk(info), setting("save", "60 1"), none.clone(), none.clone()]);
        let known = said.info.expect("readable INFO");
        assert_eq!(
            (said.is_busy, known.run_id.as_str(), known.holdings.keys, known.persists, known.refuses),
            (false, "ab", 7, Some(true), None)
        );
        let persists = |aof: &str, save: Vec<u8>| {
            let info = format!("run_id:ab\r\naof_enabled:{aof}\r\n");
            read(&[b"+PONG\r\n".to_vec(), bulk(&info), save]).info.and_then(|info| info.persists)
        };
        assert_eq!(
            [persists("0", setting("save", "")), persists("0", none.clone()), persists("1", none.clone())],
            [Some(false), None, Some(true)],
            "a refusal does not state that the node saves nothing"
        );
        let busy = b"-BUSY Redis is busy running a script.\r\n".to_vec();
        assert_eq!(
            read(&[busy.clone(), busy.clone(), busy.clone(), busy.clone(), busy]),
            InfoReply { is_busy: true, info: None }
        );
        let silent = read(&[b"+PONG\r\n".to_vec(), none.clone(), none.clone(), none.clone(), none]);
        assert_eq!(silent, InfoReply { is_busy: false, info: None });
    }

    #[test]
    fn refusal_of_writes_is_read_from_info() {
        assert_eq!(refusal("role:master\r\nrdb_last_bgsave_status:ok\r\nused_memory:9\r\nmaxmemory:0\r\n"), None);
        assert_eq!(refusal("role:slave\r\n").as_deref(), Some("READONLY it is a replica"));
        assert!(
            refusal("role:master\r\nrdb_last_bgsave_status:err\r\n").is_some_and(|why| why.starts_with("MISCONF "))
        );
        assert!(
            refusal("aof_enabled:1\r\naof_last_write_status:err\r\n").is_some_and(|why| why.starts_with("MISCONF "))
        );
        assert!(
            refusal("role:master\r\nmin_slaves_good_slaves:0\r\n")
                .is_some_and(|why| why.starts_with("NOREPLICAS it has 0 of the 1"))
        );
        let full = |policy: &str| refusal(&format!("used_memory:9\r\nmaxmemory:5\r\nmaxmemory_policy:{policy}\r\n"));
        assert!(full("noeviction").is_some_and(|why| why.starts_with("OOM ")) && full("allkeys-lru").is_none());
        let careless = Settings { save: Some(String::new()), ..Settings::default() };
        assert_eq!(
            careless.refusal("role:master\r\nrdb_last_bgsave_status:err\r\n"),
            None,
            "it saves nothing by itself"
        );
    }
}
