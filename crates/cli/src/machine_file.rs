//! Files about this user's machines, which every command reads: the numbers that `deuteron doctor --calibrate` fitted, one file for
//! the CPU and one for each kind of GPU, and beside them what `deuteron fuse` learnt, one file per machine.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use deuteron::Machine;

use crate::stored_file::{self, BadFile, Lock};

const REMEDY: &str = "delete the file, or run `deuteron doctor --calibrate` again";
const REMEDY_OF_LEARNT: &str = "run `deuteron doctor --forget`";
const NO_PLACE: &str = "no place for the machine file: neither XDG_CONFIG_HOME nor HOME is an absolute path";

/// The path of a machine's calibration: `$XDG_CONFIG_HOME/deuteron/machines/NAME.toml`, or under `~/.config`. None without a home.
pub fn path(name: &str) -> Option<PathBuf> {
    stored_file::path("machines", name, "toml")
}

/// The path of the corrections learnt for a machine: `learnt/NAME.toml` beside `machines`. A CPU is known by its model and its cores, so that
/// machines that share a home learn for themselves.
pub fn learnt_path(name: &str) -> Option<PathBuf> {
    match name {
        "cpu" => stored_file::path("learnt", &format!("cpu {}", this_cpu()), "toml"),
        gpu => stored_file::path("learnt", gpu, "toml"),
    }
}

/// The stored machine of a name, if there is one, with what was learnt about it. An unusable file is ignored with a
/// warning on standard error.
pub fn load(name: &str) -> Option<Machine> {
    let calibrated = path(name).and_then(|path| stored_file::or_note(read(&path, kind_of(name))));
    let calibrated = calibrated.map(Machine::without_learnt);
    let learnt = learnt_path(name).filter(|path| path.exists());
    let Some(path) = learnt else { return calibrated };
    let base = calibrated.clone().or_else(|| Machine::profile(name).ok())?;
    stored_file::or_note(read_learnt(&path, &base)).or(calibrated)
}

/// Stores a calibrated machine under its name, and returns the path. Corrections learnt for the previous numbers are removed.
pub fn store(machine: &Machine) -> Result<PathBuf> {
    let path = path(&machine.name).context(NO_PLACE)?;
    stored_file::write(&path, &machine.to_string()).with_context(|| format!("cannot write {}", path.display()))?;
    forget(&machine.name)?;
    Ok(path)
}

/// Updates the corrections of a machine, which was `known` when the command started, and returns the path. Concurrent commands take turns,
/// and each starts from the result of the one before.
pub fn learn(known: &Machine, change: impl FnOnce(Machine) -> Result<Option<Machine>>) -> Result<Option<PathBuf>> {
    let Some(path) = learnt_path(&known.name) else { return Ok(None) };
    let unwritten = || format!("cannot write {}", path.display());
    let lock = Lock::new(&path).with_context(unwritten)?;
    let base = known.clone().without_learnt();
    let now = read_learnt(&path, &base).ok().flatten().unwrap_or(base);
    let Some(changed) = change(now)? else { return Ok(None) };
    lock.write(&changed.learnt_text()).with_context(unwritten)?;
    Ok(Some(path))
}

/// Removes the corrections of a machine; returns their path, if there were any.
pub fn forget(name: &str) -> Result<Option<PathBuf>> {
    let Some(path) = learnt_path(name).filter(|path| path.exists()) else { return Ok(None) };
    let unremoved = || format!("cannot remove {}", path.display());
    let _lock = Lock::new(&path).with_context(unremoved)?;
    std::fs::remove_file(&path).with_context(unremoved)?;
    Ok(Some(path))
}

fn kind_of(name: &str) -> &'static str {
    if name == "cpu" { "cpu" } else { "gpu" }
}

/// This machine's CPU: model and cores.
fn this_cpu() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or(std::env::consts::ARCH, |(_, model)| model.trim());
    format!("{model} {cores} cores")
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

fn read_learnt(path: &Path, base: &Machine) -> Result<Option<Machine>, BadFile> {
    stored_file::parsed(path, REMEDY_OF_LEARNT, |text| base.clone().with_learnt(text))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use deuteron::Quantity;
    use deuteron_testkit::Scratch;

    #[test]
    fn a_machine_is_read_as_it_was_stored() {
        let folder = Scratch::make();
        let path = folder.join("machines").join("cpu.toml");
        assert!(read(&path, "cpu").unwrap().is_none());
        stored_file::write(&path, &Machine::cpu().to_string()).unwrap();
        assert_eq!(read(&path, "cpu").unwrap(), Some(Machine::cpu()));
    }

    /// Set for a process that stores a number: its value.
    const VALUE: &str = "DEUTERON_LEARNT_VALUE";

    /// Not a test by itself: stores a number as `fuse` does, in a process that may be forbidden to write.
    #[test]
    fn number_of_a_child() {
        let Ok(value) = std::env::var(VALUE) else { return };
        let learnt = |now: Machine| Ok(Some(now.learn(Quantity::CorrectRow, value.parse()?, "by a test")?));
        learn(&Machine::cpu(), learnt).unwrap();
    }

    /// Learns a number in a process whose files may not grow beyond `blocks` blocks, as on a full disk; returns its message if it fails.
    fn learnt_in(settings: &Path, value: f64, blocks: &str) -> Result<(), String> {
        let test = "--exact machine_file::tests::number_of_a_child --nocapture";
        let output = Command::new("sh")
            .args(["-c", &format!("trap '' XFSZ ; ulimit -f {blocks} ; exec \"$0\" {test}")])
            .arg(std::env::current_exe().unwrap())
            .env("XDG_CONFIG_HOME", settings)
            .env(VALUE, value.to_string())
            .output()
            .unwrap();
        output.status.success().then_some(()).ok_or_else(|| String::from_utf8_lossy(&output.stderr).into_owned())
    }

    #[test]
    fn a_number_that_a_full_disk_does_not_take_leaves_the_one_before() {
        let settings = Scratch::make();
        let folder = settings.join("deuteron").join("learnt");
        let stored = || -> Vec<String> {
            let paths = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
            let files = paths.filter(|path| !path.to_string_lossy().ends_with(".lock"));
            files.map(|path| std::fs::read_to_string(path).unwrap()).collect()
        };
        for before in [None, Some(1.25)] {
            if let Some(value) = before {
                learnt_in(&settings, value, "unlimited").unwrap();
            }
            let kept = if before.is_some() { stored() } else { Vec::new() };
            let said = learnt_in(&settings, 1.5, "0").unwrap_err();
            assert!(said.contains("cannot write") && said.contains("File too large"), "{said}");
            assert_eq!(stored(), kept);
        }
        learnt_in(&settings, 1.5, "unlimited").unwrap();
        let [text] = stored().try_into().unwrap();
        assert_eq!(Machine::cpu().with_learnt(&text).unwrap().find(Quantity::CorrectRow), Some(1.5));
    }

    #[test]
    fn a_bad_file_says_what_to_do() {
        let folder = Scratch::make();
        let path = folder.join("cpu.toml");
        std::fs::write(&path, "name = 3").unwrap();
        let message = read(&path, "cpu").unwrap_err().to_string();
        assert!(message.contains("cpu.toml") && message.contains("doctor --calibrate"), "{message}");
        let message = read_learnt(&path, &Machine::cpu()).unwrap_err().to_string();
        assert!(message.contains("doctor --forget"), "{message}");
        std::fs::write(&path, Machine::profile("h200").unwrap().to_string()).unwrap();
        assert!(read(&path, "cpu").unwrap_err().to_string().contains("kind cpu"));
    }
}
