//! Arguments and axes of a row program in the form of its loops, before their addresses are known.

use crate::body::Body;
use crate::cpu::chunks::STREAM_FROM;
use crate::cpu::simd::{Axis, BoundArg, Dim, MAX_LEADING};

/// An argument without an address, of a launch that touches this many bytes.
pub fn bind(leading: &[(usize, usize)], table_rows: usize, touched: usize) -> BoundArg {
    let mut dims = [Dim { size: 1, stride: 0 }; MAX_LEADING];
    for (dim, &(size, stride)) in dims.iter_mut().zip(leading) {
        *dim = Dim { size, stride };
    }
    let streaming = touched >= STREAM_FROM;
    BoundArg { base: std::ptr::null_mut(), dims, rank: leading.len(), table_rows, streaming }
}

/// Whether a body has this many columns and these axes.
pub fn has_space(body: &Body, cols: usize, axes: &[(usize, usize)]) -> bool {
    let known = axes.len() == usize::from(body.axes) && axes.iter().all(|&(divide, modulo)| divide > 0 && modulo > 0);
    known && (body.flat || body.cols == cols)
}

/// Launch axes, given as (divide, modulo).
pub fn bind_axes(axes: &[(usize, usize)]) -> Vec<Axis> {
    axes.iter().map(|&(divide, modulo)| Axis { divide, modulo }).collect()
}
