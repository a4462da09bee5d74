//! Functions that change while a move copies them to its target.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use switchyard_router::MoveEnd;

use super::fleet::{Client, Fleet, Server, until};
use super::relay::{Hold, has_command, relay};

fn library(answer: u32) -> String {
    format!("#!lua name=library\nredis.register_function('f', function() return {answer} end)")
}

/// A client replaces functions after they were read at the source and before the target has replied. The acknowledged
/// change must survive.
#[test]
fn a_replaced_function_does_not_return_at_the_target() {
    let source = Server::start(&[]);
    let mut target = Server::start(&[]);
    let (hold, direct) = (Arc::<Hold>::default(), target.address);
    let held = hold.clone();
    target.address = relay(direct, move |bytes| {
        if has_command(bytes, &["FUNCTION", "DUMP"]) {
            held.wait();
        }
        true
    });
    let fleet = Fleet::with(vec![source, target]);
    let mut client = fleet.client();
    client.send(&[b"FUNCTION", b"LOAD", library(1).as_bytes()]);
    assert_eq!(client.reply(), "library");
    // Empty the target, so that functions must be copied.
    assert_eq!(Client::connect(direct).cmd("FUNCTION FLUSH"), "OK");
    hold.wanted.store(true, Ordering::SeqCst);
    fleet.begin(fleet.task(1, 0, 1));
    until("the functions of the source have been read", || hold.holds.load(Ordering::SeqCst));
    let is_told = Arc::new(AtomicBool::new(false));
    let told = is_told.clone();
    let loader = std::thread::spawn(move || {
        client.send(&[b"FUNCTION", b"LOAD", b"REPLACE", library(2).as_bytes()]);
        let reply = client.reply();
        told.store(true, Ordering::SeqCst);
        reply
    });
    // Long enough to finish if nothing blocked it.
    let begun = Instant::now();
    while !is_told.load(Ordering::SeqCst) && begun.elapsed() < Duration::from_secs(1) {
        std::thread::sleep(Duration::from_millis(5));
    }
    hold.wanted.store(false, Ordering::SeqCst);
    assert_eq!(loader.join().expect("told"), "library");
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    for server in [fleet.servers[0].address, direct] {
        assert_eq!(Client::connect(server).cmd("FCALL f 0"), "2");
    }
}
