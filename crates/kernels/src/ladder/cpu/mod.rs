//! The rungs of ladders on a CPU that no plan takes: one element at a time, and matmuls that the shipped one is compared with.
//!
//! - Row work by scalar loops, in f32, f16, bf16, i32 and truth values ([`scalar`]); what it does not cover has no kernel here.
//! - Matmuls by three loops of any of these floats and strides; by tiles and by vectors in f32, whose rows are contiguous ([`Step`]).
//! - They give the bits of no other kernel: sums are one chain in the order of the loops.

mod elements;
mod matmul;
mod rows;

pub use matmul::Step;

use deuteron_codegen::kernel::Kernel;
use deuteron_codegen::lower::lower_with_origins;
use deuteron_plan::{Draft, Structure};

/// The kernel of a group that does one element at a time. None where the group is neither row work that it covers nor a plain matmul.
pub fn scalar(group: &Draft) -> Option<Kernel> {
    match *group.structure {
        Structure::Row => rows::kernel(lower_with_origins(group).0),
        _ => Step::Scalar.kernel(group),
    }
}
