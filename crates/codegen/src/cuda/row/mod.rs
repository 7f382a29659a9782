//! Row work as CUDA text: a body, spread over threads by a config.
//!
//! - Reads every argument once and writes every result once, unless a row is so long that it is read again.
//! - Sums are of `f32`, in an order that depends on the config alone: the same bits on every run.
//! - Rows, strides and addresses are words of the parameter; columns, dtypes and alignments are compiled in.
//! - Column sums stay in registers of blocks that walk over rows and load the next row ahead; a second kernel adds the blocks' sums in a
//!   fixed order. No float atomics.
//! - Where a block walks over rows, the next rows wait in shared memory: each thread copies (`cp.async`) what it will read itself, so no
//!   barrier is needed and registers are left for more columns per thread.
//! - A linear sum is taken one sweep earlier (`linear.rs`): the gradient of a norm needs one barrier instead of two.
//! - Loads are volatile assembly: the compiler treats a plain load as pure and hoisted it over a condition that forbids it.
//! - A multiplication whose result is read twice is not contracted (`whole2`, `mul.rn`): otherwise it becomes part of a multiply-add for one
//!   reader and not for the other, and `x - mean(x)` of one column is not zero.

mod config;
mod emit;
mod facts;
pub mod following;
mod layout;
mod passes;
pub mod sides;
pub mod variant;
mod words;

pub use emit::{PRELUDE, PRELUDE_FILES, PRELUDE_PARTS, TileArguments, type_name};
pub use layout::gcd;
