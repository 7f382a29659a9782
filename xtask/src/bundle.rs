//! What a machine with a GPU and without Rust needs, in the folder `bundle/`: the command, the test programs that use a
//! GPU, and the scripts that run them (`bench/gpu.sh`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{building, files, printed, program, root, succeed};

/// Packages with tests in the program `all` that use a GPU; `bench/gpu.sh` chooses them by their modules.
const TESTS: [&str; 4] = ["deuteron-device", "deuteron", "deuteron-gpt2", "deuteron-train"];

/// Packages whose own unit tests use a GPU too.
const LIBRARIES: [&str; 1] = ["deuteron-device"];

/// Flags that the scripts pass to the command: an old command is found out here, and not where GPU time is spent.
const FLAGS: [(&str, &str); 3] = [
    ("bench", "--device --once --fastest --plan --ladder --crossover --backward --elements --overhead --json"),
    ("check", "--device --cases --catalog --small --repeat --red-zones --seed"),
    ("doctor", "--device --calibrate --validate"),
];

/// The folder travels to other machines, so it is kept small.
const LARGEST: u64 = 45 << 20;

const FOLDER: &str = "bundle";

/// Chosen beside every package: it brings all features of all dependencies, so that nothing is compiled anew for the next one.
const WHOLE: [&str; 2] = ["--package", "deuteron-python"];

pub fn run() -> Result<()> {
    let root = root()?;
    let folder = root.join(FOLDER);
    let programs = build(&root)?;
    if folder.exists() {
        fs::remove_dir_all(&folder).context("the old bundle cannot be removed")?;
    }
    for part in ["tests", "bench"] {
        fs::create_dir_all(folder.join(part))?;
    }
    for program in &programs {
        let place = folder.join(&program.place);
        succeed(Command::new("strip").arg("-o").arg(&place).arg(&program.built), "`strip` of binutils")?;
        note_paths(&root, &place)?;
    }
    check_flags(&folder.join("deuteron"))?;
    for program in &programs {
        // Programs are most of the bundle, and shrink to a half or less; `bench/gpu.sh` unpacks them.
        succeed(Command::new("gzip").arg("-9").arg(folder.join(&program.place)), "`gzip`")?;
    }
    copy_scripts(&root.join("bench"), &folder.join("bench"))?;
    python(&root, &folder)?;
    fs::write(folder.join("commit"), commit(&root)?)?;
    check_size(&folder)
}

/// A program that was built, and where it belongs in the bundle.
struct Program {
    built: PathBuf,
    place: String,
}

fn build(root: &Path) -> Result<Vec<Program>> {
    let command = executables(root, &["build", "--release", "--package", "deuteron-cli", "--bin", "deuteron"])?;
    let mut programs: Vec<Program> = command.into_iter().map(|(name, built)| Program { built, place: name }).collect();
    for package in TESTS {
        // Where a test starts the command, cargo builds that too; it is in the bundle already.
        let tests = executables(root, &["test", "--release", "--no-run", "--package", package, "--test", "all"])?;
        let own = tests.into_iter().filter(|(name, _)| name == "all");
        programs.extend(own.map(|(name, built)| Program { built, place: format!("tests/{package}-{name}") }));
    }
    for package in LIBRARIES {
        let tests = executables(root, &["test", "--release", "--no-run", "--package", package, "--lib"])?;
        let own = tests.into_iter().filter(|(name, _)| *name == package.replace('-', "_"));
        programs.extend(own.map(|(_, built)| Program { built, place: format!("tests/{package}-lib") }));
    }
    Ok(programs)
}

/// Runs cargo and returns the executables it made or found up to date: name and path.
pub fn executables(root: &Path, words: &[&str]) -> Result<Vec<(String, PathBuf)>> {
    println!("cargo {}", words.join(" "));
    let mut command = Command::new(program());
    command.args(words).args(WHOLE).args(["--quiet", "--message-format", "json-render-diagnostics"]).current_dir(root);
    let output = building(&mut command).stderr(Stdio::inherit()).output().context("cargo could not be started")?;
    ensure!(output.status.success(), "cargo {} failed", words.join(" "));
    let text = String::from_utf8(output.stdout).context("cargo's messages are not UTF-8")?;
    let messages =
        text.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>().context("cargo's messages")?;
    let made = |message: &Value| {
        let path = message["executable"].as_str()?;
        Some((message["target"]["name"].as_str()?.to_string(), PathBuf::from(path)))
    };
    Ok(messages.iter().filter_map(made).collect())
}

/// The wheel and the tests of the Python package.
fn python(root: &Path, folder: &Path) -> Result<()> {
    let python = match crate::python::plain(root) {
        Ok(python) => python,
        Err(error) => {
            println!("warning: the Python package is not in the bundle: {error:#}");
            return Ok(());
        }
    };
    let wheel = crate::python::wheel(root, &python, "release")?;
    fs::create_dir_all(folder.join("python").join("tests"))?;
    fs::copy(&wheel, folder.join("python").join(wheel.file_name().context("a wheel without a name")?))?;
    fs::copy(root.join("python/pyproject.toml"), folder.join("python/pyproject.toml"))?;
    let site = folder.join("python/site");
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "pytest", "--target"];
    succeed(Command::new(&python).args(pip).arg(&site), "installing pytest for the bundle")?;
    succeed(Command::new("tar").args(["-czf", "site.tar.gz", "site"]).current_dir(folder.join("python")), "`tar`")?;
    fs::remove_dir_all(&site).context("what was packed cannot be removed")?;
    copy_scripts(&root.join("python/tests"), &folder.join("python/tests"))
}

/// Says which programs know a path of the source tree: there is none where the bundle goes, so they must do without.
fn note_paths(root: &Path, program: &Path) -> Result<()> {
    let needle = format!("{}/crates/", root.display());
    let bytes = fs::read(program)?;
    if bytes.windows(needle.len()).any(|window| window == needle.as_bytes()) {
        println!("{} knows a path of the source tree, which it must not need", program.display());
    }
    Ok(())
}

fn copy_scripts(from: &Path, to: &Path) -> Result<()> {
    for path in files::entries(from)?.iter().filter(|path| files::has_extension(path, &["py", "sh"])) {
        fs::copy(path, to.join(path.file_name().unwrap_or_default()))?;
    }
    Ok(())
}

/// The commit, and whether the tree differs from it.
fn commit(root: &Path) -> Result<String> {
    let git = |words: &[&str]| printed(Command::new("git").args(words).current_dir(root));
    let head = git(&["rev-parse", "--short", "HEAD"])?;
    let changed = !git(&["status", "--porcelain"])?.is_empty();
    Ok(format!("{head}{}\n", if changed { "+" } else { "" }))
}

fn check_flags(command: &Path) -> Result<()> {
    let mut missing = Vec::new();
    for (name, flags) in FLAGS {
        let help = Command::new(command).args([name, "--help"]).output().context("the command does not start")?;
        let text = String::from_utf8_lossy(&help.stdout).into_owned();
        let known = |flag: &str| text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').any(|word| word == flag);
        missing.extend(flags.split(' ').filter(|flag| !known(flag)).map(|flag| format!("`{name} {flag}`")));
    }
    if missing.is_empty() { Ok(()) } else { bail!("bench/gpu.sh needs {}", missing.join(", ")) }
}

fn check_size(folder: &Path) -> Result<()> {
    let mut total = 0;
    for path in files::below(folder)? {
        let size = fs::metadata(&path)?.len();
        println!("{:>8.2} MiB  {}", mebibytes(size), path.strip_prefix(folder)?.display());
        total += size;
    }
    println!("{:>8.2} MiB  in {FOLDER}/, at most {:.0}", mebibytes(total), mebibytes(LARGEST));
    ensure!(total <= LARGEST, "the bundle is too large");
    Ok(())
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
