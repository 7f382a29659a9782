//! The machine files that `deuteron doctor --calibrate` and `deuteron fuse` leave for this user, and every command reads: one
//! for the CPU, one for each kind of GPU.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use deuteron::Machine;

use crate::stored_file::{self, BadFile};

const REMEDY: &str = "delete the file, or run `deuteron doctor --calibrate` again";

/// Where the file of a machine is: `$XDG_CONFIG_HOME/deuteron/machines/NAME.toml`, or under `~/.config`. None without a home.
pub fn path(name: &str) -> Option<PathBuf> {
    stored_file::path("machines", name, "toml")
}

/// The stored machine of a name, if there is one. A file that cannot be used is a hint less, no reason to stop: it is named on
/// standard error and left alone.
pub fn load(name: &str) -> Option<Machine> {
    stored_file::or_note(read(&path(name)?, if name == "cpu" { "cpu" } else { "gpu" }))
}

/// Stores a machine under its name, and says where.
pub fn store(machine: &Machine) -> Result<PathBuf> {
    let path = path(&machine.name)
        .context("no place for the machine file: neither XDG_CONFIG_HOME nor HOME is an absolute path")?;
    stored_file::write(&path, &machine.to_string()).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

fn read(path: &Path, kind: &str) -> Result<Option<Machine>, BadFile> {
    stored_file::parsed(path, REMEDY, |text| {
        let machine = Machine::parse(text).map_err(|error| error.to_string())?;
        match machine.kind.name() {
            got if got == kind => Ok(machine),
            got => Err(format!("expected a machine of kind {kind}, got {got}")),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use deuteron_testkit::Scratch;

    #[test]
    fn a_machine_is_read_as_it_was_stored() {
        let folder = Scratch::make();
        let path = folder.join("machines").join("cpu.toml");
        assert!(read(&path, "cpu").unwrap().is_none());
        stored_file::write(&path, &Machine::cpu().to_string()).unwrap();
        assert_eq!(read(&path, "cpu").unwrap(), Some(Machine::cpu()));
    }

    #[test]
    fn a_bad_file_says_what_to_do() {
        let folder = Scratch::make();
        let path = folder.join("cpu.toml");
        std::fs::write(&path, "name = 3").unwrap();
        let message = read(&path, "cpu").unwrap_err().to_string();
        assert!(message.contains("cpu.toml") && message.contains("doctor --calibrate"), "{message}");
        std::fs::write(&path, Machine::profile("h200").unwrap().to_string()).unwrap();
        assert!(read(&path, "cpu").unwrap_err().to_string().contains("kind cpu"));
    }
}
