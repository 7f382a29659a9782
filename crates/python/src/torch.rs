//! Tensors of PyTorch, without linking to it: by the functions that it offers for DLPack, or by attributes where it is too old to.

use deuteron::{Dtype, MAX_RANK};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

use crate::dlpack::{Described, Exchange, Seen, Stored};
use crate::engines::Place;
use crate::errors::{bad_type, beyond_32_bits};
use crate::operand::{Axes, Element, Library, Operand, Transposition};
use crate::threads;

/// What is needed of the module, found once.
struct Torch {
    tensor: Py<PyAny>,
    parameter: Py<PyAny>,
    /// `torch.Tensor.is_neg`
    is_neg: Py<PyAny>,
    exchange: Option<Exchange>,
    dtypes: Vec<(Py<PyAny>, Element)>,
    int64: Py<PyAny>,
    int32: Py<PyAny>,
    empty_strided: Py<PyAny>,
    quick: Quick,
    cuda: Py<PyAny>,
    /// `torch._C._cuda_getCurrentRawStream`, where torch was built with CUDA
    stream: Option<Py<PyAny>>,
    /// `torch._C._cuda_isCurrentStreamCapturing`, likewise
    is_capturing: Option<Py<PyAny>>,
    is_grad_enabled: Py<PyAny>,
    /// whether it has complex numbers of two `bf16`
    complex_bf16: bool,
    /// functions that say whether torch looks at calls instead of doing them
    watches: Watches,
}

impl Torch {
    /// The object that a type of elements is.
    fn dtype<'py>(&self, py: Python<'py>, element: Element) -> PyResult<&Bound<'py, PyAny>> {
        let dtype = self.dtypes.iter().find(|(_, known)| *known == element).map(|(dtype, _)| dtype.bind(py));
        dtype.ok_or_else(|| bad_type(format!("torch has no dtype for {}", element.name())))
    }
}

/// Functions that make tensors faster than `torch.empty_strided` does, where torch has them: they ask no dispatcher.
#[derive(Default)]
struct Quick {
    cpu: Option<Py<PyAny>>,
    /// on the device that is current
    cuda: Option<Py<PyAny>>,
    /// `torch._C._cuda_getDevice`: which that is
    current: Option<Py<PyAny>>,
}

impl Quick {
    fn of(torch: &Bound<'_, PyAny>) -> Quick {
        let Ok(native) = torch.getattr("_C") else { return Quick::default() };
        let Ok(guards) = native.getattr("_dynamo").and_then(|dynamo| dynamo.getattr("guards")) else {
            return Quick::default();
        };
        let named = |module: &Bound<'_, PyAny>, name: &str| module.getattr(name).ok().map(Bound::unbind);
        Quick {
            cpu: named(&guards, "_empty_strided_cpu"),
            cuda: named(&guards, "_empty_strided_cuda"),
            current: named(&native, "_cuda_getDevice"),
        }
    }

    /// The one that makes tensors at a place.
    fn at(&self, py: Python<'_>, place: Place) -> PyResult<Option<&Py<PyAny>>> {
        Ok(match (place, &self.current) {
            (Place::Cpu, _) => self.cpu.as_ref(),
            (Place::Cuda(ordinal), Some(current)) if current.bind(py).call0()?.extract::<usize>()? == ordinal => {
                self.cuda.as_ref()
            }
            (Place::Cuda(_), _) => None,
        })
    }
}

/// What may stand between a call of tensors and its doing.
struct Watches {
    /// `torch._C._len_torch_dispatch_stack`
    modes: Py<PyAny>,
    /// `torch._C._functorch.peek_interpreter_stack`
    transforms: Py<PyAny>,
    /// `torch._C._is_any_autocast_enabled`
    autocast: Py<PyAny>,
    /// `torch.autograd.forward_ad`, which knows of tangents
    tangents: Py<PyAny>,
}

impl Watches {
    fn of(torch: &Bound<'_, PyAny>) -> PyResult<Watches> {
        let native = torch.getattr("_C")?;
        Ok(Watches {
            modes: native.getattr("_len_torch_dispatch_stack")?.unbind(),
            transforms: native.getattr("_functorch")?.getattr("peek_interpreter_stack")?.unbind(),
            autocast: native.getattr("_is_any_autocast_enabled")?.unbind(),
            tangents: torch.py().import("torch.autograd.forward_ad")?.into_any().unbind(),
        })
    }

    /// Whether what torch makes now may stand for something else: under a transform of functorch, or where it is not computed.
    fn stand_in(&self, py: Python<'_>) -> PyResult<bool> {
        if !self.transforms.bind(py).call0()?.is_none() {
            return Ok(true);
        }
        if !self.modes.bind(py).call0()?.is_truthy()? {
            return Ok(false);
        }
        let native = py.import("torch")?.getattr("_C")?;
        let keys = native.getattr("_TorchDispatchModeKey")?;
        for name in ["FAKE", "PROXY", "FUNCTIONAL"] {
            if !native.call_method1("_get_dispatch_mode", (keys.getattr(name)?,))?.is_none() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether any does.
    fn any(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.modes.bind(py).call0()?.is_truthy()?
            || !self.transforms.bind(py).call0()?.is_none()
            || self.autocast.bind(py).call0()?.is_truthy()?
            || self.tangents.bind(py).getattr(intern!(py, "_current_level"))?.extract::<i64>()? >= 0)
    }
}

/// How operands are to be met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    /// directly: plain tensors, without interception by torch
    Plain,
    /// so that a gradient can be taken: plain tensors
    Differentiated,
    /// by rules of Python: other objects, or someone looks at calls of torch
    Other,
}

/// How torch would have a call on these operands done.
pub(crate) fn manner(py: Python<'_>, operands: &[Bound<'_, PyAny>]) -> PyResult<Manner> {
    let Some(torch) = torch(py)? else { return Ok(Manner::Other) };
    let mut wants = false;
    for operand in operands {
        let class = operand.get_type();
        if !class.is(&torch.tensor) && !class.is(&torch.parameter) {
            return Ok(Manner::Other);
        }
        wants = wants || operand.getattr(intern!(py, "requires_grad"))?.is_truthy()?;
    }
    if torch.watches.any(py)? {
        return Ok(Manner::Other);
    }
    let differentiated = wants && torch.is_grad_enabled.bind(py).call0()?.is_truthy()?;
    Ok(if differentiated { Manner::Differentiated } else { Manner::Plain })
}

/// Whether plain tensors are to be met at once, as [`manner`] says it.
pub(crate) fn is_plain(py: Python<'_>, operands: &Bound<'_, PyTuple>) -> PyResult<bool> {
    let Some(torch) = TORCH.get(py) else { return Ok(false) };
    if torch.watches.any(py)? {
        return Ok(false);
    }
    if torch.is_grad_enabled.bind(py).call0()?.is_truthy()? {
        for operand in operands.iter_borrowed() {
            if operand.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// What is to be known of a plain tensor on the CPU to find others like it.
pub(crate) fn see(py: Python<'_>, object: &Bound<'_, PyAny>, element: Element) -> Option<Seen> {
    TORCH.get(py)?.exchange?.see(object, element)
}

/// Where an object is, if it is a plain tensor like that, which kernels read in place.
pub(crate) fn address_of_same(object: &Bound<'_, PyAny>, seen: &Seen) -> PyResult<Option<u64>> {
    let Some(torch) = TORCH.get(object.py()) else { return Ok(None) };
    let class = object.get_type_ptr().cast();
    if class != torch.tensor.as_ptr() && class != torch.parameter.as_ptr() {
        return Ok(None);
    }
    let found = torch.exchange.and_then(|exchange| exchange.address_of_same(object, seen));
    let Some(address) = found.filter(|address| address.is_multiple_of(seen.element.bytes() as u64)) else {
        return Ok(None);
    };
    Ok((!is_negated(torch, object, seen.element)?).then_some(address))
}

/// Whether a tensor is a view that stands for its negative, as the imaginary part of a conjugate does; memory does not show it.
fn is_negated(torch: &Torch, object: &Bound<'_, PyAny>, element: Element) -> PyResult<bool> {
    let may_be = element.is_float() && (torch.complex_bf16 || element != Element::Of(Dtype::Bf16));
    Ok(may_be && torch.is_neg.bind(object.py()).call1((object,))?.is_truthy()?)
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
    let (Ok(tensor), Ok(nn)) = (module.getattr("Tensor"), module.getattr("nn")) else { return Ok(None) };
    let Ok(parameter) = nn.getattr("Parameter") else { return Ok(None) };
    let named = |name: &str| module.getattr(name).map(Bound::unbind);
    let dtypes = DTYPES.iter().map(|&(name, element)| Ok((named(name)?, element))).collect::<PyResult<_>>()?;
    let native = |name: &str| module.getattr("_C").and_then(|c| c.getattr(name)).ok().map(Bound::unbind);
    let found = Torch {
        exchange: Exchange::of(&tensor),
        is_neg: tensor.getattr("is_neg")?.unbind(),
        tensor: tensor.unbind(),
        parameter: parameter.unbind(),
        dtypes,
        int64: named("int64")?,
        int32: named("int32")?,
        empty_strided: named("empty_strided")?,
        quick: Quick::of(&module),
        cuda: named("cuda")?,
        stream: native("_cuda_getCurrentRawStream"),
        is_capturing: native("_cuda_isCurrentStreamCapturing"),
        is_grad_enabled: named("is_grad_enabled")?,
        complex_bf16: module.hasattr("bcomplex32")?,
        watches: Watches::of(&module)?,
    };
    threads::share(&module);
    Ok(Some(TORCH.get_or_init(py, || found)))
}

/// The operand that a tensor is; none of another object.
pub(crate) fn operand<'py>(
    object: &Bound<'py, PyAny>,
    transposition: Transposition,
    name: &dyn Fn() -> String,
) -> PyResult<Option<Operand<'py>>> {
    let py = object.py();
    let Some(torch) = torch(py)? else { return Ok(None) };
    let class = object.get_type();
    if !class.is(&torch.tensor) && !class.is(&torch.parameter) && !object.is_instance(torch.tensor.bind(py))? {
        return Ok(None);
    }
    suited(torch, object, transposition, name, Copied::No).map(Some)
}

/// Whether a tensor is a copy that we had made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Copied {
    No,
    Yes,
}

/// The operand of a tensor, or of a copy of it that kernels can read.
fn suited<'py>(
    torch: &Torch,
    object: &Bound<'py, PyAny>,
    transposition: Transposition,
    name: &dyn Fn() -> String,
    copied: Copied,
) -> PyResult<Operand<'py>> {
    let py = object.py();
    let Described { stored, axes, address, place } = match describe(torch, object) {
        Ok(described) => described,
        Err(error) => return Err(no_memory(object, name, error)),
    };
    let Some(place) = place else {
        let device = object.getattr(intern!(py, "device"))?.str()?;
        return Err(bad_type(format!("{}: expected a tensor on cpu or cuda, got one on {device}", name())));
    };
    let element = match stored {
        Some(Stored::As(element)) => element,
        Some(Stored::Long) => {
            // What is outside of 32 bits stays outside of every table. To look for it would wait for a GPU.
            let narrow = object.call_method1(intern!(py, "clamp"), (i32::MIN, i32::MAX))?;
            let differs = || narrow.call_method1(intern!(py, "ne"), (object,))?.call_method0(intern!(py, "any"));
            if place == Place::Cpu && differs()?.is_truthy()? {
                return Err(beyond_32_bits(name));
            }
            let narrow = narrow.call_method1(intern!(py, "to"), (&torch.int32,))?;
            return suited(torch, &narrow, transposition, name, copied);
        }
        None => {
            let expected = "float32, bfloat16, float16, float64, int32, int64, int8 or bool";
            let got = object.getattr(intern!(py, "dtype"))?.str()?;
            return Err(bad_type(format!("{}: expected {expected}, got {got}", name())));
        }
    };
    if is_negated(torch, object, element)? {
        let plain = object.call_method0(intern!(py, "resolve_neg"))?;
        return suited(torch, &plain, transposition, name, copied);
    }
    let aligned = address.is_multiple_of(if place == Place::Cpu { element.bytes() as u64 } else { VECTOR });
    match axes {
        Some(axes)
            if aligned
                && (axes.reads_in_place()
                    || (transposition == Transposition::Allowed && axes.transposed().is_some())) =>
        {
            let (axes, transposed) = axes.transposed().map_or((axes, false), |axes| (axes, true));
            let (library, object) = (Library::Torch, object.clone());
            Ok(Operand { library, element, axes, address, place, transposed, object })
        }
        Some(_) if copied == Copied::No => {
            let keywords = PyDict::new(py);
            let module = py.import(intern!(py, "torch"))?;
            keywords.set_item(intern!(py, "memory_format"), module.getattr(intern!(py, "contiguous_format"))?)?;
            let made = object.call_method(intern!(py, "clone"), (), Some(&keywords))?;
            suited(torch, &made, transposition, name, Copied::Yes)
        }
        _ => {
            let shape = object.getattr(intern!(py, "shape"))?.str()?;
            Err(bad_type(format!("{}: expected at most {MAX_RANK} axes of usual sizes, got {shape}", name())))
        }
    }
}

/// Why a tensor has no memory to show: it is on a device without, or not dense.
fn no_memory(object: &Bound<'_, PyAny>, name: &dyn Fn() -> String, error: PyErr) -> PyErr {
    let device =
        object.getattr("device").and_then(|device| device.getattr("type")).and_then(|kind| kind.extract::<String>());
    match device {
        Ok(device) if device != "cpu" && device != "cuda" => {
            bad_type(format!("{}: expected a tensor on cpu or cuda, got one on {device}", name()))
        }
        _ => {
            let raised = bad_type(format!("{}: expected a dense tensor", name()));
            raised.set_cause(object.py(), Some(error));
            raised
        }
    }
}

fn describe(torch: &Torch, object: &Bound<'_, PyAny>) -> PyResult<Described> {
    if let Some(exchange) = torch.exchange
        && let Some(described) = exchange.describe(object)?
    {
        return Ok(described);
    }
    let py = object.py();
    let dtype = object.getattr(intern!(py, "dtype"))?;
    let known = torch.dtypes.iter().find(|(known, _)| dtype.is(known)).map(|&(_, element)| Stored::As(element));
    let sizes: Vec<i64> = object.getattr(intern!(py, "shape"))?.extract()?;
    let strides: Vec<i64> = object.call_method0(intern!(py, "stride"))?.extract()?;
    let place = if object.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
        Some(Place::Cuda(object.call_method0(intern!(py, "get_device"))?.extract()?))
    } else if object.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
        Some(Place::Cpu)
    } else {
        None
    };
    Ok(Described {
        stored: if dtype.is(&torch.int64) { Some(Stored::Long) } else { known },
        axes: Axes::new(&sizes, Some(&strides)),
        address: object.call_method0(intern!(py, "data_ptr"))?.extract()?,
        place,
    })
}

/// A tensor for a result on the CPU.
pub(crate) fn empty_on_cpu<'py>(
    py: Python<'py>,
    element: Element,
    [sizes, strides]: [&Bound<'py, PyTuple>; 2],
) -> PyResult<(Bound<'py, PyAny>, u64)> {
    let torch = torch(py)?.ok_or_else(|| bad_type("expected torch to be loaded"))?;
    let dtype = torch.dtype(py, element)?;
    let made = match &torch.quick.cpu {
        Some(quick) => quick.bind(py).call1((sizes, strides, dtype))?,
        None => {
            let keywords = PyDict::new(py);
            keywords.set_item(intern!(py, "dtype"), dtype)?;
            // Not where `torch.set_default_device` says.
            keywords.set_item(intern!(py, "device"), intern!(py, "cpu"))?;
            torch.empty_strided.bind(py).call((sizes, strides), Some(&keywords))?
        }
    };
    let address = describe(torch, &made)?.address;
    Ok((made, address))
}

/// A tensor for a result, beside another one.
pub(crate) fn empty<'py>(
    beside: &Operand<'py>,
    element: Element,
    [sizes, strides]: [&Bound<'py, PyTuple>; 2],
) -> PyResult<(Bound<'py, PyAny>, u64)> {
    let py = beside.object.py();
    let torch = torch(py)?.ok_or_else(|| bad_type("expected torch to be loaded"))?;
    let dtype = torch.dtype(py, element)?;
    let made = if let Some(quick) = torch.quick.at(py, beside.place)? {
        quick.bind(py).call1((sizes, strides, dtype))?
    } else {
        let keywords = PyDict::new(py);
        keywords.set_item(intern!(py, "dtype"), dtype)?;
        keywords.set_item(intern!(py, "device"), beside.object.getattr(intern!(py, "device"))?)?;
        torch.empty_strided.bind(py).call((sizes, strides), Some(&keywords))?
    };
    let address = describe(torch, &made)?.address;
    Ok((made, address))
}

/// GPU, stream and generator of a plain tensor whose seeds may come from a batch: torch computes now, under no transform or tracing mode,
/// and captures no CUDA graph.
pub(crate) fn seed_source<'py>(like: &Bound<'py, PyAny>) -> PyResult<Option<(usize, u64, Bound<'py, PyAny>)>> {
    let py = like.py();
    let Some(torch) = torch(py)? else { return Ok(None) };
    let class = like.get_type();
    if !class.is(&torch.tensor) && !class.is(&torch.parameter) {
        return Ok(None);
    }
    let Ok(Described { place: Some(Place::Cuda(ordinal)), .. }) = describe(torch, like) else { return Ok(None) };
    // What is current is asked: tensors of another GPU are left to torch.
    let current = torch.quick.current.as_ref().map(|ask| ask.bind(py).call0()?.extract::<usize>()).transpose()?;
    if current != Some(ordinal) {
        return Ok(None);
    }
    let capturing = torch.is_capturing.as_ref().map(|ask| ask.bind(py).call0()?.is_truthy()).transpose()?;
    if capturing != Some(false) || torch.watches.stand_in(py)? {
        return Ok(None);
    }
    let generator = torch.cuda.bind(py).getattr(intern!(py, "default_generators"))?.get_item(ordinal)?;
    Ok(Some((ordinal, stream(py, ordinal)?, generator)))
}

/// The stream that torch enqueues on at present.
pub(crate) fn stream(py: Python<'_>, ordinal: usize) -> PyResult<u64> {
    let Some(torch) = torch(py)? else { return Ok(0) };
    if let Some(stream) = torch.exchange.and_then(|exchange| exchange.stream(ordinal)) {
        return Ok(stream);
    }
    torch.stream.as_ref().map_or(Ok(0), |stream| stream.bind(py).call1((ordinal,))?.extract())
}
