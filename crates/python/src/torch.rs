//! Tensors of PyTorch, without linking to it: attributes by name, each asked once a call.

use deuteron::{Dtype, Shape, Span};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

use crate::engines::Place;
use crate::errors::bad_type;
use crate::operand::{Element, Library, Operand, layout, reads_in_place};

/// What is needed of the module, found once.
struct Torch {
    tensor: Py<PyAny>,
    dtypes: Vec<(Py<PyAny>, Element)>,
    int64: Py<PyAny>,
    int32: Py<PyAny>,
    empty: Py<PyAny>,
    /// `torch._C._cuda_getCurrentRawStream`, where torch was built with CUDA
    stream: Option<Py<PyAny>>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// Kernels load vectors of this many bytes.
const VECTOR: u64 = 16;

const DTYPES: [(&str, Element); 7] = [
    ("float32", Element::Of(Dtype::F32)),
    ("bfloat16", Element::Of(Dtype::Bf16)),
    ("float16", Element::Of(Dtype::F16)),
    ("float64", Element::F64),
    ("int32", Element::Of(Dtype::I32)),
    ("int8", Element::Of(Dtype::I8)),
    ("bool", Element::Of(Dtype::Bool)),
];

/// The module, if someone has loaded it: an object of a module that nobody loaded cannot be there.
fn torch(py: Python<'_>) -> PyResult<Option<&Torch>> {
    if let Some(torch) = TORCH.get(py) {
        return Ok(Some(torch));
    }
    let modules = py.import("sys")?.getattr("modules")?;
    let Ok(module) = modules.get_item("torch") else { return Ok(None) };
    // While torch itself is being imported there is no tensor yet.
    let (Ok(tensor), Ok(empty)) = (module.getattr("Tensor"), module.getattr("empty")) else { return Ok(None) };
    let dtype = |name: &str| module.getattr(name).map(Bound::unbind);
    let dtypes = DTYPES.iter().map(|&(name, element)| Ok((dtype(name)?, element))).collect::<PyResult<_>>()?;
    let stream = module.getattr("_C").and_then(|c| c.getattr("_cuda_getCurrentRawStream")).ok().map(Bound::unbind);
    let (int64, int32) = (dtype("int64")?, dtype("int32")?);
    let found = Torch { tensor: tensor.unbind(), dtypes, int64, int32, empty: empty.unbind(), stream };
    Ok(Some(TORCH.get_or_init(py, || found)))
}

/// The operand that a tensor is; none of another object.
pub(crate) fn operand<'py>(object: &Bound<'py, PyAny>, name: &dyn Fn() -> String) -> PyResult<Option<Operand<'py>>> {
    let py = object.py();
    let Some(torch) = torch(py)? else { return Ok(None) };
    if !object.is_instance(torch.tensor.bind(py))? {
        return Ok(None);
    }
    let dtype = object.getattr(intern!(py, "dtype"))?;
    if dtype.is(&torch.int64) {
        let narrow = object.call_method1(intern!(py, "to"), (&torch.int32,))?;
        return described(&narrow, Element::Of(Dtype::I32), name, Copy::Allowed).map(Some);
    }
    let known = torch.dtypes.iter().find(|(known, _)| dtype.is(known)).map(|&(_, element)| element);
    let element = known.ok_or_else(|| {
        let got = dtype.str().map_or_else(|_| "another".into(), |text| text.to_string());
        bad_type(format!(
            "{}: expected float32, bfloat16, float16, float64, int32, int64, int8 or bool, got {got}",
            name()
        ))
    })?;
    described(object, element, name, Copy::Allowed).map(Some)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Copy {
    Allowed,
    Made,
}

fn described<'py>(
    object: &Bound<'py, PyAny>,
    element: Element,
    name: &dyn Fn() -> String,
    copy: Copy,
) -> PyResult<Operand<'py>> {
    let py = object.py();
    let place = place(object, name)?;
    let sizes: Vec<usize> = object.getattr(intern!(py, "shape"))?.extract()?;
    let strides: Vec<isize> = object.call_method0(intern!(py, "stride"))?.extract()?;
    let address: u64 = object.call_method0(intern!(py, "data_ptr"))?.extract()?;
    let found = layout(&sizes, &strides, element);
    let aligned = place == Place::Cpu || address.is_multiple_of(VECTOR);
    match found {
        Some((layout, bytes)) if aligned && (copy == Copy::Made || reads_in_place(&layout)) => {
            let span = Span { address, bytes };
            Ok(Operand { library: Library::Torch, element, layout, span, place, object: object.clone() })
        }
        _ if copy == Copy::Allowed => {
            let keywords = PyDict::new(py);
            let module = py.import(intern!(py, "torch"))?;
            keywords.set_item(intern!(py, "memory_format"), module.getattr(intern!(py, "contiguous_format"))?)?;
            let made = object.call_method(intern!(py, "clone"), (), Some(&keywords))?;
            described(&made, element, name, Copy::Made)
        }
        _ => Err(bad_type(format!("{}: its sizes {sizes:?} are too large", name()))),
    }
}

fn place(object: &Bound<'_, PyAny>, name: &dyn Fn() -> String) -> PyResult<Place> {
    let py = object.py();
    if object.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
        return Ok(Place::Cuda(object.call_method0(intern!(py, "get_device"))?.extract()?));
    }
    if object.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
        return Ok(Place::Cpu);
    }
    let device = object.getattr(intern!(py, "device"))?.str()?;
    Err(PyTypeError::new_err(format!("{}: expected a tensor on cpu or cuda, got one on {device}", name())))
}

/// A tensor for a result, beside another one.
pub(crate) fn empty<'py>(
    beside: &Bound<'py, PyAny>,
    element: Element,
    shape: &Shape,
) -> PyResult<(Bound<'py, PyAny>, u64)> {
    let py = beside.py();
    let torch = torch(py)?.ok_or_else(|| bad_type("expected torch to be loaded"))?;
    let dtype = torch.dtypes.iter().find(|(_, known)| *known == element).map(|(dtype, _)| dtype);
    let dtype = dtype.ok_or_else(|| bad_type(format!("torch has no dtype for {}", element.name())))?;
    let keywords = PyDict::new(py);
    keywords.set_item(intern!(py, "dtype"), dtype)?;
    keywords.set_item(intern!(py, "device"), beside.getattr(intern!(py, "device"))?)?;
    let sizes = PyTuple::new(py, shape.dims())?;
    let made = torch.empty.bind(py).call((sizes,), Some(&keywords))?;
    let address = made.call_method0(intern!(py, "data_ptr"))?.extract()?;
    Ok((made, address))
}

/// The stream that torch enqueues on at present.
pub(crate) fn stream(py: Python<'_>, ordinal: usize) -> PyResult<u64> {
    match torch(py)?.and_then(|torch| torch.stream.as_ref()) {
        Some(stream) => stream.bind(py).call1((ordinal,))?.extract(),
        None => Ok(0),
    }
}
