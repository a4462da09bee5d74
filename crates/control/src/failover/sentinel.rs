//! Queries a Sentinel for a node's primary: at once after an announced switch, and periodically, because an
//! announcement can be missed.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use switchyard_policy::failover::Event;
use switchyard_resp::reply;
use switchyard_router::{NodeAccess, NodeTls};
use tracing::{debug, warn};

use super::Sender;
use crate::nodes::wire::{Connection, refuse_error};
use crate::nodes::{Endpoint, SentinelAddress, SentinelPlace};

/// Interval of queries without an announcement.
const INTERVAL: Duration = Duration::from_millis(500);

/// Interval between connection attempts.
const RETRY: Duration = Duration::from_millis(500);

/// Monitors a Sentinel. `tls`: TLS settings of the node, which store the host names of its servers.
pub(super) async fn monitor(
    node: usize,
    place: SentinelPlace,
    group: SentinelAddress,
    tls: Option<NodeTls>,
    sender: Sender,
) {
    let access = group.access(&place, None);
    let SentinelPlace { endpoint, .. } = place;
    let mut told = false;
    loop {
        let why = match follow(node, &endpoint, &access, (&group.master, tls.as_ref()), &sender).await {
            Ok(()) => return, // the observer has ended
            Err(why) => why,
        };
        if !std::mem::replace(&mut told, true) {
            warn!(sentinel = %endpoint, master = group.master, reason = %why, "a Sentinel does not answer; trying again");
        } else {
            debug!(sentinel = %endpoint, master = group.master, reason = %why, "a Sentinel does not answer");
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn follow(
    node: usize,
    endpoint: &Endpoint,
    access: &NodeAccess,
    group: (&str, Option<&NodeTls>),
    sender: &Sender,
) -> io::Result<()> {
    let named = endpoint.clone();
    let address = tokio::task::spawn_blocking(move || named.resolve()).await?.map_err(io::Error::other)?;
    let mut questions = Connection::open(address, access).await?;
    let mut announcements = Connection::open(address, access).await?;
    refuse_error(&announcements.call(&["SUBSCRIBE", "+switch-master"]).await?)?;
    loop {
        for event in query(&mut questions, group).await? {
            if sender.send((node, event)).await.is_err() {
                return Ok(());
            }
        }
        tokio::select! {
            announced = announcements.next() => drop(announced?),
            () = tokio::time::sleep(INTERVAL) => {}
        }
    }
}

async fn query(
    sentinel: &mut Connection,
    (master, tls): (&str, Option<&NodeTls>),
) -> io::Result<Vec<Event<SocketAddr>>> {
    // Address and epoch come from separate replies. If the epoch is the same before and after, the address belongs to
    // it.
    let before = config_epoch(sentinel, master).await?;
    let answer = sentinel.call(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", master]).await?;
    refuse_error(&answer)?;
    let after = config_epoch(sentinel, master).await?;
    let parts: Vec<String> = texts(&answer);
    let mut events = Vec::new();
    if before == after
        && let [host, port] = &parts[..]
    {
        let primary = resolve(host, port, tls).await?;
        events.push(Event::Announced { primary, config_epoch: after });
    }
    let answer = sentinel.call(&["SENTINEL", "REPLICAS", master]).await?;
    refuse_error(&answer)?;
    let mut replicas = Vec::new();
    for replica in reply::elements(&answer) {
        let fields = texts(replica);
        let field = |name: &str| fields.chunks_exact(2).find(|pair| pair[0] == name).map(|pair| pair[1].clone());
        if let (Some(host), Some(port)) = (field("ip"), field("port"))
            && let Ok(address) = resolve(&host, &port, tls).await
        {
            replicas.push(address);
        }
    }
    events.push(Event::Listed { replicas });
    Ok(events)
}

async fn config_epoch(sentinel: &mut Connection, master: &str) -> io::Result<u64> {
    let answer = sentinel.call(&["SENTINEL", "MASTER", master]).await?;
    refuse_error(&answer)?;
    let fields = texts(&answer);
    let epoch = fields.chunks_exact(2).find(|pair| pair[0] == "config-epoch").and_then(|pair| pair[1].parse().ok());
    epoch.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its answer to SENTINEL MASTER has no config-epoch"))
}

fn texts(answer: &[u8]) -> Vec<String> {
    reply::elements(answer)
        .map(|element| String::from_utf8_lossy(reply::text(element).unwrap_or_default()).into_owned())
        .collect()
}

/// Resolves an address sent by a Sentinel, and stores its host: a name if the Sentinel announces names
/// (`announce-hostnames`).
async fn resolve(host: &str, port: &str, tls: Option<&NodeTls>) -> io::Result<SocketAddr> {
    let wrong =
        || io::Error::new(io::ErrorKind::InvalidData, format!("it names the address {host}:{port}, which is invalid"));
    let port: u16 = port.parse().map_err(|_| wrong())?;
    let address = match host.parse::<IpAddr>() {
        Ok(ip) => SocketAddr::new(ip, port),
        Err(_) => {
            tokio::net::lookup_host((host, port)).await?.min_by_key(|address| !address.is_ipv4()).ok_or_else(wrong)?
        }
    };
    if let Some(tls) = tls {
        tls.note_host(address, host);
    }
    Ok(address)
}
