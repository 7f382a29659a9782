//! Wheels for release: manylinux on x86-64 and on aarch64, built on either by the C compiler and linker of Zig, and checked for what
//! they say that they are.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::{building, fetch, printed, python, root, succeed};

/// The systems that wheels are for: what Rust calls it, what the file's tag ends with, and the machine in the header of its library.
const TARGETS: [Target; 2] = [
    Target { triple: "x86_64-unknown-linux-gnu", tag: "x86_64", machine: 62 },
    Target { triple: "aarch64-unknown-linux-gnu", tag: "aarch64", machine: 183 },
];

/// What every library of these wheels may need at most: glibc 2.17, which is the least that Rust needs itself.
const POLICY: &str = "manylinux_2_17";

/// Zig as a Python package, and the version of it that the wheels were built with.
const ZIG: &str = "ziglang==0.17.0";

/// The library inside of a wheel.
const LIBRARY: &str = "deuteron/_native.abi3.so";

struct Target {
    triple: &'static str,
    tag: &'static str,
    machine: u16,
}

/// Builds both, into `target/wheels/release`.
pub fn run() -> Result<()> {
    let root = root()?;
    let python = python::plain(&root).context("an environment with maturin")?;
    fetch::pip(&python, &[ZIG], None, fetch::SHORT).context("Zig, which links for both systems")?;
    let folder = root.join("target").join("wheels").join("release");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let start = Instant::now();
    for (index, target) in TARGETS.iter().enumerate() {
        println!("[{}/{}] {}: {POLICY}", index + 1, TARGETS.len(), target.triple);
        let one = Instant::now();
        let wheel = target.build(&root, &python, &folder)?;
        python::check_size(&wheel)?;
        println!("[{}/{}] {}: {:.0} s", index + 1, TARGETS.len(), target.triple, one.elapsed().as_secs_f64());
    }
    println!("{} wheels in {}, {:.0} s", TARGETS.len(), folder.display(), start.elapsed().as_secs_f64());
    Ok(())
}

impl Target {
    fn build(&self, root: &Path, python: &Path, folder: &Path) -> Result<PathBuf> {
        self.install()?;
        let mut maturin = Command::new(python);
        maturin.args(["-m", "maturin", "build", "--profile", "release", "--target", self.triple, "--zig"]);
        maturin.args(["--compatibility", POLICY, "--out"]).arg(folder);
        // Maturin asks the `python3` of the path for Zig.
        maturin.env("PATH", path_with(python)?);
        // One line that says how many crates are done, in a log as well as on a terminal.
        maturin.env("CARGO_TERM_PROGRESS_WHEN", "always").env("CARGO_TERM_PROGRESS_WIDTH", "80");
        succeed(building(maturin.current_dir(root.join("python"))), "maturin build")?;
        let built = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>>>()?;
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let wheel = built.into_iter().find(|path| self.is_named(&name(path)));
        let wheel = wheel.with_context(|| format!("maturin built no wheel with the tag {POLICY}_{}", self.tag))?;
        let found = machine(&header(python, &wheel)?)?;
        ensure!(
            found == self.machine,
            "{}: expected a library of ELF machine {}, got {found}",
            wheel.display(),
            self.machine
        );
        Ok(wheel)
    }

    /// The standard library of Rust for it.
    fn install(&self) -> Result<()> {
        let installed = printed(Command::new("rustup").args(["target", "list", "--installed"]));
        if installed.is_ok_and(|list| list.lines().any(|line| line == self.triple)) {
            return Ok(());
        }
        succeed(Command::new("rustup").args(["target", "add", self.triple]), "rustup target add")
    }

    /// Whether a file is a wheel for it, of every Python from 3.9 on.
    fn is_named(&self, name: &str) -> bool {
        let tags = name.strip_suffix(".whl").and_then(|name| name.split_once("-cp39-abi3-"));
        tags.is_some_and(|(_, platform)| platform.split('.').any(|tag| tag == format!("{POLICY}_{}", self.tag)))
    }
}

/// The path of commands, with those of an interpreter first.
fn path_with(python: &Path) -> Result<OsString> {
    let own = python.parent().map(Path::to_path_buf);
    let path = std::env::var_os("PATH").unwrap_or_default();
    Ok(std::env::join_paths(own.into_iter().chain(std::env::split_paths(&path)))?)
}

/// The first bytes of the library in a wheel, in hexadecimal digits. A wheel is a zip file, which Python reads.
fn header(python: &Path, wheel: &Path) -> Result<Vec<u8>> {
    let code = "import sys, zipfile; print(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2])[:20].hex())";
    let digits = printed(Command::new(python).args(["-c", code]).arg(wheel).arg(LIBRARY))?;
    let byte = |at: usize| digits.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
    let bytes: Option<Vec<u8>> = (0..digits.len()).step_by(2).map(byte).collect();
    bytes.filter(|bytes| !bytes.is_empty()).with_context(|| format!("{} holds no {LIBRARY}", wheel.display()))
}

/// The machine that a little-endian ELF file of 64 bits is for.
fn machine(header: &[u8]) -> Result<u16> {
    match header {
        [0x7F, b'E', b'L', b'F', 2, 1, rest @ ..] if rest.len() >= 14 => Ok(u16::from_le_bytes([rest[12], rest[13]])),
        _ => bail!("expected an ELF file of 64 bits, got one that begins with {header:x?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_is_known_by_its_tags() {
        let name = |tags: &str| format!("deuteron-0.1.0-{tags}.whl");
        let both = "cp39-abi3-manylinux_2_17_aarch64.manylinux2014_aarch64";
        let [x86, arm] = &TARGETS;
        assert!(arm.is_named(&name(both)) && !x86.is_named(&name(both)));
        assert!(x86.is_named(&name("cp39-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64")));
        for wrong in ["cp39-abi3-linux_x86_64", "cp311-cp311-manylinux_2_17_x86_64", "cp39-abi3-manylinux_2_34_x86_64"]
        {
            assert!(!x86.is_named(&name(wrong)), "{wrong}");
        }
    }

    #[test]
    fn the_machine_is_read_from_the_header() {
        let header = |class: u8, machine: u16| {
            let mut bytes = vec![0x7F, b'E', b'L', b'F', class, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0];
            bytes.extend(machine.to_le_bytes());
            bytes
        };
        assert_eq!(machine(&header(2, 183)).unwrap(), 183);
        assert_eq!(machine(&header(2, 62)).unwrap(), 62);
        assert!(machine(&header(1, 62)).is_err() && machine(&[]).is_err() && machine(b"PK\x03\x04").is_err());
    }
}
