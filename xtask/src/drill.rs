//! `cargo xtask drill`: what takes too long for every run of the tests. Parts are chosen by name; each leaves a row in
//! `bench/results/drills.csv`.
//!
//! Most parts are tests that try something many more times than they do by default: `DEUTERON_DRILL` says how often, and lines that begin
//! with `drilled:` say how often it was.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::{printed, program, reproduce, root, sanitize};

/// How often processes are killed while they write.
const KILLS: &str = "1000";

const HEADER: &str = "drill,count,failures,note,commit,date\n";

/// One part of the drill.
struct Part {
    name: &'static str,
    run: fn(&Path) -> Result<Outcome>,
}

/// What became of a part.
pub enum Outcome {
    /// how often something was tried, what it was, and how often it went wrong
    Ran { count: usize, failures: usize, note: String },
    /// why it cannot run here
    Skipped(String),
}

/// All parts, in the order in which they run.
const PARTS: [Part; 9] = [
    Part { name: "alloc", run: |root| tests(root, "1", &[&["--package", "deuteron-gpt2", "--test", "allocation"]]) },
    Part { name: "kill", run: kill },
    Part { name: "folders", run: folders },
    Part {
        name: "signals",
        run: |root| tests(root, "25", &[&["--package", "deuteron-cli", "--test", "all", "signals::"]]),
    },
    Part { name: "address", run: |root| sanitize::run(root, "address") },
    Part { name: "thread", run: |root| sanitize::run(root, "thread") },
    Part { name: "miri", run: sanitize::miri },
    Part { name: "loom", run: loom },
    Part { name: "reproduce", run: reproduce::run },
];

/// Names of all parts.
pub fn names() -> String {
    PARTS.map(|part| part.name).join(", ")
}

/// Runs the parts of these names; all without any.
pub fn run(words: &[&str]) -> Result<()> {
    let root = root()?;
    for word in words {
        ensure!(PARTS.iter().any(|part| part.name == *word), "no drill is called `{word}`; there are {}", names());
    }
    let mut failed = Vec::new();
    for part in PARTS.iter().filter(|part| words.is_empty() || words.contains(&part.name)) {
        println!("drill {}", part.name);
        let start = Instant::now();
        match (part.run)(&root)? {
            Outcome::Skipped(why) => println!("warning: drill {} is skipped: {why}", part.name),
            Outcome::Ran { count, failures, note } => {
                ensure!(count > 0, "drill {} tried nothing", part.name);
                println!(
                    "drill {}: {count} times, {failures} failures, {:.0} s",
                    part.name,
                    start.elapsed().as_secs_f64()
                );
                append(&root, &row(&root, part.name, [count, failures], &note)?)?;
                if failures > 0 {
                    failed.push(part.name);
                }
            }
        }
    }
    if !failed.is_empty() {
        bail!("drills that failed: {}", failed.join(", "));
    }
    Ok(())
}

/// Processes that are killed while they write each of our files.
fn kill(root: &Path) -> Result<Outcome> {
    let device: &[&str] = &["--package", "deuteron-device", "--test", "all", "cache::killed"];
    let cli: &[&str] = &["--package", "deuteron-cli", "--lib", "killed"];
    let gpt2: &[&str] = &["--package", "deuteron-gpt2", "--test", "all", "download::killed"];
    tests(root, KILLS, &[device, cli, gpt2])
}

/// Folders that are full, read-only, somebody else's, links, or shared by 32 processes.
fn folders(root: &Path) -> Result<Outcome> {
    let cli: &[&str] = &["--package", "deuteron-cli", "--test", "all", "folders::"];
    let files: &[&str] = &["--package", "deuteron-cli", "--lib", "what_many_processes"];
    let device: &[&str] = &["--package", "deuteron-device", "--test", "all", "cache::thirty_two"];
    tests(root, "5", &[cli, files, device])
}

/// Interleavings of the thread pool's steps, explored by Loom.
fn loom(root: &Path) -> Result<Outcome> {
    let mut command = Command::new(program());
    command.current_dir(root.join("loom")).args(["test", "--release"]);
    counted(&mut command)
}

/// Tests with as many tries as asked for.
fn tests(root: &Path, times: &str, chosen: &[&[&str]]) -> Result<Outcome> {
    let (mut count, mut failures, mut notes) = (0, 0, Vec::new());
    for words in chosen {
        let mut command = Command::new(program());
        command.current_dir(root).arg("test").args(*words).args(["--", "--nocapture"]).env("DEUTERON_DRILL", times);
        if let Outcome::Ran { count: more, failures: failed, note } = counted(&mut command)? {
            (count, failures) = (count + more, failures + failed);
            notes.push(note);
        }
    }
    Ok(Outcome::Ran { count, failures, note: notes.join("; ") })
}

/// Runs tests, and adds up what they say they tried; where they say nothing, how many they are.
pub fn counted(command: &mut Command) -> Result<Outcome> {
    println!("{command:?}");
    let output = command.output().context("cargo could not be started")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let Summary { tried, notes, passed, failed } = summary(&text);
    // A process that was aborted has no summary.
    let failures = if output.status.success() { 0 } else { failed.max(1) };
    if failures > 0 {
        println!("{text}\n{}", String::from_utf8_lossy(&output.stderr));
    }
    let note = if notes.is_empty() { "tests".to_string() } else { notes.join("; ") };
    Ok(Outcome::Ran { count: if tried > 0 { tried } else { passed + failed }, failures, note })
}

/// What tests print.
#[derive(Debug, Default, PartialEq)]
struct Summary {
    tried: usize,
    notes: Vec<String>,
    passed: usize,
    failed: usize,
}

fn summary(text: &str) -> Summary {
    let mut summary = Summary::default();
    for line in text.lines() {
        // With --nocapture the name of the test may stand before it.
        if let Some((_, said)) = line.split_once("drilled: ") {
            let (count, what) = said.split_once(' ').unwrap_or((said, ""));
            summary.tried += count.parse::<usize>().unwrap_or(0);
            summary.notes.push(what.to_string());
        }
        if let Some((_, counts)) = line.split_once("test result: ") {
            let count = |word: &str| {
                let before = counts.split(word).next()?.trim_end();
                before.rsplit([' ', '.']).next()?.parse::<usize>().ok()
            };
            summary.passed += count("passed").unwrap_or(0);
            summary.failed += count("failed").unwrap_or(0);
        }
    }
    summary
}

fn row(root: &Path, name: &str, [count, failures]: [usize; 2], note: &str) -> Result<String> {
    let commit = printed(Command::new("git").current_dir(root).args(["rev-parse", "--short", "HEAD"]))?;
    let date = printed(Command::new("date").args(["-u", "+%F"]))?;
    Ok(format!("{name},{count},{failures},{},{commit},{date}\n", note.replace(',', "")))
}

fn append(root: &Path, row: &str) -> Result<()> {
    let path = root.join("bench").join("results").join("drills.csv");
    let before = fs::read_to_string(&path).unwrap_or_else(|_| HEADER.to_string());
    fs::write(&path, before + row).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_tests_say_is_added_up() {
        let text = "running 2 tests\ntest a ... drilled: 30 kills\nok\ndrilled: 12 allocations that failed\ntest b ... FAILED\n\n\
                    test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 3 filtered out; finished in 0.00s\n\
                    test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s\n";
        let notes = vec!["kills".to_string(), "allocations that failed".to_string()];
        assert_eq!(summary(text), Summary { tried: 42, notes, passed: 5, failed: 1 });
        assert_eq!(summary("Aborted"), Summary::default());
    }

    #[test]
    fn a_name_that_is_none_is_refused() {
        let error = run(&["kill", "nothing"]).unwrap_err().to_string();
        assert!(error.contains("`nothing`") && error.contains("alloc, kill, folders"), "{error}");
    }
}
