//! The folder of a run: its checkpoints, its log and its curve.
//!
//! ```text
//! OUT/checkpoint-200/   config.json, model.safetensors, tokenizer.json, tokenizer_config.json: a model as Hugging Face lays it out, in f32
//!                       optimizer.safetensors: the moments; training.json: the step and the settings
//! OUT/log.csv           a line for each step
//! OUT/curve.svg         the losses
//! ```
//!
//! A checkpoint is written under a name that starts with a dot, flushed to the disk and then renamed, so a folder with the final name is always
//! complete. One process at a time uses the folder.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use deuteron::{Dtype, Engine};
use deuteron_gpt2::{Checkpoint, TensorFile, Tokenizer, Weights, upload, write_checkpoint, write_tensors};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::settings::Settings;
use crate::trainer::Trainer;

const CHECKPOINT: &str = "checkpoint-";
const UNFINISHED: &str = ".checkpoint-";
const MOMENTS: &str = "optimizer.safetensors";
const PROGRESS: &str = "training.json";

/// The folder of a run, which no other process trains into.
pub struct RunFolder {
    path: PathBuf,
    /// its lock ends with it
    _lock: File,
}

/// The state of a run, and its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// steps that were taken
    pub step: u64,
    /// of the run
    pub settings: Settings,
    /// digest of the tokens
    pub data: String,
}

impl RunFolder {
    /// Creates the folder if necessary, and locks it. Unfinished files of killed processes are removed.
    pub fn open(path: &Path) -> Result<RunFolder, Error> {
        let failed = |problem| Error::Write { path: path.to_path_buf(), problem };
        fs::create_dir_all(path).map_err(failed)?;
        let lock = File::options().read(true).write(true).create(true).truncate(false).open(path.join(".lock"));
        let lock = lock.map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(Error::Locked(path.to_path_buf())),
            // A file system without locks.
            Err(TryLockError::Error(_)) => {}
        }
        let folder = RunFolder { path: path.to_path_buf(), _lock: lock };
        for name in folder.names().map_err(failed)? {
            if name.starts_with(UNFINISHED) {
                fs::remove_dir_all(path.join(name)).map_err(failed)?;
            }
        }
        Ok(folder)
    }

    /// A file of the run.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The steps of all checkpoints, in order.
    pub fn checkpoints(&self) -> Result<Vec<u64>, Error> {
        let names = self.names().map_err(|problem| Error::Write { path: self.path.clone(), problem })?;
        let mut steps: Vec<u64> = names.iter().filter_map(|name| name.strip_prefix(CHECKPOINT)?.parse().ok()).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// The folder of a checkpoint.
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.path.join(format!("{CHECKPOINT}{step}"))
    }

    /// Writes a checkpoint, unless there is one of this step, and removes all but the newest `keep`.
    pub fn save(
        &self,
        trainer: &Trainer,
        tokenizer: &Tokenizer,
        progress: &Progress,
        keep: usize,
    ) -> Result<PathBuf, Error> {
        let done = self.checkpoint(progress.step);
        if !done.exists() {
            let unfinished = self.path.join(format!("{UNFINISHED}{}", progress.step));
            let written = write(&unfinished, trainer, tokenizer, progress)
                .and_then(|()| fs::rename(&unfinished, &done).map_err(|problem| failed(&done, problem)));
            if written.is_err() {
                // The first error is the one to report.
                let _ = fs::remove_dir_all(&unfinished);
            }
            written?;
            // The new name is on the disk when the folder is; a system that cannot do so does it later.
            let _ = File::open(&self.path).and_then(|folder| folder.sync_all());
        }
        let steps = self.checkpoints()?;
        for &old in &steps[..steps.len().saturating_sub(keep.max(1))] {
            let old = self.checkpoint(old);
            fs::remove_dir_all(&old).map_err(|problem| failed(&old, problem))?;
        }
        Ok(done)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let entries = fs::read_dir(&self.path)?;
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }
}

impl Progress {
    /// The state of the run at a checkpoint.
    pub fn read(checkpoint: &Path) -> Result<Progress, Error> {
        let path = checkpoint.join(PROGRESS);
        let parsed = fs::read_to_string(&path)
            .map_err(|error| error.to_string())
            .and_then(|text| serde_json::from_str(&text).map_err(|error| error.to_string()));
        parsed.map_err(|why| Error::Progress { path, why })
    }

    /// Checks that a run with these settings continues this one.
    pub fn check(&self, checkpoint: &Path, given: &Settings, data: &str) -> Result<(), Error> {
        let differs = |name: &str, stored: String, given: String| {
            Err(Error::Differs { folder: checkpoint.to_path_buf(), name: name.to_string(), stored, given })
        };
        // Through a file as the others: reading it may take the last bit of a number.
        let again = serde_json::to_string(given).and_then(|text| serde_json::from_str::<Settings>(&text));
        let given = again.as_ref().unwrap_or(given);
        let [stored, given] =
            [&self.settings, given].map(|settings| serde_json::to_value(settings).unwrap_or_default());
        for (name, stored) in stored.as_object().into_iter().flatten() {
            let given = given.get(name).cloned().unwrap_or_default();
            if *stored != given {
                return differs(&format!("--{}", name.replace('_', "-")), stored.to_string(), given.to_string());
            }
        }
        if self.data != data {
            return differs("other tokens:", self.data.clone(), data.to_string());
        }
        Ok(())
    }
}

/// A trainer with the weights and moments of a checkpoint.
pub fn restore(engine: &Engine, checkpoint: &Path, settings: &Settings) -> Result<Trainer, Error> {
    let opened = Checkpoint::open(checkpoint)?;
    let weights = upload(engine, &opened, Weights::F32)?;
    let mut trainer = Trainer::new(engine, opened.config(), &settings.step()?, weights)?;
    if settings.step()?.optimizer.moments() > 0 {
        let file = TensorFile::open(checkpoint, MOMENTS)?;
        trainer.set_moments(|engine, name, shape| Ok(file.upload(engine, name, Dtype::F32, shape)?))?;
    }
    Ok(trainer)
}

fn write(folder: &Path, trainer: &Trainer, tokenizer: &Tokenizer, progress: &Progress) -> Result<(), Error> {
    fs::create_dir(folder).map_err(|problem| failed(folder, problem))?;
    write_checkpoint(folder, trainer.config(), tokenizer, &trainer.weights())?;
    let moments = trainer.moments();
    if !moments.is_empty() {
        write_tensors(&folder.join(MOMENTS), &moments)?;
    }
    let text = serde_json::to_string_pretty(progress).unwrap_or_default() + "\n";
    let path = folder.join(PROGRESS);
    let written = File::create(&path).and_then(|mut file| {
        io::Write::write_all(&mut file, text.as_bytes())?;
        file.sync_all()
    });
    written.map_err(|problem| failed(&path, problem))
}

fn failed(path: &Path, problem: io::Error) -> Error {
    Error::Write { path: path.to_path_buf(), problem }
}
