//! What comes over the network: Python packages and a browser. Each is fetched by a thread of its own while cargo works, within a
//! time limit. A download that fails or hangs costs the tests that need it, with a warning, and never the whole command.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use crate::log::Log;

/// For a few small packages.
pub const SHORT: Duration = Duration::from_secs(180);

/// For PyTorch with the libraries it brings, some gigabytes, while both cores compile.
pub const LONG: Duration = Duration::from_secs(900);

/// Set when downloads are no longer needed.
static STOPPED: AtomicBool = AtomicBool::new(false);

/// Commands that run now.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// How often a download is looked at.
const POLL: Duration = Duration::from_millis(100);

/// A download in the background, and then what became of it.
pub struct Download<T> {
    name: &'static str,
    thread: Option<JoinHandle<Result<T>>>,
    fetched: Option<T>,
}

impl<T: Clone + Send + 'static> Download<T> {
    pub fn start(name: &'static str, fetch: impl FnOnce() -> Result<T> + Send + 'static) -> Self {
        Self { name, thread: Some(std::thread::spawn(fetch)), fetched: None }
    }

    /// Waits for the end of the download. None where it failed, and a warning at the first time.
    pub fn wait(&mut self) -> Option<T> {
        if let Some(thread) = self.thread.take() {
            let outcome = thread.join().unwrap_or_else(|_| Err(anyhow!("the thread that fetches it panicked")));
            let warn = |error: &anyhow::Error| println!("warning: {} is not available: {error:#}", self.name);
            self.fetched = outcome.inspect_err(warn).ok();
        }
        self.fetched.clone()
    }
}

/// `pip install` with an interpreter, in the versions that a file of constraints names. Packages that are there already need no network.
pub fn pip(python: &Path, packages: &[&str], constraints: Option<&Path>, limit: Duration) -> Result<()> {
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--prefer-binary"]);
    // PyTorch has thousands of modules, of which few are imported: Python compiles those when it does.
    pip.args(["--no-compile", "--retries", "2", "--timeout", "20"]).args(packages);
    pip.args(constraints.into_iter().flat_map(|file| [OsStr::new("--constraint"), file.as_os_str()]));
    within(&mut pip, limit)
}

/// The source archive of a Python package in one version, without what it depends on.
pub fn source(package: &str, folder: &Path) -> Result<()> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]);
    pip.args(["--no-binary", ":all:", "--retries", "2", "--timeout", "20", "--dest"]).arg(folder).arg(package);
    within(&mut pip, SHORT)
}

/// A Python environment, made if it is not there yet.
pub fn environment(folder: &Path, options: &[&str]) -> Result<()> {
    if folder.join("bin/python").exists() {
        return Ok(());
    }
    within(Command::new("python3").args(["-m", "venv"]).args(options).arg(folder), SHORT)
}

/// The version of the `onnx` package whose node tests are run. Later ones come without the data.
const ONNX: &str = "onnx==1.22.0";

/// The `onnx` package below `target/onnx`, without what it depends on: only the data of its node tests are read.
pub fn onnx(root: &Path) -> Result<()> {
    let folder = root.join("target").join("onnx");
    if folder.join("onnx/backend/test/data/node").is_dir() {
        return Ok(());
    }
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--no-deps",
        "--no-compile",
    ]);
    within(pip.args(["--retries", "2", "--timeout", "20", "--target"]).arg(&folder).arg(ONNX), SHORT)
}

/// Chromium, which tests open the report page and the guide in, from the packages of the system where this user may install them.
pub fn browser() -> Result<()> {
    if has_program("chromium") {
        return Ok(());
    }
    if !has_program("apt-get") || !is_root() {
        bail!("only root may install it, by apt-get");
    }
    println!("installing chromium by apt-get");
    let apt = |words: &[&str], limit: Duration| {
        let mut apt = Command::new("apt-get");
        apt.args(["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::https::Timeout=20"]);
        within(apt.args(words).env("DEBIAN_FRONTEND", "noninteractive"), limit)
    };
    let install = ["install", "-y", "--no-install-recommends", "chromium"];
    apt(&["update"], SHORT)?;
    apt(&[&install[..], &["--download-only"]].concat(), SHORT)?;
    // Nothing comes over the network any more, and stopped half-way this would leave packages broken, so it is never stopped.
    let log = Log::new()?;
    log.run(Command::new("apt-get").args(install).env("DEBIAN_FRONTEND", "noninteractive"), "apt-get install")
}

fn has_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
}

fn is_root() -> bool {
    let user = Command::new("id").arg("-u").output();
    user.is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// Ends the commands that still run.
pub fn stop() {
    STOPPED.store(true, Ordering::SeqCst);
    while RUNNING.load(Ordering::SeqCst) > 0 {
        std::thread::sleep(POLL);
    }
}

/// Runs a command and ends it when its time is up. The last line that it prints tells why it failed.
fn within(command: &mut Command, limit: Duration) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let log = Log::new()?;
    command.stdin(Stdio::null()).stdout(log.end()?).stderr(log.end()?);
    RUNNING.fetch_add(1, Ordering::SeqCst);
    let outcome = command.spawn().map_err(anyhow::Error::from).and_then(|child| ended(child, limit));
    RUNNING.fetch_sub(1, Ordering::SeqCst);
    if outcome.with_context(|| format!("`{name}`"))? {
        return Ok(());
    }
    bail!("{}", log.last_line().unwrap_or(format!("`{name}` failed")))
}

/// Whether a process succeeded within its time.
fn ended(mut child: Child, limit: Duration) -> Result<bool> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if start.elapsed() > limit || STOPPED.load(Ordering::SeqCst) {
            child.kill()?;
            child.wait()?;
            bail!("took longer than {} s", limit.as_secs());
        }
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(text: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", text]);
        shell
    }

    #[test]
    fn a_command_that_hangs_is_ended() {
        let start = Instant::now();
        let outcome = within(&mut shell("sleep 60"), Duration::from_millis(300));
        assert!(format!("{:#}", outcome.unwrap_err()).contains("took longer"));
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_command_that_fails_says_why() {
        let outcome = within(&mut shell("echo first; echo no network >&2; exit 1"), SHORT);
        assert_eq!(outcome.unwrap_err().to_string(), "no network");
        within(&mut shell("exit 0"), SHORT).unwrap();
    }

    #[test]
    fn a_download_that_fails_is_none() {
        assert_eq!(Download::<()>::start("nothing", || bail!("no network")).wait(), None);
        assert_eq!(Download::start("something", || Ok(3)).wait(), Some(3));
    }
}
