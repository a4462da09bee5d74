//! Periodically queries the role of one server of a node.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use switchyard_policy::failover::{Event, Position, Role};
use switchyard_resp::reply;
use switchyard_router::NodeAccess;
use tokio::sync::watch;
use tracing::debug;

use super::Sender;
use crate::nodes::wire::{Connection, refuse_error};

/// Interval of queries. A failover between the servers themselves is detected within this interval and a round trip.
const INTERVAL: Duration = Duration::from_millis(200);

/// Interval while a move waits for replicas to reach a position.
const FAST_INTERVAL: Duration = Duration::from_millis(5);

/// Maximum time since a replica's last contact with its primary, in seconds, for the replica to be read.
const BEHIND_S: i64 = 10;

/// Queries a server until the receiver of the events is dropped. `node`: sent with each event.
pub(crate) async fn query(
    node: usize,
    address: SocketAddr,
    access: NodeAccess,
    sender: Sender,
    mut hurry: watch::Receiver<bool>,
) {
    let mut connection = None;
    loop {
        let event = match command(&mut connection, address, &access).await {
            Ok((role, round_trip)) => {
                Event::RoleReported { address, role, round_trip_us: round_trip.as_micros() as u32 }
            }
            Err(why) => {
                debug!(%address, reason = %why, "cannot query a server's role");
                connection = None;
                Event::Silent { address }
            }
        };
        if sender.send((node, event)).await.is_err() {
            return;
        }
        let pause = if *hurry.borrow_and_update() { FAST_INTERVAL } else { INTERVAL };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            still = hurry.changed() => if still.is_err() { return },
        }
    }
}

async fn command(
    connection: &mut Option<Connection>,
    address: SocketAddr,
    access: &NodeAccess,
) -> io::Result<(Role<SocketAddr>, Duration)> {
    let connection = match connection {
        Some(connection) => connection,
        none => none.insert(Connection::open(address, access).await?),
    };
    let asked = Instant::now();
    let answer = connection.call(&["INFO", "replication"]).await?;
    let round_trip = asked.elapsed();
    refuse_error(&answer)?;
    let info = String::from_utf8_lossy(reply::text(&answer).unwrap_or_default()).into_owned();
    let role = parse(&info).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its INFO names no role"))?;
    Ok((role, round_trip))
}

/// Parses the role in `INFO replication`.
fn parse(info: &str) -> Option<Role<SocketAddr>> {
    let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
    let number = |name: &str| field(name).and_then(|n| n.parse::<u64>().ok());
    let replication_id = field("master_replid").unwrap_or_default().to_owned();
    match field("role")? {
        "master" => Some(Role::Primary {
            replication_id,
            offset: number("master_repl_offset").unwrap_or(0),
            followed_id: field("master_replid2").filter(|id| id.bytes().any(|b| b != b'0')).map(str::to_owned),
        }),
        "slave" => {
            let host = field("master_host").and_then(|host| host.parse::<IpAddr>().ok());
            let port = field("master_port").and_then(|port| port.parse::<u16>().ok());
            let heard = field("master_last_io_seconds_ago").and_then(|s| s.parse::<i64>().ok());
            Some(Role::Replica {
                of: host.zip(port).map(SocketAddr::from),
                is_current: field("master_link_status") == Some("up")
                    && field("master_sync_in_progress").is_none_or(|syncing| syncing == "0")
                    && heard.is_some_and(|s| (0..=BEHIND_S).contains(&s)),
                position: Position { replication_id, offset: number("slave_repl_offset").unwrap_or(0) },
            })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_read_from_info() {
        let primary = "# Replication\r\nrole:master\r\nconnected_slaves:0\r\nmaster_replid:ab\r\nmaster_replid2:00\r\nmaster_repl_offset:7\r\n";
        assert_eq!(parse(primary), Some(Role::Primary { replication_id: "ab".into(), followed_id: None, offset: 7 }));
        let promoted = "role:master\r\nmaster_replid:cd\r\nmaster_replid2:ab\r\n";
        assert_eq!(
            parse(promoted),
            Some(Role::Primary { replication_id: "cd".into(), followed_id: Some("ab".into()), offset: 0 })
        );
        let replica = |link: &str, heard: &str| {
            parse(&format!(
                "role:slave\r\nmaster_host:127.0.0.1\r\nmaster_port:7001\r\nmaster_link_status:{link}\r\n\
                 master_last_io_seconds_ago:{heard}\r\nmaster_sync_in_progress:0\r\nslave_repl_offset:5\r\nmaster_replid:ab\r\n\
                 master_repl_offset:5\r\n"
            ))
        };
        let of = Some("127.0.0.1:7001".parse().unwrap());
        let position = Position { replication_id: "ab".into(), offset: 5 };
        let expected = |is_current| Some(Role::Replica { of, is_current, position: position.clone() });
        assert_eq!(replica("up", "3"), expected(true));
        assert_eq!(replica("up", "11"), expected(false));
        assert_eq!(replica("down", "-1"), expected(false));
        let named = "role:slave\r\nmaster_host:redis-a\r\nmaster_port:7001\r\nmaster_link_status:up\r\nmaster_last_io_seconds_ago:0\r\n";
        let position = Position { replication_id: String::new(), offset: 0 };
        assert_eq!(parse(named), Some(Role::Replica { of: None, is_current: true, position }));
        assert_eq!(parse("# Server\r\n"), None);
    }
}
