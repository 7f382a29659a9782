//! Attention against the formula in `f64`, on every instruction set of this CPU, with scratch and results poisoned.

mod backward;
mod case;
mod formula;
mod forward;
mod masks;
mod scores;

pub use case::{Case, Layout, MaskKind, machines, plain};

/// A generator of test numbers.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// In `[-1, 1)`.
    pub fn unit(&mut self) -> f32 {
        self.word() as f32 / (1u64 << 30) as f32 - 1.0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.word() as usize % from.len()]
    }
}

pub const LENGTHS: [usize; 7] = [1, 2, 17, 64, 127, 129, 300];
pub const WIDTHS: [usize; 7] = [1, 8, 32, 64, 80, 128, 256];
