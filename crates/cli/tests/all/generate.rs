//! `deuteron generate` on small checkpoints of the transformers library.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use deuteron_gpt2::{Checkpoint, Tokenizer};
use serde_json::Value;

use crate::support::{Folder, printed};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../gpt2/tests/fixtures").join(name)
}

fn command(folder: &Folder, arguments: &[&str]) -> Command {
    folder.command(&[&["generate", "--device", "cpu"], arguments].concat())
}

fn generate(arguments: &[&str]) -> Output {
    command(&Folder::new(), arguments).output().unwrap()
}

fn stdout(arguments: &[&str]) -> String {
    printed(generate(arguments))
}

/// The checkpoint in shards, with a token a byte: it has come without a tokenizer.
fn shards() -> Folder {
    let folder = Folder::new();
    for entry in std::fs::read_dir(fixture("shards")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.0.join(path.file_name().unwrap())).unwrap();
    }
    let words = std::fs::read(fixture("bf16").join("vocab.json")).unwrap();
    let mut words: serde_json::Map<String, Value> = serde_json::from_slice(&words).unwrap();
    // After the end of text and 256 bytes come words of several.
    words.retain(|_, id| id.as_u64().unwrap() < 257);
    folder.write("vocab.json", &serde_json::to_string(&words).unwrap());
    folder.write("merges.txt", "#version: 0.2\n");
    folder
}

#[test]
fn the_text_is_that_of_the_library() {
    let shards = shards();
    let tokenizer = Tokenizer::open(&shards.0, Checkpoint::open(&shards.0).unwrap().config()).unwrap();
    let expected: Value = serde_json::from_slice(&std::fs::read(shards.0.join("expected.json")).unwrap()).unwrap();
    let ids =
        |value: &Value| value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect::<Vec<_>>();
    let (prompt, greedy) = (ids(&expected["cases"][0]["prompt"]), ids(&expected["cases"][0]["greedy"]));
    let (prompt, text) = (tokenizer.decode(&prompt).unwrap(), tokenizer.decode(&greedy).unwrap());
    assert_eq!(stdout(&["--model", &shards.path(""), &prompt]), format!("{prompt}{text}\n"));
    // Printed as it comes or at the end: the same.
    let two = stdout(&["--model", &shards.path(""), &prompt, &prompt, "--max-tokens", "9"]);
    let short = tokenizer.decode(&greedy[..9]).unwrap();
    assert_eq!(two, format!("[1]\n{prompt}{short}\n\n[2]\n{prompt}{short}\n"));
}

#[test]
fn speed_is_told_apart_from_the_text() {
    let output = generate(&["--model", fixture("gelu").to_str().unwrap(), "hi", "--max-tokens", "5"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.starts_with("read in ") && text.contains(" tokens/s"), "{text}");
    let memory = text.trim_end().rsplit("; peak memory ").next().unwrap().split_once(' ').unwrap();
    let is_size = memory.0.parse::<f64>().is_ok_and(|size| size > 0.0) && ["KB", "MB", "GB"].contains(&memory.1);
    assert!(!cfg!(target_os = "linux") || is_size, "{text}");
    assert!(text.contains(" s; 2 prompt + 5 generated tokens in "), "{text}");
    assert_eq!(text.lines().count(), 1);
    let output = generate(&["--model", fixture("gelu").to_str().unwrap(), "hi", "--max-tokens", "500"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.ends_with("; the context of 96 tokens is full\n"), "{text}");
}

#[test]
fn json_holds_every_text() {
    let folder = fixture("gelu");
    let words = ["--model", folder.to_str().unwrap(), "one", "two three", "--json", "--max-tokens"];
    let sampled = |extra: &[&str]| -> Value {
        serde_json::from_str(&stdout(&[&words[..], &["500", "--top-k", "40"], extra].concat())).unwrap()
    };
    let report = sampled(&[]);
    assert_eq!((report["weights"].as_str(), report["prompt_tokens"].as_u64()), (Some("f32"), Some(11)), "{report}");
    let counts = report["texts"].as_array().unwrap().iter().map(|text| text["tokens"].as_array().unwrap().len());
    assert_eq!(report["generated_tokens"].as_u64(), Some(counts.sum::<usize>() as u64));
    assert!(report["seconds"].as_f64() > Some(0.0) && report["tokens_per_second"].as_f64() > Some(0.0), "{report}");
    assert!(report["device"].as_str().unwrap().starts_with("cpu"));
    assert!(report["load_seconds"].as_f64() > Some(0.0), "{report}");
    if cfg!(target_os = "linux") {
        assert!(report["peak_memory_bytes"].as_u64() > Some(1 << 20), "{report}");
    }
    let tokenizer = Tokenizer::open(&folder, Checkpoint::open(&folder).unwrap().config()).unwrap();
    for (text, prompt) in report["texts"].as_array().unwrap().iter().zip(["one", "two three"]) {
        assert_eq!(text["prompt"], prompt);
        let ids: Vec<u32> = text["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        assert_eq!(text["text"], tokenizer.decode(&ids).unwrap());
        assert!(text["stop"] == "context_full" || text["stop"] == "end_of_text", "{text}");
    }
    assert_eq!(sampled(&[])["texts"], report["texts"], "the same seed, the same text");
    assert_ne!(sampled(&["--seed", "2"])["texts"], report["texts"]);
    assert_ne!(sampled(&["--temperature", "0"])["texts"], report["texts"]);
    let rounded = sampled(&["--weights", "bf16"]);
    assert_eq!(rounded["weights"], "bf16");
}

#[test]
fn a_model_that_is_not_there_is_told_how_to_get() {
    let output = generate(&["--model", "gpt2", "hi"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    for words in ["no model `gpt2`", "hf download openai-community/gpt2", "--model box"] {
        assert!(text.contains(words), "`{words}` is missing in {text}");
    }
}

/// The greedy text is that of the library, from a folder without models and without a network.
#[test]
fn a_model_comes_with_the_command_and_says_which_it_is() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gpt2/box");
    let expected: Value = serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let case = &expected["cases"][0];
    let report: Value =
        serde_json::from_str(&stdout(&[case["text"].as_str().unwrap(), "--max-tokens", "8", "--json"])).unwrap();
    assert_eq!(report["model"], "box");
    assert_eq!(report["texts"][0]["tokens"].as_array().unwrap()[..], case["greedy"].as_array().unwrap()[..8]);
    let output = generate(&["To be", "--max-tokens", "2"]);
    let (text, notes) = (printed_of(&output.stdout), printed_of(&output.stderr));
    assert!(text.starts_with("To be") && output.status.success(), "{text}{notes}");
    assert!(notes.starts_with("model: box, 2.7 M parameters"), "{notes}");
    assert!(notes.contains("--model gpt2 --download"), "{notes}");
    // The same model from its folder needs no introduction.
    let named = generate(&["To be", "--max-tokens", "2", "--model", folder.to_str().unwrap()]);
    assert_eq!(printed_of(&named.stdout), text);
    assert!(printed_of(&named.stderr).starts_with("read in "), "{}", printed_of(&named.stderr));
    let download = generate(&["hi", "--download"]);
    assert_eq!(download.status.code(), Some(2));
    assert!(
        printed_of(&download.stderr).contains("name one, such as --model gpt2"),
        "{}",
        printed_of(&download.stderr)
    );
}

#[test]
fn perplexity_is_the_exponential_of_the_loss() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gpt2/tests/fixtures/gelu");
    let own = Folder::new();
    let text = own.write("text.txt", &"Hello, world! ".repeat(20));
    let measure = |words: &[&str]| own.run(&[&["perplexity", &text, "--device", "cpu"], words].concat());
    let model = ["--model", folder.to_str().unwrap()];
    let report: Value = serde_json::from_str(&printed(measure(&[&model[..], &["--json"]].concat()))).unwrap();
    let number = |name: &str| report[name].as_f64().unwrap();
    assert_eq!((report["bytes"].as_u64(), report["weights"].as_str()), (Some(280), Some("f32")));
    // Weights are random: about as unsure as among all 320 tokens.
    assert!((4.0..8.0).contains(&number("loss")), "{report}");
    assert!((number("perplexity") - number("loss").exp()).abs() < 1e-6 * number("perplexity"), "{report}");
    let bits = number("loss") * (number("tokens") - 1.0) / std::f64::consts::LN_2 / 280.0;
    assert!((number("bits_per_byte") - bits).abs() < 1e-6, "{report}");
    // Shakespeare's model knows his words.
    let line = own.write("line.txt", "KING HENRY.\nMy lord, I do beseech you, let me know the cause.\n");
    let of = |words: &[&str]| -> Value {
        let words = [&["perplexity", &line, "--device", "cpu", "--json"], words].concat();
        serde_json::from_str(&printed(own.run(&words))).unwrap()
    };
    assert!(of(&[])["perplexity"].as_f64() < Some(300.0) && of(&[])["model"] == "box");
    assert!(printed(measure(&[&model[..], &["--weights", "int8"]].concat())).contains("int8 weights: perplexity "));
    let empty = own.write("empty.txt", "");
    let refused = own.run(&["perplexity", &empty, "--device", "cpu"]);
    assert!(printed_of(&refused.stderr).contains("the text has 0 tokens; expected at least 2"));
}

fn printed_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn seeded_weights_need_no_files() {
    let text = stdout(&["--model", "synthetic", "Hello", "--max-tokens", "2"]);
    assert!(text.starts_with("Hello") && text.trim_end().len() > "Hello".len(), "{text}");
}

#[test]
fn a_reader_who_leaves_is_no_error() {
    let (own, folder) = (Folder::new(), fixture("gelu"));
    for extra in [&[][..], &["again"][..], &["--json"][..]] {
        let mut command =
            command(&own, &[&["--model", folder.to_str().unwrap(), "hi", "--max-tokens", "90"][..], extra].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut text = String::new();
        child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(child.wait().unwrap().success() && !text.contains("panicked"), "{extra:?}: {text}");
    }
}

#[test]
fn bad_settings_exit_with_2() {
    let folder = fixture("gelu");
    let long = "x".repeat(97);
    let cases: [(&[&str], &str); 7] = [
        (&["--temperature=-1"], "temperature must be 0 or a positive number, got -1"),
        (&["--top-k", "0"], "top-k must be at least 1"),
        (&["--top-p", "2"], "top-p must be above 0 and at most 1, got 2"),
        (&["--weights", "i8"], "unknown weights `i8`; expected f32, f16, bf16 or int8"),
        (&["--weights", "f99"], "unknown weights `f99`"),
        (&[&long], "prompt 2 has 97 tokens, but the model's context is 96"),
        (&["--model", "a/b/c"], "`a/b/c` is neither a folder"),
    ];
    for (arguments, message) in cases {
        let model = if arguments[0] == "--model" { &[][..] } else { &["--model", folder.to_str().unwrap()] };
        let output = generate(&[model, &["hi"], arguments].concat());
        let text = String::from_utf8_lossy(&output.stderr).to_string();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(text.contains(message), "{arguments:?} should say `{message}`, said:\n{text}");
        assert!(output.stdout.is_empty() && !text.contains("panicked"), "{arguments:?}: {text}");
    }
}
