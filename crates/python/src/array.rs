//! Results for operands passed by DLPack: our memory, which also supports DLPack.

use std::sync::Mutex;

use deuteron::{Shape, Tensor};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::dlpack;
use crate::engines::Place;
use crate::errors::{bad_type, bad_value};
use crate::operand::{Axes, Element, Library, Operand};

/// An array on the CPU. `numpy.from_dlpack`, `torch.from_dlpack` and others take it without a copy; `numpy.asarray` too.
#[pyclass(frozen, module = "deuteron")]
pub(crate) struct Array {
    element: Element,
    shape: Shape,
    address: u64,
    /// Owns the memory at `address`, which is written to by whoever it was made for and then by nobody of ours.
    _memory: Mutex<Tensor>,
}

#[pymethods]
impl Array {
    /// Its sizes.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.shape.dims())
    }

    /// `"f32"`, `"bf16"`, ...
    #[getter]
    fn dtype(&self) -> &'static str {
        self.element.name()
    }

    #[pyo3(signature = (**_options))]
    fn __dlpack__<'py>(slf: &Bound<'py, Array>, _options: Option<&Bound<'py, PyDict>>) -> PyResult<Bound<'py, PyAny>> {
        let array = slf.get();
        dlpack::export(slf.as_any(), array.address, array.element, array.shape.dims())
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }

    fn __repr__(&self) -> String {
        format!("deuteron.Array({}{})", self.element.name(), self.shape)
    }
}

/// An array of zeros for a result.
pub(crate) fn empty<'py>(py: Python<'py>, element: Element, shape: &Shape) -> PyResult<(Bound<'py, PyAny>, u64)> {
    // Twice as many elements of four bytes have the bytes of doubles.
    let stored = match element {
        Element::Of(_) => shape.clone(),
        Element::F64 => Shape::from([2 * shape.elements()]),
    };
    let mut memory = Tensor::filled(element.dtype(), stored, 0.0).map_err(bad_value)?;
    let bytes = memory.bytes_mut().ok_or_else(|| bad_type("memory that is shared"))?;
    let address = bytes.as_mut_ptr() as u64;
    let made = Array { element, shape: shape.clone(), address, _memory: Mutex::new(memory) };
    Ok((Bound::new(py, made)?.into_any(), address))
}

/// The operand that an array of ours is; none of another object.
pub(crate) fn operand<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Operand<'py>>> {
    let Ok(array) = object.cast::<Array>() else { return Ok(None) };
    let array = array.get();
    let sizes: Vec<i64> = array.shape.dims().iter().map(|&size| size as i64).collect();
    let axes = Axes::new(&sizes, None).ok_or_else(|| bad_type("an array with too many axes"))?;
    let (library, element, address) = (Library::Dlpack, array.element, array.address);
    let (place, transposed, object) = (Place::Cpu, false, object.clone());
    Ok(Some(Operand { library, element, axes, address, place, transposed, object }))
}
