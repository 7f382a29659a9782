//! Seeds on a GPU, drawn in batches, as each would take a kernel of its own.
//!
//! Which seed comes next depends on the generator of torch alone: its seed and its offset, which taking a seed advances as an op of
//! torch would. So a restored state, as from a checkpoint, gives the same seeds again.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::torch;

/// Seeds of a batch.
const BATCH: u64 = 256;
/// By how much one seed advances the generator.
const STEP: u64 = 4;
/// Batches kept, at most.
const BATCHES: usize = 64;

/// Batches of seeds: one per GPU and stream, as other streams may not read yet what one stream writes.
#[pyclass(frozen, module = "deuteron._native")]
pub(crate) struct SeedBatches {
    /// draws a batch: `(device, seed, offset, count)` to a tuple of tensors
    draw: Py<PyAny>,
    /// `threading.RLock`, held while a generator is read and advanced: calls of Python may release the interpreter
    lock: Py<PyAny>,
    known: Mutex<HashMap<(usize, u64), Batch>>,
}

struct Batch {
    /// seed of the generator, and how many batches came before
    of: (u64, u64),
    seeds: Py<PyTuple>,
}

#[pymethods]
impl SeedBatches {
    #[new]
    fn new(py: Python<'_>, draw: Py<PyAny>) -> PyResult<SeedBatches> {
        let lock = py.import("threading")?.call_method0("RLock")?.unbind();
        Ok(SeedBatches { draw, lock, known: Mutex::default() })
    }

    /// The next seed beside a tensor; none where torch must draw it itself.
    fn next_seed<'py>(&self, like: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let source = torch::seed_source(like)?;
        source.map(|(ordinal, stream, generator)| self.next_seed_at(ordinal, stream, &generator)).transpose()
    }

    /// The next seed of a generator, on a GPU and for a stream.
    fn next_seed_at<'py>(
        &self,
        ordinal: usize,
        stream: u64,
        generator: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = generator.py();
        let lock = self.lock.bind(py);
        lock.call_method0(intern!(py, "acquire"))?;
        let advanced = advance(generator);
        lock.call_method0(intern!(py, "release"))?;
        let (count, seed) = advanced?;
        let of = (seed, count / BATCH);
        let place = (count % BATCH) as usize;
        {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(batch) = known.get(&(ordinal, stream)).filter(|batch| batch.of == of) {
                return batch.seeds.bind(py).get_item(place);
            }
        }
        let drawn = self.draw.bind(py).call1((ordinal, of.0, of.1 * BATCH * STEP, BATCH))?.cast_into::<PyTuple>()?;
        let next = drawn.get_item(place)?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let full = known.len() >= BATCHES && !known.contains_key(&(ordinal, stream));
        // Tensors are freed when nobody waits for the lock.
        let others = if full { std::mem::take(&mut *known) } else { HashMap::new() };
        let before = known.insert((ordinal, stream), Batch { of, seeds: drawn.unbind() });
        drop(known);
        drop((others, before));
        Ok(next)
    }
}

/// How many seeds a generator has given, and its own seed. Advances it.
fn advance(generator: &Bound<'_, PyAny>) -> PyResult<(u64, u64)> {
    let py = generator.py();
    let count = generator.call_method0(intern!(py, "get_offset"))?.extract::<u64>()? / STEP;
    generator.call_method1(intern!(py, "set_offset"), ((count + 1) * STEP,))?;
    Ok((count, generator.call_method0(intern!(py, "initial_seed"))?.extract()?))
}
