//! Layouts of arguments: which strides are compiled in, and which are launch parameters.

use crate::argument::ArgBinding;
use crate::body::{Access, Body};

/// One argument as a row kernel addresses it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ArgLayout {
    /// (size, stride in elements) of the axes that a row's number is taken apart into, outermost first; none where every
    /// row is the same
    pub axes: Vec<(usize, usize)>,
    /// bytes that every access along a row is a multiple of, a power of two up to 16
    pub alignment: usize,
}

/// Layouts of all arguments of a launch.
pub(crate) fn layouts(body: &Body, args: &[ArgBinding]) -> Vec<ArgLayout> {
    let specs = body.args.iter().zip(args);
    specs.map(|(spec, binding)| layout(spec.access, body.flat, binding)).collect()
}

pub(crate) fn layout(access: Access, flat: bool, binding: &ArgBinding) -> ArgLayout {
    let size = binding.dtype.bytes();
    let axes = match access {
        // Columns are written once, at the end; a flat kernel has no rows.
        Access::Columns => Vec::new(),
        _ if flat => Vec::new(),
        // The index takes the place of the row.
        Access::GatheredRow { .. } => binding.leading.clone(),
        Access::Row | Access::PerRow => merged(&binding.leading),
    };
    let strides = axes.iter().map(|&(_, stride)| stride * size);
    let common = strides.chain([binding.offset * size]).filter(|&bytes| bytes > 0).fold(16, gcd);
    ArgLayout { axes, alignment: common }
}

/// Neighbouring axes that one number walks over become one; axes that stand still at the end or everywhere are none.
fn merged(leading: &[(usize, usize)]) -> Vec<(usize, usize)> {
    let mut axes: Vec<(usize, usize)> = Vec::new();
    for &(size, stride) in leading {
        match axes.last_mut() {
            Some(last) if last.1 == stride * size => *last = (last.0 * size, stride),
            _ => axes.push((size, stride)),
        }
    }
    if axes.iter().all(|&(_, stride)| stride == 0) {
        axes.clear();
    }
    axes
}

/// The greatest common divisor.
pub fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_that_follow_each_other_are_one() {
        assert_eq!(merged(&[(4, 128), (8, 16)]), [(32, 16)]);
        assert_eq!(merged(&[(4, 0), (8, 0)]), []);
        assert_eq!(merged(&[(4, 0), (8, 16)]), [(4, 0), (8, 16)]);
        assert_eq!(merged(&[(4, 256), (8, 16)]), [(4, 256), (8, 16)]);
    }
}
