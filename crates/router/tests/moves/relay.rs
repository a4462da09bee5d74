//! A relay to a server, on which a test can hold a command or break a connection.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Holds a command on its way to a server, on request.
#[derive(Default)]
pub(crate) struct Hold {
    pub(crate) wanted: AtomicBool,
    pub(crate) holds: AtomicBool,
}

impl Hold {
    pub(crate) fn wait(&self) {
        while self.wanted.load(Ordering::SeqCst) {
            self.holds.store(true, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Starts a relay. `passes` receives the bytes before the server, and closes the connection by returning false. Returns
/// the address.
pub(crate) fn relay(to: SocketAddr, passes: impl Fn(&[u8]) -> bool + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    let passes = Arc::new(passes);
    std::thread::spawn(move || {
        for inward in listener.incoming().map_while(Result::ok) {
            // The server may end before the test.
            let Ok(outward) = TcpStream::connect(to) else { continue };
            for stream in [&inward, &outward] {
                stream.set_nodelay(true).expect("no delay");
            }
            let (back_from, back_to) = (outward.try_clone().expect("a clone"), inward.try_clone().expect("a clone"));
            std::thread::spawn(move || pass(back_from, back_to, &|_| true));
            let passes = passes.clone();
            std::thread::spawn(move || pass(inward, outward, &*passes));
        }
    });
    address
}

fn pass(mut from: TcpStream, mut to: TcpStream, passes: &dyn Fn(&[u8]) -> bool) {
    let mut chunk = [0; 65536];
    while let Ok(count @ 1..) = from.read(&mut chunk) {
        if !passes(&chunk[..count]) || to.write_all(&chunk[..count]).is_err() {
            break;
        }
    }
    for stream in [from, to] {
        let _ = stream.shutdown(Shutdown::Both);
    }
}

/// Whether the bytes contain a command with these words in sequence.
pub(crate) fn has_command(bytes: &[u8], words: &[&str]) -> bool {
    let words: String = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
    bytes.windows(words.len()).any(|window| window == words.as_bytes())
}
