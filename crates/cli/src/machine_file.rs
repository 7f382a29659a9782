//! The machine files that `deuteron doctor --calibrate` and `deuteron fuse` leave for this user, and every command reads: one
//! for the CPU, one for each kind of GPU.

use std::fmt;
use std::fs::{DirBuilder, File};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use deuteron::{Machine, MachineError};

/// A machine file has some KB; a file that is longer than this is none of ours.
const LONGEST: u64 = 1 << 20;

/// A stored machine file that cannot be used.
#[derive(Debug)]
pub struct BadMachineFile {
    path: PathBuf,
    problem: Problem,
}

#[derive(Debug)]
enum Problem {
    Unreadable(std::io::Error),
    Malformed(MachineError),
    Kind { expected: &'static str, got: &'static str },
}

impl fmt::Display for BadMachineFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.path.display())?;
        match &self.problem {
            Problem::Unreadable(error) => write!(f, "{error}")?,
            Problem::Malformed(error) => write!(f, "{error}")?,
            Problem::Kind { expected, got } => write!(f, "expected a machine of kind {expected}, got {got}")?,
        }
        write!(f, "; delete the file, or run `deuteron doctor --calibrate` again")
    }
}

impl std::error::Error for BadMachineFile {}

/// Where the file of a machine is: `$XDG_CONFIG_HOME/deuteron/machines/NAME.toml`, or under `~/.config`. None without a home.
pub fn path(name: &str) -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let config = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")))?;
    Some(config.join("deuteron").join("machines").join(format!("{}.toml", file_name(name))))
}

/// A machine's name as that of a file.
fn file_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c.to_ascii_lowercase() } else { '-' };
    name.chars().map(plain).collect()
}

/// The stored machine of a name, if there is one.
pub fn load(name: &str) -> Result<Option<Machine>> {
    let Some(path) = path(name) else { return Ok(None) };
    Ok(read(&path, if name == "cpu" { "cpu" } else { "gpu" })?)
}

/// Stores a machine under its name, and says where. The file is complete or not there: it is written under another name
/// first.
pub fn store(machine: &Machine) -> Result<PathBuf> {
    let path = path(&machine.name)
        .context("no place for the machine file: neither XDG_CONFIG_HOME nor HOME is an absolute path")?;
    write(&path, machine).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

fn read(path: &Path, kind: &'static str) -> Result<Option<Machine>, BadMachineFile> {
    let bad = |problem: Problem| BadMachineFile { path: path.to_path_buf(), problem };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(bad(Problem::Unreadable(error))),
    };
    let mut text = String::new();
    file.take(LONGEST + 1).read_to_string(&mut text).map_err(|error| bad(Problem::Unreadable(error)))?;
    let machine = Machine::parse(&text).map_err(|error| bad(Problem::Malformed(error)))?;
    match machine.kind.name() {
        got if got == kind => Ok(Some(machine)),
        got => Err(bad(Problem::Kind { expected: kind, got })),
    }
}

fn write(path: &Path, machine: &Machine) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    private_folders().create(folder)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let unfinished = folder.join(format!(".{name}.{}", std::process::id()));
    let written = File::create(&unfinished).and_then(|mut file| {
        file.write_all(machine.to_string().as_bytes())?;
        file.sync_all()
    });
    let stored = written.and_then(|()| std::fs::rename(&unfinished, path));
    if stored.is_err() {
        // The first error is the one to report.
        let _ = std::fs::remove_file(&unfinished);
    }
    stored
}

/// Makes folders that only their owner can look into.
fn private_folders() -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("deuteron-{name}-{}", std::process::id()))
    }

    #[test]
    fn a_machine_is_read_as_it_was_stored() {
        let folder = folder("machine-file");
        let path = folder.join("machines").join("cpu.toml");
        assert!(read(&path, "cpu").unwrap().is_none());
        write(&path, &Machine::cpu()).unwrap();
        assert_eq!(read(&path, "cpu").unwrap(), Some(Machine::cpu()));
        let left: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "no unfinished file stays behind");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn every_machine_has_a_file_name() {
        assert_eq!(file_name("h200"), "h200");
        assert_eq!(file_name("NVIDIA H200 / SXM"), "nvidia-h200---sxm");
    }

    #[test]
    fn a_bad_file_says_what_to_do() {
        let folder = folder("bad-machine-file");
        let path = folder.join("cpu.toml");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(&path, "name = 3").unwrap();
        let message = read(&path, "cpu").unwrap_err().to_string();
        assert!(message.contains("cpu.toml") && message.contains("doctor --calibrate"), "{message}");
        std::fs::write(&path, Machine::profile("h200").unwrap().to_string()).unwrap();
        assert!(read(&path, "cpu").unwrap_err().to_string().contains("kind cpu"));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
