//! GPT-2's tokens: byte-level byte pair encoding, exactly as the published models were trained with.

mod bytes;
mod decoder;
mod merge;
mod read;
mod split;
mod train;
mod write;

use std::path::{Path, PathBuf};

pub use decoder::Decoder;
use merge::{Merger, Merges};
pub use read::FormatError;

use crate::config::Config;
use crate::folder::{FileError, Folder};

/// The end of a document, GPT-2's only special token.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// Why a tokenizer cannot be loaded or text cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenizerError {
    /// A file cannot be read.
    #[error("`{}` {problem}", .path.display())]
    File {
        /// the file
        path: PathBuf,
        /// why
        problem: FileError,
    },
    /// A file is invalid.
    #[error("`{}`: {problem}", .path.display())]
    Format {
        /// the file
        path: PathBuf,
        /// why
        problem: FormatError,
    },
    /// The tokenizer belongs to another model.
    #[error(
        "the tokenizer has {tokens} tokens, but the model has {vocabulary}; put the model's own tokenizer.json, or vocab.json and \
         merges.txt, into its folder"
    )]
    Vocabulary {
        /// of the tokenizer
        tokens: usize,
        /// of the model
        vocabulary: usize,
    },
    /// An id beyond the vocabulary.
    #[error("token {id} is not in the vocabulary of {tokens}")]
    Token {
        /// the token
        id: u32,
        /// of the tokenizer
        tokens: usize,
    },
}

/// Text to tokens and back.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    /// the bytes of each token
    words: Vec<Box<[u8]>>,
    merges: Merges,
    /// the token of each byte
    bytes: [u32; 256],
    /// tokens found in text before anything else, such as the end of text
    added: Vec<(String, u32)>,
}

impl Tokenizer {
    /// GPT-2's own tokenizer, which all published sizes share. It is part of the program.
    pub fn gpt2() -> Tokenizer {
        read::built_in()
    }

    /// One token for each byte, and the end of text: 257 tokens, for small models.
    pub fn byte_level() -> Tokenizer {
        let words = (0..=255).map(|byte: u8| Box::from([byte])).chain([END_OF_TEXT.as_bytes().into()]).collect();
        let bytes = std::array::from_fn(|byte| byte as u32);
        Tokenizer { words, merges: Merges::default(), bytes, added: vec![(END_OF_TEXT.to_string(), 256)] }
    }

    /// A vocabulary of at most `tokens` tokens, built from texts: the bytes, the most frequent pairs, the end of text. `None` below 257
    /// tokens; fewer than requested if the texts have no more pairs.
    pub fn trained<'a>(texts: impl Iterator<Item = &'a str>, tokens: usize) -> Option<Tokenizer> {
        (tokens >= train::LEAST).then(|| train::trained(texts, tokens))
    }

    /// The tokenizer of a `tokenizer.json`.
    pub fn from_json(text: &str) -> Result<Tokenizer, FormatError> {
        read::json(text)
    }

    /// The tokenizer as a `tokenizer.json`.
    pub fn to_json(&self) -> String {
        write::json(self)
    }

    /// The tokenizer of a model's folder: its `tokenizer.json`, or its `vocab.json` and `merges.txt`, or GPT-2's own if it has
    /// none of them.
    pub fn open(path: &Path, config: &Config) -> Result<Tokenizer, TokenizerError> {
        let folder = Folder::new(path).map_err(|problem| TokenizerError::File { path: path.to_path_buf(), problem })?;
        let text =
            |name: &str| folder.text(name).map_err(|problem| TokenizerError::File { path: folder.path(name), problem });
        let format = |name: &'static str| {
            let path = folder.path(name);
            move |problem| TokenizerError::Format { path, problem }
        };
        let tokenizer = if folder.has("tokenizer.json") {
            read::json(&text("tokenizer.json")?).map_err(format("tokenizer.json"))?
        } else if folder.has("vocab.json") || folder.has("merges.txt") {
            let vocabulary = read::vocabulary(&text("vocab.json")?).map_err(format("vocab.json"))?;
            let added = match folder.has("added_tokens.json") {
                true => read::vocabulary(&text("added_tokens.json")?).map_err(format("added_tokens.json"))?,
                false => Vec::new(),
            };
            let pairs = text("merges.txt")?;
            let pairs = read::pairs(&pairs).map_err(format("merges.txt"))?;
            read::files(vocabulary, added, &pairs).map_err(format("vocab.json"))?
        } else {
            Tokenizer::gpt2()
        };
        // A model may have more rows than tokens: some pad the table for speed.
        if tokenizer.tokens() > config.vocabulary {
            let (tokens, vocabulary) = (tokenizer.tokens(), config.vocabulary);
            return Err(TokenizerError::Vocabulary { tokens, vocabulary });
        }
        Ok(tokenizer)
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.words.len()
    }

    /// The token that ends a text, if there is one.
    pub fn end_of_text(&self) -> Option<u32> {
        self.added.iter().find(|(word, _)| word == END_OF_TEXT).map(|&(_, id)| id)
    }

    /// The tokens of a text. `<|endoftext|>` in it becomes that token, as in the transformers library.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let mut encoding = Encoding { tokenizer: self, merger: Merger::new(&self.merges), ids: Vec::new() };
        let mut next: Vec<Option<usize>> = self.added.iter().map(|(word, _)| text.find(word.as_str())).collect();
        let mut from = 0;
        loop {
            for (next, (word, _)) in next.iter_mut().zip(&self.added) {
                // A word that was not found is not looked for again, or many words would cost their number in passes.
                if next.is_some_and(|at| at < from) {
                    *next = text[from..].find(word.as_str()).map(|at| from + at);
                }
            }
            // The first in the text, the longest of those.
            let found = next.iter().zip(&self.added).filter_map(|(next, added)| Some(((*next)?, added)));
            let found = found.min_by_key(|(at, (word, _))| (*at, std::cmp::Reverse(word.len())));
            let Some((at, (word, id))) = found else { break };
            encoding.ordinary(&text[from..at]);
            encoding.ids.push(*id);
            from = at + word.len();
        }
        encoding.ordinary(&text[from..]);
        encoding.ids
    }

    /// The tokens of a text without special tokens, for untrusted text.
    pub fn encode_ordinary(&self, text: &str) -> Vec<u32> {
        let mut encoding = Encoding { tokenizer: self, merger: Merger::new(&self.merges), ids: Vec::new() };
        encoding.ordinary(text);
        encoding.ids
    }

    /// The bytes of a token.
    pub fn bytes(&self, id: u32) -> Result<&[u8], TokenizerError> {
        let word = usize::try_from(id).ok().and_then(|id| self.words.get(id));
        word.map(|word| &**word).ok_or(TokenizerError::Token { id, tokens: self.tokens() })
    }

    /// The text of tokens. Invalid UTF-8 becomes U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        let mut bytes = Vec::new();
        for &id in ids {
            bytes.extend_from_slice(self.bytes(id)?);
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// An incremental decoder.
    pub fn decoder(&self) -> Decoder<'_> {
        Decoder::new(self)
    }
}

struct Encoding<'a> {
    tokenizer: &'a Tokenizer,
    merger: Merger<'a>,
    ids: Vec<u32>,
}

impl Encoding<'_> {
    fn ordinary(&mut self, text: &str) {
        let Encoding { tokenizer, merger, ids } = self;
        for piece in split::pieces(text) {
            merger.merge(piece.bytes().map(|byte| tokenizer.bytes[usize::from(byte)]), ids);
        }
    }
}
