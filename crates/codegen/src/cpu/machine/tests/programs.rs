//! Programs of every instruction, run both ways: equal bits, but for what a NaN carries.

use deuteron_graph::{BinaryOp, CompareOp, Dtype, UnaryOp};

use crate::cpu::machine::LargeResults;
use crate::cpu::program::{
    Access, ArgSpec, Dst, Inst, IntegerOp, LaneKind, Partial, Pass, Src, TileProgram, TileReduce, TileUnary,
};
use crate::cpu::simd::tests::{Buffer, mixed, per_row, reads, scramble, writes};
use crate::cpu::simd::{Axis, BoundArg, Isa, Launch, Scratch, compile, run};

/// Widths around every boundary: vectors, whole and half bodies of 64 and 128 columns, strips.
const WIDTHS: [usize; 16] = [1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 127, 129, 200, 448, 1024, 1500];
const ROWS: usize = 19;

fn isas() -> Vec<Isa> {
    let generated = Isa::available().into_iter().filter(|isa| ["avx512", "avx2"].contains(&isa.name()));
    // Only AVX-512 has extensions that code makes use of.
    generated.flat_map(|isa| [Some(isa), isa.is_avx512().then(|| isa.without_extensions())]).flatten().collect()
}

/// What an argument holds at first: numbers of every kind where it is read, poison where it is written.
fn content(spec: ArgSpec, elements: usize, seed: u32) -> Vec<u8> {
    if spec.written {
        return vec![0xFF; elements * spec.dtype.bytes()];
    }
    let floats = mixed(elements, seed);
    match spec.dtype {
        Dtype::F32 => floats.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        Dtype::I32 if spec.access == Access::PerRow => {
            (0..elements as u32).flat_map(|i| (scramble(seed + i) % 5).to_ne_bytes()).collect()
        }
        Dtype::Bool => (0..elements as u32).map(|i| (scramble(seed + i) % 2) as u8).collect(),
        dtype => (0..(elements * dtype.bytes()) as u32).map(|i| scramble(seed.wrapping_mul(77) + i) as u8).collect(),
    }
}

struct Case {
    program: TileProgram,
    rows: usize,
    /// Bytes that arguments start behind a multiple of 64.
    misalign: usize,
    streaming: bool,
    window: Option<(usize, usize)>,
    split: usize,
}

impl Case {
    fn of(program: TileProgram, rows: usize) -> Case {
        Case { program, rows, misalign: 0, streaming: false, window: None, split: rows }
    }

    /// What each argument holds afterwards, and the column sums.
    fn outcome(&self, isa: Isa, large: LargeResults) -> (Vec<Vec<u8>>, Vec<f32>) {
        let program = &self.program;
        let cols = if program.flat { 1 } else { program.cols };
        let mut buffers: Vec<Buffer> = program
            .args
            .iter()
            .enumerate()
            .map(|(arg, &spec)| {
                let elements = match spec.access {
                    Access::Row => self.rows * cols,
                    Access::PerRow => self.rows,
                    Access::GatheredRow { .. } | Access::Columns => 5 * cols,
                };
                Buffer::of_bytes(&content(spec, elements, arg as u32 + 1), self.misalign)
            })
            .collect();
        let bound: Vec<BoundArg> = buffers
            .iter_mut()
            .zip(&program.args)
            .map(|(buffer, spec)| {
                let stride = match spec.access {
                    Access::PerRow => 1,
                    _ => cols,
                };
                let bound = match program.flat {
                    true => buffer.bind(&[]),
                    false => buffer.rows(self.rows, stride),
                };
                let table_rows = if matches!(spec.access, Access::GatheredRow { .. }) { 5 } else { 0 };
                BoundArg { streaming: self.streaming && spec.written, table_rows, ..bound }
            })
            .collect();
        let axes: Vec<Axis> = (0..program.axes).map(|axis| Axis { divide: 1 + usize::from(axis), modulo: 3 }).collect();
        let launch = Launch { program, args: &bound, axes: &axes, window: self.window };
        let mut scratch = match compile(isa, program, &bound, large) {
            Ok(compiled) => Scratch::with_code(program, compiled),
            Err(_) => Scratch::for_program(program),
        };
        let mut partials = vec![0.0; program.partials.iter().map(|partial| partial.width).sum()];
        let mut row = 0;
        while row < self.rows {
            let end = (row + self.split).min(self.rows);
            // SAFETY: the buffers hold `rows` rows, and this thread alone uses them.
            unsafe { run(isa, &launch, row..end, &mut scratch, &mut partials) }.expect("no index is out of range");
            row = end;
        }
        buffers.iter().for_each(Buffer::assert_red_zones);
        (buffers.iter().map(|buffer| buffer.content().to_vec()).collect(), partials)
    }

    #[track_caller]
    fn check(&self) {
        for isa in isas() {
            self.check_with(isa, LargeResults::PastCaches);
            if self.streaming {
                self.check_with(isa, LargeResults::Fetched);
            }
        }
    }

    #[track_caller]
    fn check_with(&self, isa: Isa, large: LargeResults) {
        let compiled = compile(isa, &self.program, &self.bound_nowhere(), large);
        assert!(compiled.is_ok(), "{}: {:?}\n{}", isa.name(), compiled.err(), self.program);
        let (got, got_sums) = self.outcome(isa, large);
        let (expected, sums) = self.outcome(isa.interpreting(), large);
        for (arg, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let dtype = self.program.args[arg].dtype;
            let place = differs(got, expected, dtype);
            assert!(
                place.is_none(),
                "{}, {} rows, misaligned by {}, streaming {}: argument {arg}, byte {place:?}\n{}",
                isa.name(),
                self.rows,
                self.misalign,
                self.streaming,
                self.program,
            );
        }
        crate::cpu::simd::tests::assert_same(&got_sums, &sums, "column sums");
    }

    fn bound_nowhere(&self) -> Vec<BoundArg> {
        let mut nothing = Buffer::new(0, 0);
        let bound = |_: &ArgSpec| BoundArg { streaming: self.streaming, ..nothing.rows(1, 0) };
        self.program.args.iter().map(bound).collect()
    }
}

/// The first byte where two buffers hold other elements; all NaN are equal.
fn differs(a: &[u8], b: &[u8], dtype: Dtype) -> Option<usize> {
    let is_nan = |element: &[u8]| match dtype {
        Dtype::F32 => f32::from_ne_bytes(element.try_into().expect("4 bytes")).is_nan(),
        Dtype::F16 => half::f16::from_ne_bytes(element.try_into().expect("2 bytes")).is_nan(),
        Dtype::Bf16 => half::bf16::from_ne_bytes(element.try_into().expect("2 bytes")).is_nan(),
        _ => false,
    };
    let size = dtype.bytes();
    let mut pairs = a.chunks_exact(size).zip(b.chunks_exact(size));
    pairs.position(|(a, b)| a != b && !(is_nan(a) && is_nan(b))).map(|element| element * size)
}

fn flat(args: Vec<ArgSpec>, strip: Vec<Inst>) -> TileProgram {
    crate::cpu::simd::tests::flat_program(args, strip)
}

fn rows(cols: usize, args: Vec<ArgSpec>, passes: Vec<Pass>) -> TileProgram {
    crate::cpu::simd::tests::rows_program(cols, args, passes)
}

fn unary_ops() -> Vec<TileUnary> {
    use UnaryOp::{Abs, Erf, Exp, Log, Neg, Reciprocal, Round, Rsqrt, Sigmoid, Sqrt, Tanh};
    let primitives = [Abs, Erf, Exp, Log, Neg, Reciprocal, Round, Rsqrt, Sigmoid, Sqrt, Tanh];
    let others = [
        TileUnary::GeluTanh,
        TileUnary::GeluErf,
        TileUnary::Silu,
        TileUnary::IntToFloat,
        TileUnary::FloatToInt,
        TileUnary::RoundF16,
        TileUnary::RoundBf16,
    ];
    primitives.into_iter().map(TileUnary::Primitive).chain(others).collect()
}

fn lane_instructions(dst: Dst, [a, b, c, d, e]: [Src; 5]) -> Vec<Inst> {
    let mut insts: Vec<Inst> = unary_ops().into_iter().map(|op| Inst::Unary { op, dst, a }).collect();
    use BinaryOp::{Add, Div, Max, Min, Mul, Sub};
    insts.extend([Add, Sub, Mul, Div, Max, Min].map(|op| Inst::Binary { op, dst, a, b }));
    insts.extend(IntegerOp::ALL.map(|op| Inst::Integer { op, dst, a, b }));
    use CompareOp::{Eq, Ge, Gt, Le, Lt, Ne};
    for kind in [LaneKind::Float, LaneKind::Int] {
        insts.extend([Lt, Le, Eq, Ne, Gt, Ge].map(|op| Inst::Compare { op, kind, dst, a, b }));
    }
    insts.extend([
        Inst::MulAdd { dst, a, b, c },
        Inst::MulMulAdd { dst, a, b, c, d },
        Inst::SubMulMulAdd { dst, a, b, c, d, e },
        Inst::ExpSub { dst, a, b },
        Inst::Select { dst, cond: a, a: b, b: c },
    ]);
    insts
}

#[test]
fn every_function_of_lanes() {
    let arguments = [0, 1, 2, 3, 4].map(Src::Arg);
    let mixed = [Src::Const(0.5), Src::Arg(1), Src::Const(-2.0), Src::Arg(3), Src::Const(0.0)];
    let same = [Src::Arg(0); 5];
    for operands in [arguments, mixed, same] {
        for inst in lane_instructions(Dst::Tile(0), operands) {
            let args = [vec![reads(Dtype::F32); 5], vec![writes(Dtype::F32)]].concat();
            let program = flat(args, vec![inst, Inst::Store { arg: 5, a: Src::Tile(0) }]);
            for length in [3, 64, 301] {
                Case::of(program.clone(), length).check();
            }
        }
    }
}

#[test]
fn every_function_of_scalars() {
    for inst in lane_instructions(Dst::Scalar(5), [0, 1, 2, 3, 4].map(Src::Scalar)) {
        let load = |scalar: u16| Inst::Load { dst: Dst::Scalar(scalar), arg: scalar };
        let mut row: Vec<Inst> = (0..5).map(load).collect();
        row.push(inst);
        row.push(Inst::Store { arg: 5, a: Src::Scalar(5) });
        let args = [vec![per_row(Dtype::F32, false); 5], vec![per_row(Dtype::F32, true), writes(Dtype::F32)]].concat();
        let strip = vec![
            Inst::Binary { op: BinaryOp::Add, dst: Dst::Tile(0), a: Src::Scalar(5), b: Src::Const(1.0) },
            Inst::Store { arg: 6, a: Src::Tile(0) },
        ];
        Case::of(rows(20, args, vec![Pass { row, strip }]), ROWS).check();
    }
}

/// `a1 = a0`, through lanes.
fn conversion(from: Dtype, to: Dtype) -> Vec<Inst> {
    let _ = (from, to);
    vec![Inst::Load { dst: Dst::Tile(0), arg: 0 }, Inst::Store { arg: 1, a: Src::Tile(0) }]
}

const READ: [Dtype; 6] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8, Dtype::Bool, Dtype::I32];
const WRITTEN: [Dtype; 7] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8, Dtype::Bool, Dtype::I32, Dtype::F8e4m3];

#[test]
fn every_format_at_every_width_and_place() {
    for (which, (from, to)) in READ.into_iter().flat_map(|from| WRITTEN.map(|to| (from, to))).enumerate() {
        for (turn, cols) in WIDTHS.into_iter().enumerate() {
            let args = vec![reads(from), writes(to)];
            let pass = Pass { row: vec![], strip: conversion(from, to) };
            let size = from.bytes().max(to.bytes());
            let misalign = [0, size, 32, 3, 60][(turn + which) % 5];
            let streaming = (turn + which) % 3 > 0;
            let program = rows(cols, args.clone(), vec![pass]);
            Case { misalign, streaming, ..Case::of(program, 5) }.check();
            let length = 7 * cols;
            Case { misalign, streaming, split: 1024, ..Case::of(flat(args, conversion(from, to)), length) }.check();
        }
    }
}

#[test]
fn formats_of_one_element_a_row() {
    for (from, to) in READ.into_iter().flat_map(|from| WRITTEN.map(|to| (from, to))) {
        let row = vec![Inst::Load { dst: Dst::Scalar(0), arg: 0 }, Inst::Store { arg: 1, a: Src::Scalar(0) }];
        let args = vec![per_row(from, false), per_row(to, true)];
        Case::of(rows(3, args, vec![Pass { row, strip: vec![] }]), ROWS).check();
    }
}

/// A softmax like chain: a maximum, a sum of kept exponentials, a scaled store.
fn softmax(cols: usize, dtype: Dtype) -> TileProgram {
    let load = Inst::Load { dst: Dst::Tile(1), arg: 0 };
    let first = vec![load, Inst::Reduce { op: TileReduce::Max, into: 0, a: Src::Tile(1), b: Src::Const(0.0) }];
    let second = vec![
        load,
        Inst::ExpSub { dst: Dst::Kept(0), a: Src::Tile(1), b: Src::Scalar(0) },
        Inst::Reduce { op: TileReduce::Sum, into: 1, a: Src::Kept(0), b: Src::Const(0.0) },
    ];
    let reciprocal = TileUnary::Primitive(UnaryOp::Reciprocal);
    let third = Pass {
        row: vec![Inst::Unary { op: reciprocal, dst: Dst::Scalar(2), a: Src::Scalar(1) }],
        strip: vec![
            Inst::Binary { op: BinaryOp::Mul, dst: Dst::Tile(0), a: Src::Kept(0), b: Src::Scalar(2) },
            Inst::Store { arg: 1, a: Src::Tile(0) },
        ],
    };
    let pass = |strip: Vec<Inst>| Pass { row: vec![], strip };
    rows(cols, vec![reads(dtype), writes(dtype)], vec![pass(first), pass(second), third])
}

#[test]
fn passes_with_reductions_and_kept_rows() {
    for (turn, cols) in WIDTHS.into_iter().enumerate() {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            let misalign = [0, 4, 32][turn % 3];
            Case { misalign, streaming: turn % 2 == 0, ..Case::of(softmax(cols, dtype), ROWS) }.check();
            Case { split: 4, ..Case::of(softmax(cols, dtype), ROWS) }.check();
        }
    }
}

#[test]
fn all_reductions_of_a_pass_at_once() {
    use TileReduce::{AbsMax, Deviation, Dot, Max, Sum};
    for cols in WIDTHS {
        let ops = [Sum, Dot, Deviation, Max, AbsMax];
        let reduce =
            |(into, op): (usize, TileReduce)| Inst::Reduce { op, into: into as u16, a: Src::Arg(0), b: Src::Arg(1) };
        let strip: Vec<Inst> = ops.into_iter().enumerate().map(reduce).collect();
        let store = |arg: u16| Inst::Store { arg: arg + 2, a: Src::Scalar(arg) };
        let args = [vec![reads(Dtype::F32); 2], vec![per_row(Dtype::F32, true); 5]].concat();
        let last = Pass { row: (0..5).map(store).collect(), strip: vec![] };
        Case::of(rows(cols, args, vec![Pass { row: vec![], strip }, last]), ROWS).check();
    }
}

#[test]
fn column_sums_gathered_rows_and_coordinates() {
    for cols in WIDTHS {
        let args = vec![
            ArgSpec { dtype: Dtype::F32, access: Access::GatheredRow { index: 1 }, written: false },
            per_row(Dtype::I32, false),
            reads(Dtype::Bf16),
            writes(Dtype::I32),
            ArgSpec { dtype: Dtype::F32, access: Access::Columns, written: true },
            ArgSpec { dtype: Dtype::F32, access: Access::Columns, written: true },
            ArgSpec { dtype: Dtype::F32, access: Access::Columns, written: true },
        ];
        let float = TileUnary::IntToFloat;
        let row = vec![
            Inst::RowIndex { dst: Dst::Scalar(0), axis: 1 },
            Inst::Unary { op: float, dst: Dst::Scalar(1), a: Src::Scalar(0) },
            Inst::ColumnAdd { partial: 2, a: Src::Scalar(1) },
            Inst::ColumnAdd { partial: 2, a: Src::Const(0.25) },
        ];
        let strip = vec![
            Inst::Load { dst: Dst::Tile(0), arg: 2 },
            Inst::MulAdd { dst: Dst::Tile(1), a: Src::Tile(0), b: Src::Arg(0), c: Src::Scalar(1) },
            Inst::ColumnAdd { partial: 0, a: Src::Tile(1) },
            Inst::ColumnAdd { partial: 1, a: Src::Arg(0) },
            Inst::ColumnIndex { dst: Dst::Tile(2) },
            Inst::Store { arg: 3, a: Src::Tile(2) },
        ];
        let mut program = rows(cols, args, vec![Pass { row, strip }]);
        program.axes = 2;
        program.partials =
            vec![Partial { arg: 4, width: cols }, Partial { arg: 5, width: cols }, Partial { arg: 6, width: 1 }];
        Case::of(program.clone(), ROWS).check();
        Case { split: 3, ..Case::of(program, ROWS) }.check();
    }
}

#[test]
fn random_numbers_at_every_place_of_a_block() {
    let keep = |dst, offset| Inst::Keep { dst, seed: Src::Scalar(0), offset, threshold: 0x4000_0000 };
    let scale = |dst, keep| Inst::MulMulAdd { dst, a: Src::Arg(0), b: keep, c: Src::Const(1.25), d: Src::Const(0.5) };
    for cols in [1, 3, 4, 5, 17, 62, 64, 66, 129, 1022, 1024] {
        let row = vec![Inst::Load { dst: Dst::Scalar(0), arg: 1 }];
        let strip = vec![
            keep(Dst::Tile(0), 3),
            scale(Dst::Tile(1), Src::Tile(0)),
            keep(Dst::Tile(2), 9),
            Inst::Binary { op: BinaryOp::Add, dst: Dst::Tile(1), a: Src::Tile(1), b: Src::Tile(2) },
            Inst::Reduce { op: TileReduce::Sum, into: 1, a: Src::Tile(1), b: Src::Const(0.0) },
            Inst::Store { arg: 2, a: Src::Tile(1) },
        ];
        let args = vec![reads(Dtype::F32), per_row(Dtype::I32, false), writes(Dtype::F32)];
        for streaming in [false, true] {
            let program = rows(cols, args.clone(), vec![Pass { row: row.clone(), strip: strip.clone() }]);
            Case { streaming, split: 5, ..Case::of(program, ROWS) }.check();
        }
    }
    for length in [5, 64, 300, 2000] {
        let seed = Src::ConstInt(7);
        let keep = Inst::Keep { dst: Dst::Tile(0), seed, offset: 3, threshold: 0x8000_0000 };
        let strip = vec![keep, scale(Dst::Tile(1), Src::Tile(0)), Inst::Store { arg: 1, a: Src::Tile(1) }];
        let program = flat(vec![reads(Dtype::F32), writes(Dtype::F32)], strip);
        Case { split: 101, streaming: true, ..Case::of(program.clone(), length) }.check();
        Case { split: 1024, ..Case::of(program, length) }.check();
    }
}

#[test]
fn a_window_of_columns() {
    let strip = vec![
        Inst::Binary { op: BinaryOp::Mul, dst: Dst::Tile(0), a: Src::Arg(0), b: Src::Arg(0) },
        Inst::Store { arg: 1, a: Src::Tile(0) },
    ];
    let program = rows(200, vec![reads(Dtype::F32), writes(Dtype::Bf16)], vec![Pass { row: vec![], strip }]);
    for window in [(0, 64), (64, 128), (128, 200), (100, 101)] {
        Case { window: Some(window), ..Case::of(program.clone(), ROWS) }.check();
    }
}

/// More values at once than there are registers.
#[test]
fn values_that_leave_their_registers() {
    let mut strip: Vec<Inst> = (0..40)
        .map(|tile| Inst::Binary {
            op: BinaryOp::Mul,
            dst: Dst::Tile(tile),
            a: Src::Arg(0),
            b: Src::Const(f32::from(tile)),
        })
        .collect();
    for tile in 1..40 {
        strip.push(Inst::MulAdd { dst: Dst::Tile(0), a: Src::Tile(0), b: Src::Const(1.5), c: Src::Tile(tile) });
        strip.push(Inst::Unary { op: TileUnary::GeluErf, dst: Dst::Tile(tile), a: Src::Tile(tile) });
    }
    for tile in 1..40 {
        strip.push(Inst::Binary { op: BinaryOp::Add, dst: Dst::Tile(0), a: Src::Tile(0), b: Src::Tile(tile) });
    }
    strip.push(Inst::Store { arg: 1, a: Src::Tile(0) });
    let mut program = flat(vec![reads(Dtype::F32), writes(Dtype::F32)], strip);
    program.tiles = 40;
    Case::of(program, 1000).check();
}

/// More values at once than there are registers, after the step of a reduction whose lanes are in registers.
#[test]
fn lanes_of_reductions_stay_in_their_registers() {
    let reduce = |op: TileReduce, into: u16| Inst::Reduce { op, into, a: Src::Arg(0), b: Src::Arg(1) };
    for ops in [vec![TileReduce::Sum], vec![TileReduce::Max, TileReduce::Deviation], vec![TileReduce::Dot; 2]] {
        let mut strip: Vec<Inst> = ops.iter().enumerate().map(|(into, &op)| reduce(op, into as u16)).collect();
        let product = |tile: u16| Inst::Binary {
            op: BinaryOp::Mul,
            dst: Dst::Tile(tile),
            a: Src::Arg(0),
            b: Src::Const(f32::from(tile)),
        };
        strip.extend((0..30).map(product));
        for tile in 1..30 {
            strip.push(Inst::Unary { op: TileUnary::GeluErf, dst: Dst::Tile(tile), a: Src::Tile(tile) });
            strip.push(Inst::Binary { op: BinaryOp::Add, dst: Dst::Tile(0), a: Src::Tile(0), b: Src::Tile(tile) });
        }
        strip.push(Inst::Store { arg: 2, a: Src::Tile(0) });
        let last = Pass {
            row: (0..ops.len() as u16).map(|scalar| Inst::Store { arg: 3 + scalar, a: Src::Scalar(scalar) }).collect(),
            strip: vec![],
        };
        let mut args = vec![reads(Dtype::F32), reads(Dtype::F32), writes(Dtype::F32)];
        args.extend(ops.iter().map(|_| per_row(Dtype::F32, true)));
        let mut program = rows(200, args, vec![Pass { row: vec![], strip }, last]);
        program.tiles = 30;
        Case::of(program, ROWS).check();
    }
}

#[test]
fn in_place_updates() {
    let strip = vec![
        Inst::MulAdd { dst: Dst::Tile(0), a: Src::Arg(1), b: Src::Const(-0.1), c: Src::Arg(0) },
        Inst::Store { arg: 2, a: Src::Tile(0) },
    ];
    let program = flat(vec![reads(Dtype::F32), reads(Dtype::F32), writes(Dtype::F32)], strip);
    for isa in isas() {
        for (streaming, length) in [(false, 1000), (true, 1000), (true, 77), (true, 4096)] {
            let result = |isa: Isa| {
                let (mut state, mut change) = (Buffer::of(&mixed(length, 1), 4), Buffer::of(&mixed(length, 2), 0));
                let (state_arg, change_arg) = (state.bind(&[]), change.bind(&[]));
                let bound = [state_arg, change_arg, BoundArg { streaming, ..state_arg }];
                let mut scratch = match compile(isa, &program, &bound, LargeResults::Fetched) {
                    Ok(compiled) => Scratch::with_code(&program, compiled),
                    Err(_) => Scratch::for_program(&program),
                };
                let launch = Launch { program: &program, args: &bound, axes: &[], window: None };
                // SAFETY: the buffers hold that many elements; state and result start at the same address.
                unsafe { run(isa, &launch, 0..length, &mut scratch, &mut []) }.expect("nothing is gathered");
                state.floats()
            };
            crate::cpu::simd::tests::assert_same(&result(isa), &result(isa.interpreting()), "in place");
        }
    }
}

#[test]
fn what_is_not_covered_says_so() {
    use crate::cpu::machine::Uncovered;
    let reduce = Inst::Reduce { op: TileReduce::ArgMax, into: 0, a: Src::Arg(0), b: Src::Const(0.0) };
    let pass = Pass { row: vec![], strip: vec![reduce] };
    for isa in isas() {
        let arg_max = rows(64, vec![reads(Dtype::F32)], vec![pass.clone()]);
        let mut buffer = Buffer::new(256, 0);
        let bound = [buffer.rows(1, 64)];
        assert_eq!(compile(isa, &arg_max, &bound, LargeResults::Fetched).unwrap_err(), Uncovered::ArgMax);
        assert_eq!(
            compile(isa, &softmax(0, Dtype::F32), &[bound[0]; 2], LargeResults::Fetched).unwrap_err(),
            Uncovered::NoColumns
        );
        let interpreted = compile(isa.interpreting(), &softmax(64, Dtype::F32), &[bound[0]; 2], LargeResults::Fetched);
        assert_eq!(interpreted.unwrap_err(), Uncovered::Interpreter);
    }
}
