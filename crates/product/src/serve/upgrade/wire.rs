//! Messages between the old and the new process: packets of JSON on a pair of connected Unix sockets. Listening sockets
//! are in the ancillary data of packets (SCM_RIGHTS).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::{Deserialize, Serialize};
use switchyard_router::{ListenAddress, ListeningSockets};

/// Version of the messages. A process refuses the offer of another version.
const PROTOCOL: u32 = 2;

/// Maximum length of a packet, in bytes. Enough for the addresses of some hundred listeners, and below the usual socket
/// buffer of 208 KiB.
const LENGTH_MAX: usize = 64 << 10;

/// Descriptors per packet. The kernel permits 253.
const FILES_PER_PACKET: usize = 128;

/// Maximum number of descriptors: 64 listeners with 1,024 workers each.
const FILES_MAX: usize = 1 << 16;

/// Maximum time until the other process has room for a packet.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// A message.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Message {
    /// Listening sockets, which follow in packets of [`Message::Files`].
    Offer {
        protocol: u32,
        /// Address of the admin port as configured.
        admin: SocketAddr,
        listeners: Vec<Offered>,
    },
    /// Some of the sockets, in the order of the offer: the admin port; of each listener its claim, then its sockets.
    Files,
    /// The new process can accept clients.
    Ready { pid: u32, version: String },
    /// The new process has failed, and ends.
    Refused { why: String },
    /// The new process must accept clients.
    Open,
    /// The new process accepts clients.
    Opened,
    /// The old process accepts no more clients.
    Go,
}

/// Sockets of a listener.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Offered {
    place: Place,
    sockets: usize,
}

/// Address of a listener as configured.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Place {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// Listening sockets of a process.
#[derive(Debug)]
pub(super) struct Sockets {
    /// Address of the admin port as configured, and its socket.
    pub(super) admin: (SocketAddr, OwnedFd),
    pub(super) listeners: Vec<ListeningSockets>,
}

/// One end of the pair of sockets.
#[derive(Debug)]
pub(super) struct Channel(OwnedFd);

impl Channel {
    /// Creates a pair. Returns the other end as a descriptor for another process.
    pub(super) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self::new(ours)?, theirs))
    }

    /// Uses a socket that another process has created.
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        set_socket_timeout(&socket, Timeout::Send, Some(SEND_TIMEOUT))?;
        Ok(Self(socket))
    }

    /// Sends a message.
    pub(super) fn send(&self, message: &Message) -> io::Result<()> {
        self.send_with(message, &[])
    }

    /// Receives a message without sockets. The error `UnexpectedEof` means that the other process has ended.
    pub(super) fn receive(&self, until: Instant) -> io::Result<Message> {
        Ok(self.receive_with(until)?.0)
    }

    /// Sends listening sockets.
    pub(super) fn offer(&self, offered: &Sockets) -> io::Result<()> {
        let listener = |listener: &ListeningSockets| Offered {
            place: match &listener.address {
                ListenAddress::Tcp(address) => Place::Tcp(*address),
                ListenAddress::Unix { path, .. } => Place::Unix(path.clone()),
            },
            sockets: listener.sockets.len(),
        };
        let (admin, socket) = &offered.admin;
        let listeners = offered.listeners.iter().map(listener).collect();
        self.send(&Message::Offer { protocol: PROTOCOL, admin: *admin, listeners })?;
        let of_listeners = offered.listeners.iter().flat_map(|of| std::iter::once(&of.claim).chain(&of.sockets));
        let files: Vec<BorrowedFd<'_>> = std::iter::once(socket).chain(of_listeners).map(AsFd::as_fd).collect();
        files.chunks(FILES_PER_PACKET).try_for_each(|files| self.send_with(&Message::Files, files))
    }

    /// Receives listening sockets.
    pub(super) fn receive_offer(&self, until: Instant) -> io::Result<Sockets> {
        let (admin, offered) = match self.receive(until)? {
            Message::Offer { protocol: PROTOCOL, admin, listeners } => (admin, listeners),
            Message::Offer { protocol, .. } => {
                return Err(invalid(&format!(
                    "the old process hands its sockets over by version {protocol}, and this one by version {PROTOCOL}: this upgrade needs a restart"
                )));
            }
            other => return Err(invalid(&format!("the old process has sent {other:?} instead of its sockets"))),
        };
        let count = offered.iter().try_fold(1usize, |sum, of| sum.checked_add(of.sockets)?.checked_add(1));
        let count = count.filter(|count| *count <= FILES_MAX).ok_or_else(|| invalid("there are too many sockets"))?;
        let mut files = Vec::new();
        while files.len() < count {
            match self.receive_with(until)? {
                (Message::Files, more) if !more.is_empty() && more.len() <= count - files.len() => files.extend(more),
                _ => return Err(invalid("the old process has sent other sockets than it has offered")),
            }
        }
        let mut files = files.into_iter();
        let missing = || invalid("a socket is missing");
        let socket = files.next().ok_or_else(missing)?;
        let listener = |Offered { place, sockets }: Offered| {
            let address = match place {
                Place::Tcp(address) => ListenAddress::Tcp(address),
                // The mode is of the new configuration.
                Place::Unix(path) => ListenAddress::Unix { path, mode: 0 },
            };
            let claim = files.next().ok_or_else(missing)?;
            Ok(ListeningSockets { address, claim, sockets: files.by_ref().take(sockets).collect() })
        };
        let listeners = offered.into_iter().map(listener).collect::<io::Result<_>>()?;
        Ok(Sockets { admin: (admin, socket), listeners })
    }

    fn send_with(&self, message: &Message, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let text = serde_json::to_vec(message)?;
        if text.len() > LENGTH_MAX {
            return Err(invalid("there are too many listeners"));
        }
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_PER_PACKET))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(invalid("there are too many sockets for a packet"));
        }
        rustix::io::retry_on_intr(|| sendmsg(&self.0, &[IoSlice::new(&text)], &mut control, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    fn receive_with(&self, until: Instant) -> io::Result<(Message, Vec<OwnedFd>)> {
        let mut text = vec![0; LENGTH_MAX];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_PER_PACKET))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            set_socket_timeout(&self.0, Timeout::Recv, Some(left))?;
            match recvmsg(&self.0, &mut [IoSliceMut::new(&mut text)], &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR | Errno::AGAIN) => {}
                received => break received?,
            }
        };
        let files: Vec<OwnedFd> = control
            .drain()
            .flat_map(|part| match part {
                RecvAncillaryMessage::ScmRights(files) => files.collect(),
                _ => Vec::new(),
            })
            .collect();
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(invalid("a message is too long, or this process may open no more files"));
        }
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let message = serde_json::from_slice(&text[..received.bytes]);
        Ok((message.map_err(|error| invalid(&format!("a message is unknown: {error}")))?, files))
    }
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.to_owned())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (Channel, Channel) {
        let (one, other) = Channel::pair().expect("a pair");
        (one, Channel::new(other).expect("a socket"))
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    fn socket() -> OwnedFd {
        TcpListener::bind("127.0.0.1:0").expect("a port").into()
    }

    fn sockets(listeners: &[(ListenAddress, usize)]) -> Sockets {
        let listeners = listeners.iter().map(|(address, count)| ListeningSockets {
            address: address.clone(),
            claim: socket(),
            sockets: (0..*count).map(|_| socket()).collect(),
        });
        Sockets { admin: (([127, 0, 0, 1], 1).into(), socket()), listeners: listeners.collect() }
    }

    fn local_address(socket: &OwnedFd) -> SocketAddr {
        TcpListener::from(socket.try_clone().expect("a copy")).local_addr().expect("an address")
    }

    #[test]
    fn sockets_arrive_in_their_order() {
        let (old, new) = pair();
        let tcp = ListenAddress::Tcp(([127, 0, 0, 1], 0).into());
        let unix = ListenAddress::Unix { path: "/run/a b".into(), mode: 0 };
        // More than one packet of descriptors.
        let sent = sockets(&[(tcp, 300), (unix, 1)]);
        old.offer(&sent).expect("sent");
        let received = new.receive_offer(soon()).expect("received");
        assert_eq!(received.admin.0, sent.admin.0);
        assert_eq!(local_address(&received.admin.1), local_address(&sent.admin.1));
        assert_eq!(received.listeners.len(), 2);
        for (received, sent) in received.listeners.iter().zip(&sent.listeners) {
            assert_eq!(received.address, sent.address);
            assert_eq!(local_address(&received.claim), local_address(&sent.claim));
            let all = |of: &ListeningSockets| of.sockets.iter().map(local_address).collect::<Vec<_>>();
            assert_eq!(all(received), all(sent));
        }
    }

    #[test]
    fn messages_arrive_until_the_other_process_ends() {
        let (old, new) = pair();
        for message in [
            Message::Ready { pid: 7, version: "1 (x)".to_owned() },
            Message::Refused { why: "a\nb".to_owned() },
            Message::Open,
            Message::Opened,
            Message::Go,
        ] {
            new.send(&message).expect("sent");
            assert_eq!(old.receive(soon()).expect("received"), message);
        }
        let late = old.receive(Instant::now() + Duration::from_millis(20)).expect_err("silence");
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        drop(new);
        assert_eq!(old.receive(soon()).expect_err("ended").kind(), io::ErrorKind::UnexpectedEof);
        assert!(old.send(&Message::Go).is_err());
    }

    #[test]
    fn offers_of_other_versions_are_refused() {
        let (old, new) = pair();
        let offer = r#"{"offer":{"protocol":1,"admin":"127.0.0.1:1","listeners":[],"more":1}}"#;
        rustix::net::send(&old.0, offer.as_bytes(), SendFlags::empty()).expect("sent");
        let error = new.receive_offer(soon()).expect_err("refused").to_string();
        assert!(error.contains("by version 1,") && error.contains("needs a restart"), "{error}");
    }

    #[test]
    fn hostile_messages_are_refused() {
        let huge = usize::MAX;
        let offer = |count: usize| {
            format!(
                r#"{{"offer":{{"protocol":2,"admin":"127.0.0.1:1","listeners":[{{"place":{{"tcp":"127.0.0.1:0"}},"sockets":{count}}}]}}}}"#
            )
        };
        let long = format!("{{\"refused\":{{\"why\":\"{}\"}}}}", "x".repeat(2 * LENGTH_MAX));
        let texts: Vec<Vec<u8>> = [
            "x",
            "{}",
            "null",
            "\"go\"",
            "\"files\"",
            "{\"offer\":{}}",
            "{\"offer\":{\"protocol\":-1}}",
            "{\"ready\":{\"pid\":4294967296,\"version\":\"\"}}",
            &offer(huge),
            &offer(FILES_MAX),
            &long,
        ]
        .map(|text| text.as_bytes().to_vec())
        .into_iter()
        .chain([vec![0xff; 100], vec![b'['; 60_000]])
        .collect();
        for text in texts {
            let (old, new) = pair();
            rustix::net::send(&old.0, &text, SendFlags::empty()).expect("sent");
            let start = String::from_utf8_lossy(&text[..text.len().min(80)]).into_owned();
            assert_eq!(new.receive_offer(soon()).expect_err(&start).kind(), io::ErrorKind::InvalidData, "{start}");
        }
    }

    #[test]
    fn sockets_that_were_not_offered_are_refused() {
        let offer = r#"{"offer":{"protocol":2,"admin":"127.0.0.1:1","listeners":[]}}"#;
        for count in [0, 2, FILES_PER_PACKET] {
            let (old, new) = pair();
            rustix::net::send(&old.0, offer.as_bytes(), SendFlags::empty()).expect("sent");
            let files: Vec<OwnedFd> = (0..count).map(|_| socket()).collect();
            let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
            old.send_with(&Message::Files, &files).expect("sent");
            assert!(new.receive_offer(soon()).is_err(), "{count}");
        }
    }
}
