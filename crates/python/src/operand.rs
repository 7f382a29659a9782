//! A Python object as an operand: its memory and layout.

use deuteron::{Dtype, Layout, MAX_RANK, Shape, Span};
use pyo3::prelude::*;

use crate::engines::Place;
use crate::errors::bad_type;

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

/// The library of the object, which also allocates results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Library {
    Torch,
    Numpy,
    Dlpack,
}

/// How the elements of an operand lie: sizes and strides in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Axes {
    rank: usize,
    sizes: [usize; MAX_RANK],
    strides: [usize; MAX_RANK],
}

impl Axes {
    /// From sizes and strides, if there are not too many and no stride is negative.
    pub fn new(sizes: &[i64], strides: Option<&[i64]>) -> Option<Axes> {
        let rank = sizes.len();
        if rank > MAX_RANK {
            return None;
        }
        let mut axes = Axes { rank, sizes: [0; MAX_RANK], strides: [0; MAX_RANK] };
        let mut usual = 1usize;
        for axis in (0..rank).rev() {
            let size = usize::try_from(sizes[axis]).ok()?;
            axes.sizes[axis] = size;
            // Where there is one element or none, the stride says nothing.
            axes.strides[axis] = match strides {
                Some(strides) if size > 1 && !sizes.contains(&0) => usize::try_from(strides[axis]).ok()?,
                _ => usual,
            };
            usual = usual.checked_mul(size)?;
        }
        Some(axes)
    }

    pub fn sizes(&self) -> &[usize] {
        &self.sizes[..self.rank]
    }

    pub fn strides(&self) -> &[usize] {
        &self.strides[..self.rank]
    }

    pub fn shape(&self) -> Shape {
        Shape::new(self.sizes().to_vec())
    }

    pub fn layout(&self) -> Layout {
        Layout { shape: self.shape(), strides: self.strides().to_vec(), offset: 0 }
    }

    /// Elements from the first to the last.
    pub fn reach(&self) -> usize {
        if self.sizes().contains(&0) {
            return 0;
        }
        self.sizes().iter().zip(self.strides()).map(|(size, stride)| (size - 1) * stride).sum::<usize>() + 1
    }

    /// Whether kernels read it in place: its columns follow each other.
    pub fn reads_in_place(&self) -> bool {
        self.rank == 0 || self.sizes[self.rank - 1] <= 1 || self.strides[self.rank - 1] == 1
    }

    /// Whether its elements follow each other in the usual order.
    pub fn is_contiguous(&self) -> bool {
        let mut usual = 1;
        self.sizes().iter().zip(self.strides()).rev().all(|(&size, &stride)| {
            let follows = size <= 1 || stride == usual;
            usual *= size;
            follows
        }) || self.sizes().contains(&0)
    }

    /// The axes of its transpose, if that is read in place and it is not.
    pub fn transposed(&self) -> Option<Axes> {
        if self.rank != 2 || self.reads_in_place() || self.strides[0] != 1 {
            return None;
        }
        let mut axes = *self;
        axes.sizes.swap(0, 1);
        axes.strides.swap(0, 1);
        Some(axes)
    }

    /// Appends what tells it from others.
    pub fn sign(&self, signature: &mut Vec<u64>) {
        signature.push(self.rank as u64);
        signature.extend(self.sizes().iter().chain(self.strides()).map(|&number| number as u64));
    }
}

/// An object that can be worked on, and what keeps its memory alive.
pub(crate) struct Operand<'py> {
    pub library: Library,
    pub element: Element,
    pub axes: Axes,
    pub address: u64,
    pub place: Place,
    /// whether its two axes are given in the other order
    pub transposed: bool,
    /// the object, or a copy of it that suits
    pub object: Bound<'py, PyAny>,
}

/// What a kernel can do with an operand that does not lie as usual.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transposition {
    /// read its transpose
    Allowed,
    /// nothing
    Refused,
}

/// What a call does with the memory of an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// reads it
    Read,
    /// writes to it too: it is a state
    Update,
}

impl Operand<'_> {
    /// Its memory.
    pub fn span(&self) -> Span {
        Span { address: self.address, bytes: self.axes.reach() * self.element.bytes() }
    }
}
