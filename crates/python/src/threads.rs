//! Threads of the CPU: how many, and whether they are those of the OpenMP runtime that PyTorch runs on.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use deuteron::threads::{Pool, Runtime, Sharing};
use pyo3::prelude::*;

use crate::engines;
use crate::errors::bad_value;

/// Settings that hold for engines to come, and the pool of the engine that is open.
struct Settings {
    /// What `set_num_threads` asked for.
    limit: Option<usize>,
    /// PyTorch's runtime, and the generation of the process that loaded it.
    runtime: Option<(Runtime, u64)>,
    /// The pool of this process, and its generation.
    pool: Option<(Arc<Pool>, u64)>,
}

/// Taken only with the interpreter held, so that no fork meets the lock.
static SETTINGS: Mutex<Settings> = Mutex::new(Settings { limit: None, runtime: None, pool: None });

impl Settings {
    fn change(change: impl FnOnce(&mut Settings)) {
        let mut settings = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut settings);
        settings.update();
    }

    /// Tells the open pool what holds now.
    fn update(&mut self) {
        let now = engines::generation();
        let Some((pool, _)) = self.pool.as_ref().filter(|(_, of)| *of == now) else { return };
        if let Some(limit) = self.limit {
            pool.set_limit(limit);
        }
        if let Some((runtime, loaded)) = self.runtime {
            // A forked process has PyTorch's settings but none of its threads.
            pool.follow(runtime, if loaded == now { Sharing::Threads } else { Sharing::Count });
        }
    }
}

/// Applies the settings to the pool of an engine that is being opened, and to no other pool from now on.
pub(crate) fn apply(pool: &Arc<Pool>) {
    Settings::change(|settings| {
        if let Some(old) = settings.pool.replace((pool.clone(), engines::generation())) {
            // In a forked process the threads of the old pool do not exist; to end them would wait forever.
            std::mem::forget(old);
        }
    });
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// At most this many threads from now on.
#[pyfunction]
pub(crate) fn set_num_threads(threads: i64) -> PyResult<()> {
    let cores = cores();
    let limit = usize::try_from(threads).ok().filter(|limit| (1..=cores).contains(limit));
    let limit = limit.ok_or_else(|| {
        bad_value(format!("set_num_threads: expected 1 to {cores}, the number of cores, got {threads}"))
    })?;
    Settings::change(|settings| settings.limit = Some(limit));
    Ok(())
}

/// How many threads a call takes now.
#[pyfunction]
pub(crate) fn get_num_threads() -> usize {
    let settings = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
    let limit = settings.limit.unwrap_or_else(cores);
    settings.runtime.map_or(limit, |(runtime, _)| limit.min(runtime.max_threads()))
}

/// Runs on the OpenMP runtime of PyTorch from now on, if it has one. `module` is `torch`, loaded.
pub(crate) fn share(module: &Bound<'_, PyAny>) {
    let Ok(file) = module.getattr("__file__").and_then(|file| file.extract::<PathBuf>()) else { return };
    let Some(runtime) = Runtime::of(&file.with_file_name("lib").join("libtorch_cpu.so")) else { return };
    Settings::change(|settings| {
        settings.runtime.get_or_insert((runtime, engines::generation()));
    });
}
