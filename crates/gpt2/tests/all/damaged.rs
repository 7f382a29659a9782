//! Damaged and hostile folders: each gets an error that names file and tensor, and nothing outside the folder is read.

use std::path::Path;

use crate::support::{Scratch, Tensor, fixture, safetensors, with_header};
use deuteron_gpt2::{
    Checkpoint, CheckpointError, Config, FileError, HeaderError, TensorError, Tokenizer, TokenizerError,
};

fn open(scratch: &Scratch) -> CheckpointError {
    Checkpoint::open(&scratch.0).expect_err("a damaged folder")
}

/// The error of a `model.safetensors` of these bytes.
fn file(bytes: &[u8]) -> CheckpointError {
    let scratch = Scratch::copy_of("gelu");
    scratch.write("model.safetensors", bytes);
    open(&scratch)
}

fn header(bytes: &[u8]) -> HeaderError {
    match file(bytes) {
        CheckpointError::Header { problem, path } => {
            assert!(path.ends_with("model.safetensors"));
            problem
        }
        other => panic!("{other:?}"),
    }
}

fn tensor(error: CheckpointError) -> (String, TensorError) {
    match error {
        CheckpointError::Tensor { tensor, problem, .. } => (tensor, problem),
        other => panic!("{other:?}"),
    }
}

/// The tensors of a fixture of one file, to be changed.
fn tensors(name: &str) -> Vec<Tensor> {
    let checkpoint = Checkpoint::open(&fixture(name)).unwrap();
    let weight = |(name, _): (String, _)| {
        let weight = checkpoint.weight(&name).unwrap();
        Tensor { dtype: "F32", shape: weight.shape.dims().to_vec(), bytes: weight.bytes.to_vec(), name }
    };
    checkpoint.config().weights().into_iter().map(weight).collect()
}

#[test]
fn every_cut_is_noticed() {
    let whole = std::fs::read(fixture("gelu/model.safetensors")).unwrap();
    for length in (0..40).chain([200, 2000, 5000, whole.len() / 2, whole.len() - 4, whole.len() - 1]) {
        header(&whole[..length]);
    }
    assert_eq!(header(&whole[..7]), HeaderError::TooShort(7));
    assert!(matches!(header(&[&whole[..], &[0]].concat()), HeaderError::End { .. }));
}

#[test]
fn headers_are_checked() {
    let length = |length: u64| header(&[&length.to_le_bytes()[..], b"{}"].concat());
    for bad in [3, 1 << 40, u64::MAX] {
        assert_eq!(length(bad), HeaderError::Length { header: bad, file: 10 });
    }
    for text in ["", "[]", "{", "null", "{}{}", "\u{0}", "{\"a\":1}", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}"] {
        assert!(matches!(header(&with_header(text, &[])), HeaderError::Json(_)), "{text}");
    }
    // Nested deeper than any stack.
    assert!(matches!(header(&with_header(&"{\"a\":".repeat(100_000), &[])), HeaderError::Json(_)));
    let entry = |shape: &str, begin: &str, end: &str| {
        format!("{{\"dtype\":\"F32\",\"shape\":{shape},\"data_offsets\":[{begin},{end}]}}")
    };
    let one = |shape: &str, begin: &str, end: &str| {
        header(&with_header(&format!("{{\"a\":{}}}", entry(shape, begin, end)), &[0; 8]))
    };
    assert!(matches!(one("[3]", "0", "8"), HeaderError::Size { .. }));
    assert!(matches!(one("[18446744073709551615,2]", "0", "8"), HeaderError::Size { .. }));
    assert!(matches!(one("[4294967296,4294967296]", "0", "8"), HeaderError::Size { .. }));
    assert!(matches!(one("[2]", "0", "4"), HeaderError::End { expected: 4, got: 8 }));
    assert!(matches!(one("[2]", "0", "800"), HeaderError::End { expected: 800, got: 8 }));
    assert!(matches!(one("[2]", "8", "0"), HeaderError::Place { .. }));
    assert!(matches!(one("[1]", "4", "8"), HeaderError::Place { .. }));
    assert!(matches!(one("[2]", "-8", "0"), HeaderError::Json(_)));
    assert!(matches!(one("[2]", "0", "18446744073709551616"), HeaderError::Json(_)));
    let two =
        |first: String, second: String| header(&with_header(&format!("{{\"a\":{first},\"b\":{second}}}"), &[0; 8]));
    let overlapping = two(entry("[2]", "0", "8"), entry("[1]", "4", "8"));
    assert_eq!(overlapping, HeaderError::Place { tensor: "b".into(), expected: 8, got: 4 });
    assert!(matches!(two(entry("[1]", "0", "4"), entry("[1]", "8", "12")), HeaderError::Place { .. }));
    let twice = with_header(&format!("{{\"a\":{0},\"a\":{0}}}", entry("[2]", "0", "8")), &[0; 8]);
    assert!(header(&twice).to_string().contains("tensor `a` occurs twice"));
    let unknown = with_header("{\"a\":{\"dtype\":\"F7\",\"shape\":[8],\"data_offsets\":[0,8]}}", &[0; 8]);
    assert_eq!(header(&unknown), HeaderError::Dtype { tensor: "a".into(), dtype: "F7".into() });
}

#[test]
fn tensors_are_checked_against_the_configuration() {
    let changed = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let mut tensors = tensors("gelu");
        change(&mut tensors);
        file(&safetensors(&tensors))
    };
    let missing = tensor(changed(&|tensors| tensors.retain(|tensor| tensor.name != "h.1.mlp.c_fc.bias")));
    assert_eq!(missing, ("h.1.mlp.c_fc.bias".into(), TensorError::Missing));
    let unknown = tensor(changed(&|tensors| tensors.push(Tensor::zeros("h.2.ln_1.weight", "F32", 4, &[32]))));
    assert_eq!(unknown, ("h.2.ln_1.weight".into(), TensorError::Unknown));
    let twice = tensor(changed(&|tensors| tensors.push(Tensor::zeros("transformer.ln_f.bias", "F32", 4, &[32])))).1;
    assert_eq!(twice, TensorError::Twice);
    let dtype = tensor(changed(&|tensors| tensors[0] = Tensor::zeros("wte.weight", "F64", 8, &[320, 32])));
    assert_eq!(dtype, ("wte.weight".into(), TensorError::Dtype("F64".into())));
    let head = tensor(changed(&|tensors| tensors.push(Tensor::zeros("lm_head.weight", "F32", 4, &[320, 32]))));
    assert_eq!(head, ("lm_head.weight".into(), TensorError::Untied));
    // Stored as torch.nn.Linear does, [out, in].
    let turned = changed(&|tensors| {
        let found = tensors.iter_mut().find(|tensor| tensor.name == "h.0.mlp.c_fc.weight").unwrap();
        found.shape.reverse();
    });
    let words = turned.to_string();
    assert!(
        words.ends_with("tensor `h.0.mlp.c_fc.weight` has shape [128,32], but config.json implies [32,128]"),
        "{words}"
    );
}

#[test]
fn another_model_s_configuration_is_noticed() {
    let scratch = Scratch::copy_of("gelu");
    scratch.replace("config.json", "\"vocab_size\": 320", "\"vocab_size\": 50257");
    let (name, problem) = tensor(open(&scratch));
    assert_eq!(name, "wte.weight");
    assert!(matches!(problem, TensorError::Shape { .. }));
    let scratch = Scratch::copy_of("gelu");
    scratch.replace("config.json", "\"n_layer\": 2", "\"n_layer\": 3");
    assert_eq!(tensor(open(&scratch)).1, TensorError::Missing);
    let scratch = Scratch::copy_of("gelu");
    scratch.replace("config.json", "\"n_layer\": 2", "\"n_layer\": 1");
    assert_eq!(tensor(open(&scratch)).1, TensorError::Unknown);
    scratch.write("config.json", "{}");
    assert!(matches!(open(&scratch), CheckpointError::Config { .. }));
    scratch.write("config.json", [0xff, 0xfe]);
    assert!(matches!(open(&scratch), CheckpointError::File { problem: FileError::NotUtf8, .. }));
}

const INDEX: &str = "model.safetensors.index.json";
const FIRST: &str = "model-00001-of-00004.safetensors";

/// A shard's name is a plain file name: nothing else is opened, though it exists.
#[test]
fn shards_stay_in_the_folder() {
    let outside = Scratch::copy_of("shards");
    for name in
        ["../x", "./x", "a/b", "/etc/passwd", "..", ".", "", "a\\\\b", "C:x", &outside.0.join(FIRST).to_string_lossy()]
    {
        let scratch = Scratch::copy_of("shards");
        scratch.replace(INDEX, FIRST, name);
        match open(&scratch) {
            CheckpointError::File { problem, .. } => assert_eq!(problem, FileError::NotPlain, "{name}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn shards_are_checked_against_the_index() {
    let scratch = Scratch::copy_of("shards");
    std::fs::remove_file(scratch.0.join(FIRST)).unwrap();
    assert!(matches!(open(&scratch), CheckpointError::File { problem: FileError::Unreadable(_), .. }));
    let scratch = Scratch::copy_of("shards");
    std::fs::copy(scratch.0.join("model-00002-of-00004.safetensors"), scratch.0.join(FIRST)).unwrap();
    assert_eq!(tensor(open(&scratch)).1, TensorError::Misplaced);
    for text in ["", "{}", "[]", "{\"weight_map\":[]}", "{\"weight_map\":{\"a\":1}}"] {
        scratch.write(INDEX, text);
        assert!(matches!(open(&scratch), CheckpointError::Index { .. }), "{text}");
    }
    scratch.write(INDEX, "{\"weight_map\":{}}");
    assert_eq!(tensor(open(&scratch)), ("wte.weight".into(), TensorError::Missing));
    std::fs::remove_file(scratch.0.join(INDEX)).unwrap();
    scratch.write("pytorch_model.bin", "");
    assert!(matches!(open(&scratch), CheckpointError::NoWeights { pickle: true, .. }));
    let nowhere = Checkpoint::open(Path::new("no such folder")).unwrap_err();
    assert!(nowhere.to_string().starts_with("`no such folder` cannot be read: "), "{nowhere}");
}

#[cfg(unix)]
#[test]
fn links_out_of_the_folder_are_refused() {
    use std::os::unix::fs::symlink;
    let scratch = Scratch::copy_of("gelu");
    std::fs::rename(scratch.0.join("model.safetensors"), scratch.0.join("weights")).unwrap();
    symlink("weights", scratch.0.join("model.safetensors")).unwrap();
    assert!(Checkpoint::open(&scratch.0).is_ok(), "a link inside the folder is good");
    std::fs::remove_file(scratch.0.join("model.safetensors")).unwrap();
    symlink(fixture("gelu/model.safetensors"), scratch.0.join("model.safetensors")).unwrap();
    match open(&scratch) {
        CheckpointError::File { problem: FileError::LeavesFolder(to), .. } => {
            assert!(to.ends_with("model.safetensors"))
        }
        other => panic!("{other:?}"),
    }
    std::fs::remove_file(scratch.0.join("model.safetensors")).unwrap();
    std::fs::create_dir(scratch.0.join("model.safetensors")).unwrap();
    assert!(matches!(open(&scratch), CheckpointError::File { problem: FileError::NotAFile, .. }));
}

/// The error of opening a changed tokenizer of 320 words.
fn tokenizer(folder: &str, name: &str, from: &str, to: &str) -> String {
    let scratch = Scratch::copy_of(folder);
    scratch.replace(name, from, to);
    let error = Tokenizer::open(&scratch.0, &Config { vocabulary: 320, ..Config::SMALL }).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(name) || name == "merges.txt", "{text}");
    text[text.find("`: ").map_or(0, |at| at + 3)..].to_string()
}

#[test]
fn tokenizers_are_checked() {
    let json = |from, to| tokenizer("gelu", "tokenizer.json", from, to);
    assert_eq!(json("\"BPE\"", "\"Unigram\""), "`model.type` is Some(\"Unigram\"); expected BPE, as in GPT-2");
    assert!(json("\"add_prefix_space\":false", "\"add_prefix_space\":true").starts_with("`pre_tokenizer` is {"));
    assert!(json("\"ignore_merges\":false", "\"ignore_merges\":true").starts_with("`model.ignore_merges` is true"));
    assert!(json("\"lstrip\":false", "\"lstrip\":true").starts_with("`added_tokens` is `<|endoftext|>` with"));
    assert!(json("\"vocab\":{", "\"vocab\":[").starts_with("not the file of a byte-level BPE: "));
    let words = |from, to| tokenizer("bf16", "vocab.json", from, to);
    assert_eq!(words("\"A\":", "\"中\":"), "word `中` has a character that does not encode a byte");
    assert_eq!(words("\"A\":", "\"B\":"), "word `B` occurs twice, or shares its id with another word");
    assert!(words(":319", ":320").ends_with("has id 320 among 320 words; expected ids without gaps"));
    assert!(words(":319", ":4294967295").contains("has id 4294967295 among 320 words; expected ids without gaps"));
    assert!(words(":319", ":318").contains("occurs twice"));
    assert_eq!(words("\"A\":", "\"AAA\":"), "no word for byte 65; expected one for each of the 256");
    let merges = |from, to| tokenizer("bf16", "merges.txt", from, to);
    assert_eq!(
        merges("#version: 0.2\n", "Q Z\n"),
        "the merge of `Q` and `Z` uses words that are not in the vocabulary; are both files from one model?"
    );
    assert_eq!(
        merges("#version: 0.2\n", "Q\n"),
        "line 1: `Q` is not a merge; expected two words with a space between them"
    );
}

#[test]
fn a_tokenizer_of_another_model_is_refused() {
    let small = Config { vocabulary: 300, ..Config::SMALL };
    let expected = TokenizerError::Vocabulary { tokens: 320, vocabulary: 300 };
    assert_eq!(Tokenizer::open(&fixture("gelu"), &small).unwrap_err(), expected);
    // A folder without files has GPT-2's own, if the model is large enough.
    let built_in = TokenizerError::Vocabulary { tokens: 50257, vocabulary: 300 };
    assert_eq!(Tokenizer::open(&fixture("f16"), &small).unwrap_err(), built_in);
    let padded = Config { vocabulary: 50304, ..Config::SMALL };
    assert_eq!(Tokenizer::open(&fixture("f16"), &padded).unwrap().tokens(), 50257);
}
