//! The walk over rows: strides, repeats, gathers, spans, streaming.

use deuteron_graph::{BinaryOp, Dtype};

use super::reductions::layer_norm;
use super::{
    Buffer, WIDTHS, assert_same, flat_program, mixed, ordinary, reads, rows_program, run_all, scramble, try_run, writes,
};
use crate::cpu::program::{Access, ArgSpec, Dst, Inst, Pass, Src, TileProgram, TileReduce, TileUnary};
use crate::cpu::simd::{Dim, Fault, Isa, Launch, Scratch, run};

fn add_rows(cols: usize) -> TileProgram {
    let add = Inst::Binary { op: BinaryOp::Add, dst: Dst::Tile(0), a: Src::Arg(0), b: Src::Arg(1) };
    let strip = vec![add, Inst::Store { arg: 2, a: Src::Tile(0) }];
    let args = vec![reads(Dtype::F32), reads(Dtype::F32), writes(Dtype::F32)];
    rows_program(cols, args, vec![Pass { row: vec![], strip }])
}

/// `a` is a transposed and padded view, `b` repeats along the outer axis, the output has gaps that stay untouched.
#[test]
fn leading_axes_are_walked_in_order() {
    let (outer, inner) = (3, 4);
    for isa in Isa::available() {
        for cols in WIDTHS {
            let padded = cols + 3;
            let (a, b) = (mixed(outer * inner * padded, 70), mixed(inner * cols, 71));
            let (mut left, mut right) = (Buffer::of(&a, 4), Buffer::of(&b, 0));
            let mut output = Buffer::of(&vec![7.0; outer * inner * padded], 8);
            let args = [
                left.bind(&[Dim { size: outer, stride: padded }, Dim { size: inner, stride: outer * padded }]),
                right.bind(&[Dim { size: outer, stride: 0 }, Dim { size: inner, stride: cols }]),
                output.bind(&[Dim { size: outer * inner, stride: padded }]),
            ];
            run_all(isa, &add_rows(cols), &args, outer * inner);
            output.assert_red_zones();
            let got = output.floats();
            for row in 0..outer * inner {
                let (i, j) = (row / inner, row % inner);
                let expected: Vec<f32> = (0..cols).map(|c| a[(j * outer + i) * padded + c] + b[j * cols + c]).collect();
                assert_same(&got[row * padded..][..cols], &expected, &format!("row {row} x {cols}, {}", isa.name()));
                assert_eq!(&got[row * padded + cols..][..3], &[7.0; 3], "the gap after row {row} x {cols}");
            }
        }
    }
}

#[test]
fn no_rows_touch_nothing() {
    for isa in Isa::available() {
        let mut buffers = [Buffer::new(0, 0), Buffer::new(0, 0), Buffer::new(0, 0)];
        let args = buffers.each_mut().map(|buffer| buffer.rows(0, 64));
        run_all(isa, &add_rows(64), &args, 0);
        buffers.iter().for_each(Buffer::assert_red_zones);
    }
}

fn gather_rows(cols: usize, dtype: Dtype) -> TileProgram {
    let table = ArgSpec { dtype, access: Access::GatheredRow { index: 1 }, written: false };
    let index = ArgSpec { dtype: Dtype::I32, access: Access::PerRow, written: false };
    let strip = vec![Inst::Load { dst: Dst::Tile(0), arg: 0 }, Inst::Store { arg: 2, a: Src::Tile(0) }];
    rows_program(cols, vec![table, index, writes(Dtype::F32)], vec![Pass { row: vec![], strip }])
}

#[test]
fn gathered_rows_follow_their_index() {
    let indices = [4, 0, 4, 2, 1];
    for isa in Isa::available() {
        for cols in WIDTHS {
            let stride = cols + 1;
            let table = mixed(5 * stride, 72);
            let (mut rows, mut picks) = (Buffer::of(&table, 0), Buffer::of_ints(&indices, 1));
            let mut output = Buffer::new(4 * indices.len() * cols, 0);
            let mut gathered = rows.rows(5, stride);
            gathered.table_rows = 5;
            let args = [gathered, picks.rows(indices.len(), 1), output.rows(indices.len(), cols)];
            run_all(isa, &gather_rows(cols, Dtype::F32), &args, indices.len());
            output.assert_red_zones();
            let expected: Vec<f32> =
                indices.iter().flat_map(|&index| table[index as usize * stride..][..cols].to_vec()).collect();
            assert_same(&output.floats(), &expected, &format!("x {cols} on {}", isa.name()));
        }
    }
}

#[test]
fn an_index_out_of_range_is_a_fault() {
    for isa in Isa::available() {
        for (bad, index) in [(5, 5), (-1, -1), (i32::MIN, i64::from(i32::MIN))] {
            let (mut rows, mut picks) = (Buffer::new(4 * 5 * 8, 0), Buffer::of_ints(&[0, 4, bad], 0));
            let mut output = Buffer::new(4 * 3 * 8, 0);
            let mut gathered = rows.rows(5, 8);
            gathered.table_rows = 5;
            let args = [gathered, picks.rows(3, 1), output.rows(3, 8)];
            let fault = try_run(isa, &gather_rows(8, Dtype::F32), &args, &[], 3).expect_err("the index is bad");
            assert_eq!(fault, Fault { arg: 0, row: 2, index, table_rows: 5 });
            let message = format!("row 2, argument 0: expected an index in 0..5, got {index}");
            assert_eq!(fault.to_string(), message);
        }
    }
}

#[test]
fn an_empty_table_faults_at_once() {
    for isa in Isa::available() {
        let (mut rows, mut picks) = (Buffer::new(0, 0), Buffer::of_ints(&[0], 0));
        let mut output = Buffer::new(4 * 8, 0);
        let args = [rows.rows(0, 8), picks.rows(1, 1), output.rows(1, 8)];
        let fault = try_run(isa, &gather_rows(8, Dtype::F32), &args, &[], 1).expect_err("the table is empty");
        assert_eq!(fault, Fault { arg: 0, row: 0, index: 0, table_rows: 0 });
    }
}

/// The output of a launch whose rows (or elements) are split at `cuts`.
fn split(
    isa: Isa,
    program: &TileProgram,
    inputs: &[Vec<f32>],
    length: usize,
    cuts: &[usize],
    streaming: bool,
) -> Vec<u32> {
    let cols = if program.flat { 1 } else { program.cols };
    let mut buffers: Vec<Buffer> = inputs.iter().map(|input| Buffer::of(input, 0)).collect();
    let mut output = Buffer::new(4 * length * cols, 16);
    let mut args: Vec<_> = buffers
        .iter_mut()
        .zip(inputs)
        .map(
            |(buffer, input)| {
                if program.flat || input.len() == cols { buffer.bind(&[]) } else { buffer.rows(length, cols) }
            },
        )
        .collect();
    args.push(if program.flat { output.bind(&[]) } else { output.rows(length, cols) });
    args.last_mut().expect("the output was pushed").streaming = streaming;
    let launch = Launch { program, args: &args, axes: &[], window: None };
    let mut scratch = Scratch::for_program(program);
    let mut first = 0;
    for &cut in cuts.iter().chain(&[length]) {
        // SAFETY: the buffers hold `length` rows and are used here alone.
        unsafe { run(isa, &launch, first..cut, &mut scratch, &mut []) }.expect("nothing is gathered");
        first = cut;
    }
    output.assert_red_zones();
    output.bits()
}

#[test]
fn bits_do_not_depend_on_the_spans() {
    for isa in Isa::available() {
        for cols in [1, 17, 768, 1025] {
            let rows = 9;
            let inputs = [ordinary(rows * cols, 80), ordinary(cols, 81), ordinary(cols, 82)];
            let program = layer_norm(cols);
            let whole = split(isa, &program, &inputs, rows, &[], false);
            for cuts in [vec![1], vec![4, 4, 5], (1..rows).collect()] {
                for streaming in [false, true] {
                    let got = split(isa, &program, &inputs, rows, &cuts, streaming);
                    assert_eq!(got, whole, "{cols} columns, {cuts:?}, {}", isa.name());
                }
            }
        }
        let gelu = vec![
            Inst::Binary { op: BinaryOp::Add, dst: Dst::Tile(0), a: Src::Arg(0), b: Src::Arg(1) },
            Inst::Unary { op: TileUnary::GeluTanh, dst: Dst::Tile(1), a: Src::Tile(0) },
            Inst::Store { arg: 2, a: Src::Tile(1) },
        ];
        let program = flat_program(vec![reads(Dtype::F32), reads(Dtype::F32), writes(Dtype::F32)], gelu);
        let inputs = [ordinary(5000, 83), ordinary(5000, 84)];
        let whole = split(isa, &program, &inputs, 5000, &[], false);
        for cuts in [vec![1], vec![1024, 2048], vec![333, 1111, 4999], vec![2500]] {
            for streaming in [false, true] {
                assert_eq!(split(isa, &program, &inputs, 5000, &cuts, streaming), whole, "{cuts:?}, {}", isa.name());
            }
        }
    }
}

/// Tiles that pass from one instruction to the next, a kept row, scalars, elements of two formats, and reductions of both kinds: those
/// that one loop does for all rows in flight, and the others.
fn of_every_place(cols: usize) -> TileProgram {
    let args = vec![reads(Dtype::Bf16), reads(Dtype::F32), writes(Dtype::F32), writes(Dtype::Bf16)];
    let widen = Inst::Load { dst: Dst::Tile(0), arg: 0 };
    let passes = vec![
        Pass {
            row: vec![],
            strip: vec![
                widen,
                Inst::Unary { op: TileUnary::Silu, dst: Dst::Tile(1), a: Src::Tile(0) },
                Inst::Binary { op: BinaryOp::Max, dst: Dst::Tile(2), a: Src::Tile(1), b: Src::Arg(1) },
                Inst::Reduce { op: TileReduce::Max, into: 0, a: Src::Tile(2), b: Src::Tile(2) },
                Inst::Reduce { op: TileReduce::ArgMax, into: 1, a: Src::Tile(2), b: Src::Tile(2) },
            ],
        },
        Pass {
            row: vec![],
            strip: vec![
                Inst::ExpSub { dst: Dst::Kept(0), a: Src::Arg(1), b: Src::Scalar(0) },
                Inst::Reduce { op: TileReduce::Sum, into: 2, a: Src::Kept(0), b: Src::Kept(0) },
            ],
        },
        Pass {
            row: vec![
                Inst::Unary { op: TileUnary::IntToFloat, dst: Dst::Scalar(3), a: Src::Scalar(1) },
                Inst::MulAdd { dst: Dst::Scalar(4), a: Src::Scalar(2), b: Src::Const(0.25), c: Src::Scalar(3) },
            ],
            strip: vec![
                widen,
                Inst::MulAdd { dst: Dst::Tile(3), a: Src::Kept(0), b: Src::Scalar(4), c: Src::Tile(0) },
                Inst::Store { arg: 3, a: Src::Tile(3) },
                Inst::Binary { op: BinaryOp::Sub, dst: Dst::Tile(1), a: Src::Const(1.0), b: Src::Tile(3) },
                Inst::Store { arg: 2, a: Src::Tile(1) },
            ],
        },
    ];
    rows_program(cols, args, passes)
}

/// Rows in flight are done by one loop where all arguments' rows are evenly apart, and row by row elsewhere: at the end of an inner axis
/// of a transposed view. A span of one row is always alone.
#[test]
fn rows_together_have_the_bits_of_rows_alone() {
    let (outer, inner) = (5, 7);
    let rows = outer * inner;
    for isa in Isa::available() {
        for cols in [1, 16, 63, 64, 65, 200, 1024] {
            let program = of_every_place(cols);
            let (mut halves, x) = (Buffer::of_bytes(&bf16(rows * cols), 2), ordinary(rows * (cols + 3), 91));
            let mut results = Vec::new();
            for length in [rows, 1] {
                let mut x = Buffer::of(&x, 4);
                let (mut y, mut z) = (Buffer::new(4 * rows * cols, 8), Buffer::new(2 * rows * cols, 2));
                let transposed =
                    [Dim { size: outer, stride: cols + 3 }, Dim { size: inner, stride: outer * (cols + 3) }];
                let args = [halves.rows(rows, cols), x.bind(&transposed), y.rows(rows, cols), z.rows(rows, cols)];
                let launch = Launch { program: &program, args: &args, axes: &[], window: None };
                let mut scratch = Scratch::for_program(&program);
                for first in (0..rows).step_by(length) {
                    // SAFETY: the buffers hold `rows` rows and are used here alone.
                    unsafe { run(isa, &launch, first..first + length, &mut scratch, &mut []) }
                        .expect("nothing is gathered");
                }
                y.assert_red_zones();
                z.assert_red_zones();
                results.push((y.bits(), z.content().to_vec()));
            }
            assert_eq!(results[0], results[1], "{cols} columns, {}", isa.name());
        }
    }
}

/// Elements of `bf16` between 1 and 2.
fn bf16(length: usize) -> Vec<u8> {
    (0..length).flat_map(|index| (0x3F80 | (scramble(index as u32) & 0x7F) as u16).to_le_bytes()).collect()
}
