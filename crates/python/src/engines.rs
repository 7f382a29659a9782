//! One engine for each device, opened when it is first needed.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use deuteron::Engine;
use deuteron_cli::device::{self, RedZones};
use deuteron_cli::tuning_file::Choice;
use pyo3::prelude::*;

use crate::errors::failed;
use crate::threads;

/// Where operands are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    /// memory of the host
    Cpu,
    /// memory of the GPU of that number
    Cuda(usize),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Cpu => write!(f, "cpu"),
            Place::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// Engines of this process: which process, and those that are open.
static ENGINES: Mutex<Option<(u64, HashMap<Place, Engine>)>> = Mutex::new(None);

/// Counts forks.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// How often this process was forked. What was compiled before the last fork is of no use.
pub(crate) fn generation() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

/// To be called in a process that was just forked: its engines have no threads and no GPU.
pub(crate) fn forget() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// The engine of a place. Engines are opened with the interpreter held, so that no fork meets the lock.
pub(crate) fn engine(py: Python<'_>, place: Place) -> PyResult<Engine> {
    let mut engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
    let now = generation();
    let stale = engines.as_ref().is_none_or(|(of, _)| *of != now);
    if stale && let Some(old) = engines.replace((now, HashMap::new())) {
        // Its threads are not in this process and cannot be stopped.
        std::mem::forget(old);
    }
    let Some((_, open)) = engines.as_mut() else { return Err(failed("no engines")) };
    if let Some(engine) = open.get(&place) {
        return Ok(engine.clone());
    }
    let opened = match place {
        Place::Cpu => device::open_cpu(None).map(|cpu| {
            threads::apply(cpu.pool());
            Engine::on(cpu)
        }),
        Place::Cuda(ordinal) => device::gpu(ordinal, RedZones::Off, &Choice::Stored, &package_folders(py)?),
    };
    let engine = opened.map_err(|error| failed(format!("{place}: {error:#}")))?;
    open.insert(place, engine.clone());
    Ok(engine)
}

/// The engines that are open, each with its place.
pub(crate) fn opened() -> Vec<(Place, Engine)> {
    let engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
    let now = generation();
    let current = engines.iter().filter(|(of, _)| *of == now).flat_map(|(_, open)| open);
    current.map(|(place, engine)| (*place, engine.clone())).collect()
}

/// Folders of packages of this interpreter, among which NVIDIA's libraries may be.
pub(crate) fn package_folders(py: Python<'_>) -> PyResult<Vec<PathBuf>> {
    let sys = py.import("sys")?;
    let mut folders: Vec<PathBuf> = vec![sys.getattr("prefix")?.extract::<String>()?.into()];
    for entry in sys.getattr("path")?.try_iter()? {
        let Ok(path) = entry?.extract::<String>() else { continue };
        let path = PathBuf::from(path);
        if path.ends_with("site-packages") || path.ends_with("dist-packages") {
            folders.push(path);
        }
    }
    Ok(folders)
}
