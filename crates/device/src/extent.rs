//! How far each argument of a launch reaches: checked once, when a job is loaded, so that running needs no checks.

use deuteron_codegen::{
    Access, AppendShape, ArgBinding, AttentionKernel, AttentionOperand, AttentionShape, BackwardOperand, Geometry,
    Launch, MatmulShape, Operand, Piece, Role,
};

use crate::check::{Form, ProductForm, RowForm, tail_argument};

/// Bytes from the start of its buffer that argument `position` may touch.
pub(crate) fn extent(form: &Form, launch: &Launch, position: usize) -> usize {
    let arg = &launch.args[position];
    let elements = match (form, &launch.geometry) {
        (Form::Row(kernel), Geometry::Row { rows, cols, .. }) => row(kernel, arg, position, *rows, *cols),
        (Form::Matmul(kernel), Geometry::Matmul(shape)) => matmul(kernel.operands()[position], shape),
        (Form::Product(form), Geometry::Product { shape, .. }) => product(form, shape, arg, position),
        (Form::Attention(kernel), Geometry::Attention(shape)) => attention(kernel, shape, kernel.operands()[position]),
        (Form::AttentionRow(kernel, rows, sums), Geometry::AttentionRows { shape, .. }) => {
            let (operands, joined) = (kernel.operands().len() - 1, rows.cols / kernel.width.max(1));
            if position < operands {
                attention(kernel, shape, kernel.operands()[position])
            } else {
                let count = shape.batch * shape.heads * shape.queries / joined.max(1);
                row(rows, arg, tail_argument(position, operands, *sums), count, rows.cols)
            }
        }
        (Form::AttentionBlock(kernel, form), Geometry::AttentionBlock { attention: shape, product: of, .. }) => {
            let operands = kernel.operands().len() - 1;
            match position.checked_sub(operands) {
                None => attention(kernel, shape, kernel.operands()[position]),
                Some(other) => product(form, of, arg, other + 1),
            }
        }
        (_, Geometry::ScatterAdd { count, cols, rows }) => match position {
            0 => *count,
            1 => count * cols,
            _ => rows * cols,
        },
        (_, Geometry::Append(shape)) => append(shape, position),
        (_, Geometry::Copy(pieces)) => copy(pieces, position, launch.args.len()),
        (_, Geometry::Row { .. } | Geometry::Matmul(_) | Geometry::Product { .. }) => 0,
        (Form::AttentionBackward(kernel), Geometry::AttentionBackward(shape)) => {
            let AttentionShape { batch, heads, queries, keys, .. } = *shape;
            match kernel.backward_operands().nth(position) {
                Some(BackwardOperand::Operand(operand)) => attention(kernel, shape, operand),
                Some(BackwardOperand::Gradient(AttentionOperand::Q)) => batch * heads * queries * kernel.width,
                Some(BackwardOperand::Gradient(_)) => batch * heads * keys * kernel.width,
                Some(BackwardOperand::ResultGradient) => attention(kernel, shape, AttentionOperand::O),
                None => 0,
            }
        }
        (_, Geometry::Attention(_) | Geometry::AttentionBackward(_)) => 0,
        (_, Geometry::AttentionRows { .. } | Geometry::AttentionBlock { .. }) => 0,
    };
    if elements == 0 { 0 } else { (arg.offset + elements) * arg.dtype.bytes() }
}

fn row(kernel: &RowForm, arg: &ArgBinding, position: usize, rows: usize, cols: usize) -> usize {
    let access = kernel.args[position].access;
    if rows == 0 && access != Access::Columns {
        return 0;
    }
    let reach: usize = arg.leading.iter().map(|&(size, stride)| size.saturating_sub(1) * stride).sum();
    match access {
        Access::Row if kernel.flat => rows * cols,
        Access::Row | Access::GatheredRow { .. } => {
            if cols == 0 {
                0
            } else {
                reach + cols
            }
        }
        Access::PerRow => reach + 1,
        Access::Columns => {
            kernel.partials.iter().filter(|(arg, _)| *arg == position).map(|(_, width)| *width).max().unwrap_or(0)
        }
    }
}

fn product(form: &ProductForm, shape: &MatmulShape, arg: &ArgBinding, position: usize) -> usize {
    let rows = shape.m * shape.batch.iter().map(|axis| axis[0]).product::<usize>();
    match (form.roles[position], &form.head, &form.tail) {
        (Role::Left, ..) => matmul(Operand::A, shape),
        // Of a table that is routed to, every matrix.
        (Role::Right(_), ..) if form.routed => match (matmul(Operand::B, shape), arg.leading.as_slice()) {
            (0, _) | (_, [] | [(0, _), ..]) => 0,
            (matrix, [(experts, stride), ..]) => (experts - 1) * stride + matrix,
        },
        (Role::Indices, ..) => shape.m,
        (Role::Right(_), ..) => matmul(Operand::B, shape),
        (Role::Result, ..) => matmul(Operand::C, shape),
        (Role::Head(of_head), Some((head, _)), _) => row(head, arg, of_head, rows, shape.k),
        (Role::Tail(of_tail), _, Some((tail, _))) => row(tail, arg, of_tail, rows, shape.n),
        (Role::Head(_) | Role::Tail(_), ..) => 0,
    }
}

pub(crate) fn matmul(operand: Operand, shape: &MatmulShape) -> usize {
    // Sizes, strides, and which of the batch strides counts.
    let (sizes, strides, batch) = match operand {
        Operand::A => ((shape.m, shape.k), shape.a, Some(1)),
        Operand::B => ((shape.k, shape.n), shape.b, Some(2)),
        Operand::Bias => ((1, shape.n), (0, 1), None),
        Operand::Residual | Operand::C => ((shape.m, shape.n), shape.c, Some(3)),
    };
    if sizes.0 == 0 || sizes.1 == 0 || shape.batch.iter().any(|axis| axis[0] == 0) {
        return 0;
    }
    let batch: usize = batch.map_or(0, |stride| shape.batch.iter().map(|axis| (axis[0] - 1) * axis[stride]).sum());
    batch + (sizes.0 - 1) * strides.0 + (sizes.1 - 1) * strides.1 + 1
}

pub(crate) fn attention(kernel: &AttentionKernel, shape: &AttentionShape, operand: AttentionOperand) -> usize {
    let &AttentionShape { batch, heads, queries, keys, .. } = shape;
    let key_heads = kernel.sized(shape, 0).kv_heads;
    // Sizes, strides, and elements that follow each other.
    let (sizes, strides, run) = match operand {
        AttentionOperand::Q => ([batch, heads, queries], shape.q, kernel.width),
        AttentionOperand::K => ([batch, key_heads, keys], shape.k, kernel.width),
        AttentionOperand::V => ([batch, key_heads, keys], shape.v, kernel.width),
        AttentionOperand::Mask => ([batch, heads, queries], shape.mask, keys),
        AttentionOperand::O => ([batch, heads, queries], shape.o, kernel.result_row(shape)),
        AttentionOperand::Positions => return batch,
        AttentionOperand::Seed => return 1,
    };
    if sizes.contains(&0) || run == 0 {
        return 0;
    }
    let steps = [strides.batch, strides.head, strides.position];
    sizes.iter().zip(steps).map(|(size, step)| (size - 1) * step).sum::<usize>() + run
}

fn append(shape: &AppendShape, position: usize) -> usize {
    match position {
        1 if shape.blocks() == 0 || shape.rows == 0 || shape.cols == 0 => 0,
        1 => {
            let leading = shape.leading.iter().map(|&(size, stride)| (size - 1) * stride).sum::<usize>();
            leading + (shape.rows - 1) * shape.stride + shape.cols
        }
        2 => shape.sequences(),
        _ => shape.blocks() * shape.capacity * shape.cols,
    }
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
