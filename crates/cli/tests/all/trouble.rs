//! Trouble around a command: output that cannot be written. A gate that failed stays failed.

use std::fs::File;
use std::process::{Command, Output, Stdio};

use crate::support::Folder;

const GRAPH: &str = "x = input f32[4,64] ; y = gelu x ; out y";

/// The command with a standard output that has no room, as on a full disk.
fn on_a_full_disk(mut command: Command) -> Output {
    command.stdout(File::options().write(true).open("/dev/full").unwrap()).output().unwrap()
}

/// The command with a standard output that nobody reads.
fn without_a_reader(mut command: Command) -> Output {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    command.stdout(Stdio::from(writer)).output().unwrap()
}

fn error_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).to_string()
}

#[test]
fn output_that_is_lost_is_an_error_and_a_reader_who_leaves_is_none() {
    let folder = Folder::new();
    let graph = folder.write("graph.txt", GRAPH);
    let small = ["--rows", "3", "--cols", "64", "--device", "cpu"];
    let bench = [&["bench", "add_act", "--once"][..], &small].concat();
    let fuse = [&["fuse", "add_act", "--no-learn"][..], &small].concat();
    let commands: [&[&str]; 15] = [
        &["ops"],
        &["ops", "--json"],
        &["kernel", &graph],
        &["kernel", &graph, "--text"],
        &["kernel", &graph, "--json"],
        &["analyze", &graph],
        &["doctor", "--device", "cpu"],
        &["explain"],
        &["explain", "E-PLAN-004"],
        &["explain", "--schema"],
        &["check", "--cases", "1", "--device", "cpu"],
        &bench,
        &fuse,
        &["--help"],
        &["--version"],
    ];
    for words in commands {
        let output = on_a_full_disk(folder.command(words));
        let text = error_text(&output);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {text}");
        assert!(text.contains("output is lost") && !text.contains("panicked"), "{words:?}: {text}");
        let output = without_a_reader(folder.command(words));
        assert_eq!(output.status.code(), Some(0), "{words:?}: {}", error_text(&output));
        assert_eq!(error_text(&output), "", "{words:?}");
    }
}

#[test]
fn a_gate_that_failed_stays_failed_whatever_becomes_of_its_output() {
    let folder = Folder::new();
    let bad = folder.write("bad.txt", "not fused: layer_norm, gelu\n");
    let words = ["analyze", "norm_act", "--expect", &bad];
    assert_eq!(folder.run(&words).status.code(), Some(1));
    let (full, closed) = (on_a_full_disk(folder.command(&words)), without_a_reader(folder.command(&words)));
    for output in [&full, &closed] {
        assert_eq!(output.status.code(), Some(1), "{}", error_text(output));
        assert!(error_text(output).contains("line 1: expected"), "{}", error_text(output));
    }
    assert!(error_text(&full).contains("output is lost") && !error_text(&closed).contains("output is lost"));
    // Nor does a standard error that cannot be written change how a command ends.
    let full = || File::options().write(true).open("/dev/full").unwrap();
    assert_eq!(folder.command(&words).stdout(full()).stderr(full()).status().unwrap().code(), Some(1));
    assert_eq!(folder.command(&["explain", "E-PLAN-999"]).stderr(full()).status().unwrap().code(), Some(2));
}

#[test]
fn generated_text_that_is_lost_is_an_error() {
    let folder = Folder::new();
    for extra in [&[][..], &["again"][..], &["--json"][..]] {
        let words = [&["generate", "--model", "synthetic", "--device", "cpu", "hi", "--max-tokens", "2"][..], extra];
        let output = on_a_full_disk(folder.command(&words.concat()));
        assert_eq!(output.status.code(), Some(2), "{extra:?}: {}", error_text(&output));
        assert!(error_text(&output).contains("output is lost"), "{extra:?}: {}", error_text(&output));
    }
}
