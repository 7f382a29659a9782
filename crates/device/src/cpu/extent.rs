//! How far each argument of a launch reaches: checked once, when a job is loaded, so that running needs no checks.

use deuteron_codegen::cpu::program::{Access, Program};
use deuteron_codegen::{ArgBinding, Geometry, Launch, MatmulShape, Piece, Source};

/// Bytes from the start of its buffer that argument `position` may touch.
pub(crate) fn extent(kernel: &Source, launch: &Launch, position: usize) -> usize {
    let arg = &launch.args[position];
    let elements = match (kernel, &launch.geometry) {
        (Source::Row(program), Geometry::Row { rows, cols, .. }) => row(program, arg, position, *rows, *cols),
        (_, Geometry::Matmul(shape)) => matmul(shape, position),
        (_, Geometry::ScatterAdd { count, cols, rows }) => match position {
            0 => *count,
            1 => count * cols,
            _ => rows * cols,
        },
        (_, Geometry::Copy(pieces)) => copy(pieces, position, launch.args.len()),
        (_, Geometry::Row { .. }) => 0,
    };
    if elements == 0 { 0 } else { (arg.offset + elements) * arg.dtype.bytes() }
}

fn row(program: &Program, arg: &ArgBinding, position: usize, rows: usize, cols: usize) -> usize {
    let access = program.args[position].access;
    if rows == 0 && access != Access::Columns {
        return 0;
    }
    let reach: usize = arg.leading.iter().map(|&(size, stride)| size.saturating_sub(1) * stride).sum();
    match access {
        Access::Row if program.flat => rows * cols,
        Access::Row | Access::GatheredRow { .. } => {
            if cols == 0 {
                0
            } else {
                reach + cols
            }
        }
        Access::PerRow => reach + 1,
        Access::Columns => {
            program.partials.iter().filter(|p| p.arg as usize == position).map(|p| p.width).max().unwrap_or(0)
        }
    }
}

fn matmul(shape: &MatmulShape, position: usize) -> usize {
    let (sizes, strides) = match position {
        0 => ((shape.m, shape.k), shape.a),
        1 => ((shape.k, shape.n), shape.b),
        _ => ((shape.m, shape.n), shape.c),
    };
    if sizes.0 == 0 || sizes.1 == 0 || shape.batch.iter().any(|axis| axis[0] == 0) {
        return 0;
    }
    let batch: usize = shape.batch.iter().map(|axis| (axis[0] - 1) * axis[position + 1]).sum();
    batch + (sizes.0 - 1) * strides.0 + (sizes.1 - 1) * strides.1 + 1
}

fn copy(pieces: &[Piece], position: usize, args: usize) -> usize {
    let reach = |dims: &[usize], strides: &[usize], offset: usize| {
        if dims.contains(&0) {
            return 0;
        }
        offset + dims.iter().zip(strides).map(|(&size, &stride)| (size - 1) * stride).sum::<usize>() + 1
    };
    let is_destination = position + 1 == args;
    let reaches = pieces.iter().filter(|piece| is_destination || piece.source == position).map(|piece| {
        if is_destination {
            reach(&piece.dims, &piece.to, piece.to_offset)
        } else {
            reach(&piece.dims, &piece.from, piece.from_offset)
        }
    });
    reaches.max().unwrap_or(0)
}
