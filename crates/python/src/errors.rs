//! Errors of the engine as Python's.

use std::fmt::Display;

use deuteron::reference::ReferenceError;
use deuteron::{DeviceError, Error, GraphError};
use pyo3::PyErr;
use pyo3::exceptions::{PyIndexError, PyMemoryError, PyOverflowError, PyRuntimeError, PyTypeError, PyValueError};

/// An error of the engine, with the op it came from.
pub(crate) fn of(op: &str, error: Error) -> PyErr {
    let said = error.to_string();
    let text = if said.starts_with(op) { said } else { format!("{op}: {said}") };
    match &error {
        Error::Device(DeviceError::OutOfMemory { .. }) | Error::Reference(ReferenceError::OutOfMemory { .. }) => {
            PyMemoryError::new_err(text)
        }
        Error::Device(DeviceError::Index { .. } | DeviceError::EarlierIndex { .. }) => PyIndexError::new_err(text),
        Error::Reference(ReferenceError::IndexRange { .. }) | Error::Target { .. } => PyIndexError::new_err(text),
        Error::Device(_) => PyRuntimeError::new_err(text),
        Error::NoBackward(_) | Error::Graph(GraphError::NoGradient { .. }) => PyTypeError::new_err(text),
        _ => PyValueError::new_err(text),
    }
}

/// Whole numbers of 64 bits that kernels, which have 32, do not hold.
pub(crate) fn beyond_32_bits(name: &dyn Fn() -> String) -> PyErr {
    PyOverflowError::new_err(format!(
        "{}: expected whole numbers that 32 bits hold, got some beyond; graphs have no others",
        name()
    ))
}

pub(crate) fn bad_value(error: impl Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

pub(crate) fn bad_type(error: impl Display) -> PyErr {
    PyTypeError::new_err(error.to_string())
}

pub(crate) fn failed(error: impl Display) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}
