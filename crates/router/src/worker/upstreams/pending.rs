//! Entry of a command in flight on a connection, and requests that connections recognize by their bytes.

use switchyard_resp::command::CommandClass;

use crate::slab::Handle;
use crate::worker::command::CommandSeq;
use crate::worker::turn::Turn;

/// Start and end of a transaction.
pub(in crate::worker) const MULTI: &[u8] = b"*1\r\n$5\r\nMULTI\r\n";
pub(in crate::worker) const EXEC: &[u8] = b"*1\r\n$4\r\nEXEC\r\n";

/// Receiver of a reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum Purpose {
    /// The client, unchanged.
    Client,
    /// A client, after the command was healed once (NOSCRIPT): not again.
    ClientHealed,
    /// A gather, as part `seq`.
    Gather,
    /// None: SELECT between commands for different databases, SCRIPT LOAD before a healed EVALSHA.
    Discarded,
    /// A topic of the worker: subscribes to it.
    Subscribe,
    /// A client's UNSUBSCRIBE: earlier messages have arrived when this is answered. `seq` is the command's number.
    Sync,
    /// CLIENT TRACKING ON on a connection of subscriptions. `seq` is the generation of the prefixes.
    Track,
    /// The list of the node's commands.
    Learn,
    /// MULTI, or a command of a transaction: an error is kept for EXEC. `seq` is 0 for MULTI.
    Queued,
    /// EXEC of a client.
    Exec,
    /// EXEC after the node has refused MULTI: the commands were executed individually.
    ExecWithoutMulti,
    /// WATCH of a client.
    Watch,
    /// WAIT or WAITAOF of a client, at one of its nodes.
    Wait,
    /// The answer to CLIENT UNBLOCK for the connection `who`.
    Unblock,
    /// The answer to the query whether the client on the connection `who` waits at the node; `seq` is the query's
    /// number.
    Look,
    /// The value of a hot copy; `seq` is the fill's number.
    Fill,
    /// PTTL of the key of a hot copy, with the same `seq`.
    FillTtl,
    /// PING on a connection for fills: its reply extends the lease of hot copies.
    Beat,
    /// TOUCH of a copy's own key on a connection for fills: its reply confirms the copy. `seq` is its number.
    Touch,
    /// The answer to CLIENT KILL ID for a broken connection: confirms that its commands have ended. `seq` is the
    /// zombie's number.
    Confirm,
}

/// Whether a command may be sent again after its reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum Again {
    Never,
    /// A read: a large reply may be fetched on another connection.
    Reads,
    /// EVALSHA or a relative: a NOSCRIPT reply can be healed.
    Heals,
}

/// A command passed to a connection. There are many: its size is five words.
#[derive(Clone, Copy, Debug)]
pub(in crate::worker) struct Pending {
    /// The client or the gather.
    pub(in crate::worker) who: Handle,
    /// Number of the client's command, or of the gather's part.
    pub(in crate::worker) seq: u32,
    /// Bytes of the request in `out`.
    pub(in crate::worker) len: u32,
    pub(in crate::worker) sent_us: u32,
    /// Low bits of the epoch at sending.
    pub(in crate::worker) epoch: u32,
    pub(in crate::worker) purpose: Purpose,
    pub(in crate::worker) class: u8,
    pub(in crate::worker) again: Again,
    /// May take as long as commands of the slow lane.
    pub(in crate::worker) is_long: bool,
    /// Number for the observers of its end.
    pub(in crate::worker) end: CommandSeq,
    /// Low bits of the generation of cacheable keys for which it has closed gates.
    pub(in crate::worker) cacheable: u32,
}

impl Pending {
    /// A request of the router whose reply is ignored.
    pub(in crate::worker) fn of_ours(turn: &Turn) -> Self {
        Self {
            who: Handle::NONE,
            seq: 0,
            len: 0,
            sent_us: turn.now_us() as u32,
            epoch: turn.routing().topology.epoch() as u32,
            purpose: Purpose::Discarded,
            class: CommandClass::Admin as u8,
            again: Again::Never,
            is_long: false,
            end: CommandSeq::NONE,
            cacheable: turn.cacheable(),
        }
    }
}

/// Advances the replication offset of a connection without changing anything.
pub(in crate::worker) const MARK: &[u8] = b"*3\r\n$6\r\nSWAPDB\r\n$1\r\n0\r\n$1\r\n0\r\n";

/// Mark for members of a cluster, which refuse `SWAPDB`: restores the dump of a Redis 7.0 without libraries. All later
/// versions accept its format.
pub(in crate::worker) const MEMBER_MARK: &[u8] =
    b"*4\r\n$8\r\nFUNCTION\r\n$7\r\nRESTORE\r\n$10\r\n\x0a\x00\x5d\x9b\x5c\x40\x0f\x7f\xa2\xda\r\n$6\r\nAPPEND\r\n";
