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
    /// `threading.RLock`, held while a generator is asked and moved on: calls of Python may let other threads go on
    turn: Py<PyAny>,
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
    fn new(py: Python<'_>, draw: Py<PyAny>) -> PyResult<Decks> {
        let turn = py.import("threading")?.call_method0("RLock")?.unbind();
        Ok(Decks { draw, turn, known: Mutex::default() })
    }

    /// The next seed beside a tensor; none where torch must draw it itself.
    fn deal<'py>(&self, like: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let dealer = torch::dealer(like)?;
        dealer.map(|(ordinal, stream, generator)| self.deal_at(ordinal, stream, &generator)).transpose()
    }

    /// The next seed of a generator, on a GPU and for a stream.
    fn deal_at<'py>(&self, ordinal: usize, stream: u64, generator: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = generator.py();
        let lock = self.turn.bind(py);
        lock.call_method0(intern!(py, "acquire"))?;
        let next = next(generator);
        lock.call_method0(intern!(py, "release"))?;
        let (turn, seed) = next?;
        let of = (seed, turn / DECK);
        let place = (turn % DECK) as usize;
        {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(deck) = known.get(&(ordinal, stream)).filter(|deck| deck.of == of) {
                return deck.seeds.bind(py).get_item(place);
            }
        }
        let drawn = self.draw.bind(py).call1((ordinal, of.0, of.1 * DECK * STEP, DECK))?.cast_into::<PyTuple>()?;
        let dealt = drawn.get_item(place)?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let full = known.len() >= DECKS && !known.contains_key(&(ordinal, stream));
        // Tensors are freed when nobody waits for the lock.
        let others = if full { std::mem::take(&mut *known) } else { HashMap::new() };
        let before = known.insert((ordinal, stream), Deck { of, seeds: drawn.unbind() });
        drop(known);
        drop((others, before));
        Ok(dealt)
    }
}

/// How many seeds a generator has dealt, and its own seed. It is moved on.
fn next(generator: &Bound<'_, PyAny>) -> PyResult<(u64, u64)> {
    let py = generator.py();
    let turn = generator.call_method0(intern!(py, "get_offset"))?.extract::<u64>()? / STEP;
    generator.call_method1(intern!(py, "set_offset"), ((turn + 1) * STEP,))?;
    Ok((turn, generator.call_method0(intern!(py, "initial_seed"))?.extract()?))
}
