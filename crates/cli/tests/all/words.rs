//! Words that the command knows: models by name, completions, manual pages.

use crate::support::{Folder, printed};

fn refused(words: &[&str]) -> String {
    let output = Folder::new().run(words);
    assert_eq!(output.status.code(), Some(2), "{words:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn published_models_are_analysed_by_name() {
    for name in ["bert", "vit", "t5-small", "bert-block", "vit-block", "t5-block"] {
        let text = printed(Folder::new().run(&["analyze", name, "--device", "h200", "--dtype", "bf16"]));
        assert!(text.starts_with(&format!("{name} on h200")) && text.contains("Fuse "), "{text}");
    }
    let gradients = printed(Folder::new().run(&["analyze", "bert-block", "--device", "h200", "--backward"]));
    assert!(gradients.contains("grad("), "{gradients}");
}

#[test]
fn a_block_of_a_published_model_is_verified() {
    for name in ["bert-block", "t5-block"] {
        let words = ["fuse", name, "--seq", "9", "--device", "cpu", "--no-learn"];
        let text = printed(Folder::new().run(&words));
        assert!(text.contains("Verified against f64"), "{text}");
    }
}

#[test]
fn sizes_that_a_model_does_not_have_are_refused() {
    let fixed = refused(&["analyze", "vit", "--seq", "64"]);
    assert!(fixed.contains("--seq does nothing for the model `vit`; it takes --batch, --dtype"), "{fixed}");
    let long = refused(&["analyze", "bert", "--seq", "600"]);
    assert!(long.contains("seq must be from 1 to 512, got 600"), "{long}");
    let bytes = refused(&["analyze", "bert", "--dtype", "int8"]);
    assert!(bytes.contains("int8"), "{bytes}");
    let near = refused(&["analyze", "brt"]);
    assert!(near.contains("did you mean `bert`?"), "{near}");
}

#[test]
fn shells_get_completions_for_every_subcommand() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = printed(Folder::new().run(&["completions", shell]));
        for word in ["analyze", "profile", "doctor", "calibrate"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    assert!(refused(&["completions", "csh"]).contains("possible values: bash"));
}

#[test]
fn manual_pages_are_of_the_command_and_of_its_subcommands() {
    let page = printed(Folder::new().run(&["man"]));
    assert!(page.contains(".TH deuteron 1") && page.contains("deuteron\\-analyze(1)"), "{page}");
    let analyze = printed(Folder::new().run(&["man", "analyze"]));
    assert!(analyze.contains(".TH deuteron-analyze 1") && analyze.contains("\\-\\-forbid"), "{analyze}");
    let missing = refused(&["man", "nosuch"]);
    assert!(missing.contains("`nosuch` is no subcommand; expected one of analyze,"), "{missing}");
}
