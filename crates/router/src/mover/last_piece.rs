//! Last step of a staged key, in its leg: reads the dirty elements at the source, writes them to the staging key, and
//! renames the staging key.
//!
//! Two steps at the target, because the element count decides whether there is a second one
//! (`switchyard_policy::migration::staging`). Each is one transaction, so a broken connection leaves the staging key or
//! the key, never both or neither.

use switchyard_policy::migration::Key;
use switchyard_policy::migration::dirty_elements::Element;
use switchyard_policy::migration::staging::{Counted, Place, Renamed, StagingReply, Step};
use switchyard_resp::reply;

use super::connection::{Connection, error_text};
use super::pieces::{Kind, Piece};
use super::staging::{LIFE_MS, Staged};

/// Elements per command.
const AT_ONCE: usize = 1000;

/// Queries sent to the source for one key.
#[derive(Debug)]
pub(super) struct DirtyRead {
    kind: Kind,
    name: Vec<u8>,
    elements: Vec<Element>,
    copied: u64,
}

/// Dirty elements that the staging key lacks.
#[derive(Debug)]
pub(super) struct MissingElements {
    pub(super) kind: Kind,
    pub(super) name: Vec<u8>,
    /// Elements (or bytes) at the source.
    count: i64,
    piece: Piece,
    /// Bytes copied of the whole value.
    pub(super) bytes: u64,
}

/// A staged key whose last step is in progress.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) place: Place,
    /// Expiry, Unix time in milliseconds. 0: never.
    pub(super) expires_ms: i64,
    pub(super) replies: usize,
}

/// Requests the length and the dirty elements at the source.
pub(super) fn request_dirty_elements(
    connection: &mut Connection,
    key: &Key,
    staged: &Staged,
    elements: Vec<Element>,
) -> DirtyRead {
    connection.push(&[staged.kind.length(), key]);
    for some in elements.chunks(AT_ONCE) {
        staged.kind.request_elements(connection, key, some);
    }
    DirtyRead { kind: staged.kind, name: staged.name.clone(), elements, copied: staged.copied }
}

impl DirtyRead {
    /// Takes the replies. `None` if the value now has another type.
    pub(super) fn take(&self, next: &mut impl FnMut() -> Vec<u8>) -> Option<MissingElements> {
        let count = next();
        let count = if reply::is_error(&count) { None } else { reply::integer(&count) };
        let mut all = Some(Piece::default());
        for some in self.elements.chunks(AT_ONCE) {
            let answer = next();
            all = all.zip(self.kind.take_elements(some, &answer)).map(|(mut all, piece)| {
                all.present.extend(piece.present);
                all.missing.extend(piece.missing);
                all
            });
        }
        let (count, piece) = count.zip(all)?;
        Some(MissingElements { kind: self.kind, name: self.name.clone(), count, piece, bytes: self.copied })
    }
}

/// Sends a step to the target.
pub(super) fn push(connection: &mut Connection, step: Step, item: &Item, last: &MissingElements) {
    let MissingElements { kind, name, piece, .. } = last;
    let key = &item.place.0;
    connection.push(&[b"MULTI"]);
    match step {
        Step::Write => {
            connection.push(&[b"EXISTS", key]);
            connection.push(&[b"PEXPIRE", name, LIFE_MS]);
            kind.write(connection, name, piece);
            // Repeated in case the write has created the key.
            connection.push(&[b"PEXPIRE", name, LIFE_MS]);
            connection.push(&[kind.length(), name]);
        }
        Step::Rename => {
            let at = item.expires_ms.to_string();
            match item.expires_ms {
                0 => connection.push(&[b"PERSIST", name]),
                _ => connection.push(&[b"PEXPIREAT", name, at.as_bytes()]),
            }
            connection.push(&[b"RENAMENX", name, key]);
            // If the rename fails, the staging key must still expire.
            connection.push(&[b"PEXPIRE", name, LIFE_MS]);
        }
    }
    connection.push(&[b"EXEC"]);
}

/// Returns the result of a step.
pub(super) fn step_result(step: Step, item: &Item, last: &MissingElements, answers: &[Vec<u8>]) -> StagingReply {
    let exec = answers.last().map(Vec::as_slice).unwrap_or_default();
    if let Some(error) = answers.iter().find(|answer| reply::is_error(answer)) {
        return StagingReply::Refused(error_text(error));
    }
    let results: Vec<&[u8]> = reply::elements(exec).collect();
    let number = |at: usize| results.get(at).and_then(|answer| reply::integer(answer));
    match step {
        Step::Write => {
            if let Some(error) = results.iter().find(|answer| reply::is_error(answer)) {
                return StagingReply::Unusable(error_text(error));
            }
            let there = results.last().and_then(|answer| reply::integer(answer)).unwrap_or(0);
            let (key_was_there, staging_was_there) = (number(0) == Some(1), number(1) == Some(1));
            StagingReply::Counted(Counted {
                key_existed: key_was_there,
                staging_existed: staging_was_there,
                there,
                at_source: last.count,
            })
        }
        Step::Rename => match results.get(1) {
            Some(answer) if reply::is_error(answer) && item.expires_ms > 0 && number(0) == Some(1) => {
                StagingReply::Renamed(Renamed::Expired)
            }
            Some(answer) if reply::is_error(answer) => StagingReply::Unusable(error_text(answer)),
            Some(answer) if reply::integer(answer) == Some(1) => StagingReply::Renamed(Renamed::Yes),
            Some(answer) if reply::integer(answer) == Some(0) => StagingReply::Renamed(Renamed::KeyExists),
            _ => StagingReply::Unusable("the node's reply to EXEC has another form".to_owned()),
        },
    }
}
