//! The machine files that `deuteron doctor --calibrate` and `deuteron fuse` leave for this user, and every command reads: one
//! for the CPU, one for each kind of GPU.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use deuteron::{Machine, MachineError};

use crate::stored_file;

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
    stored_file::path("machines", name, "toml")
}

/// The stored machine of a name, if there is one.
pub fn load(name: &str) -> Result<Option<Machine>> {
    let Some(path) = path(name) else { return Ok(None) };
    Ok(read(&path, if name == "cpu" { "cpu" } else { "gpu" })?)
}

/// Stores a machine under its name, and says where.
pub fn store(machine: &Machine) -> Result<PathBuf> {
    let path = path(&machine.name)
        .context("no place for the machine file: neither XDG_CONFIG_HOME nor HOME is an absolute path")?;
    stored_file::write(&path, &machine.to_string()).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

fn read(path: &Path, kind: &'static str) -> Result<Option<Machine>, BadMachineFile> {
    let bad = |problem: Problem| BadMachineFile { path: path.to_path_buf(), problem };
    let text = stored_file::read(path).map_err(|error| bad(Problem::Unreadable(error)))?;
    let Some(text) = text else { return Ok(None) };
    let machine = Machine::parse(&text).map_err(|error| bad(Problem::Malformed(error)))?;
    match machine.kind.name() {
        got if got == kind => Ok(Some(machine)),
        got => Err(bad(Problem::Kind { expected: kind, got })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stored_file::test_folder;

    #[test]
    fn a_machine_is_read_as_it_was_stored() {
        let folder = test_folder("machine-file");
        let path = folder.join("machines").join("cpu.toml");
        assert!(read(&path, "cpu").unwrap().is_none());
        stored_file::write(&path, &Machine::cpu().to_string()).unwrap();
        assert_eq!(read(&path, "cpu").unwrap(), Some(Machine::cpu()));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_bad_file_says_what_to_do() {
        let folder = test_folder("bad-machine-file");
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
