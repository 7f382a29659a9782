//! The text form, which [`Graph`] prints and which users and tests write.
//!
//! ```text
//! graph feed_forward
//! x = input f32[1024,768]
//! w = weight f32[768] ; b = weight f32[768]     # statements end at a line break or a semicolon
//! y, mean, rstd = layer_norm x w b eps=1e-05
//! z = gelu y kind=tanh
//! out z
//! ```
//!
//! - A value is `name` or `%n`, the n-th node; `q[128,64]` or `q:bf16[128,64]` declares an input where it is first used;
//!   a number is a constant of the other operand's dtype.
//! - `name { .. }` holds primitives that a pass grouped; `part n` begins the n-th part of the block.
//! - `out y` hands out a value, `out d_x=%12` under another name.
//!
//! Printing and parsing are inverse: `parse(print(g)) == g` for every graph.

mod nearest;
mod parse;
mod print;
