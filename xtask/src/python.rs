//! The Python package: its wheel is built, installed into an environment, and its tests are run there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// What the tests need at least. Tests of torch and transformers run where those are installed.
const NEEDED: [&str; 4] = ["maturin>=1.9,<2", "numpy", "pytest", "mypy"];

/// A wheel must not be larger.
const LARGEST: u64 = 15 << 20;

/// An interpreter of another environment to use, with torch and transformers, say.
const VARIABLE: &str = "DEUTERON_PYTHON";

/// Builds and installs the package, and gives the interpreter that has it. Without an environment and without a network it says
/// what will be left out.
pub fn install(root: &Path) -> Result<Option<PathBuf>> {
    let Some(python) = environment(root)? else { return Ok(None) };
    let wheel = wheel(root, &python, "dev")?;
    let install = ["-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall"];
    run(Command::new(&python).args(install).arg(&wheel), "pip install")?;
    Ok(Some(python))
}

/// Tests the package that an interpreter has.
pub fn test(root: &Path, python: &Path) -> Result<()> {
    let has = |module: &str| {
        let status = Command::new(python).args(["-c", &format!("import {module}")]).output();
        status.is_ok_and(|output| output.status.success())
    };
    for module in ["torch", "transformers"].into_iter().filter(|module| !has(module)) {
        println!(
            "PYTHON TESTS OF {module} ARE LEFT OUT: it is not installed; name an interpreter that has it in {VARIABLE}"
        );
    }
    println!("mypy and pytest of python/");
    run(Command::new(python).args(["-m", "mypy"]).current_dir(root.join("python")), "mypy")?;
    // From a folder that does not hold the package, so that the installed one is tested.
    let tests = root.join("python").join("tests");
    let config = root.join("python").join("pyproject.toml");
    let mut pytest = Command::new(python);
    pytest.args(["-m", "pytest", "-p", "no:cacheprovider", "-c"]).arg(config).arg("--rootdir").arg(&tests).arg(&tests);
    run(pytest.current_dir(root.join("target")), "pytest")
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
    run(maturin.current_dir(root.join("python")), "maturin build")?;
    let built = fs::read_dir(&folder)?.next().context("maturin built no wheel")??.path();
    let bytes = fs::metadata(&built)?.len();
    println!("{} has {:.1} MB", built.file_name().unwrap_or_default().to_string_lossy(), bytes as f64 / 1e6);
    if bytes > LARGEST {
        bail!("the wheel is too large: at most {} MB", LARGEST >> 20);
    }
    Ok(built)
}

/// The interpreter to use: the one that is named, or one of an environment below `target/`. None where neither is to be had.
pub fn environment(root: &Path) -> Result<Option<PathBuf>> {
    let named = std::env::var_os(VARIABLE).map(PathBuf::from);
    let python = match &named {
        Some(python) => python.clone(),
        None => {
            let folder = root.join("target").join("python");
            let python = folder.join("bin").join("python");
            let made = python.exists()
                || Command::new("python3")
                    .args(["-m", "venv", "--system-site-packages"])
                    .arg(&folder)
                    .status()
                    .is_ok_and(|status| status.success());
            if !made {
                println!("PYTHON TESTS ARE LEFT OUT: `python3 -m venv` failed");
                return Ok(None);
            }
            python
        }
    };
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    let installed = Command::new(&python).args(install).args(NEEDED).status().context("Python could not be started")?;
    match (installed.success(), named.is_some()) {
        (true, _) => Ok(Some(python)),
        (false, true) => bail!("pip could not install {} into the environment of {VARIABLE}", NEEDED.join(", ")),
        (false, false) => {
            println!("PYTHON TESTS ARE LEFT OUT: pip could not install {}", NEEDED.join(", "));
            Ok(None)
        }
    }
}

fn run(command: &mut Command, what: &str) -> Result<()> {
    let status = command.status().with_context(|| format!("{what} could not be started"))?;
    if !status.success() {
        bail!("{what} failed");
    }
    Ok(())
}
