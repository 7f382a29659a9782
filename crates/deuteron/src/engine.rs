//! The engine: a device, and the sessions of ready-made ops kept for reuse.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use deuteron_device::{Cpu, Device, MemoryStats};
use deuteron_graph::{Dtype, Graph, Shape};
use deuteron_plan::Layout;

use crate::catalog;
use crate::error::Error;
use crate::session::{Session, SessionOptions};
use crate::tensor::Tensor;

/// Maximum number of sessions kept; unused ones are dropped beyond that.
const SESSIONS: usize = 256;

/// A device and its compiled sessions. Cloning shares both.
#[derive(Clone)]
pub struct Engine {
    device: Arc<dyn Device>,
    sessions: Arc<Mutex<HashMap<Key, Arc<Mutex<Session>>>>>,
}

/// What a session of a ready-made op depends on. Kernels depend on less (columns, dtypes, arithmetic): a new number of
/// rows makes a new session around kernels that are already compiled.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    /// the op with its attributes, and the direction
    pub op: String,
    /// what it is called with
    pub inputs: Vec<(Dtype, Layout)>,
}

impl Engine {
    /// The CPU, all cores.
    pub fn cpu() -> Engine {
        Engine::on(Arc::new(Cpu::new()))
    }

    /// Any device.
    pub fn on(device: Arc<dyn Device>) -> Engine {
        Engine { device, sessions: Arc::default() }
    }

    /// The device.
    pub fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// The memory that sessions keep between runs, without tensors.
    pub fn memory_stats(&self) -> MemoryStats {
        self.device.memory_stats()
    }

    /// Frees memory that no current run uses. Later runs allocate it again.
    pub fn release_memory(&self) {
        self.device.release_memory();
    }

    /// Runs a graph on tensors, keeping the session under `op` for the next call with equal layouts.
    pub(crate) fn call(
        &self,
        op: String,
        inputs: &[&Tensor],
        graph: impl FnOnce() -> Result<Graph, Error>,
    ) -> Result<Vec<Tensor>, Error> {
        let layouts = inputs.iter().map(|tensor| (tensor.dtype(), tensor.layout().clone())).collect();
        let key = Key { op, inputs: layouts };
        let known = self.lock().get(&key).cloned();
        let session = match known {
            Some(session) => session,
            None => {
                let graph = graph()?;
                let layouts: Vec<Layout> = inputs.iter().map(|tensor| tensor.layout().clone()).collect();
                let options = SessionOptions::from(catalog::strategy(&graph)).layouts(layouts);
                let session = Session::new(self, &graph, options)?;
                self.keep(key, Arc::new(Mutex::new(session)))
            }
        };
        let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
        session.run(inputs)?;
        (0..session.graph().outputs().len()).map(|index| session.output(index)).collect()
    }

    fn keep(&self, key: Key, session: Arc<Mutex<Session>>) -> Arc<Mutex<Session>> {
        let mut sessions = self.lock();
        if sessions.len() >= SESSIONS {
            sessions.retain(|_, kept| Arc::strong_count(kept) > 1);
        }
        sessions.entry(key).or_insert(session).clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Arc<Mutex<Session>>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tensor {
    /// Copies raw bytes in row-major order, once, directly to the memory that the engine's kernels read fastest.
    pub fn upload(engine: &Engine, dtype: Dtype, shape: impl Into<Shape>, bytes: &[u8]) -> Result<Tensor, Error> {
        Tensor::on(engine.device(), dtype, shape.into(), bytes)
    }

    /// The same tensor in the memory that the engine's kernels read fastest.
    pub fn to_device(&self, engine: &Engine) -> Result<Tensor, Error> {
        self.uploaded(engine.device())
    }
}
