//! `cargo xtask test`: format, tests, lints, docs, fuzzing and the Python package, as CI runs them.
//!
//! What comes over the network is fetched while cargo works. The first Rust tests end after a minute or two; cargo's own summaries end
//! the output. What keeps one core busy, or none, runs beside something that cargo does.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, ensure};

use crate::fetch::{self, Download};
use crate::log::Log;
use crate::phases::Phases;
use crate::{building, bundle, guide, hardware, program, python, root, succeed};

/// Packages that are tested first: they take least to build, and all others depend on them.
const FIRST: [&str; 4] = ["deuteron-graph", "deuteron-plan", "deuteron-reference", "deuteron-onnx"];

/// Packages that are tested last: they take seconds, and their summaries end the output.
const LAST: [&str; 8] = [
    "deuteron-gpt2",
    "deuteron-train",
    "deuteron-guide",
    "deuteron-report",
    "deuteron-cli",
    "deuteron-testkit",
    "deuteron-fuzzing",
    "xtask",
];

/// Has no tests of its own, but brings all features of all dependencies, so that nothing is compiled anew for another choice of packages.
const WHOLE: &str = "deuteron-python";

pub fn run() -> Result<()> {
    let outcome = all(&root()?);
    fetch::stop();
    outcome
}

fn all(root: &Path) -> Result<()> {
    let mut phases = Phases::default();
    let folder = root.to_path_buf();
    let mut onnx = Download::start("the onnx package with its node tests", move || fetch::onnx(&folder));
    let downloads = Downloads::start(root);
    let mut environments = python::Environments::start(root);
    phases.time("format", || cargo(&["fmt", "--all", "--check"], &[]))?;
    phases.time("onnx package", || onnx.wait());
    phases.time("first tests, with their build", || test(&FIRST, &[]))?;
    lint(&mut phases)?;
    // Here, where overflow of numbers is checked, and nothing is compiled once more for it.
    let fuzzing = phases.time("build of the fuzzer", || fuzz(&["--seconds", "3"]))?;
    let wheel = phases.time("wheel", || python::build(root, &mut environments));
    // Both end before either error is returned, so that no process is left running; the same below.
    let fuzzed = phases.time("rest of fuzzing", || ended(fuzzing));
    let wheel = wheel?;
    fuzzed?;
    let python = wheel.map(|wheel| Job::start(root.to_path_buf(), environments, wheel)).transpose()?;
    let tested = test_engines(root, downloads, &mut phases);
    phases.time("rest of the Python tests", || python.map_or(Ok(()), Job::wait))?;
    let environment = tested?;
    let nvrtc = environment.iter().map(|(_, folder)| PathBuf::from(folder)).next();
    phases.time("guide", || guide::check(root, nvrtc))?;
    println!("{phases}");
    test(&LAST, &environment)
}

/// Environment variables of the tests.
type Environment = Vec<(&'static str, String)>;

/// What tests of Rust need from the network.
struct Downloads {
    nvrtc: Download<PathBuf>,
    browser: Download<()>,
}

impl Downloads {
    fn start(root: &Path) -> Self {
        let root = root.to_path_buf();
        Self {
            nvrtc: Download::start("NVRTC", move || hardware::nvrtc(&root)),
            browser: Download::start("a browser for the tests of the report and the guide", fetch::browser),
        }
    }
}

fn lint(phases: &mut Phases) -> Result<()> {
    let clippy = ["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"];
    phases.time("clippy", || cargo(&clippy, &[]))?;
    let flags = ("RUSTDOCFLAGS", "-D warnings".to_string());
    phases.time("docs", || cargo(&["doc", "--workspace", "--no-deps", "--quiet"], &[flags]))?;
    phases.time("dependencies", check_dependencies)?;
    phases.time("other targets", check_other_target)
}

/// Builds all tests and runs those that are neither first nor last. Gives the environment that the last ones need too.
fn test_engines(root: &Path, mut downloads: Downloads, phases: &mut Phases) -> Result<Environment> {
    phases.time("build of all other tests", || cargo(&["test", "--workspace", "--no-run", "--quiet"], &[]))?;
    let nvrtc = phases.time("rest of the downloads", || {
        downloads.browser.wait();
        downloads.nvrtc.wait()
    });
    count_needs(root, nvrtc.is_some())?;
    let folder = nvrtc.map(|folder| ("DEUTERON_NVRTC_ENV", folder.to_string_lossy().into_owned()));
    let environment = Vec::from_iter(folder);
    let chosen = [&["test", "--workspace"][..], &excluded()].concat();
    phases.time("tests of the engines", || cargo(&chosen, &environment))?;
    Ok(environment)
}

/// All that are tested first or last.
fn excluded() -> Vec<&'static str> {
    FIRST.into_iter().chain(LAST).flat_map(|name| ["--exclude", name]).collect()
}

/// Tests of some packages.
fn test(packages: &[&str], environment: &[(&str, String)]) -> Result<()> {
    let chosen = packages.iter().copied().chain([WHOLE]).flat_map(|name| ["--package", name]);
    cargo(&["test"].into_iter().chain(chosen).collect::<Vec<_>>(), environment)
}

/// Says how many tests need what this machine may not have.
fn count_needs(root: &Path, has_nvrtc: bool) -> Result<()> {
    let needs = hardware::needs(root)?;
    for (what, count, is_here) in [("NVRTC", needs.nvrtc, has_nvrtc), ("a GPU", needs.gpu, hardware::has_gpu())] {
        let skipped = if is_here { 0 } else { count };
        let word = if is_here { "" } else { "warning: " };
        println!("{word}tests that need {what}: {count}, {skipped} skipped");
    }
    Ok(())
}

/// The Python tests, while cargo builds.
struct Job {
    thread: JoinHandle<(Log, Result<()>)>,
}

impl Job {
    fn start(root: PathBuf, mut environments: python::Environments, wheel: PathBuf) -> Result<Self> {
        let log = Log::new()?;
        let test = move || {
            let outcome = python::test(&root, &mut environments, &wheel, &log);
            (log, outcome)
        };
        Ok(Self { thread: std::thread::spawn(test) })
    }

    /// Waits for the end and shows what was printed.
    fn wait(self) -> Result<()> {
        let (log, outcome) = self.thread.join().map_err(|_| anyhow!("the thread of the Python tests panicked"))?;
        print!("{}", log.text());
        outcome
    }
}

/// Starts mutated files into every reader, planner and kernels. The program is built with the features of the whole workspace, so that what it shares with
/// tests is compiled once.
pub fn fuzz(words: &[&str]) -> Result<Child> {
    let built = bundle::executables(&root()?, &["build", "--package", "deuteron-fuzzing", "--bin", "deuteron-fuzz"])?;
    let (_, program) = built.into_iter().next().context("cargo built no deuteron-fuzz")?;
    println!("deuteron-fuzz {}", words.join(" "));
    Command::new(program).args(words).spawn().context("deuteron-fuzz could not be started")
}

pub fn ended(mut fuzzing: Child) -> Result<()> {
    ensure!(fuzzing.wait()?.success(), "deuteron-fuzz failed");
    Ok(())
}

/// Advisories, licences, versions and sources of dependencies, as `deny.toml` says. Where cargo-deny is not installed, say so and go on.
fn check_dependencies() -> Result<()> {
    let found = Command::new("cargo-deny").arg("--version").output();
    if !found.is_ok_and(|output| output.status.success()) {
        println!("warning: cargo-deny is not installed here: dependencies are not checked against deny.toml");
        return Ok(());
    }
    cargo(&["deny", "check"], &[])
}

/// aarch64 must at least compile. Where its standard library is not installed, say so and go on.
fn check_other_target() -> Result<()> {
    const TARGET: &str = "aarch64-unknown-linux-gnu";
    let listed = Command::new("rustup").args(["target", "list", "--installed"]).output();
    let installed = listed.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(TARGET));
    if !installed {
        println!("{TARGET} is not installed here: not checked");
        return Ok(());
    }
    cargo(&["check", "--workspace", "--quiet", "--target", TARGET], &[])
}

fn cargo(arguments: &[&str], environment: &[(&str, String)]) -> Result<()> {
    println!("cargo {}", arguments.join(" "));
    let mut command = Command::new(program());
    command.args(arguments).envs(environment.iter().cloned());
    succeed(building(&mut command), &format!("cargo {}", arguments.join(" ")))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use super::*;

    /// A file without a `mod` declaration is silently not compiled.
    #[test]
    fn every_file_of_tests_belongs_to_the_program_of_its_crate() {
        let crates = fs::read_dir(root().unwrap().join("crates")).unwrap();
        let folders: Vec<PathBuf> = crates.map(|entry| entry.unwrap().path().join("tests/all")).collect();
        let mut modules = 0;
        for folder in folders.into_iter().filter(|folder| folder.is_dir()) {
            let program = fs::read_to_string(folder.join("main.rs")).unwrap();
            for entry in fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.file_stem().unwrap().to_string_lossy().into_owned();
                let is_named = program.lines().any(|line| line == format!("mod {name};"));
                assert!(name == "main" || is_named, "{} is in no program", path.display());
                modules += 1;
            }
        }
        assert!(modules > 40, "{modules}");
    }

    /// With another feature of a dependency, all that stands on it is compiled once more: a minute or more of every run.
    #[test]
    fn every_choice_of_packages_has_the_same_features() {
        let features = |words: &[&str]| {
            let mut command = Command::new(program());
            command.args([
                "tree",
                "--offline",
                "--edges",
                "normal,build,dev",
                "--prefix",
                "none",
                "--format",
                "{p} [{f}]",
            ]);
            let output = command.args(words).current_dir(root().unwrap()).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let text = String::from_utf8(output.stdout).unwrap();
            text.lines().map(|line| line.trim_end_matches(" (*)").to_string()).collect::<BTreeSet<String>>()
        };
        let whole = features(&["--workspace"]);
        let chosen = |packages: &[&'static str]| {
            packages.iter().copied().chain([WHOLE]).flat_map(|name| ["--package", name]).collect::<Vec<_>>()
        };
        let engines = [&["--workspace"][..], &excluded()].concat();
        for words in [chosen(&FIRST), chosen(&LAST), chosen(&["deuteron-fuzzing"]), chosen(&[]), engines] {
            let other: Vec<String> = features(&words).difference(&whole).cloned().collect();
            assert_eq!(other, Vec::<String>::new(), "{words:?}");
        }
    }

    #[test]
    fn packages_are_tested_once() {
        let all: Vec<&str> = FIRST.into_iter().chain(LAST).collect();
        assert!(all.iter().all(|name| all.iter().filter(|other| *other == name).count() == 1 && *name != WHOLE));
    }
}
