//! DLPack: how libraries of arrays hand memory to each other (the structures of its version 0.8, which all of them give).

use std::ffi::{CStr, c_void};

use deuteron::{Dtype, Span};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;

use crate::engines::Place;
use crate::errors::bad_type;
use crate::operand::{Element, Library, Operand, layout, reads_in_place};

const NAME: &CStr = c"dltensor";
const CPU: i32 = 1;

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

/// code, bits: 0 signed whole numbers, 2 floats, 4 bfloat, 6 truth values
const DTYPES: [(u8, u8, Element); 7] = [
    (2, 32, Element::Of(Dtype::F32)),
    (2, 16, Element::Of(Dtype::F16)),
    (4, 16, Element::Of(Dtype::Bf16)),
    (2, 64, Element::F64),
    (0, 32, Element::Of(Dtype::I32)),
    (0, 8, Element::Of(Dtype::I8)),
    (6, 8, Element::Of(Dtype::Bool)),
];

/// The operand that an object with `__dlpack__` is; none of another object.
pub(crate) fn operand<'py>(object: &Bound<'py, PyAny>, name: &dyn Fn() -> String) -> PyResult<Option<Operand<'py>>> {
    let py = object.py();
    let Some(method) = object.getattr_opt(intern!(py, "__dlpack__"))? else { return Ok(None) };
    let (kind, _): (i32, i32) = object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
    if kind != CPU {
        return Err(bad_type(format!(
            "{}: expected an array on the CPU, got one on DLPack's device {kind}; use torch tensors there",
            name()
        )));
    }
    let capsule = method.call0()?;
    // SAFETY: a call of Python's on an object that lives; the name is that of the protocol, and a capsule of another name is refused.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()) };
    if pointer.is_null() {
        return Err(
            PyErr::take(py).unwrap_or_else(|| bad_type(format!("{}: its `__dlpack__` gives no capsule", name())))
        );
    }
    // SAFETY: a capsule of that name holds such a structure, which lives as long as the capsule: its name is left as it is, so that
    // its own destructor frees it.
    let tensor = unsafe { &(*pointer.cast::<Managed>()).tensor };
    let axes = usize::try_from(tensor.axes).unwrap_or(0);
    // SAFETY: the protocol says that there are so many sizes.
    let sizes: Vec<i64> = (0..axes).map(|axis| unsafe { *tensor.shape.add(axis) }).collect();
    let sizes: Vec<usize> = sizes.into_iter().map(|size| usize::try_from(size).unwrap_or(0)).collect();
    let strides: Vec<isize> = if tensor.strides.is_null() {
        deuteron::Shape::new(sizes.clone()).strides().into_iter().map(|stride| stride as isize).collect()
    } else {
        // SAFETY: as many as sizes, where there are any.
        (0..axes).map(|axis| unsafe { *tensor.strides.add(axis) } as isize).collect()
    };
    let DataType { code, bits, lanes } = tensor.dtype;
    let known = DTYPES.iter().find(|(of, wide, _)| lanes == 1 && *of == code && *wide == bits);
    let element = known.map(|&(_, _, element)| element).ok_or_else(|| {
        bad_type(format!("{}: expected float32, float16, bfloat16, float64, int32, int8 or bool, got DLPack's type {code} of {bits} bits", name()))
    })?;
    let address = tensor.data as u64 + tensor.byte_offset;
    match layout(&sizes, &strides, element) {
        Some((layout, bytes)) if reads_in_place(&layout) && address.is_multiple_of(element.bytes() as u64) => {
            let span = Span { address, bytes };
            Ok(Some(Operand { library: Library::Dlpack, element, layout, span, place: Place::Cpu, object: capsule }))
        }
        _ => Err(bad_type(format!(
            "{}: expected its last axis to be contiguous and aligned, got strides {strides:?}; copy it first",
            name()
        ))),
    }
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
    let known = DTYPES.iter().find(|(_, _, known)| *known == element);
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
