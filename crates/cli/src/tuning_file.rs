//! The launch shapes that `deuteron bench --tune` stores for this user, one file for each kind of GPU, and those of a file that the
//! user names.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use deuteron::cuda::Tuning;

use crate::stored_file::{self, BadFile, Lock};

const REMEDY: &str = "or go without with `--tuning none`";

/// The measured launch shapes to use on a GPU.
#[derive(Args)]
pub struct TuningArguments {
    /// File of measured launch shapes to use on a GPU, which is only read; none to use no measured shapes [default:
    /// those that `bench --tune` stored for the GPU]
    #[arg(long, value_name = "FILE")]
    tuning: Option<String>,
}

/// The requested launch shapes.
#[derive(Debug, PartialEq)]
pub enum Choice {
    /// the stored ones of the GPU, to which new ones are added
    Stored,
    /// only these
    Frozen(Tuning),
}

impl TuningArguments {
    /// Whether `--tuning` was given.
    pub fn is_given(&self) -> bool {
        self.tuning.is_some()
    }

    /// The requested launch shapes, read if they are a file.
    pub fn choice(&self) -> Result<Choice> {
        match self.tuning.as_deref() {
            None => Ok(Choice::Stored),
            Some("none") => Ok(Choice::none()),
            Some(file) => {
                let path = Path::new(file);
                let missing = || BadFile::new(path, "expected a file of launch shapes, got none", REMEDY);
                Ok(Choice::Frozen(read(path)?.ok_or_else(missing)?))
            }
        }
    }
}

impl Choice {
    /// No measured launch shapes.
    pub fn none() -> Choice {
        Choice::Frozen(Tuning::default())
    }

    /// The launch shapes for a named GPU. An unusable stored file is ignored with a warning on standard error.
    pub fn of(&self, name: &str) -> Tuning {
        match (self, path(name)) {
            (Choice::Frozen(tuning), _) => tuning.clone(),
            (Choice::Stored, Some(path)) => stored_file::or_note(read(&path)).unwrap_or_default(),
            (Choice::Stored, None) => Tuning::default(),
        }
    }

    /// The launch shapes for a GPU that need not be present: nothing is stored for it.
    pub fn of_none(self) -> Tuning {
        match self {
            Choice::Frozen(tuning) => tuning,
            Choice::Stored => Tuning::default(),
        }
    }

    /// Stores launch shapes for a named GPU beside those of other kernels, and returns the path; stores nothing if the choice is
    /// frozen.
    pub fn keep(&self, name: &str, newer: Tuning) -> Result<Option<PathBuf>> {
        if *self != Choice::Stored {
            return Ok(None);
        }
        let path =
            path(name).context("no place for launch shapes: neither XDG_CONFIG_HOME nor HOME is an absolute path")?;
        add(&path, newer)?;
        Ok(Some(path))
    }
}

fn path(name: &str) -> Option<PathBuf> {
    stored_file::path("tuning", name, "txt")
}

fn read(path: &Path) -> Result<Option<Tuning>, BadFile> {
    stored_file::parsed(path, REMEDY, str::parse)
}

fn add(path: &Path, newer: Tuning) -> Result<()> {
    let unwritten = || format!("cannot write {}", path.display());
    // Before it is read: what others add meanwhile would be lost.
    let lock = Lock::new(path).with_context(unwritten)?;
    let mut tuning = read(path)?.unwrap_or_default();
    tuning.merge(newer);
    lock.write(&tuning.to_string()).with_context(unwritten)
}

#[cfg(test)]
mod tests {
    use super::*;
    use deuteron_testkit::Scratch;

    /// Entries with launch shapes that differ by their threads.
    fn tuning(entries: &[(&str, usize)]) -> Tuning {
        use deuteron::cuda::{Arch, CudaCatalog, CudaTarget};
        let graph = "x = input f32[99,768] ; y, m, r = layer_norm x w[768] b[768] ; out y".parse().unwrap();
        let machine = deuteron::Machine::profile("h200").unwrap();
        let target = deuteron::Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
        let (strategy, cuda) = (deuteron::Strategy::Greedy, CudaTarget::new(Arch::Sm90a, 132));
        let (_, configs) = deuteron::tune::launch_shapes(&graph, strategy, target, &cuda).unwrap().swap_remove(0);
        let mut tuning = Tuning::default();
        entries.iter().for_each(|&(key, config)| tuning.insert(key, configs[config].clone()));
        tuning
    }

    fn text(tuning: &Tuning) -> String {
        tuning.to_string()
    }

    #[test]
    fn new_launch_shapes_join_the_stored_ones() {
        let folder = Scratch::make();
        let path = folder.join("tuning").join("h200.txt");
        assert!(read(&path).unwrap().is_none());
        add(&path, tuning(&[("a", 0), ("b", 0)])).unwrap();
        add(&path, tuning(&[("b", 1), ("c", 1)])).unwrap();
        let stored = read(&path).unwrap().unwrap();
        assert_eq!(text(&stored), text(&tuning(&[("a", 0), ("b", 1), ("c", 1)])));
        assert_ne!(text(&stored), text(&tuning(&[("a", 0), ("b", 0), ("c", 1)])));
    }

    #[test]
    fn a_frozen_file_is_not_written() {
        let folder = Scratch::make();
        let path = folder.join("frozen.txt");
        stored_file::write(&path, &text(&tuning(&[("a", 0)]))).unwrap();
        for tuning_words in [path.to_str().unwrap(), "none"] {
            let choice = TuningArguments { tuning: Some(tuning_words.into()) }.choice().unwrap();
            assert_eq!(choice.of("h200").len(), if tuning_words == "none" { 0 } else { 1 });
            assert_eq!(choice.keep("h200", tuning(&[("b", 1)])).unwrap(), None);
        }
        assert_eq!(text(&read(&path).unwrap().unwrap()), text(&tuning(&[("a", 0)])));
        assert_eq!(std::fs::read_dir(&*folder).unwrap().count(), 2, "the file, and the lock of the one who made it");
        assert_eq!(TuningArguments { tuning: None }.choice().unwrap(), Choice::Stored);
    }

    #[test]
    fn a_bad_file_says_what_to_do_and_stays_as_it_is() {
        let folder = Scratch::make();
        let path = folder.join("h200.txt");
        stored_file::write(&path, "k policy=fast\n").unwrap();
        let arguments = TuningArguments { tuning: path.to_str().map(String::from) };
        for message in [arguments.choice().unwrap_err(), add(&path, tuning(&[("a", 0)])).unwrap_err()] {
            assert!(message.is::<BadFile>());
            let message = message.to_string();
            for word in ["h200.txt", "line 1", "delete the line", "--tuning none"] {
                assert!(message.contains(word), "{message}");
            }
        }
        assert_eq!(stored_file::or_note(read(&path)), None, "what is stored for the user is only a hint");
        assert_eq!(stored_file::read(&path).unwrap().as_deref(), Some("k policy=fast\n"));
        let missing = TuningArguments { tuning: Some("missing.txt".into()) }.choice().unwrap_err();
        assert!(missing.to_string().starts_with("missing.txt: expected a file"), "{missing}");
    }
}
