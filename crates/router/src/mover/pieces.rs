//! Big values in pieces: the commands that read and write a piece of each type, and that read touched elements.
//!
//! A piece is some elements with their values, as arguments of the command that writes them. Reads always return
//! current values (`HMGET`, not a log of changes), so a piece may be written twice, and a later read replaces an
//! earlier one.

use switchyard_policy::migration::dirty_elements::Element;
use switchyard_resp::reply;

use super::connection::Connection;

/// Types that are copied in pieces. Streams are not: their groups and last entry id cannot be read and set exactly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Hash,
    Set,
    Zset,
    List,
    String,
}

/// Start of the next piece.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Cursor {
    /// Cursor of HSCAN, SSCAN or ZSCAN.
    Scan(Vec<u8>),
    /// Index in a list, or byte offset in a string.
    At(u64),
}

/// Elements with their values, as arguments.
#[derive(Debug, Default)]
pub(super) struct Piece {
    /// Elements that exist, as arguments of the command that writes them.
    pub(super) present: Vec<Vec<u8>>,
    /// Elements that do not exist.
    pub(super) missing: Vec<Vec<u8>>,
}

impl Piece {
    pub(super) fn is_empty(&self) -> bool {
        self.present.is_empty() && self.missing.is_empty()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.present.iter().map(|arg| arg.len() as u64).sum()
    }
}

/// Maximum arguments per command. A larger command would block the node for too long.
const ARGUMENTS: usize = 4096;

impl Kind {
    /// Returns the type with this TYPE name.
    pub(super) fn named(name: &[u8]) -> Option<Self> {
        Some(match name {
            b"hash" => Self::Hash,
            b"set" => Self::Set,
            b"zset" => Self::Zset,
            b"list" => Self::List,
            b"string" => Self::String,
            _ => return None,
        })
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Hash => "hash",
            Self::Set => "set",
            Self::Zset => "zset",
            Self::List => "list",
            Self::String => "string",
        }
    }

    pub(super) fn begin(self) -> Cursor {
        match self {
            Self::Hash | Self::Set | Self::Zset => Cursor::Scan(b"0".to_vec()),
            Self::List | Self::String => Cursor::At(0),
        }
    }

    /// Returns the command for the number of elements (or bytes) of a value.
    pub(super) const fn length(self) -> &'static [u8] {
        match self {
            Self::Hash => b"HLEN",
            Self::Set => b"SCARD",
            Self::Zset => b"ZCARD",
            Self::List => b"LLEN",
            Self::String => b"STRLEN",
        }
    }

    const fn adds(self) -> &'static [u8] {
        match self {
            Self::Hash => b"HSET",
            Self::Set => b"SADD",
            Self::Zset => b"ZADD",
            Self::List => b"RPUSH",
            Self::String => b"APPEND",
        }
    }

    const fn removes(self) -> &'static [u8] {
        match self {
            Self::Hash => b"HDEL",
            Self::Set => b"SREM",
            // Elements of lists and strings are never removed.
            _ => b"ZREM",
        }
    }

    /// Requests a piece of about `count` elements (or bytes).
    pub(super) fn request_piece(self, connection: &mut Connection, key: &[u8], cursor: &Cursor, count: u64) {
        let text = count.to_string();
        match (self, cursor) {
            (Self::Hash, Cursor::Scan(at)) => connection.push(&[b"HSCAN", key, at, b"COUNT", text.as_bytes()]),
            (Self::Set, Cursor::Scan(at)) => connection.push(&[b"SSCAN", key, at, b"COUNT", text.as_bytes()]),
            (_, Cursor::Scan(at)) => connection.push(&[b"ZSCAN", key, at, b"COUNT", text.as_bytes()]),
            (_, Cursor::At(at)) => {
                let (first, last) = (at.to_string(), (at + count - 1).to_string());
                let command: &[u8] = if self == Self::String { b"GETRANGE" } else { b"LRANGE" };
                connection.push(&[command, key, first.as_bytes(), last.as_bytes()]);
            }
        }
    }

    /// Returns the piece and the start of the next one, if any. `None` if the reply has another form.
    pub(super) fn take(self, cursor: &Cursor, count: u64, answer: &[u8]) -> Option<(Piece, Option<Cursor>)> {
        if reply::is_error(answer) {
            return None;
        }
        let mut piece = Piece::default();
        let next = match cursor {
            Cursor::Scan(_) => {
                let mut pair = reply::elements(answer);
                let next = reply::text(pair.next()?)?.to_vec();
                piece.present = reply::elements(pair.next()?).filter_map(reply::text).map(<[u8]>::to_vec).collect();
                if self == Self::Zset {
                    piece.present.chunks_exact_mut(2).for_each(|pair| pair.swap(0, 1));
                }
                (next != b"0").then_some(Cursor::Scan(next))
            }
            Cursor::At(at) => {
                let got = if self == Self::String {
                    let bytes = reply::text(answer)?;
                    if !bytes.is_empty() {
                        piece.present.push(bytes.to_vec());
                    }
                    bytes.len() as u64
                } else {
                    piece.present = reply::elements(answer).filter_map(reply::text).map(<[u8]>::to_vec).collect();
                    piece.present.len() as u64
                };
                (got == count).then_some(Cursor::At(at + got))
            }
        };
        Some((piece, next))
    }

    /// Requests the current values of these elements.
    pub(super) fn request_elements(self, connection: &mut Connection, key: &[u8], elements: &[Element]) {
        let command: &[u8] = match self {
            Self::Hash => b"HMGET",
            Self::Set => b"SMISMEMBER",
            _ => b"ZMSCORE",
        };
        let mut args: Vec<&[u8]> = vec![command, key];
        args.extend(elements.iter().map(|element| &element[..]));
        connection.push(&args);
    }

    /// Returns the elements of a reply to [`Self::request_elements`].
    pub(super) fn take_elements(self, elements: &[Element], answer: &[u8]) -> Option<Piece> {
        if reply::is_error(answer) {
            return None;
        }
        let mut piece = Piece::default();
        let mut values = reply::elements(answer);
        for element in elements {
            let value = values.next()?;
            let is_there = if self == Self::Set { reply::integer(value)? == 1 } else { !reply::is_null(value) };
            if !is_there {
                piece.missing.push(element.to_vec());
                continue;
            }
            match self {
                Self::Hash => piece.present.extend([element.to_vec(), reply::text(value)?.to_vec()]),
                Self::Zset => piece.present.extend([reply::text(value)?.to_vec(), element.to_vec()]),
                _ => piece.present.push(element.to_vec()),
            }
        }
        Some(piece)
    }

    /// Writes a piece to a key. All replies are counts.
    pub(super) fn write(self, connection: &mut Connection, key: &[u8], piece: &Piece) {
        for (command, all) in [(self.adds(), &piece.present), (self.removes(), &piece.missing)] {
            for some in all.chunks(ARGUMENTS) {
                let mut args: Vec<&[u8]> = vec![command, key];
                args.extend(some.iter().map(Vec::as_slice));
                connection.push(&args);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_arguments_of_the_writing_command() {
        let scan = Cursor::Scan(b"0".to_vec());
        let answer = b"*2\r\n$2\r\n17\r\n*4\r\n$1\r\na\r\n$1\r\n1\r\n$1\r\nb\r\n$1\r\n2\r\n";
        let (piece, next) = Kind::Hash.take(&scan, 10, answer).expect("a piece");
        assert_eq!((piece.present.concat(), next), (b"a1b2".to_vec(), Some(Cursor::Scan(b"17".to_vec()))));
        let (piece, _) = Kind::Zset.take(&scan, 10, answer).expect("a piece");
        assert_eq!(piece.present.concat(), b"1a2b");
        let (piece, next) = Kind::List.take(&Cursor::At(4), 2, b"*2\r\n$1\r\na\r\n$1\r\nb\r\n").expect("a piece");
        assert_eq!((piece.present.concat(), next), (b"ab".to_vec(), Some(Cursor::At(6))));
        let (piece, next) = Kind::String.take(&Cursor::At(4), 9, b"$2\r\nab\r\n").expect("a piece");
        assert_eq!((piece.bytes(), next), (2, None));
        assert!(Kind::Hash.take(&scan, 10, b"-WRONGTYPE no\r\n").is_none());
    }

    #[test]
    fn elements_are_present_or_missing() {
        let elements: Vec<Element> = [&b"a"[..], b"b"].into_iter().map(Element::from).collect();
        let hash = Kind::Hash.take_elements(&elements, b"*2\r\n$1\r\n1\r\n$-1\r\n").expect("a piece");
        assert_eq!((hash.present.concat(), hash.missing.concat()), (b"a1".to_vec(), b"b".to_vec()));
        let set = Kind::Set.take_elements(&elements, b"*2\r\n:0\r\n:1\r\n").expect("a piece");
        assert_eq!((set.present.concat(), set.missing.concat()), (b"b".to_vec(), b"a".to_vec()));
        let zset = Kind::Zset.take_elements(&elements, b"*2\r\n$3\r\n1.5\r\n*-1\r\n").expect("a piece");
        assert_eq!((zset.present.concat(), zset.missing.concat()), (b"1.5a".to_vec(), b"b".to_vec()));
        assert!(Kind::Hash.take_elements(&elements, b"-WRONGTYPE no\r\n").is_none());
        assert!(Kind::Hash.take_elements(&elements, b"*1\r\n$-1\r\n").is_none(), "one is missing");
    }
}
