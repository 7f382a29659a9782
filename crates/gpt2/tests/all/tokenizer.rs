//! Tokens against the tokenizers library: the fixtures are made by `bench/make_gpt2_fixtures.py`.

use std::time::{Duration, Instant};

use crate::support::fixture;
use deuteron::reference::Generator;
use deuteron_gpt2::{Config, END_OF_TEXT, Tokenizer};

fn expected(name: &str) -> Vec<(String, Vec<u32>)> {
    serde_json::from_slice(&std::fs::read(fixture("tokens").join(name)).unwrap()).unwrap()
}

fn check(tokenizer: &Tokenizer, cases: &[(String, Vec<u32>)]) {
    for (text, ids) in cases {
        assert_eq!(tokenizer.encode(text), *ids, "{text:?}");
        assert_eq!(tokenizer.decode(ids).as_ref(), Ok(text));
        let mut decoder = tokenizer.decoder();
        let mut streamed: String = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
        streamed.push_str(&decoder.finish());
        assert_eq!(streamed, *text);
    }
}

#[test]
fn gpt2_is_exact() {
    let tokenizer = Tokenizer::gpt2();
    assert_eq!((tokenizer.tokens(), tokenizer.end_of_text()), (50257, Some(50256)));
    let cases = expected("strings.json");
    assert!(cases.len() > 2500);
    check(&tokenizer, &cases);
}

#[test]
fn a_long_text_is_exact() {
    let text = std::fs::read_to_string(fixture("tokens/text.txt")).unwrap();
    let bytes = std::fs::read(fixture("tokens/text.ids")).unwrap();
    let ids: Vec<u32> = bytes.as_chunks::<2>().0.iter().map(|&pair| u16::from_le_bytes(pair).into()).collect();
    check(&Tokenizer::gpt2(), &[(text, ids)]);
}

#[test]
fn both_forms_of_files_are_exact() {
    let config = Config { vocabulary: 320, ..Config::SMALL };
    for folder in ["gelu", "bf16"] {
        let tokenizer = Tokenizer::open(&fixture(folder), &config).unwrap();
        assert_eq!((tokenizer.tokens(), tokenizer.end_of_text()), (320, Some(0)));
        check(&tokenizer, &expected("small.json"));
    }
}

#[test]
fn special_text_is_ordinary_where_asked() {
    let tokenizer = Tokenizer::gpt2();
    assert_eq!(tokenizer.encode(END_OF_TEXT), [50256]);
    let ids = tokenizer.encode_ordinary(END_OF_TEXT);
    assert!(ids.len() > 1 && !ids.contains(&50256));
    assert_eq!(tokenizer.decode(&ids).unwrap(), END_OF_TEXT);
}

/// Any tokens at all: their bytes need not be UTF-8.
#[test]
fn streaming_gives_the_text_of_the_whole() {
    let tokenizer = Tokenizer::gpt2();
    let mut random = Generator::new(5);
    for _ in 0..2000 {
        // Half of them single bytes, so that characters break everywhere.
        let mut id = || {
            let limit = random.pick(&[256, 50257]);
            random.below(limit) as u32
        };
        let ids: Vec<u32> = (0..20).map(|_| id()).collect();
        let mut decoder = tokenizer.decoder();
        let mut streamed = String::new();
        for &id in &ids {
            let text = decoder.push(id).unwrap();
            streamed.push_str(&text);
        }
        streamed.push_str(&decoder.finish());
        assert_eq!(streamed, tokenizer.decode(&ids).unwrap());
    }
}

#[test]
fn characters_come_when_they_are_whole() {
    let tokenizer = Tokenizer::gpt2();
    let mut decoder = tokenizer.decoder();
    let bytes: Vec<u32> = "a😀é".bytes().map(|byte| byte_token(&tokenizer, byte)).collect();
    let texts: Vec<String> = bytes.iter().map(|&id| decoder.push(id).unwrap()).collect();
    assert_eq!(texts, ["a", "", "", "", "😀", "", "é"]);
    assert_eq!(decoder.finish(), "");
}

/// Random text of every plane goes there and back.
#[test]
fn round_trip() {
    let tokenizer = Tokenizer::gpt2();
    let mut random = Generator::new(7);
    for _ in 0..3000 {
        let mut character = || {
            let limit = random.pick(&[0x80, 0x800, 0x3000, 0x11_0000]);
            char::from_u32(random.below(limit) as u32).unwrap_or(' ')
        };
        let text: String = (0..30).map(|_| character()).collect();
        let ids = tokenizer.encode(&text);
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        assert_eq!(tokenizer.decode(&tokenizer.encode_ordinary(&text)).unwrap(), text);
    }
}

/// A megabyte without a border: a quadratic encoder would take hours.
#[test]
fn long_pieces_take_linear_time() {
    let tokenizer = Tokenizer::gpt2();
    for unit in ["a", " ", "!", "7", "中", "ab", "\n", "\u{301}", "'s", END_OF_TEXT] {
        let text = unit.repeat(1_000_000 / unit.len());
        let start = Instant::now();
        let ids = tokenizer.encode(&text);
        assert!(start.elapsed() < Duration::from_secs(60), "{unit:?} took {:?}", start.elapsed());
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }
}

#[test]
fn unknown_tokens_are_refused() {
    let tokenizer = Tokenizer::gpt2();
    let error = tokenizer.decode(&[1, 50257]).unwrap_err();
    assert_eq!(error.to_string(), "token 50257 is not in the vocabulary of 50257");
    assert_eq!(
        tokenizer.decoder().push(u32::MAX).unwrap_err().to_string(),
        error.to_string().replace("50257 is", "4294967295 is")
    );
}

fn byte_token(tokenizer: &Tokenizer, byte: u8) -> u32 {
    (0..256).find(|&id| tokenizer.bytes(id).unwrap() == [byte]).unwrap()
}
