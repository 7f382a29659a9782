//! What a Python object is as an operand: where it lies, and how.

use deuteron::{Dtype, Layout, Shape, Span};
use pyo3::prelude::*;

use crate::engines::Place;
use crate::errors::bad_type;
use crate::{array, dlpack, numpy, torch};

/// The type of an element: one that kernels know, or `f64`, which the reference computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    Of(Dtype),
    F64,
}

impl Element {
    pub fn bytes(self) -> usize {
        match self {
            Element::Of(dtype) => dtype.bytes(),
            Element::F64 => 8,
        }
    }

    pub fn is_float(self) -> bool {
        match self {
            Element::Of(dtype) => dtype.is_float(),
            Element::F64 => true,
        }
    }

    /// The dtype of graphs: `f64` is computed by graphs of `f32`, exactly.
    pub fn dtype(self) -> Dtype {
        match self {
            Element::Of(dtype) => dtype,
            Element::F64 => Dtype::F32,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Element::Of(dtype) => dtype.name(),
            Element::F64 => "f64",
        }
    }

    pub fn find(name: &str) -> PyResult<Element> {
        if name == "f64" {
            return Ok(Element::F64);
        }
        let parsed = name.parse::<Dtype>();
        parsed.map(Element::Of).map_err(|_| bad_type(format!("expected a dtype such as f32, got `{name}`")))
    }
}

/// Whose object it is, and so who allocates results beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Library {
    Torch,
    Numpy,
    Dlpack,
}

/// An object that can be worked on, and what keeps its memory alive.
pub(crate) struct Operand<'py> {
    pub library: Library,
    pub element: Element,
    pub layout: Layout,
    pub span: Span,
    pub place: Place,
    /// the object, or a copy of it that suits
    pub object: Bound<'py, PyAny>,
}

impl<'py> Operand<'py> {
    /// Looks at an object. `name` is for messages.
    pub fn of(object: &Bound<'py, PyAny>, name: &dyn Fn() -> String) -> PyResult<Operand<'py>> {
        if let Some(operand) = torch::operand(object, name)? {
            return Ok(operand);
        }
        if let Some(operand) = array::operand(object)? {
            return Ok(operand);
        }
        if let Some(operand) = numpy::operand(object, name)? {
            return Ok(operand);
        }
        if let Some(operand) = dlpack::operand(object, name)? {
            return Ok(operand);
        }
        let kind = object.get_type().name()?;
        Err(bad_type(format!(
            "{}: expected a tensor of PyTorch, an array of NumPy or an object with `__dlpack__`, got {kind}",
            name()
        )))
    }
}

/// A layout from sizes and strides in elements, if no stride is negative; and the bytes that it spans.
pub(crate) fn layout(sizes: &[usize], strides: &[isize], element: Element) -> Option<(Layout, usize)> {
    let shape = Shape::new(sizes.to_vec());
    shape.checked_elements()?;
    let usual = shape.strides();
    let mut own = Vec::with_capacity(sizes.len());
    for (axis, &stride) in strides.iter().enumerate() {
        // Where there is one element, the stride says nothing.
        let stride = if sizes[axis] <= 1 { usual[axis] } else { usize::try_from(stride).ok()? };
        own.push(stride);
    }
    let last: usize = if sizes.contains(&0) {
        0
    } else {
        sizes.iter().zip(&own).map(|(size, stride)| (size - 1) * stride).sum::<usize>() + 1
    };
    Some((Layout { shape, strides: own, offset: 0 }, last * element.bytes()))
}

/// Whether kernels read it in place: its columns follow each other.
pub(crate) fn reads_in_place(layout: &Layout) -> bool {
    let rank = layout.shape.rank();
    rank == 0 || layout.shape[rank - 1] <= 1 || layout.strides[rank - 1] == 1
}
