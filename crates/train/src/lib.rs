//! Training of GPT-2: from scratch or from a checkpoint, on a CPU or a GPU, by the same code.
//!
//! - [`Corpus`]: files become one stream of tokens; a batch depends only on seed and step.
//! - [`Step`]: forward, loss, backward, norm of the gradient, clipping and optimiser are *one graph*; weights and moments are states of its one
//!   session, written in place. [`Optimizer`](deuteron::Optimizer)s are graph expressions.
//! - [`Trainer`]: that session on an engine, with those of accumulated micro-batches and of evaluation.
//! - [`RunFolder`]: checkpoints, written atomically, in Hugging Face's layout, with the optimiser's moments.
//! - [`run`]: the loop. A resumed run gives the same bits as an uninterrupted one.
//!
//! Kernels give the same bits on every run, batches and dropout masks depend on the step's number, and work between steps (losses of
//! validation tokens, samples, checkpoints) writes no state, so [`Settings`], data and machine determine every bit of a run.
#![forbid(unsafe_code)]

mod data;
mod error;
mod folder;
mod log;
mod run;
mod settings;
mod start;
mod step;
mod trainer;

pub use data::{Batch, Corpus, DataError, Draw, Validation, vocabulary};
pub use error::Error;
pub use folder::{Progress, RunFolder, restore};
pub use log::{Line, Log};
pub use run::{Cadence, Ended, RunOptions, Watch, run};
pub use settings::{Settings, SettingsError, flops_per_token, sized};
pub use start::fresh_weights;
pub use step::{Precision, Stateful, Step, StepOptions, decays};
pub use trainer::{MemoryUse, Scalars, StepResult, Trainer};
