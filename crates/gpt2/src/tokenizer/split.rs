//! GPT-2's pieces: contractions, words, numbers, other characters, spaces. No token crosses a piece.
//!
//! The pattern is `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`, matched by hand: one pass with one
//! character of lookahead.

use std::sync::LazyLock;

use regex_syntax::hir::{Class, HirKind};

/// The pieces of a text, in order; together they are the text.
pub fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (piece, after) = rest.split_at(first(rest));
        rest = after;
        Some(piece)
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Letter,
    Number,
    Space,
    Other,
}

fn kind(character: char) -> Kind {
    match character {
        'a'..='z' | 'A'..='Z' => Kind::Letter,
        // Unicode's White_Space and general category N.
        _ if character.is_whitespace() => Kind::Space,
        _ if character.is_numeric() => Kind::Number,
        '\0'..='\x7f' => Kind::Other,
        _ if is_letter(character) => Kind::Letter,
        _ => Kind::Other,
    }
}

/// Bytes of the first piece. `text` is not empty.
fn first(text: &str) -> usize {
    if let Some(contraction) =
        ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"].iter().find(|word| text.starts_with(**word))
    {
        return contraction.len();
    }
    let after_space = text.strip_prefix(' ').unwrap_or(text);
    let Some(start) = after_space.chars().next().map(kind).filter(|&start| start != Kind::Space) else {
        return spaces(text);
    };
    let run = after_space.char_indices().find(|&(_, character)| kind(character) != start);
    text.len() - after_space.len() + run.map_or(after_space.len(), |(end, _)| end)
}

/// The last space of a run belongs to the next word, unless it is the only one.
fn spaces(text: &str) -> usize {
    let Some((end, _)) = text.char_indices().find(|&(_, character)| kind(character) != Kind::Space) else {
        return text.len();
    };
    let last = text[..end].char_indices().next_back().map_or(0, |(last, _)| last);
    if last == 0 { end } else { last }
}

/// General category L, which is not Rust's `is_alphabetic`: that has marks and numbers too.
fn is_letter(character: char) -> bool {
    LETTERS
        .binary_search_by(|&(low, high)| {
            if high < character {
                std::cmp::Ordering::Less
            } else if low > character {
                std::cmp::Ordering::Greater
            } else {
                std::cmp::Ordering::Equal
            }
        })
        .is_ok()
}

static LETTERS: LazyLock<Vec<(char, char)>> = LazyLock::new(|| {
    let class = regex_syntax::parse(r"\p{L}").map(|parsed| parsed.into_kind());
    match class {
        Ok(HirKind::Class(Class::Unicode(letters))) => {
            letters.ranges().iter().map(|range| (range.start(), range.end())).collect()
        }
        // The class is part of the crate's feature; a test sees to it.
        _ => Vec::new(),
    }
});

#[cfg(test)]
mod tests {
    use super::*;

    fn split(text: &str) -> Vec<&str> {
        pieces(text).collect()
    }

    #[test]
    fn letters_are_those_of_unicode() {
        assert!(LETTERS.len() > 600);
        assert!(['é', 'ß', 'λ', 'Ж', '中', 'ª', 'ʰ'].into_iter().all(is_letter));
        assert!(!['\u{345}', 'Ⅷ', '१', '€', '\u{301}'].into_iter().any(is_letter));
    }

    #[test]
    fn pieces_are_those_of_the_pattern() {
        assert_eq!(split("I'll we'LL 'tis don't"), ["I", "'ll", " we", "'", "LL", " '", "tis", " don", "'t"]);
        assert_eq!(split("a  b\n\n c\t"), ["a", " ", " b", "\n\n", " c", "\t"]);
        assert_eq!(split("x\n\ny   "), ["x", "\n", "\n", "y", "   "]);
        assert_eq!(split(" 12ab!? 34"), [" 12", "ab", "!?", " 34"]);
        assert_eq!(split("\u{a0}\u{a0}z"), ["\u{a0}", "\u{a0}", "z"]);
        assert_eq!(split(""), [""; 0]);
    }
}
