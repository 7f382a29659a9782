//! DLPack, by which array libraries exchange memory (the structures of version 0.8, which all of them support).

use std::ffi::{CStr, c_void};

use deuteron::{Dtype, MAX_RANK};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::engines::Place;
use crate::errors::{bad_type, bad_value};
use crate::operand::{Access, Axes, Element, Library, Operand};

const NAME: &CStr = c"dltensor";
/// Of a capsule that says its version and whether its memory may be written to.
const VERSIONED: &CStr = c"dltensor_versioned";
/// Flags of such a capsule.
const READ_ONLY: u64 = 1;
const COPIED: u64 = 2;
/// Of the functions that a library offers for its class.
const EXCHANGE: &CStr = c"dlpack_exchange_api";
/// The version whose structures these are.
const MAJOR: u32 = 1;
const CPU: i32 = 1;
const CUDA: i32 = 2;
/// Memory of the host that GPUs reach.
const PINNED: i32 = 3;

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    axes: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// What a capsule with a version holds.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Tensor,
}

/// The functions that a library offers for its class, of which two are used.
#[repr(C)]
struct Functions {
    major: u32,
    minor: u32,
    earlier: *const c_void,
    allocate: *const c_void,
    export: *const c_void,
    import: *const c_void,
    look: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut Tensor) -> i32>,
    stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> i32>,
}

/// code, bits: 0 signed whole numbers, 2 floats, 4 bfloat, 6 truth values
const DTYPES: [(u8, u8, Stored); 8] = [
    (2, 32, Stored::As(Element::Of(Dtype::F32))),
    (2, 16, Stored::As(Element::Of(Dtype::F16))),
    (4, 16, Stored::As(Element::Of(Dtype::Bf16))),
    (2, 64, Stored::As(Element::F64)),
    (0, 32, Stored::As(Element::Of(Dtype::I32))),
    (0, 8, Stored::As(Element::Of(Dtype::I8))),
    (6, 8, Stored::As(Element::Of(Dtype::Bool))),
    (0, 64, Stored::Long),
];

/// How elements are stored: as kernels take them, or as whole numbers of 64 bits, of which kernels take the lower half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    As(Element),
    Long,
}

/// What the structure of a tensor says.
pub(crate) struct Described {
    /// none where we have no such type
    pub stored: Option<Stored>,
    /// none where it has too many axes or runs backwards
    pub axes: Option<Axes>,
    pub address: u64,
    /// none where it is on a device that we know nothing of
    pub place: Option<Place>,
}

/// Type, sizes and strides of a tensor on the CPU.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    dtype: DataType,
    rank: usize,
    sizes: [i64; MAX_RANK],
    strides: [i64; MAX_RANK],
    /// What kernels take its elements as.
    pub element: Element,
}

/// # Safety
/// The tensor's sizes and strides are there.
unsafe fn described(tensor: &Tensor) -> Described {
    let DataType { code, bits, lanes } = tensor.dtype;
    let known = DTYPES.iter().find(|(of, wide, _)| lanes == 1 && *of == code && *wide == bits);
    let rank = usize::try_from(tensor.axes).unwrap_or(0);
    let numbers = |from: *const i64| match rank == 0 || from.is_null() {
        true => &[][..],
        // SAFETY: the protocol says that there are this many sizes, and as many strides where there are any.
        false => unsafe { std::slice::from_raw_parts(from, rank) },
    };
    let strides = (!tensor.strides.is_null()).then(|| numbers(tensor.strides));
    let place = match (tensor.device.kind, usize::try_from(tensor.device.id)) {
        (CPU | PINNED, _) => Some(Place::Cpu),
        (CUDA, Ok(ordinal)) => Some(Place::Cuda(ordinal)),
        _ => None,
    };
    Described {
        stored: known.map(|&(_, _, stored)| stored),
        axes: Axes::new(numbers(tensor.shape), strides),
        address: tensor.data as u64 + tensor.byte_offset,
        place,
    }
}

/// The functions of a library's class, if it offers them.
#[derive(Clone, Copy)]
pub(crate) struct Exchange(&'static Functions);

// SAFETY: the structure is never written to, and its functions are called with the interpreter held.
unsafe impl Send for Exchange {}
// SAFETY: as above.
unsafe impl Sync for Exchange {}

impl Exchange {
    /// Looks for them on a class.
    pub fn of(class: &Bound<'_, PyAny>) -> Option<Exchange> {
        let capsule = class.getattr("__dlpack_c_exchange_api__").ok()?;
        // SAFETY: a call of Python's on an object that lives; a capsule of another name is refused.
        let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), EXCHANGE.as_ptr()) };
        if pointer.is_null() {
            let _ = PyErr::take(class.py());
            return None;
        }
        // SAFETY: a capsule of that name holds such a structure, which the protocol says lives as long as the process; its first two
        // numbers are the same in all versions.
        let functions = unsafe { &*pointer.cast::<Functions>() };
        (functions.major == MAJOR).then_some(Exchange(functions))
    }

    /// What an object of the class is; an error of Python's where it has no memory to show.
    pub fn describe(self, object: &Bound<'_, PyAny>) -> PyResult<Option<Described>> {
        let Some(look) = self.0.look else { return Ok(None) };
        let mut tensor = std::mem::MaybeUninit::<Tensor>::uninit();
        // SAFETY: the object is of the class, and the interpreter is held; the structure is ours.
        if unsafe { look(object.as_ptr(), tensor.as_mut_ptr()) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: it was filled in, with sizes and strides that live as long as the object.
        Ok(Some(unsafe { described(&tensor.assume_init()) }))
    }

    /// What is to be known of an object on the CPU, whose elements kernels take as `element`, to find others like it.
    pub fn see(self, object: &Bound<'_, PyAny>, element: Element) -> Option<Seen> {
        let tensor = self.structure(object)?;
        let rank = usize::try_from(tensor.axes).ok().filter(|&rank| rank <= MAX_RANK)?;
        if tensor.device.kind != CPU || (rank > 0 && tensor.strides.is_null()) {
            return None;
        }
        let mut seen = Seen { dtype: tensor.dtype, rank, sizes: [0; MAX_RANK], strides: [0; MAX_RANK], element };
        for axis in 0..rank {
            // SAFETY: the protocol says that there are this many of both.
            (seen.sizes[axis], seen.strides[axis]) = unsafe { (*tensor.shape.add(axis), *tensor.strides.add(axis)) };
        }
        Some(seen)
    }

    /// Where an object is, if it is one like that.
    pub fn address_of_same(self, object: &Bound<'_, PyAny>, seen: &Seen) -> Option<u64> {
        let tensor = self.structure(object)?;
        let is_such = tensor.dtype == seen.dtype && tensor.device.kind == CPU && tensor.axes as usize == seen.rank;
        if !is_such || (seen.rank > 0 && tensor.strides.is_null()) {
            return None;
        }
        for axis in 0..seen.rank {
            // SAFETY: the protocol says that there are this many of both.
            let numbers = unsafe { (*tensor.shape.add(axis), *tensor.strides.add(axis)) };
            if numbers != (seen.sizes[axis], seen.strides[axis]) {
                return None;
            }
        }
        Some(tensor.data as u64 + tensor.byte_offset)
    }

    /// The structure of an object of the class; none where it has no memory to show.
    fn structure(self, object: &Bound<'_, PyAny>) -> Option<Tensor> {
        let mut tensor = std::mem::MaybeUninit::<Tensor>::uninit();
        // SAFETY: the object is of the class, and the interpreter is held; the structure is ours.
        if unsafe { self.0.look?(object.as_ptr(), tensor.as_mut_ptr()) } != 0 {
            let _ = PyErr::take(object.py());
            return None;
        }
        // SAFETY: it was filled in, with sizes and strides that live as long as the object.
        Some(unsafe { tensor.assume_init() })
    }

    /// The stream that the library enqueues on at present.
    pub fn stream(self, ordinal: usize) -> Option<u64> {
        let mut stream: *mut c_void = std::ptr::null_mut();
        // SAFETY: the interpreter is held; the pointer is to a handle of ours.
        let code = unsafe { self.0.stream?(CUDA, ordinal as i32, &mut stream) };
        (code == 0).then_some(stream as u64)
    }
}

/// The operand that an object with `__dlpack__` is; none of another object.
pub(crate) fn operand<'py>(
    object: &Bound<'py, PyAny>,
    access: Access,
    name: &dyn Fn() -> String,
) -> PyResult<Option<Operand<'py>>> {
    let py = object.py();
    let Some(method) = object.getattr_opt(intern!(py, "__dlpack__"))? else { return Ok(None) };
    let (kind, _): (i32, i32) = object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
    if kind != CPU && kind != PINNED {
        let problem = "expected an array on the CPU, got one on another device; use tensors of PyTorch there";
        return Err(bad_type(format!("{}: {problem}", name())));
    }
    let (capsule, Described { stored, axes, address, .. }) = match access {
        Access::Read => {
            let capsule = method.call0()?;
            let described = plain(&capsule, name)?;
            (capsule, described)
        }
        Access::Update => writable(&method, name)?,
    };
    let Some(Stored::As(element)) = stored else {
        let expected = "float32, float16, bfloat16, float64, int32, int8 or bool";
        return Err(bad_type(format!("{}: expected {expected}, got another type of DLPack's", name())));
    };
    match axes {
        Some(axes) if axes.reads_in_place() && address.is_multiple_of(element.bytes() as u64) => {
            let (library, place) = (Library::Dlpack, Place::Cpu);
            Ok(Some(Operand { library, element, axes, address, place, transposed: false, object: capsule }))
        }
        _ => {
            let expected = "its last axis to be contiguous and aligned; copy it first";
            Err(bad_type(format!("{}: expected {expected}", name())))
        }
    }
}

/// What a capsule without a version says.
fn plain(capsule: &Bound<'_, PyAny>, name: &dyn Fn() -> String) -> PyResult<Described> {
    // SAFETY: a call of Python's on an object that lives; a capsule of another name is refused.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()) };
    if pointer.is_null() {
        let error = PyErr::take(capsule.py());
        return Err(error.unwrap_or_else(|| bad_type(format!("{}: its `__dlpack__` gives no capsule", name()))));
    }
    // SAFETY: a capsule of that name holds such a structure, which lives as long as the capsule: its name is left as it is, so that
    // its own destructor frees it.
    Ok(unsafe { described(&(*pointer.cast::<Managed>()).tensor) })
}

/// The capsule of a state: with a version where the library gives one, which says whether its memory may be written to. A library
/// without versions must not hand out memory that may not.
fn writable<'py>(method: &Bound<'py, PyAny>, name: &dyn Fn() -> String) -> PyResult<(Bound<'py, PyAny>, Described)> {
    let py = method.py();
    let refused = |got: &str| {
        let expected = "a state that is writable and handed over without a copy";
        bad_value(format!(
            "{}: expected {expected}, got {got}; hand over a writable copy and read the update there",
            name()
        ))
    };
    let options = PyDict::new(py);
    options.set_item(intern!(py, "max_version"), (MAJOR, 0))?;
    options.set_item(intern!(py, "copy"), false)?;
    let made = match method.call((), Some(&options)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => method.call0(),
        made => made,
    };
    let capsule = made.map_err(|error| {
        let raised = refused("an object whose `__dlpack__` refuses that");
        raised.set_cause(py, Some(error));
        raised
    })?;
    // SAFETY: a call of Python's on an object that lives.
    if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), VERSIONED.as_ptr()) } == 0 {
        let described = plain(&capsule, name)?;
        return Ok((capsule, described));
    }
    // SAFETY: the capsule has that name, and so holds such a structure, which lives as long as the capsule; the first two numbers are the
    // same in all versions, and the rest in all of one major version.
    let described = unsafe {
        let versioned = ffi::PyCapsule_GetPointer(capsule.as_ptr(), VERSIONED.as_ptr()).cast::<Versioned>();
        if (*versioned).major != MAJOR {
            return Err(refused("a capsule of another version of DLPack"));
        }
        match (*versioned).flags {
            flags if flags & READ_ONLY != 0 => return Err(refused("read-only memory")),
            flags if flags & COPIED != 0 => return Err(refused("a copy")),
            _ => described(&(*versioned).tensor),
        }
    };
    Ok((capsule, described))
}

/// What a capsule of ours owns: the structure, its sizes and strides, and a reference to the object whose memory it is.
struct Exported {
    managed: Managed,
    numbers: Vec<i64>,
    owner: *mut ffi::PyObject,
}

/// A capsule for memory that an object owns, on the CPU.
pub(crate) fn export<'py>(
    owner: &Bound<'py, PyAny>,
    address: u64,
    element: Element,
    sizes: &[usize],
) -> PyResult<Bound<'py, PyAny>> {
    let py = owner.py();
    let known = DTYPES.iter().find(|(_, _, known)| *known == Stored::As(element));
    let &(code, bits, _) = known.ok_or_else(|| bad_type(format!("DLPack has no type for {}", element.name())))?;
    let strides = deuteron::Shape::new(sizes.to_vec()).strides();
    let numbers: Vec<i64> = sizes.iter().chain(&strides).map(|&number| number as i64).collect();
    let tensor = Tensor {
        data: address as usize as *mut c_void,
        device: Device { kind: CPU, id: 0 },
        axes: sizes.len() as i32,
        dtype: DataType { code, bits, lanes: 1 },
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let managed = Managed { tensor, context: std::ptr::null_mut(), deleter: Some(delete) };
    let mut exported = Box::new(Exported { managed, numbers, owner: owner.clone().into_ptr() });
    exported.managed.tensor.shape = exported.numbers.as_mut_ptr();
    // SAFETY: there are twice as many numbers as sizes.
    exported.managed.tensor.strides = unsafe { exported.numbers.as_mut_ptr().add(sizes.len()) };
    let raw = Box::into_raw(exported);
    // SAFETY: the box lives until the deleter frees it; its first field's address is taken without reading it.
    unsafe {
        (*raw).managed.context = raw.cast();
        let capsule = ffi::PyCapsule_New((&raw mut (*raw).managed).cast(), NAME.as_ptr(), Some(destroy));
        if capsule.is_null() {
            delete(&raw mut (*raw).managed);
        }
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

/// Frees what a capsule of ours owns.
///
/// # Safety
/// `managed` is of an [`Exported`] and is not used again.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: the caller's; the context is the box that holds it.
    let exported = unsafe { Box::from_raw((*managed).context.cast::<Exported>()) };
    Python::attach(|_| {
        // SAFETY: the reference was taken by `export`.
        unsafe { ffi::Py_DECREF(exported.owner) }
    });
}

/// Frees what nobody took out of a capsule.
///
/// # Safety
/// Python calls it with a capsule of `export`.
unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
    // SAFETY: the capsule lives; whoever took its memory has renamed it.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) != 0 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}
