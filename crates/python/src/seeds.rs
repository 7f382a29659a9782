//! Seeds on a GPU, drawn many at a time, as each would take a kernel of its own.
//!
//! Which seed comes next is told by the generator of torch alone: its own seed and how far it has come, which a deal moves on as an op
//! of torch would. So a state that is set again, as by a checkpoint, gives the same seeds again.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::torch;

/// Seeds that are drawn at a time.
const DECK: u64 = 256;
/// By how much one moves the generator on.
const STEP: u64 = 4;
/// Decks kept, at most.
const DECKS: usize = 64;

/// Decks of seeds: one for a GPU and a stream, as memory that one stream fills is not there for others yet.
#[pyclass(frozen, module = "deuteron._native")]
pub(crate) struct Decks {
    /// draws a deck: `(device, seed, offset, count)` to a tuple of tensors
    draw: Py<PyAny>,
    known: Mutex<HashMap<(usize, u64), Deck>>,
}

struct Deck {
    /// seed of the generator, and how many decks it had gone through
    of: (u64, u64),
    seeds: Py<PyTuple>,
}

#[pymethods]
impl Decks {
    #[new]
    fn new(draw: Py<PyAny>) -> Decks {
        Decks { draw, known: Mutex::default() }
    }

    /// The next seed beside a tensor; none where torch must draw it itself.
    fn deal<'py>(&self, like: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = like.py();
        let Some((ordinal, stream, generator)) = torch::dealer(like)? else { return Ok(None) };
        // No other thread of Python comes between these two.
        let turn = generator.call_method0(intern!(py, "get_offset"))?.extract::<u64>()? / STEP;
        generator.call_method1(intern!(py, "set_offset"), ((turn + 1) * STEP,))?;
        let of = (generator.call_method0(intern!(py, "initial_seed"))?.extract()?, turn / DECK);
        let place = (turn % DECK) as usize;
        {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(deck) = known.get(&(ordinal, stream)).filter(|deck| deck.of == of) {
                return deck.seeds.bind(py).get_item(place).map(Some);
            }
        }
        let drawn = self.draw.bind(py).call1((ordinal, of.0, of.1 * DECK * STEP, DECK))?.cast_into::<PyTuple>()?;
        let seed = drawn.get_item(place)?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let full = known.len() >= DECKS && !known.contains_key(&(ordinal, stream));
        // Tensors are freed when nobody waits for the lock.
        let others = if full { std::mem::take(&mut *known) } else { HashMap::new() };
        let before = known.insert((ordinal, stream), Deck { of, seeds: drawn.unbind() });
        drop(known);
        drop((others, before));
        Ok(Some(seed))
    }
}
