//! Fuzz target: any bytes as the payload of FUNCTION RESTORE, and as LZF.

use std::convert::Infallible;

use super::{CRC, decompress, with_code};

/// Checks that a payload with replaced code is read again with that code, and that LZF is unpacked as by a second
/// reader. The input gets a valid checksum, which a fuzzer does not find.
///
/// # Panics
/// If one of these is wrong.
pub fn function_dump(input: &[u8]) {
    let _ = codes(input);
    let signed = [input, &CRC.checksum(input).to_le_bytes()].concat();
    if let Some((read, written)) = codes(&signed) {
        let (again, rewritten) = codes(&written).expect("own payloads are valid");
        assert_eq!((&again, &rewritten), (&read, &written));
        assert_eq!(written[written.len() - 10..][..2], input[input.len() - 2..], "version");
    }
    match unpacked(input) {
        Some(plain) => {
            assert_eq!(decompress(input, plain.len() + 1), None, "one byte is missing");
            assert_eq!(decompress(input, plain.len()), Some(plain));
        }
        None => assert_eq!(decompress(input, usize::from(u16::MAX)), None),
    }
    let packed: Vec<u8> = input.chunks(32).flat_map(|part| [&[part.len() as u8 - 1], part].concat()).collect();
    assert_eq!(decompress(&packed, input.len()).as_deref(), Some(input));
}

/// Returns the code of all libraries, and the payload written again.
fn codes(payload: &[u8]) -> Option<(Vec<Vec<u8>>, Vec<u8>)> {
    let mut codes = Vec::new();
    let written = with_code(payload, |code| {
        codes.push(code.to_vec());
        Ok::<_, Infallible>(code.to_vec())
    })
    .ok()?;
    Some((codes, written))
}

/// Unpacks LZF by its description: a control byte below 32 precedes as many bytes and one more. Otherwise its upper three
/// bits are a length (7: the next byte is added), and the rest with the next byte is a distance.
fn unpacked(packed: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let mut bytes = packed.iter().copied();
    while let Some(control) = bytes.next() {
        if control < 32 {
            for _ in 0..=control {
                out.push(bytes.next()?);
            }
            continue;
        }
        let more = if control >> 5 == 7 { bytes.next()? } else { 0 };
        let distance = (usize::from(control & 31) << 8) + usize::from(bytes.next()?) + 1;
        for _ in 0..usize::from(control >> 5) + usize::from(more) + 2 {
            out.push(out[out.len().checked_sub(distance)?]);
        }
    }
    Some(out)
}
