//! A vocabulary made from text: the most frequent pair of neighbouring tokens becomes a token, until there are enough.
//!
//! Pieces are counted once. Each merge then changes only the pieces that contain its pair. Among equally frequent pairs, the one with the
//! smaller ids wins, so the same text gives the same vocabulary; so does the trainer of Hugging Face's `tokenizers`, with the byte-level alphabet.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use super::merge::Merges;
use super::{END_OF_TEXT, Tokenizer, bytes, split};

/// The fewest tokens of a vocabulary: the bytes and the end of text.
pub const LEAST: usize = 257;

type Pair = (u32, u32);

/// Where a pair is found.
#[derive(Default)]
struct Places {
    count: u64,
    /// pieces that hold the pair, or held it once
    pieces: Vec<usize>,
}

/// A distinct piece of the text.
struct Piece {
    tokens: Vec<u32>,
    count: u64,
}

/// A tokenizer of at most `tokens` tokens, and at least [`LEAST`]. It has fewer than requested if every piece became one token.
pub fn trained<'a>(texts: impl Iterator<Item = &'a str>, tokens: usize) -> Tokenizer {
    let mut words: Vec<Box<[u8]>> = bytes::in_order().map(|byte| Box::from([byte])).collect();
    let mut alphabet = [0; 256];
    for (id, byte) in (0..).zip(bytes::in_order()) {
        alphabet[usize::from(byte)] = id;
    }
    let mut pieces = counted(texts, &alphabet);
    let mut pairs: HashMap<Pair, Places> = HashMap::new();
    for (at, piece) in pieces.iter().enumerate() {
        for pair in piece.tokens.windows(2) {
            found(&mut pairs, (pair[0], pair[1]), piece.count, at);
        }
    }
    let mut waiting: BinaryHeap<(u64, Reverse<Pair>)> =
        pairs.iter().map(|(&pair, places)| (places.count, Reverse(pair))).collect();
    let mut ids: HashMap<Box<[u8]>, u32> = words.iter().cloned().zip(0..).collect();
    let mut merges = Merges::default();
    while words.len() + 1 < tokens {
        let Some((count, Reverse(pair))) = waiting.pop() else { break };
        let Some(places) = pairs.get_mut(&pair).filter(|places| places.count > 0) else { continue };
        if places.count != count {
            // The count fell since the pair was put there.
            waiting.push((places.count, Reverse(pair)));
            continue;
        }
        let holders = std::mem::take(places).pieces;
        let word: Box<[u8]> = [&*words[pair.0 as usize], &*words[pair.1 as usize]].concat().into();
        // Two pairs may spell one word; it stays one token.
        let into = *ids.entry(word.clone()).or_insert_with(|| {
            words.push(word);
            words.len() as u32 - 1
        });
        if !merges.has(pair) {
            merges.push(pair, into);
        }
        for pair in merge(&mut pieces, &mut pairs, holders, pair, into) {
            waiting.push((pairs[&pair].count, Reverse(pair)));
        }
    }
    let end = words.len() as u32;
    words.push(END_OF_TEXT.as_bytes().into());
    Tokenizer { words, merges, bytes: alphabet, added: vec![(END_OF_TEXT.to_string(), end)] }
}

/// The distinct pieces of texts, in an order of their own.
fn counted<'a>(texts: impl Iterator<Item = &'a str>, alphabet: &[u32; 256]) -> Vec<Piece> {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for piece in texts.flat_map(split::pieces) {
        *counts.entry(piece).or_default() += 1;
    }
    let token = |byte: u8| alphabet[usize::from(byte)];
    counts.into_iter().map(|(piece, count)| Piece { tokens: piece.bytes().map(token).collect(), count }).collect()
}

/// Counts a pair in a piece.
fn found(pairs: &mut HashMap<Pair, Places>, pair: Pair, count: u64, piece: usize) {
    let places = pairs.entry(pair).or_default();
    places.count += count;
    if places.pieces.last() != Some(&piece) {
        places.pieces.push(piece);
    }
}

/// Joins a pair in the pieces that hold it. Gives the pairs that became more frequent.
fn merge(
    pieces: &mut [Piece],
    pairs: &mut HashMap<Pair, Places>,
    mut holders: Vec<usize>,
    pair: Pair,
    into: u32,
) -> Vec<Pair> {
    let mut more = Vec::new();
    holders.sort_unstable();
    holders.dedup();
    for at in holders {
        let Piece { tokens, count } = &mut pieces[at];
        if !tokens.windows(2).any(|next| (next[0], next[1]) == pair) {
            continue;
        }
        let count = *count;
        for old in tokens.windows(2) {
            if let Some(places) = pairs.get_mut(&(old[0], old[1])) {
                places.count = places.count.saturating_sub(count);
            }
        }
        *tokens = joined(tokens, pair, into);
        for new in tokens.windows(2) {
            let new = (new[0], new[1]);
            if new.0 == into || new.1 == into {
                found(pairs, new, count, at);
                more.push(new);
            } else if let Some(places) = pairs.get_mut(&new) {
                places.count += count;
            }
        }
    }
    // No piece holds it now.
    pairs.remove(&pair);
    more.sort_unstable();
    more.dedup();
    more.retain(|pair| pairs.contains_key(pair));
    more
}

/// The tokens with each occurrence of the pair joined, from the left.
fn joined(tokens: &[u32], pair: Pair, into: u32) -> Vec<u32> {
    let mut out = Vec::with_capacity(tokens.len());
    let mut rest = tokens;
    while let [first, after @ ..] = rest {
        match after {
            [second, after @ ..] if (*first, *second) == pair => {
                out.push(into);
                rest = after;
            }
            _ => {
                out.push(*first);
                rest = after;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::read;
    use super::*;

    const TEXT: &str =
        "the cat sat on the mat; the other cats sat there. aaaa aaa banana bananas \u{e9}\u{e9}\n\nThen the theatre.";

    fn trained_on(text: &str, tokens: usize) -> Tokenizer {
        trained([text].into_iter(), tokens)
    }

    /// What the `tokenizers` package, version 0.23.3, makes of the text: its `BpeTrainer` with the byte-level alphabet.
    #[test]
    fn merges_are_those_of_another_trainer() {
        let merges = "h+e t+he a+t a+a Ġ+the a+n b+an c+at r+e s+at Ã+© Ġ+o Ġ+aa Ġ+ban Ġ+cat Ġ+sat an+a Ġban+ana T+he m+at \
                      Ġ+Ã© Ġ+mat the+r at+re Ġthe+re Ġthe+atre Ġo+n Ġo+ther Ġaa+a Ġaa+aa";
        let tokenizer = trained_on(TEXT, 256 + 30 + 1);
        let word = |id: u32| bytes::encode(tokenizer.bytes(id).unwrap());
        let got: Vec<String> =
            tokenizer.merges.pairs().map(|(left, right)| format!("{}+{}", word(left), word(right))).collect();
        assert_eq!(got, merges.split(' ').collect::<Vec<&str>>());
        assert_eq!((tokenizer.tokens(), tokenizer.end_of_text()), (287, Some(286)));
        let ids = tokenizer.encode(TEXT);
        assert_eq!(tokenizer.decode(&ids).unwrap(), TEXT);
        let first: Vec<String> = ids[..6].iter().map(|&id| word(id)).collect();
        assert_eq!(first, ["the", "Ġcat", "Ġsat", "Ġon", "Ġthe", "Ġmat"]);
    }

    #[test]
    fn a_file_of_it_is_read_back() {
        let tokenizer = trained_on(TEXT, 300);
        let again = read::json(&tokenizer.to_json()).unwrap();
        for text in [TEXT, "that other theatre<|endoftext|>\u{10ffff}"] {
            assert_eq!(again.encode(text), tokenizer.encode(text));
        }
    }

    #[test]
    fn a_text_that_has_no_more_pairs_gives_fewer_tokens() {
        let tokenizer = trained_on("ab ab ab", 5000);
        // `ab` and ` ab` beside the bytes and the end of text.
        assert_eq!(tokenizer.tokens(), 259);
        assert_eq!(tokenizer.encode("ab ab"), [256, 257]);
        assert_eq!(trained_on("", 5000).tokens(), LEAST);
    }

    /// A run of one byte holds its pair once for two of them, whatever their number.
    #[test]
    fn pairs_that_overlap_are_joined_from_the_left() {
        assert_eq!(joined(&[1, 1, 1, 2], (1, 1), 9), [9, 1, 2]);
        let tokenizer = trained_on("aaaaaaa", 259);
        let lengths: Vec<usize> =
            tokenizer.encode("aaaaaaa").iter().map(|&id| tokenizer.bytes(id).unwrap().len()).collect();
        assert_eq!(lengths, [4, 2, 1]);
    }
}
