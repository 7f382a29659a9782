//! Incremental decoding of tokens into text.

use super::{Tokenizer, TokenizerError};

/// Returns text as soon as its characters are complete: a token may end in the middle of one.
#[derive(Debug, Clone)]
pub struct Decoder<'a> {
    tokenizer: &'a Tokenizer,
    /// an incomplete character, at most three bytes
    pending: Vec<u8>,
}

impl<'a> Decoder<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Decoder { tokenizer, pending: Vec::new() }
    }

    /// The text that a token completes; may be empty. Invalid UTF-8 becomes U+FFFD.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.pending.extend_from_slice(self.tokenizer.bytes(id)?);
        let open = open_end(&self.pending);
        let complete = self.pending.len() - open;
        let text = String::from_utf8_lossy(&self.pending[..complete]).into_owned();
        self.pending.drain(..complete);
        Ok(text)
    }

    /// The rest: U+FFFD if a character is incomplete.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// Bytes at the end that more bytes may complete to a character.
fn open_end(bytes: &[u8]) -> usize {
    let Some(last) = bytes.utf8_chunks().last() else { return 0 };
    let invalid = last.invalid();
    let may_grow = std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
    if may_grow { invalid.len() } else { 0 }
}
