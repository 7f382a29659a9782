//! Storage of results: in the buffer of an earlier value if possible, rounded on request.

use std::sync::{Mutex, PoisonError};

use deuteron_graph::{Dtype, memory};

use crate::round::round_slice;

/// Values below this many elements are not worth keeping.
const LEAST_KEPT: usize = 1 << 16;
/// Most buffers kept: a few operations' worth.
const MOST_KEPT: usize = 8;

/// Buffers that values have left. Fresh pages cost a third of the time of a large elementwise operation.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    free: Mutex<Vec<Vec<f64>>>,
}

impl Buffers {
    /// Keeps a buffer; the smallest goes if there are too many.
    pub fn give(&self, buffer: Vec<f64>) {
        if buffer.len() < LEAST_KEPT {
            return;
        }
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(buffer);
        free.sort_by_key(Vec::len);
        if free.len() > MOST_KEPT {
            free.remove(0);
        }
    }

    /// A buffer whose contents do not matter.
    fn take(&self, length: usize) -> Option<Vec<f64>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        // Not much larger than needed, so that memory stays proportional to the live values.
        let position = free.iter().position(|buffer| (length..=2 * length).contains(&buffer.len()))?;
        let mut buffer = free.remove(position);
        buffer.truncate(length);
        Some(buffer)
    }
}

/// How an operation stores its result.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Store<'a> {
    /// The dtype to round to.
    pub rounding: Option<Dtype>,
    /// Where buffers come from.
    pub buffers: Option<&'a Buffers>,
}

impl Store<'_> {
    /// As it is, in fresh memory.
    pub const PLAIN: Store<'static> = Store { rounding: None, buffers: None };

    /// A buffer of any contents: the caller writes every element.
    pub fn buffer(self, length: usize) -> Vec<f64> {
        let kept = if length < LEAST_KEPT { None } else { self.buffers.and_then(|buffers| buffers.take(length)) };
        kept.unwrap_or_else(|| memory::zeros(length))
    }

    /// One step of a sum: kernels accumulate in `f32`, whatever they store.
    pub fn add(self, sum: f64, term: f64) -> f64 {
        match self.rounding {
            Some(_) => (sum as f32 + term as f32) as f64,
            None => sum + term,
        }
    }

    /// A sum in order.
    pub fn sum(self, terms: impl Iterator<Item = f64>) -> f64 {
        terms.fold(0.0, |sum, term| self.add(sum, term))
    }

    /// Rounds what has been computed.
    pub fn finish(self, values: &mut [f64]) {
        if let Some(dtype) = self.rounding {
            round_slice(dtype, values);
        }
    }
}
