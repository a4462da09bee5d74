//! Start, reload, drain, restart.

use std::time::Duration;

use rustix::process::Signal;

use crate::support::client::TIMEOUT;
use crate::support::{
    Client, Node, Router, RouterOptions, Site, SiteOptions, Value, bulk, int, ok, ports, simple, until,
};

fn with_config(config: &str) -> SiteOptions {
    SiteOptions::config(config)
}

#[test]
fn sigterm_finishes_commands_in_flight_and_exits_with_0() {
    for signal in [Signal::TERM, Signal::INT] {
        // Timeouts that are long enough on any busy machine.
        let Some(mut site) =
            Site::router_only(2, &with_config("shutdown-timeout = \"5m\"\n[nodes]\ncommand-timeout = \"5m\"\n"))
        else {
            return;
        };
        let mut idle = site.client();
        idle.cmd("PING");
        let mut busy = site.client();
        busy.cmd("SET k 1");
        // In flight until the nodes are resumed, after the signal to the router.
        site.nodes().iter().for_each(Node::freeze);
        busy.send(&["INCR", "k"]);
        busy.send(&["GET", "k"]);
        until("a command is in flight", || {
            let status = site.router().metrics();
            status.lines().any(|l| l.starts_with("switchyard_node_in_flight") && !l.ends_with(" 0"))
        });
        site.router().process().signal(signal);
        assert!(idle.closed_within(TIMEOUT), "a client that waits for nothing is closed at once");
        until("no client can connect", || Client::try_connect(site.address()).is_err());
        site.nodes().iter().for_each(Node::thaw);
        assert_eq!((busy.reply(), busy.reply()), (int(2), bulk("2")), "commands in flight must be finished");
        assert!(busy.closed_within(TIMEOUT));
        let status = site.router_mut().process_mut().wait(Duration::from_secs(30));
        assert_eq!(status.code(), Some(0), "{}", site.router().process().log());
        assert!(Client::try_connect(site.address()).is_err(), "the port is still open");
    }
}

#[test]
fn a_drain_ends_within_its_timeout() {
    let Some(mut site) = Site::router_only(1, &with_config("shutdown-timeout = \"1s\"\n")) else {
        return;
    };
    let mut client = site.client();
    client.cmd("SET k v");
    site.nodes()[0].freeze();
    client.post("GET k");
    std::thread::sleep(Duration::from_millis(100));
    site.router().process().signal(Signal::TERM);
    // The node never replies: the drain ends by its timeout, long before the test's.
    let status = site.router_mut().process_mut().wait(Duration::from_secs(20));
    assert_eq!(status.code(), Some(0), "{}", site.router().process().log());
}

#[test]
fn a_second_router_on_the_same_port_or_state_is_refused() {
    let Some(site) = Site::router_only(1, &SiteOptions::default()) else {
        return;
    };
    let router = site.router();
    let fresh = || ([127, 0, 0, 1], ports::free()).into();
    let elsewhere = tempfile::TempDir::new().expect("a directory");
    for (what, listen, admin, state) in [
        ("port", router.address(), fresh(), elsewhere.path().to_owned()),
        ("admin port", fresh(), router.admin(), elsewhere.path().to_owned()),
        ("state directory", fresh(), fresh(), router.state_dir()),
    ] {
        // Without this flag it would be refused because of the first router.
        let options = RouterOptions::args(&["--allow-other-router"]);
        let mut rival = router.start_beside(&options, listen, admin, &state);
        let status = rival.wait(Duration::from_secs(20));
        assert!(!status.success(), "a second serve on the same {what} must be refused");
        let log = rival.log();
        let named = match what {
            "port" => listen.to_string(),
            "admin port" => admin.to_string(),
            _ => state.display().to_string(),
        };
        assert!(log.contains(&named), "the refusal must name the {what} {named}: {log}");
    }
    // The first router is not affected.
    for _ in 0..50 {
        assert_eq!(site.client().cmd("SET k v"), ok());
    }
}

#[test]
fn sighup_applies_some_settings_and_names_the_others() {
    let Some(site) = Site::router_only(2, &with_config("[clients]\nmax-clients = 3\n")) else {
        return;
    };
    let router = site.router();
    let mut steady: Vec<Client> = Vec::new();
    until("three are in", || {
        let mut client = site.client();
        if client.cmd("SET k v") == ok() {
            steady.push(client);
        }
        steady.len() == 3
    });
    assert!(site.client().reply().expect_error().contains("max number of clients"));
    std::fs::write(router.config_file(), "pin = true\n[clients]\nmax-clients = 50\npassword = \"new\"\n")
        .expect("configuration");
    router.process().signal(Signal::HUP);
    until("the new limit holds", || {
        let mut client = Client::try_connect(site.address()).ok()?;
        client.post("AUTH new");
        (client.try_reply().ok()? == ok()).then_some(())
    });
    until("the log names what needs a restart", || {
        let log = router.process().log();
        log.contains("pin") && log.contains("restart")
    });
    assert!(!router.process().log().contains("\"new\""), "a password in the log");
    // Connected clients stay connected, as in Redis after CONFIG SET requirepass.
    assert_eq!(steady[0].cmd("GET k"), bulk("v"));
    assert!(site.client().cmd("GET k").expect_error().starts_with("NOAUTH"));
    // A mistake changes nothing, and is reported with its place.
    std::fs::write(router.config_file(), "[clients]\nmax-client = 1\n").expect("configuration");
    router.process().signal(Signal::HUP);
    until("the mistake is named", || {
        let log = router.process().log();
        log.contains("max-client") && log.contains("max-clients")
    });
    let mut client = site.client();
    assert_eq!(client.cmd("AUTH new"), ok());
    assert_eq!(client.cmd("GET k"), bulk("v"));
}

#[test]
fn a_reload_under_load_fails_no_command() {
    let Some(site) = Site::router_only(2, &with_config("[nodes]\ncommand-timeout = \"5s\"\n")) else {
        return;
    };
    let router = site.router();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|i| {
                let mut client = site.client();
                scope.spawn(move || {
                    for n in 0..4000 {
                        assert_eq!(client.cmd(&format!("INCR reload{i}")), int(n + 1));
                    }
                })
            })
            .collect();
        let mut round = 0;
        while !clients.iter().all(|c| c.is_finished()) {
            round += 1;
            std::fs::write(
                router.config_file(),
                format!(
                    "[nodes]\ncommand-timeout = \"{}s\"\n[clients]\nmax-clients = {}\n",
                    5 + round % 3,
                    1000 + round
                ),
            )
            .expect("configuration");
            router.process().signal(Signal::HUP);
            std::thread::sleep(Duration::from_millis(30));
        }
        clients.into_iter().for_each(|c| c.join().expect("a client without errors"));
    });
}

/// The map is stored, and does not depend on the order of nodes.
#[test]
fn keys_are_found_after_a_restart_with_nodes_in_any_order() {
    let Some(mut site) = Site::router_only(3, &SiteOptions::default()) else {
        return;
    };
    let mut client = site.client();
    let n = 300;
    for i in 0..n {
        assert_eq!(client.cmd(&format!("SET stay{i} {i}")), ok());
    }
    let mut addresses: Vec<_> = site.nodes().iter().map(Node::address).collect();
    for _ in 0..3 {
        addresses.rotate_left(1);
        let order = addresses.clone();
        site.router_mut().restart(&order);
        let mut client = site.client();
        for i in 0..n {
            assert_eq!(client.cmd(&format!("GET stay{i}")), bulk(i.to_string()));
        }
    }
    addresses.reverse();
    // Without any state: the same nodes in another order yield the same map.
    let beside = vec!["--allow-other-router".to_owned()];
    let forgetful = Router::start(&addresses, &RouterOptions { args: beside, ..RouterOptions::default() });
    let mut client = Client::connect(forgetful.address());
    let missing = (0..n).filter(|i| client.cmd(&format!("GET stay{i}")) == Value::Nil).count();
    assert_eq!(
        missing, 0,
        "a router without state, with the same nodes in another order, misses {missing} of {n} keys"
    );
    assert_eq!(client.cmd("PING"), simple("PONG"));
}
