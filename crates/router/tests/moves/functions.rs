//! Functions that change while a move gives them to its target.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use switchyard_router::MoveEnd;

use super::fleet::{Client, Fleet, Server, until};

/// Holds back a FUNCTION DUMP on its way to a server, while it is told to.
#[derive(Default)]
struct Hold {
    wanted: AtomicBool,
    holds: AtomicBool,
}

/// A way to a server on which that can be held. Gives its address.
fn relay(to: SocketAddr, hold: Arc<Hold>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    std::thread::spawn(move || {
        for inward in listener.incoming().map_while(Result::ok) {
            let outward = TcpStream::connect(to).expect("the server");
            for stream in [&inward, &outward] {
                stream.set_nodelay(true).expect("no delay");
            }
            let (back_from, back_to) = (outward.try_clone().expect("a clone"), inward.try_clone().expect("a clone"));
            std::thread::spawn(move || pass(back_from, back_to, &|_| {}));
            let hold = hold.clone();
            std::thread::spawn(move || {
                pass(inward, outward, &|bytes| {
                    let is_dump = bytes.windows(20).any(|w| w == b"FUNCTION\r\n$4\r\nDUMP\r\n");
                    while is_dump && hold.wanted.load(Ordering::SeqCst) {
                        hold.holds.store(true, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(1));
                    }
                });
            });
        }
    });
    address
}

fn pass(mut from: TcpStream, mut to: TcpStream, before: &dyn Fn(&[u8])) {
    let mut chunk = [0; 65536];
    while let Ok(count @ 1..) = from.read(&mut chunk) {
        before(&chunk[..count]);
        if to.write_all(&chunk[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

fn library(answer: u32) -> String {
    format!("#!lua name=library\nredis.register_function('f', function() return {answer} end)")
}

/// The source's functions have been read, and the target's have not been answered: a client replaces them. What it was told is done stays done.
#[test]
fn a_function_that_was_replaced_does_not_come_back_at_the_target() {
    let source = Server::start(&[]);
    let mut target = Server::start(&[]);
    let (hold, direct) = (Arc::<Hold>::default(), target.address);
    target.address = relay(direct, hold.clone());
    let fleet = Fleet::with(vec![source, target]);
    let mut client = fleet.client();
    client.send(&[b"FUNCTION", b"LOAD", library(1).as_bytes()]);
    assert_eq!(client.reply(), "library");
    // The target has to be given them.
    assert_eq!(Client::connect(direct).cmd("FUNCTION FLUSH"), "OK");
    hold.wanted.store(true, Ordering::SeqCst);
    fleet.begin(fleet.order(1, 0, 1));
    until("the functions of the source have been read", || hold.holds.load(Ordering::SeqCst));
    let is_told = Arc::new(AtomicBool::new(false));
    let told = is_told.clone();
    let loader = std::thread::spawn(move || {
        client.send(&[b"FUNCTION", b"LOAD", b"REPLACE", library(2).as_bytes()]);
        let reply = client.reply();
        told.store(true, Ordering::SeqCst);
        reply
    });
    // As long as it would take if nothing kept it waiting.
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
