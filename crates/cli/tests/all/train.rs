//! `deuteron train`: a run from words to a model that generates, stopped by a signal or not.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Folder, printed};

const SIZES: [&str; 12] =
    ["--layers", "1", "--heads", "2", "--width", "16", "--context", "16", "--batch", "2", "--device", "cpu"];

fn text(folder: &Folder) -> String {
    folder.write("text.txt", &"the quick brown fox jumps over the lazy dog. ".repeat(50))
}

fn train(folder: &Folder, out: &str, words: &[&str]) -> Command {
    let (text, out) = (text(folder), folder.path(out));
    folder.command(&[&["train", &text, "--out", &out], &SIZES[..], words].concat())
}

fn error(output: Output) -> String {
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).unwrap()
}

fn model(folder: &Folder, out: &str, step: u64) -> [Vec<u8>; 2] {
    let checkpoint = folder.0.join(out).join(format!("checkpoint-{step}"));
    ["model.safetensors", "optimizer.safetensors"].map(|name| std::fs::read(checkpoint.join(name)).unwrap())
}

#[test]
fn a_trained_model_generates_and_is_trained_further() {
    let folder = Folder::new();
    let words = ["--steps", "40", "--evaluate-every", "20", "--json", "--learning-rate", "0.01", "--memory", "1GiB"];
    let report: Value = serde_json::from_str(&printed(train(&folder, "run", &words).output().unwrap())).unwrap();
    assert_eq!(report["step"], 40);
    assert_eq!(report["finished"], true);
    assert!(report["memory_bytes"].as_u64() > Some(100_000) && report["saves_memory"] == false, "{report}");
    assert_eq!(report["tokens"], 40 * 2 * 16);
    let [loss, validation] = ["loss", "validation_loss"].map(|name| report[name].as_f64().unwrap());
    assert!(loss < 5.0 && validation < 5.0, "{report}");
    let checkpoint = report["checkpoint"].as_str().unwrap();
    let generate = ["generate", "the", "--model", checkpoint, "--max-tokens", "8", "--device", "cpu"];
    assert!(printed(folder.run(&generate)).starts_with("the"));
    // From the model on, with samples.
    let (text, out) = (text(&folder), folder.path("further"));
    let further = [
        "train",
        &text,
        "--model",
        checkpoint,
        "--out",
        &out,
        "--steps",
        "2",
        "--device",
        "cpu",
        "--sample-every",
        "2",
        "--prompt",
        "the quick",
        "--precision",
        "bf16",
        "--validation-share",
        "0",
    ];
    let output = folder.run(&further);
    assert!(String::from_utf8_lossy(&output.stderr).contains("trained: 2 of 2 steps, loss "), "{output:?}");
    assert!(printed(output).starts_with("--- step 2\nthe quick"));
    let log = std::fs::read_to_string(Path::new(&out).join("log.csv")).unwrap();
    let first: f64 = log.lines().nth(1).unwrap().split(',').nth(2).unwrap().parse().unwrap();
    assert!(first < 5.0, "it starts from what was trained: {first}");
}

#[test]
fn a_vocabulary_of_the_text_and_the_model_in_16_bits() {
    let folder = Folder::new();
    let export = folder.path("small");
    let words = ["--steps", "3", "--tokenizer", "bpe:280", "--export", &export, "--evaluate-every", "0", "--json"];
    let run = |extra: &[&str]| -> Value {
        let output = train(&folder, "run", &[&words[..], extra].concat()).output().unwrap();
        serde_json::from_str(&printed(output)).unwrap()
    };
    let first = run(&["--until", "2"]);
    assert!(first["step"] == 2 && first["finished"] == false, "{first}");
    let report = run(&["--resume"]);
    assert!(report["step"] == 3 && report["finished"] == true, "{report}");
    let files =
        |path: &Path| ["tokenizer.json", "model.safetensors"].map(|name| std::fs::read(path.join(name)).unwrap());
    let [whole, small] = [Path::new(report["checkpoint"].as_str().unwrap()), Path::new(&export)].map(files);
    assert_eq!(whole[0], small[0], "the tokenizer");
    assert!(String::from_utf8_lossy(&small[0]).contains("\"\u{120}the\""), "a word of the text is a token");
    assert!(2 * small[1].len() < whole[1].len() + 8192, "{} and {} bytes", small[1].len(), whole[1].len());
    let generate = ["generate", "the", "--model", &export, "--max-tokens", "4", "--device", "cpu"];
    assert!(printed(folder.run(&generate)).starts_with("the"));
}

#[test]
#[cfg(unix)]
fn a_signal_saves_and_resume_goes_on_with_the_same_bits() {
    let folder = Folder::new();
    let words = ["--steps", "300", "--dropout", "0.1", "--evaluate-every", "0"];
    let whole = train(&folder, "whole", &words).output().unwrap();
    assert!(whole.status.success(), "{whole:?}");
    for signal in ["-INT", "-TERM"] {
        let out = format!("run{signal}");
        let mut child = train(&folder, &out, &words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let log = folder.0.join(&out).join("log.csv");
        let start = Instant::now();
        while std::fs::read_to_string(&log).unwrap_or_default().lines().count() < 4 {
            assert!(start.elapsed() < Duration::from_secs(120) && child.try_wait().unwrap().is_none());
            sleep(Duration::from_millis(1));
        }
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let stopped = child.wait_with_output().unwrap();
        let said = String::from_utf8(stopped.stderr).unwrap();
        assert!(stopped.status.success() && said.contains("--resume continues"), "{signal}: {said}");
        let again = error(train(&folder, &out, &words).output().unwrap());
        assert!(again.contains("continue it with --resume"), "{again}");
        let resumed = train(&folder, &out, &[&words[..], &["--resume"]].concat()).output().unwrap();
        assert!(resumed.status.success(), "{resumed:?}");
        assert!(model(&folder, &out, 300) == model(&folder, "whole", 300), "{signal}");
    }
}

#[test]
fn a_flag_that_does_nothing_is_an_error() {
    let folder = Folder::new();
    let cases: [(&[&str], &str); 16] = [
        (&["--optimizer", "sgd", "--beta2", "0.9"], "--beta2 is for adamw and lion"),
        (&["--optimizer", "lion", "--epsilon", "1e-6"], "--epsilon is for adamw"),
        (&["--optimizer", "adam"], "--optimizer must be adamw, sgd or lion, got `adam`"),
        (&["--prompt", "a"], "expected --sample-every"),
        (&["--sample-every", "5", "--json"], "--json"),
        (&["--evaluate-every", "0", "--evaluate-batches", "3"], "got --evaluate-every 0"),
        (&["--evaluate-every", "0", "--validation", "some.txt"], "got --evaluate-every 0"),
        (&["--evaluate-batches", "0"], "--evaluate-batches must be at least 1"),
        (&["--keep", "0"], "--keep must be at least 1"),
        (&["--sequence", "17"], "--sequence must be at most the model's context, got 17"),
        (&["--model", "gpt2"], "cannot be used with"),
        (&["--tokenizer", "nowhere"], "expected bytes, bpe:TOKENS, gpt2, or a folder"),
        (&["--tokenizer", "bpe:many"], "tokenizer `bpe:many`: expected a number, such as bpe:2048"),
        (&["--tokenizer", "bpe:256"], "a vocabulary has at least 257 tokens"),
        (&["--precision", "f16"], "expected f32 or bf16"),
        (&["--memory", "lots"], "expected a size such as 16GiB"),
    ];
    for (words, expected) in cases {
        let said = error(train(&folder, "run", words).output().unwrap());
        assert!(said.contains(expected), "{words:?}: {said}");
    }
    assert!(!folder.0.join("run").exists(), "nothing was begun");
    let said = error(train(&folder, "small", &["--memory", "10KB"]).output().unwrap());
    assert!(said.contains("--memory is 10.0 KB; take a smaller --batch"), "{said}");
    assert!(!folder.0.join("small/log.csv").exists(), "nothing was begun");
}
