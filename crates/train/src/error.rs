//! Errors of training.

use std::io;
use std::path::PathBuf;

use deuteron::Bytes;
use deuteron_gpt2::{CheckpointError, SaveError};

use crate::data::DataError;
use crate::settings::SettingsError;
use crate::trainer::MemoryUse;

/// Why training stopped, or did not start. Messages say what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No training data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A setting out of range.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Invalid sizes.
    #[error(transparent)]
    Size(#[from] deuteron_gpt2::SizeError),
    /// The wrong number of micro-batches.
    #[error("a step was made for {expected} micro-batches, got {got}")]
    Batches {
        /// of the step
        expected: usize,
        /// the value found
        got: usize,
    },
    /// More memory than is allowed, even with recomputed activations.
    #[error(
        "training takes at least {} ({} weights, moments and accumulated gradients; {} activations and gradients), but --memory is {}; \
         take a smaller --batch with more of --accumulate, a shorter --sequence, or a higher --memory",
        Bytes(.least.all()), Bytes(.least.states), Bytes(.least.sessions), Bytes(*.limit)
    )]
    Memory {
        /// the limit
        limit: u64,
        /// the minimum
        least: MemoryUse,
    },
    /// An unknown input of the graph.
    #[error("the graph of a step has the unknown input `{0}`; this is a defect of the program")]
    Input(String),
    /// The loss or the gradient is NaN or infinite.
    #[error(
        "step {step}: the {what} is {value}; {}; lower --learning-rate, lengthen --warmup, or set --clip",
        saved(.last)
    )]
    NotFinite {
        /// from 1
        step: u64,
        /// loss or norm of the gradient
        what: &'static str,
        /// what it is
        value: f64,
        /// the newest checkpoint, saved before this step
        last: Option<PathBuf>,
    },
    /// The folder already contains a run.
    #[error("`{}` has a run that was stopped at step {step}; continue it with --resume, or give another --out", .folder.display())]
    Occupied {
        /// the folder
        folder: PathBuf,
        /// of its newest checkpoint
        step: u64,
    },
    /// Another process trains into the folder.
    #[error("another process is training into `{}`; end that process, or give another --out", .0.display())]
    Locked(PathBuf),
    /// An empty prompt.
    #[error("`{}` has no checkpoint to resume from; start without --resume", .0.display())]
    NoCheckpoint(PathBuf),
    /// A setting differs from that of the run to resume.
    #[error("`{}` was trained with {name} {stored}, but {given} is given; a run resumes with its own settings", .folder.display())]
    Differs {
        /// the checkpoint
        folder: PathBuf,
        /// the setting
        name: String,
        /// of the run
        stored: String,
        /// the given value
        given: String,
    },
    /// The file with the state of a run is damaged.
    #[error("`{}` does not describe the state of a run: {why}", .path.display())]
    Progress {
        /// the file
        path: PathBuf,
        /// why
        why: String,
    },
    /// The system refused.
    #[error("cannot write `{}`: {problem}", .path.display())]
    Write {
        /// the file or folder
        path: PathBuf,
        /// why
        problem: io::Error,
    },
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// A checkpoint is refused.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A sample cannot be drawn.
    #[error(transparent)]
    Sample(#[from] deuteron_gpt2::Error),
    /// The engine refused or failed.
    #[error(transparent)]
    Engine(#[from] deuteron::Error),
}

fn saved(last: &Option<PathBuf>) -> String {
    match last {
        Some(path) => format!("the newest checkpoint is `{}`", path.display()),
        None => "nothing was saved".to_string(),
    }
}
