//! Tests of what is `unsafe`, under sanitizers and under Miri. Where the toolchain cannot, that part of the drill is skipped.
//!
//! The runtimes of the sanitizers ship with `rustc`; the flag that links them is unstable, hence `RUSTC_BOOTSTRAP`. The standard library
//! is not instrumented. To the address sanitizer that makes no difference for code of ours. The thread sanitizer does not see all that
//! the standard library waits for: `xtask/sanitizers/thread.txt` lists what it reports for that.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Result;

use crate::drill::{Outcome, counted};
use crate::{printed, program};

/// Instrumented code and what runs on the host while it is compiled are kept apart by naming the target.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Kernels and what runs them: tests of all that holds `unsafe` on a CPU.
const TESTS: [&[&str]; 5] = [
    &["--package", "deuteron-codegen", "--lib"],
    &["--package", "deuteron-matmul", "--lib"],
    &["--package", "deuteron-attention", "--lib"],
    &["--package", "deuteron-kernels", "--lib"],
    &["--package", "deuteron-device", "--test", "all", "cpu::"],
];

/// Runs the tests under a sanitizer: `address` or `thread`.
pub fn run(root: &Path, sanitizer: &str) -> Result<Outcome> {
    let ask = |what: &str| printed(Command::new("rustc").current_dir(root).args(["--print", what]));
    let runtime = format!("_rt.{}san.a", &sanitizer[..1]);
    let libraries = fs::read_dir(ask("target-libdir")?).into_iter().flatten().flatten();
    let mut names = libraries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    if ask("host-tuple")? != TARGET || !names.any(|name| name.ends_with(&runtime)) {
        return Ok(Outcome::Skipped(format!("the toolchain has no runtime of the {sanitizer} sanitizer for {TARGET}")));
    }
    let (mut count, mut failures) = (0, 0);
    for words in TESTS {
        let mut command = Command::new(program());
        command.current_dir(root).arg("test").args(words).args(["--target", TARGET, "--target-dir"]);
        command.arg(root.join("target").join(format!("{sanitizer}-sanitizer"))).env("RUSTC_BOOTSTRAP", "1");
        command.env(
            "RUSTFLAGS",
            format!("-Zsanitizer={sanitizer} -Cunsafe-allow-abi-mismatch=sanitizer -Cdebuginfo=line-tables-only"),
        );
        // What is alive at the end, the pool's threads among it, is no leak.
        command.env("ASAN_OPTIONS", "detect_leaks=0");
        command.env("TSAN_OPTIONS", format!("suppressions={}", root.join("xtask/sanitizers/thread.txt").display()));
        if let Outcome::Ran { count: more, failures: failed, .. } = counted(&mut command)? {
            (count, failures) = (count + more, failures + failed);
        }
    }
    Ok(Outcome::Ran { count, failures, note: format!("tests under the {sanitizer} sanitizer") })
}

/// Runs what Miri can run: it has no vector instructions beyond the first, no drivers, and takes a thousand times as long.
pub fn miri(root: &Path) -> Result<Outcome> {
    let has = Command::new("cargo").args(["+nightly", "miri", "--version"]).stderr(Stdio::null()).output();
    if !has.is_ok_and(|output| output.status.success()) {
        let how = "`rustup toolchain install nightly --component miri`";
        return Ok(Outcome::Skipped(format!("there is no nightly toolchain with Miri ({how})")));
    }
    let mut command = Command::new("cargo");
    command.current_dir(root).args(["+nightly", "miri", "test", "--package", "deuteron-device", "--lib", "workspace"]);
    counted(command.env("MIRIFLAGS", "-Zmiri-disable-isolation"))
}
