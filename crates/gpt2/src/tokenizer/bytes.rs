//! The byte-level alphabet: vocabularies write each byte as one printable character.

/// Printable bytes map to themselves; the others, in order, to the characters from U+0100 on.
fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

/// The bytes in the order of GPT-2's first 256 tokens: the printable ones, then the others.
pub fn in_order() -> impl Iterator<Item = u8> {
    (0..=255).filter(|&byte| is_printable(byte)).chain((0..=255).filter(|&byte| !is_printable(byte)))
}

/// The bytes that a vocabulary's word encodes; `None` if a character does not encode a byte.
pub fn decode(word: &str) -> Option<Vec<u8>> {
    word.chars().map(byte).collect()
}

/// The vocabulary's word for bytes.
pub fn encode(bytes: &[u8]) -> String {
    let character = |&byte: &u8| match byte {
        byte if is_printable(byte) => char::from(byte),
        // As in `byte`.
        0..=0x20 => char::from_u32(0x100 + u32::from(byte)).unwrap_or(char::REPLACEMENT_CHARACTER),
        0x7f..=0xa0 => char::from_u32(0x121 + u32::from(byte) - 0x7f).unwrap_or(char::REPLACEMENT_CHARACTER),
        _ => '\u{143}',
    };
    bytes.iter().map(character).collect()
}

fn byte(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ 0..=0xff => Some(code as u8).filter(|&byte| is_printable(byte)),
        // 0..=0x20 are the first 33 of the others, 0x7f..=0xa0 the next 34, 0xad the last.
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let hidden = (0..=255u8).filter(|&byte| !is_printable(byte));
        for (index, expected) in hidden.enumerate() {
            assert_eq!(byte(char::from_u32(0x100 + index as u32).unwrap()), Some(expected));
        }
        for expected in (0..=255u8).filter(|&byte| is_printable(byte)) {
            assert_eq!(byte(char::from(expected)), Some(expected));
        }
        for byte in 0..=255 {
            assert_eq!(decode(&encode(&[byte])), Some(vec![byte]));
        }
        assert_eq!(["\u{144}", " ", "\u{ad}"].map(decode), [None, None, None]);
        assert_eq!(in_order().take(2).collect::<Vec<u8>>(), [b'!', b'"']);
        assert_eq!(in_order().count(), 256);
    }
}
