//! Training data: one stream of tokens, a part of it held out, and batches drawn from it.
//!
//! - A file whose name ends in `.bin` holds tokens and nothing else, little-endian: 16 bits each where the vocabulary has at most 65,536 of them,
//!   else 32 bits. This is how nanoGPT stores them. Any other file is UTF-8 text.
//! - Files are concatenated; each text ends with the end-of-text token, if the tokenizer has one.
//! - Validation is the end of the stream, or files of its own.
//! - A batch is a function of only the seed, the step and its number within the step: a resumed run draws the
//!   same batches. Sequences are windows at random positions.

use std::path::{Path, PathBuf};

use deuteron::reference::Generator;
use deuteron_gpt2::Tokenizer;

/// Why files cannot be used for training.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DataError {
    /// No files.
    #[error("no files to train on; expected at least one text file or .bin file of tokens")]
    Nothing,
    /// The system refused.
    #[error("cannot read `{}`: {problem}", .path.display())]
    Unreadable {
        /// the file
        path: PathBuf,
        /// why
        problem: String,
    },
    /// Text in another encoding.
    #[error("`{}` is not UTF-8 text; convert it, or give tokens in a .bin file", .0.display())]
    NotUtf8(PathBuf),
    /// Half a token.
    #[error("`{}` has {bytes} bytes; tokens of a vocabulary of {vocabulary} take {each} each", .path.display())]
    Length {
        /// the file
        path: PathBuf,
        /// its length
        bytes: usize,
        /// tokens of the model
        vocabulary: usize,
        /// bytes of a token
        each: usize,
    },
    /// A token that the model does not have.
    #[error("`{}`: token {token} at {at} is not in the vocabulary of {vocabulary}; was the file made with this tokenizer?", .path.display())]
    Token {
        /// the file
        path: PathBuf,
        /// the token
        token: u32,
        /// its place, from 0
        at: usize,
        /// tokens of the model
        vocabulary: usize,
    },
    /// Too few tokens for one sequence.
    #[error("{tokens} tokens for {what}; a sequence of {sequence} needs at least {}: give more text, a shorter --sequence{}", .sequence + 1, .advice)]
    Few {
        /// training or validation
        what: &'static str,
        /// how many there are
        tokens: usize,
        /// tokens of a sequence
        sequence: usize,
        /// another remedy
        advice: &'static str,
    },
    /// A vocabulary from no text.
    #[error("`{}` holds tokens; a vocabulary is built from text files", .0.display())]
    NotText(PathBuf),
    /// A vocabulary below the bytes and the end of text.
    #[error("a vocabulary has at least 257 tokens, the bytes and the end-of-text token; got {0}")]
    Vocabulary(usize),
    /// A share out of range.
    #[error("the share for validation must be at least 0 and below 1, got {0}")]
    Share(f64),
}

/// Tokens for training, and held-out tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Corpus {
    train: Vec<u32>,
    validation: Vec<u32>,
}

/// The source of validation tokens.
#[derive(Debug, Clone, PartialEq)]
pub enum Validation {
    /// a share of the stream, its end
    Share(f64),
    /// files of its own
    Files(Vec<PathBuf>),
}

/// Sequences, and for each token the one that follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// `[batch, sequence]`, row by row
    pub tokens: Vec<i32>,
    /// the same, one token later
    pub targets: Vec<i32>,
}

/// Which batch, and its sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draw {
    /// of the run
    pub seed: u64,
    /// from 0
    pub step: u64,
    /// within the step, from 0
    pub micro_batch: usize,
    /// sequences
    pub batch: usize,
    /// tokens of each
    pub sequence: usize,
}

impl Corpus {
    /// Reads files. `vocabulary` is the model's, which may have more rows than the tokenizer has tokens.
    pub fn read(
        files: &[PathBuf],
        validation: &Validation,
        tokenizer: &Tokenizer,
        vocabulary: usize,
    ) -> Result<Corpus, DataError> {
        let mut train = tokens(files, tokenizer, vocabulary)?;
        let validation = match validation {
            Validation::Files(files) => tokens(files, tokenizer, vocabulary)?,
            Validation::Share(share) if !(0.0..1.0).contains(share) => return Err(DataError::Share(*share)),
            Validation::Share(share) => train.split_off(train.len() - (share * train.len() as f64) as usize),
        };
        Ok(Corpus { train, validation })
    }

    /// A corpus of given tokens.
    pub fn new(train: Vec<u32>, validation: Vec<u32>) -> Corpus {
        Corpus { train, validation }
    }

    /// Checks that there is at least one sequence of this length for training, and for validation if there are such tokens.
    pub fn check(&self, sequence: usize) -> Result<(), DataError> {
        let few = |what, tokens: &[u32], advice| Err(DataError::Few { what, tokens: tokens.len(), sequence, advice });
        match (&self.train, &self.validation) {
            (train, _) if train.len() <= sequence => few("training", train, ""),
            (_, validation) if !validation.is_empty() && validation.len() <= sequence => {
                few("validation", validation, ", or another --validation-share")
            }
            _ => Ok(()),
        }
    }

    /// Tokens for training.
    pub fn train(&self) -> &[u32] {
        &self.train
    }

    /// Held-out tokens.
    pub fn validation(&self) -> &[u32] {
        &self.validation
    }

    /// A digest of the corpus: FNV-1a of all tokens.
    pub fn digest(&self) -> u64 {
        let all = self.train.iter().chain([&u32::MAX]).chain(&self.validation);
        all.fold(0xcbf2_9ce4_8422_2325, |hash, &token| (hash ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3))
    }

    /// A batch of a step. The corpus must have passed [`Corpus::check`].
    pub fn batch(&self, draw: Draw) -> Batch {
        let stream = [draw.seed, draw.step, draw.micro_batch as u64];
        let mut generator = Generator::new(mixed(&stream));
        let places = self.train.len().saturating_sub(draw.sequence).max(1);
        Batch::windows(&self.train, (0..draw.batch).map(|_| generator.below(places)), draw.sequence)
    }

    /// At most `most` batches that cover the validation tokens evenly, always the same ones.
    pub fn validation_batches(&self, batch: usize, sequence: usize, most: usize) -> Vec<Batch> {
        if self.validation.len() <= sequence {
            return Vec::new();
        }
        let places = self.validation.len() - sequence;
        let count = most.min(places.div_ceil(sequence * batch)).max(1);
        let all = (count * batch - 1).max(1);
        let place = |number: usize| (number as u128 * (places - 1) as u128 / all as u128) as usize;
        let batches = (0..count).map(|at| (at * batch..(at + 1) * batch).map(place));
        batches.map(|places| Batch::windows(&self.validation, places, sequence)).collect()
    }
}

impl Batch {
    fn windows(stream: &[u32], places: impl Iterator<Item = usize>, sequence: usize) -> Batch {
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for place in places {
            let window = &stream[place..place + sequence + 1];
            tokens.extend(window[..sequence].iter().map(|&token| token as i32));
            targets.extend(window[1..].iter().map(|&token| token as i32));
        }
        Batch { tokens, targets }
    }
}

/// Mixes several numbers into one.
pub(crate) fn mixed(parts: &[u64]) -> u64 {
    parts.iter().fold(0, |state, part| Generator::new(state ^ part).bits())
}

/// A tokenizer of at most `tokens` tokens, built from the training text ([`Tokenizer::trained`]).
pub fn vocabulary(files: &[PathBuf], tokens: usize) -> Result<Tokenizer, DataError> {
    let text = |path: &PathBuf| match is_stored(path) {
        true => Err(DataError::NotText(path.clone())),
        false => text(path, read(path)?),
    };
    let texts = files.iter().map(text).collect::<Result<Vec<String>, DataError>>()?;
    Tokenizer::trained(texts.iter().map(String::as_str), tokens).ok_or(DataError::Vocabulary(tokens))
}

fn is_stored(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "bin")
}

fn read(path: &Path) -> Result<Vec<u8>, DataError> {
    std::fs::read(path).map_err(|error| DataError::Unreadable { path: path.to_path_buf(), problem: error.to_string() })
}

fn text(path: &Path, bytes: Vec<u8>) -> Result<String, DataError> {
    String::from_utf8(bytes).map_err(|_| DataError::NotUtf8(path.to_path_buf()))
}

fn tokens(files: &[PathBuf], tokenizer: &Tokenizer, vocabulary: usize) -> Result<Vec<u32>, DataError> {
    if files.is_empty() {
        return Err(DataError::Nothing);
    }
    let mut all = Vec::new();
    for path in files {
        let bytes = read(path)?;
        if is_stored(path) {
            all.extend(stored(path, &bytes, vocabulary)?);
            continue;
        }
        all.extend(tokenizer.encode(&text(path, bytes)?));
        all.extend(tokenizer.end_of_text());
    }
    Ok(all)
}

fn stored(path: &Path, bytes: &[u8], vocabulary: usize) -> Result<Vec<u32>, DataError> {
    let each = if vocabulary <= 1 << 16 { 2 } else { 4 };
    if !bytes.len().is_multiple_of(each) {
        return Err(DataError::Length { path: path.to_path_buf(), bytes: bytes.len(), vocabulary, each });
    }
    let tokens: Vec<u32> = match each {
        2 => bytes.as_chunks().0.iter().map(|&bytes| u32::from(u16::from_le_bytes(bytes))).collect(),
        _ => bytes.as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect(),
    };
    match tokens.iter().position(|&token| token as usize >= vocabulary) {
        Some(at) => Err(DataError::Token { path: path.to_path_buf(), token: tokens[at], at, vocabulary }),
        None => Ok(tokens),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAW: Draw = Draw { seed: 1, step: 5, micro_batch: 0, batch: 3, sequence: 7 };

    #[test]
    fn a_batch_depends_on_seed_step_and_number_alone() {
        let corpus = Corpus::new((0..1000).collect(), Vec::new());
        let batch = corpus.batch(DRAW);
        assert_eq!(batch, corpus.batch(DRAW));
        assert_eq!(batch.tokens.len(), 21);
        for row in 0..3 {
            for at in 7 * row..7 * row + 7 {
                assert_eq!(batch.targets[at], batch.tokens[at] + 1);
            }
        }
        for other in [Draw { seed: 2, ..DRAW }, Draw { step: 6, ..DRAW }, Draw { micro_batch: 1, ..DRAW }] {
            assert_ne!(batch, corpus.batch(other), "{other:?}");
        }
        // Every place is drawn sooner or later, the last one among them.
        let small = Corpus::new((0..10).collect(), Vec::new());
        let mut firsts: Vec<i32> =
            (0..100).flat_map(|step| [0, 7, 14].map(|at| small.batch(Draw { step, ..DRAW }).tokens[at])).collect();
        firsts.sort_unstable();
        firsts.dedup();
        assert_eq!(firsts, [0, 1, 2]);
    }

    #[test]
    fn validation_is_covered_from_end_to_end() {
        let corpus = Corpus::new(Vec::new(), (0..100).collect());
        let batches = corpus.validation_batches(2, 10, 4);
        assert_eq!(batches.len(), 4);
        assert_eq!((batches[0].tokens[0], *batches[3].targets.last().unwrap()), (0, 99));
        assert_eq!(corpus.validation_batches(2, 10, 100).len(), 5, "no more than it takes");
        assert!(corpus.validation_batches(2, 100, 4).is_empty());
        let one = Corpus::new(Vec::new(), (0..11).collect()).validation_batches(1, 10, 4);
        assert_eq!(one.len(), 1);
    }

    #[test]
    fn a_vocabulary_is_of_text_and_has_all_bytes() {
        let tokens = vocabulary(&["tokens.bin".into()], 300);
        assert_eq!(tokens.unwrap_err(), DataError::NotText("tokens.bin".into()));
        assert_eq!(vocabulary(&[], 256).unwrap_err(), DataError::Vocabulary(256));
        assert_eq!(vocabulary(&[], 300).unwrap().tokens(), 257);
    }

    #[test]
    fn too_little_is_refused_with_what_to_do() {
        let corpus = Corpus::new(vec![0; 8], vec![0; 3]);
        assert_eq!(corpus.check(2), Ok(()));
        assert!(corpus.check(7).unwrap_err().to_string().contains("validation"));
        let error = corpus.check(8).unwrap_err().to_string();
        assert!(error.starts_with("8 tokens for training; a sequence of 8 needs at least 9"), "{error}");
    }
}
