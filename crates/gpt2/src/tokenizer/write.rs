//! A tokenizer as a `tokenizer.json` that other libraries read.

use serde::ser::{SerializeMap, Serializer};
use serde_json::json;

use super::{Tokenizer, bytes};

/// The whole file.
pub fn json(tokenizer: &Tokenizer) -> String {
    let is_added = |id: u32| tokenizer.added.iter().any(|&(_, added)| added == id);
    let word = |id: u32| tokenizer.words.get(id as usize).map_or(String::new(), |bytes| bytes::encode(bytes));
    let added = tokenizer.added.iter().map(|(content, id)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    });
    let vocabulary = (0..tokenizer.tokens() as u32).filter(|&id| !is_added(id)).map(|id| (word(id), id));
    let vocabulary = Vocabulary(vocabulary.collect());
    let merges: Vec<[String; 2]> = tokenizer.merges.pairs().map(|(left, right)| [word(left), word(right)]).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let file = File {
        version: "1.0",
        truncation: None,
        padding: None,
        added_tokens: added.collect(),
        normalizer: None,
        pre_tokenizer: byte_level.clone(),
        post_processor: None,
        decoder: byte_level,
        model: Model {
            r#type: "BPE",
            dropout: None,
            unk_token: None,
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: false,
            vocab: vocabulary,
            merges,
        },
    };
    // Strings and numbers alone: nothing in it can fail.
    serde_json::to_string(&file).unwrap_or_default()
}

type None = Option<()>;

#[derive(serde::Serialize)]
struct File {
    version: &'static str,
    truncation: None,
    padding: None,
    added_tokens: Vec<serde_json::Value>,
    normalizer: None,
    pre_tokenizer: serde_json::Value,
    post_processor: None,
    decoder: serde_json::Value,
    model: Model,
}

#[derive(serde::Serialize)]
struct Model {
    r#type: &'static str,
    dropout: None,
    unk_token: None,
    continuing_subword_prefix: None,
    end_of_word_suffix: None,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: Vocabulary,
    merges: Vec<[String; 2]>,
}

/// An object in the order of ids.
struct Vocabulary(Vec<(String, u32)>);

impl serde::Serialize for Vocabulary {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(Some(self.0.len()))?;
        for (word, id) in &self.0 {
            map.serialize_entry(word, id)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::super::read;
    use super::*;

    #[test]
    fn a_file_is_read_as_the_tokenizer_that_wrote_it() {
        for tokenizer in [Tokenizer::byte_level(), Tokenizer::gpt2()] {
            let again = read::json(&tokenizer.to_json()).unwrap();
            let text = "Hello, world!  \u{e9}\u{10ffff}\n<|endoftext|>\0\x7f 12345 the  end\r\n";
            assert_eq!(again.encode(text), tokenizer.encode(text));
            assert_eq!(again.tokens(), tokenizer.tokens());
            assert_eq!(again.end_of_text(), tokenizer.end_of_text());
            assert_eq!(again.decode(&again.encode(text)).unwrap(), text);
        }
    }

    #[test]
    fn a_byte_is_a_token() {
        let tokenizer = Tokenizer::byte_level();
        assert_eq!(tokenizer.tokens(), 257);
        assert_eq!(tokenizer.encode("a\u{e9}<|endoftext|>"), [97, 0xc3, 0xa9, 256]);
    }
}
