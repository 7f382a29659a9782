//! Tokenizers from files: `tokenizer.json`, `vocab.json` with `merges.txt`, and GPT-2's own.

use std::collections::HashMap;
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::merge::Merges;
use super::{END_OF_TEXT, Tokenizer, bytes};

/// Why a tokenizer's file is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// No JSON of its kind.
    #[error("not the file of a byte-level BPE: {0}")]
    Json(String),
    /// A setting that changes GPT-2's tokens.
    #[error("`{key}` is {got}; expected {expected}, as in GPT-2")]
    Unsupported {
        /// the key
        key: &'static str,
        /// the value found
        got: String,
        /// what GPT-2 has
        expected: &'static str,
    },
    /// A word with a character that does not encode a byte.
    #[error("word `{0}` has a character that does not encode a byte")]
    Word(String),
    /// A duplicate word or id.
    #[error("word `{0}` occurs twice, or shares its id with another word")]
    Twice(String),
    /// Ids are not 0, 1, 2 and so on.
    #[error("word `{word}` has id {id} among {tokens} words; expected ids without gaps")]
    Gap {
        /// the word
        word: String,
        /// its id
        id: u32,
        /// number of words
        tokens: usize,
    },
    /// A byte without a token.
    #[error("no word for byte {0}; expected one for each of the 256")]
    Byte(u8),
    /// A line of `merges.txt`.
    #[error("line {line}: `{text}` is not a merge; expected two words with a space between them")]
    Line {
        /// from 1 on
        line: usize,
        /// its text
        text: String,
    },
    /// A merge of unknown words.
    #[error(
        "the merge of `{left}` and `{right}` uses words that are not in the vocabulary; are both files from one model?"
    )]
    Merge {
        /// the first word
        left: String,
        /// the second word
        right: String,
    },
}

/// Words with their ids, in the file's order.
pub type Words = Vec<(String, u32)>;

/// GPT-2's merges in order, each as two ids of 16 bits, little-endian. The first 256 tokens are the bytes; merge `n` makes
/// token `256 + n`; the end of text is last. See `data/README.md`.
static GPT2: &[u8] = include_bytes!("../../data/gpt2.merges");

/// GPT-2's tokenizer.
pub fn built_in() -> Tokenizer {
    let mut words: Vec<Box<[u8]>> = bytes::in_order().map(|byte| Box::from([byte])).collect();
    let mut tokens = [0; 256];
    for (id, byte) in (0..).zip(bytes::in_order()) {
        tokens[usize::from(byte)] = id;
    }
    let (pairs, _) = GPT2.as_chunks::<4>();
    let mut merges = Merges::with_capacity(pairs.len());
    for (into, &[a, b, c, d]) in (256..).zip(pairs) {
        let (left, right) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
        let word = [&*words[usize::from(left)], &*words[usize::from(right)]].concat();
        merges.push((left.into(), right.into()), into);
        words.push(word.into());
    }
    let end = words.len() as u32;
    words.push(END_OF_TEXT.as_bytes().into());
    Tokenizer { words, merges, bytes: tokens, added: vec![(END_OF_TEXT.to_string(), end)] }
}

/// From the parts of `vocab.json`, `added_tokens.json` and `merges.txt`.
pub fn files(mut vocabulary: Words, mut added: Words, pairs: &[(&str, &str)]) -> Result<Tokenizer, FormatError> {
    let end = vocabulary.iter().position(|(word, _)| word == END_OF_TEXT).map(|index| vocabulary.swap_remove(index));
    added.extend(end);
    build(vocabulary, added, pairs.iter().copied())
}

/// The words of a `vocab.json` or `added_tokens.json`.
pub fn vocabulary(text: &str) -> Result<Words, FormatError> {
    let Entries(words) = serde_json::from_str(text).map_err(json_error)?;
    Ok(words)
}

/// The pairs of a `merges.txt`. A line that starts with `#` may be a merge; only the version is a comment.
pub fn pairs(text: &str) -> Result<Vec<(&str, &str)>, FormatError> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.is_empty() && !line.starts_with("#version"));
    lines
        .map(|(index, line)| pair(line).ok_or_else(|| FormatError::Line { line: index + 1, text: line.into() }))
        .collect()
}

/// From a `tokenizer.json`.
pub fn json(text: &str) -> Result<Tokenizer, FormatError> {
    let file: File = serde_json::from_str(text).map_err(json_error)?;
    file.refuse_others()?;
    let Entries(mut vocabulary) = file.model.vocab;
    let added: Words = file.added_tokens.into_iter().map(|added| (added.content, added.id)).collect();
    // Added words may be in the vocabulary too, and are then the same.
    let ids: HashMap<&str, u32> = added.iter().map(|(word, id)| (word.as_str(), *id)).collect();
    vocabulary.retain(|(word, id)| ids.get(word.as_str()) != Some(id));
    let mut pairs = Vec::with_capacity(file.model.merges.len());
    for merge in &file.model.merges {
        pairs.push(match merge {
            Pair::Two([left, right]) => (left.as_str(), right.as_str()),
            Pair::One(text) => {
                pair(text).ok_or_else(|| FormatError::Line { line: pairs.len() + 1, text: text.clone() })?
            }
        });
    }
    build(vocabulary, added, pairs.into_iter())
}

fn build<'a>(
    vocabulary: Words,
    added: Words,
    pairs: impl ExactSizeIterator<Item = (&'a str, &'a str)>,
) -> Result<Tokenizer, FormatError> {
    let count = vocabulary.len() + added.len();
    let mut words: Vec<Option<Box<[u8]>>> = vec![None; count];
    let mut place = |word: &str, id: u32, bytes: Vec<u8>| match words.get_mut(id as usize) {
        Some(place) if place.is_none() => {
            *place = Some(bytes.into());
            Ok(())
        }
        Some(_) => Err(FormatError::Twice(word.to_string())),
        None => Err(FormatError::Gap { word: word.to_string(), id, tokens: count }),
    };
    for (word, id) in &added {
        // An empty word would be found everywhere.
        if word.is_empty() {
            return Err(FormatError::Word(word.clone()));
        }
        place(word, *id, word.as_bytes().to_vec())?;
    }
    let mut ids: HashMap<&str, u32> = HashMap::with_capacity(vocabulary.len());
    let mut tokens: [Option<u32>; 256] = [None; 256];
    for (word, id) in &vocabulary {
        let bytes = bytes::decode(word).filter(|bytes| !bytes.is_empty());
        let bytes = bytes.ok_or_else(|| FormatError::Word(word.clone()))?;
        if ids.insert(word, *id).is_some() {
            return Err(FormatError::Twice(word.clone()));
        }
        if let [byte] = bytes[..] {
            tokens[usize::from(byte)] = Some(*id);
        }
        place(word, *id, bytes)?;
    }
    let mut bytes = [0; 256];
    for ((place, token), byte) in bytes.iter_mut().zip(tokens).zip(0..=255) {
        *place = token.ok_or(FormatError::Byte(byte))?;
    }
    let mut merges = Merges::with_capacity(pairs.len());
    let mut joined = String::new();
    for (left, right) in pairs {
        joined.clear();
        joined.extend([left, right]);
        let found = || Some(((*ids.get(left)?, *ids.get(right)?), *ids.get(joined.as_str())?));
        let Some((pair, into)) = found() else {
            return Err(FormatError::Merge { left: left.to_string(), right: right.to_string() });
        };
        if !merges.push(pair, into) {
            return Err(FormatError::Twice(format!("{left} {right}")));
        }
    }
    // As many places as words, none twice: all are filled.
    let words = words.into_iter().flatten().collect();
    Ok(Tokenizer { words, merges, bytes, added })
}

/// Two words with one space between them.
fn pair(text: &str) -> Option<(&str, &str)> {
    text.split_once(' ').filter(|(left, right)| !left.is_empty() && !right.is_empty() && !right.contains(' '))
}

fn json_error(error: serde_json::Error) -> FormatError {
    FormatError::Json(error.to_string())
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

#[derive(Deserialize)]
struct Model {
    r#type: Option<String>,
    vocab: Entries,
    merges: Vec<Pair>,
    dropout: Option<f64>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    ignore_merges: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Pair {
    One(String),
    Two([String; 2]),
}

impl File {
    /// Checks for settings that would change GPT-2's tokens.
    fn refuse_others(&self) -> Result<(), FormatError> {
        let model = &self.model;
        let text = |value: &Option<Value>| value.as_ref().map_or("null".to_string(), Value::to_string);
        let kind = |value: &Option<Value>| Some(value.as_ref()?.get("type")?.as_str()?.to_string());
        let setting = |key: &str| self.pre_tokenizer.as_ref().and_then(|value| value.get(key)?.as_bool());
        let plain = |affix: &Option<String>| affix.as_ref().is_none_or(String::is_empty);
        let stripped = self.added_tokens.iter().find(|added| added.single_word || added.lstrip || added.rstrip);
        let checks = [
            (
                "model.type",
                model.r#type.as_deref().is_none_or(|name| name == "BPE"),
                format!("{:?}", model.r#type),
                "BPE",
            ),
            (
                "model.dropout",
                model.dropout.is_none_or(|dropout| dropout == 0.0),
                format!("{:?}", model.dropout),
                "none",
            ),
            ("model.continuing_subword_prefix", plain(&model.continuing_subword_prefix), "set".to_string(), "none"),
            ("model.end_of_word_suffix", plain(&model.end_of_word_suffix), "set".to_string(), "none"),
            ("model.ignore_merges", model.ignore_merges != Some(true), "true".to_string(), "false"),
            ("normalizer", self.normalizer.is_none(), text(&self.normalizer), "none"),
            (
                "pre_tokenizer",
                kind(&self.pre_tokenizer).as_deref() == Some("ByteLevel")
                    && setting("add_prefix_space") != Some(true)
                    && setting("use_regex") != Some(false),
                text(&self.pre_tokenizer),
                "ByteLevel with its pattern and without a prefix space",
            ),
            (
                "post_processor",
                self.post_processor.is_none() || kind(&self.post_processor).as_deref() == Some("ByteLevel"),
                text(&self.post_processor),
                "ByteLevel or none",
            ),
            (
                "added_tokens",
                stripped.is_none(),
                stripped
                    .map_or(String::new(), |added| format!("`{}` with single_word, lstrip or rstrip", added.content)),
                "literal words",
            ),
        ];
        match checks.into_iter().find(|(_, good, ..)| !good) {
            Some((key, _, got, expected)) => Err(FormatError::Unsupported { key, got, expected }),
            None => Ok(()),
        }
    }
}

/// A JSON object of ids in its order; duplicate names are kept, for the caller to refuse.
struct Entries(Words);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(EntriesVisitor)
    }
}

struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
    type Value = Entries;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of ids")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
        let mut words = Vec::new();
        while let Some(entry) = map.next_entry()? {
            words.push(entry);
        }
        Ok(Entries(words))
    }
}
