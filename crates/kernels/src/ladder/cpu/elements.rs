//! Elements in memory, one at a time, at any alignment.

use deuteron_graph::Dtype;
use half::{bf16, f16};

/// A storage type of floats.
pub trait Element: Copy {
    /// As `f32`.
    fn widen(self) -> f32;
    /// To the nearest.
    fn narrow(value: f32) -> Self;
}

impl Element for f32 {
    fn widen(self) -> f32 {
        self
    }
    fn narrow(value: f32) -> f32 {
        value
    }
}

impl Element for f16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn narrow(value: f32) -> f16 {
        f16::from_f32(value)
    }
}

impl Element for bf16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn narrow(value: f32) -> bf16 {
        bf16::from_f32(value)
    }
}

/// Elements of a type that is known at run time. Integers pass through as bits, truth values as 1 and 0.
#[derive(Clone, Copy)]
pub(super) struct Elements {
    pub base: *mut u8,
    pub dtype: Dtype,
}

impl Elements {
    /// Whether elements of this type can be read and written.
    pub fn takes(dtype: Dtype) -> bool {
        matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16 | Dtype::I32 | Dtype::Bool)
    }

    /// # Safety
    /// There is such an element, of a type that [`Elements::takes`].
    pub unsafe fn read(self, at: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                Dtype::F16 => self.base.cast::<f16>().add(at).read_unaligned().widen(),
                Dtype::Bf16 => self.base.cast::<bf16>().add(at).read_unaligned().widen(),
                Dtype::Bool => f32::from(u8::from(self.base.add(at).read() != 0)),
                _ => self.base.cast::<f32>().add(at).read_unaligned(),
            }
        }
    }

    /// # Safety
    /// As [`Elements::read`], and nobody else touches the element.
    pub unsafe fn write(self, at: usize, value: f32) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                Dtype::F16 => self.base.cast::<f16>().add(at).write_unaligned(f16::narrow(value)),
                Dtype::Bf16 => self.base.cast::<bf16>().add(at).write_unaligned(bf16::narrow(value)),
                Dtype::Bool => self.base.add(at).write(u8::from(value != 0.0)),
                _ => self.base.cast::<f32>().add(at).write_unaligned(value),
            }
        }
    }
}
