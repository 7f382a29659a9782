//! Row work as CUDA text: a body, mapped to threads by a config.
//!
//! - Reads every argument once and writes every result once, unless a row is so long that it is read again.
//! - Sums are `f32`, in an order that depends only on the config: the same bits on every run.
//! - Rows, strides and addresses are words of the parameter; columns, dtypes and alignments are compiled in.
//! - Column sums stay in registers of persistent blocks, which prefetch the next row; a second kernel adds the blocks' sums in a
//!   fixed order. No float atomics.
//! - Persistent blocks stage the next rows in shared memory: each thread copies (`cp.async`) the elements that it will read itself, so no
//!   barrier is needed and registers are left for more columns per thread.
//! - A linear sum is computed one pass earlier (`linear.rs`): the gradient of a norm needs one barrier instead of two.
//! - Loads are volatile assembly: the compiler treats a plain load as pure and hoisted it over a condition that forbids it.
//! - A multiplication whose result is read twice is not contracted (`whole2`, `mul.rn`): otherwise it becomes part of a multiply-add for one
//!   reader and not for the other, and `x - mean(x)` of one column is not zero.

mod config;
mod emit;
mod facts;
pub mod following;
mod layout;
pub mod many;
mod passes;
pub mod sides;
pub mod variant;
mod words;

pub use emit::{PRELUDE, PRELUDE_FILES, PRELUDE_PARTS, TileArguments, type_name};
pub use layout::gcd;
