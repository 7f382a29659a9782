//! Arrays of NumPy, by what `__array_interface__` says.

use deuteron::{Dtype, MAX_RANK};
use pyo3::basic::CompareOp;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::engines::Place;
use crate::errors::{bad_type, beyond_32_bits};
use crate::operand::{Axes, Element, Library, Operand, Transposition};

/// The operand that an array is; none of an object that does not say where its elements lie.
pub(crate) fn operand<'py>(
    object: &Bound<'py, PyAny>,
    transposition: Transposition,
    name: &dyn Fn() -> String,
) -> PyResult<Option<Operand<'py>>> {
    let py = object.py();
    let Some(interface) = object.getattr_opt(intern!(py, "__array_interface__"))? else { return Ok(None) };
    let dtype = object.getattr(intern!(py, "dtype"))?;
    if !dtype.getattr(intern!(py, "isnative"))?.is_truthy()? {
        let native = dtype.call_method1(intern!(py, "newbyteorder"), ("=",))?;
        return operand(&object.call_method1(intern!(py, "astype"), (native,))?, transposition, name);
    }
    let dtype = dtype.getattr(intern!(py, "name"))?.extract::<String>()?;
    if dtype == "int64" {
        let narrow = object.call_method1(intern!(py, "clip"), (i32::MIN, i32::MAX))?;
        if narrow.rich_compare(object, CompareOp::Ne)?.call_method0("any")?.is_truthy()? {
            return Err(beyond_32_bits(name));
        }
        let narrow = narrow.call_method1(intern!(py, "astype"), ("int32",))?;
        return operand(&narrow, transposition, name);
    }
    let element = element(&dtype).ok_or_else(|| {
        bad_type(format!(
            "{}: expected float32, float16, bfloat16, float64, int32, int64, int8 or bool, got {dtype}",
            name()
        ))
    })?;
    let sizes: Vec<i64> = object.getattr(intern!(py, "shape"))?.extract()?;
    let strides: Vec<i64> = object.getattr(intern!(py, "strides"))?.extract()?;
    let (address, _): (u64, bool) = interface.get_item(intern!(py, "data"))?.extract()?;
    let size = element.bytes() as i64;
    let whole = strides.iter().all(|stride| stride % size == 0) && address.is_multiple_of(size as u64);
    let strides: Vec<i64> = strides.iter().map(|stride| stride / size).collect();
    if sizes.len() > MAX_RANK {
        return Err(bad_type(format!("{}: expected at most {MAX_RANK} axes, got {}", name(), sizes.len())));
    }
    match Axes::new(&sizes, Some(&strides)) {
        Some(axes)
            if whole
                && (axes.reads_in_place()
                    || (transposition == Transposition::Allowed && axes.transposed().is_some())) =>
        {
            let (library, place, object) = (Library::Numpy, Place::Cpu, object.clone());
            let (axes, transposed) = axes.transposed().map_or((axes, false), |axes| (axes, true));
            Ok(Some(Operand { library, element, axes, address, place, transposed, object }))
        }
        _ => {
            let order = PyDict::new(py);
            order.set_item(intern!(py, "order"), "C")?;
            operand(&object.call_method(intern!(py, "copy"), (), Some(&order))?, transposition, name)
        }
    }
}

fn element(dtype: &str) -> Option<Element> {
    Some(match dtype {
        "float32" => Element::Of(Dtype::F32),
        "float16" => Element::Of(Dtype::F16),
        "bfloat16" => Element::Of(Dtype::Bf16),
        "float64" => Element::F64,
        "int32" => Element::Of(Dtype::I32),
        "int8" => Element::Of(Dtype::I8),
        "bool" => Element::Of(Dtype::Bool),
        _ => return None,
    })
}

/// An array for a result, beside another one.
pub(crate) fn empty<'py>(
    beside: &Bound<'py, PyAny>,
    element: Element,
    sizes: &Bound<'py, PyTuple>,
) -> PyResult<(Bound<'py, PyAny>, u64)> {
    let py = beside.py();
    let module = py.import(intern!(py, "numpy"))?;
    let name = match element {
        Element::Of(Dtype::F32) => "float32",
        Element::Of(Dtype::F16) => "float16",
        Element::F64 => "float64",
        Element::Of(Dtype::I32) => "int32",
        Element::Of(Dtype::I8) => "int8",
        Element::Of(Dtype::Bool) => "bool",
        // NumPy itself has none; the library of the operand has its dtype.
        Element::Of(_) => "",
    };
    let dtype =
        if name.is_empty() { beside.getattr(intern!(py, "dtype"))? } else { name.into_pyobject(py)?.into_any() };
    let made = module.call_method1(intern!(py, "empty"), (sizes, dtype))?;
    let interface = made.getattr(intern!(py, "__array_interface__"))?;
    let (address, _): (u64, bool) = interface.get_item(intern!(py, "data"))?.extract()?;
    Ok((made, address))
}
