//! The Python package: its wheel is built, installed into environments, and tested there in two passes: one without PyTorch, which the
//! package must do without, and one with PyTorch and transformers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::fetch::{self, Download};
use crate::log::Log;
use crate::{building, files, succeed};

/// What building and testing the package needs.
const NEEDED: [&str; 4] = ["maturin>=1.9,<2", "numpy", "pytest", "mypy"];

/// The second type checker, with the Node that it runs on. Types are checked in the pass without PyTorch: a test is skipped where it is not.
const CHECKER: &str = "basedpyright";

/// What the second pass needs beside it.
const PEERS: [&str; 2] = ["torch", "transformers"];

/// What some of its tests need; they are skipped where an interpreter that is named lacks it.
const EXTRAS: [&str; 1] = ["peft"];

/// Versions of these, and of all that they bring.
const CONSTRAINTS: &str = "python/constraints.txt";

/// A wheel must not be larger.
const LARGEST: u64 = 15 << 20;

/// Names the interpreter for the pass with PyTorch; otherwise PyTorch is installed below `target/`.
const VARIABLE: &str = "DEUTERON_PYTHON";

/// Tests that call neither PyTorch nor anything that depends on it: after the pass without PyTorch they are not run again.
const ONCE: [&str; 6] = [
    "test_types.py",
    "test_fuzz.py",
    "test_indices.py",
    "test_settings.py",
    "test_functions.py::test_values_are_those_of_the_formula",
    "test_functions.py::test_misuse_is_told",
];

/// The environments of both passes.
pub struct Environments {
    plain: Download<PathBuf>,
    peers: Download<PathBuf>,
}

impl Environments {
    /// Starts to fetch them.
    pub fn start(root: &Path) -> Self {
        let (one, other) = (root.to_path_buf(), root.to_path_buf());
        Self {
            plain: Download::start("Python with numpy, pytest, maturin and type checkers", move || plain(&one)),
            peers: Download::start("Python with PyTorch and transformers", move || with_peers(&other)),
        }
    }
}

/// The environment without PyTorch, unless `python3` itself has it: packages of the system are seen, as they need no network.
pub fn plain(root: &Path) -> Result<PathBuf> {
    let folder = root.join("target").join("python");
    fetch::environment(&folder, &["--system-site-packages"])?;
    let python = folder.join("bin").join("python");
    let constraints = root.join(CONSTRAINTS);
    fetch::pip(&python, &NEEDED, Some(&constraints), fetch::SHORT)?;
    // Apart: where its Node cannot be had, everything else is still tested.
    if let Err(error) = fetch::pip(&python, &[CHECKER], Some(&constraints), fetch::SHORT) {
        println!("warning: {CHECKER} cannot be installed, its test is skipped: {error}");
    }
    Ok(python)
}

fn with_peers(root: &Path) -> Result<PathBuf> {
    if let Some(python) = std::env::var_os(VARIABLE).map(PathBuf::from) {
        if !NEEDED.iter().all(|name| has(&python, module(name))) {
            let found = fetch::pip(&python, &NEEDED, None, fetch::SHORT);
            found.with_context(|| format!("the interpreter of {VARIABLE}"))?;
        }
        let missing: Vec<&str> = PEERS.into_iter().filter(|name| !has(&python, name)).collect();
        ensure!(missing.is_empty(), "the interpreter of {VARIABLE} has no {}", missing.join(" and no "));
        return Ok(python);
    }
    let folder = root.join("target").join("python-torch");
    fetch::environment(&folder, &["--system-site-packages"])?;
    let python = folder.join("bin").join("python");
    let packages = [&NEEDED[..], &PEERS, &EXTRAS].concat();
    fetch::pip(&python, &packages, Some(&root.join(CONSTRAINTS)), fetch::LONG)?;
    Ok(python)
}

/// The name that a requirement is imported by.
fn module(requirement: &str) -> &str {
    requirement.split(['>', '<', '=']).next().unwrap_or(requirement)
}

fn has(python: &Path, module: &str) -> bool {
    let code = format!("import importlib.util, sys; sys.exit(importlib.util.find_spec('{module}') is None)");
    let status = Command::new(python).args(["-c", &code]).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Builds the wheel that is tested. None where that is not possible, and a warning with the number of tests that are skipped.
pub fn build(root: &Path, environments: &mut Environments) -> Result<Option<PathBuf>> {
    let skipped = |why: &str| -> Result<Option<PathBuf>> {
        println!("warning: {why}: {} Python tests and the type check are skipped", count(root)?);
        Ok(None)
    };
    let Some(python) = environments.plain.wait().or_else(|| environments.peers.wait()) else {
        return skipped("no environment can build the Python package");
    };
    // Maturin asks cargo for the packages of all systems, of which a build for this one fetches only some.
    let mut metadata = Command::new(crate::program());
    if !metadata.args(["metadata", "--format-version", "1"]).current_dir(root).output()?.status.success() {
        return skipped("maturin needs all packages of Cargo.lock (`cargo fetch`)");
    }
    wheel(root, &python, "dev").map(Some)
}

/// Installs the wheel and tests it in both environments.
pub fn test(root: &Path, environments: &mut Environments, wheel: &Path, log: &Log) -> Result<()> {
    let plain = environments.plain.wait().filter(|python| !has(python, "torch"));
    match &plain {
        Some(python) => {
            let files = without_torch(root)?;
            log.line("Python without PyTorch: mypy and pytest; tests that need PyTorch follow in a second pass")?;
            install(python, wheel, log)?;
            mypy(root, python, &files, log)?;
            pytest(root, python, &[], log)?;
        }
        None => log.line("warning: no Python here is without PyTorch: that pass is skipped")?,
    }
    let Some(python) = environments.peers.wait() else {
        let modules = modules(root)?.len() - without_torch(root)?.len();
        return log.line(&format!(
            "warning: there is no second pass: the tests counted above and the type check of {modules} modules are skipped"
        ));
    };
    log.line("Python with PyTorch and transformers: mypy and pytest")?;
    install(&python, wheel, log)?;
    mypy(root, &python, &[], log)?;
    let once = if plain.is_some() { &ONCE[..] } else { &[] };
    let deselected: Vec<String> = once.iter().map(|name| format!("--deselect={name}")).collect();
    pytest(root, &python, &deselected, log)
}

fn install(python: &Path, wheel: &Path, log: &Log) -> Result<()> {
    let words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"];
    log.run(Command::new(python).args(words).arg("--force-reinstall").arg(wheel), "pip install")
}

/// Checks the types of these files, or of the whole package if none is named.
fn mypy(root: &Path, python: &Path, files: &[PathBuf], log: &Log) -> Result<()> {
    log.run(Command::new(python).args(["-m", "mypy"]).args(files).current_dir(root.join("python")), "mypy")
}

/// From a folder that does not hold the package, so that the installed one is tested.
fn pytest(root: &Path, python: &Path, options: &[String], log: &Log) -> Result<()> {
    let tests = root.join("python").join("tests");
    let config = root.join("python").join("pyproject.toml");
    let mut pytest = Command::new(python);
    pytest.args(["-m", "pytest", "-p", "no:cacheprovider", "-c"]).arg(config).arg("--rootdir").arg(&tests);
    // Some tests start processes that import PyTorch and transformers. pip installed these without bytecode, so bytecode is cached below `target/`,
    // also where the environment forbids it: otherwise each process compiles every module again.
    pytest.env_remove("PYTHONDONTWRITEBYTECODE").env("PYTHONPYCACHEPREFIX", root.join("target").join("pycache"));
    log.run(pytest.args(options).arg(&tests).current_dir(root.join("target")), "pytest")
}

/// The modules of the package.
fn modules(root: &Path) -> Result<Vec<PathBuf>> {
    let package = files::below(&root.join("python").join("deuteron"))?;
    Ok(package.into_iter().filter(|path| files::has_extension(path, &["py", "pyi"])).collect())
}

/// Those that do not import PyTorch: their types can be checked without its types.
fn without_torch(root: &Path) -> Result<Vec<PathBuf>> {
    let is_import = |line: &str| {
        let mut words = line.split([' ', '.']).filter(|word| !word.is_empty());
        matches!(words.next(), Some("import" | "from")) && words.next().is_some_and(|name| PEERS.contains(&name))
    };
    let mut found = Vec::new();
    for path in modules(root)? {
        if !fs::read_to_string(&path)?.lines().any(is_import) {
            found.push(path);
        }
    }
    Ok(found)
}

/// How many functions of the tests are tests; each may run with several parameters.
fn count(root: &Path) -> Result<usize> {
    let mut found = 0;
    let tests = files::entries(&root.join("python").join("tests"))?;
    for path in tests.iter().filter(|path| files::has_extension(path, &["py"])) {
        found += fs::read_to_string(path)?.lines().filter(|line| line.starts_with("def test_")).count();
    }
    Ok(found)
}

/// The wheel, built with a profile of cargo.
pub fn wheel(root: &Path, python: &Path, profile: &str) -> Result<PathBuf> {
    let folder = root.join("target").join("wheels").join(profile);
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    println!("maturin build --profile {profile}");
    let mut maturin = Command::new(python);
    maturin.args(["-m", "maturin", "build", "--quiet", "--profile", profile, "--out"]).arg(&folder);
    succeed(building(maturin.current_dir(root.join("python"))), "maturin build")?;
    let built = fs::read_dir(&folder)?.next().context("maturin built no wheel")??.path();
    check_size(&built)?;
    Ok(built)
}

/// Says how large a wheel is, which is an error if it is too large.
pub fn check_size(wheel: &Path) -> Result<()> {
    let bytes = fs::metadata(wheel)?.len();
    println!("{} has {:.1} MB", wheel.file_name().unwrap_or_default().to_string_lossy(), bytes as f64 / 1e6);
    ensure!(bytes <= LARGEST, "the wheel is too large: at most {} MB", LARGEST >> 20);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_has_one_version() {
        let text = fs::read_to_string(crate::root().unwrap().join(CONSTRAINTS)).unwrap();
        let lines = || text.lines().filter(|line| !line.starts_with('#'));
        let version = |line: &str| {
            let version = line.split_once("==").and_then(|(_, version)| version.split(' ').next());
            version.is_some_and(|version| version.starts_with(|first: char| first.is_ascii_digit()))
        };
        assert!(lines().all(version), "{text}");
        for name in NEEDED.iter().chain(&PEERS).chain(&EXTRAS).chain([&CHECKER]).map(|requirement| module(requirement))
        {
            let pins = lines().filter(|line| line.starts_with(&format!("{name}=="))).count();
            assert_eq!(pins, 1, "{name}");
        }
    }
}
