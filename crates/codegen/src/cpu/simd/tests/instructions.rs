//! Every instruction that maps lanes, at every width, against a model of one element.

use deuteron_graph::{BinaryOp, CompareOp, Dtype, UnaryOp};

use super::{
    Buffer, TILE, WIDTHS, apply, assert_same, flat_program, mixed, per_row, reads, rows_program, run_all, scramble,
    try_run, writes,
};
use crate::cpu::program::{Dst, Inst, IntegerOp, LaneKind, Pass, Src, TileUnary};
use crate::cpu::simd::{Axis, Isa};

fn all_unary() -> Vec<TileUnary> {
    use TileUnary::{FloatToInt, GeluErf, GeluTanh, IntToFloat, Silu};
    let compounds = [GeluTanh, GeluErf, Silu, IntToFloat, FloatToInt];
    UnaryOp::ALL.into_iter().map(TileUnary::Primitive).chain(compounds).collect()
}

fn binary_model(op: BinaryOp, a: f32, b: f32) -> f32 {
    match op {
        BinaryOp::Add => a + b,
        BinaryOp::Sub => a - b,
        BinaryOp::Mul => a * b,
        BinaryOp::Div => a / b,
        BinaryOp::Max if a.is_nan() || b.is_nan() => f32::NAN,
        BinaryOp::Max => a.max(b),
        BinaryOp::Min if a.is_nan() || b.is_nan() => f32::NAN,
        BinaryOp::Min => a.min(b),
    }
}

fn compare_model<T: PartialOrd>(op: CompareOp, a: T, b: T) -> f32 {
    let holds = match op {
        CompareOp::Lt => a < b,
        CompareOp::Le => a <= b,
        CompareOp::Eq => a == b,
        CompareOp::Ne => a != b,
        CompareOp::Gt => a > b,
        CompareOp::Ge => a >= b,
    };
    f32::from(u8::from(holds))
}

/// Equal, but for the sign of zero where the order of `max(0, -0)` is left to the machine.
fn same_but_for_zeros(got: &[f32], expected: &[f32], what: &str) {
    let normal = |xs: &[f32]| -> Vec<f32> { xs.iter().map(|&x| if x == 0.0 { 0.0 } else { x }).collect() };
    assert_same(&normal(got), &normal(expected), what);
}

#[test]
fn binary_instructions_match_the_model() {
    for isa in Isa::available() {
        for width in WIDTHS {
            let (a, b) = (mixed(width, 1), mixed(width, 2));
            for op in BinaryOp::ALL {
                let got = apply(isa, Inst::Binary { op, dst: TILE, a: Src::Arg(0), b: Src::Arg(1) }, &[&a, &b]);
                let expected: Vec<f32> = a.iter().zip(&b).map(|(&a, &b)| binary_model(op, a, b)).collect();
                same_but_for_zeros(&got, &expected, &format!("{op:?} x {width} on {}", isa.name()));
                let got = apply(isa, Inst::Binary { op, dst: TILE, a: Src::Const(1.5), b: Src::Arg(0) }, &[&a]);
                let expected: Vec<f32> = a.iter().map(|&a| binary_model(op, 1.5, a)).collect();
                same_but_for_zeros(&got, &expected, &format!("1.5 {op:?} x {width} on {}", isa.name()));
            }
        }
    }
}

#[test]
fn comparisons_match_the_model() {
    for isa in Isa::available() {
        for width in WIDTHS {
            let (a, b) = (mixed(width, 3), mixed(width, 3 + (width as u32 % 2)));
            for op in CompareOp::ALL {
                let inst = |kind| Inst::Compare { op, kind, dst: TILE, a: Src::Arg(0), b: Src::Arg(1) };
                let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| compare_model(op, a, b)).collect();
                let what = format!("{op:?} x {width} on {}", isa.name());
                assert_same(&apply(isa, inst(LaneKind::Float), &[&a, &b]), &expected, &what);
                let int = |x: &f32| x.to_bits() as i32;
                let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| compare_model(op, int(a), int(b))).collect();
                assert_same(&apply(isa, inst(LaneKind::Int), &[&a, &b]), &expected, &what);
            }
        }
    }
}

#[test]
fn select_and_mul_add_match_the_model() {
    for isa in Isa::available() {
        for width in WIDTHS {
            let (a, b, c) = (mixed(width, 5), mixed(width, 6), mixed(width, 7));
            let inst = Inst::Select { dst: TILE, cond: Src::Arg(0), a: Src::Arg(1), b: Src::Arg(2) };
            let got = apply(isa, inst, &[&a, &b, &c]);
            let expected: Vec<f32> = (0..width).map(|i| if a[i] != 0.0 { b[i] } else { c[i] }).collect();
            assert_same(&got, &expected, &format!("select x {width} on {}", isa.name()));

            let inst = Inst::MulAdd { dst: TILE, a: Src::Arg(0), b: Src::Arg(1), c: Src::Arg(2) };
            for (i, got) in apply(isa, inst, &[&a, &b, &c]).into_iter().enumerate() {
                let (fused, rounded) = (a[i].mul_add(b[i], c[i]), a[i] * b[i] + c[i]);
                let same = |x: f32| got.to_bits() == x.to_bits() || (got.is_nan() && x.is_nan());
                assert!(same(fused) || same(rounded), "{} * {} + {} = {got} on {}", a[i], b[i], c[i], isa.name());
            }
        }
    }
}

#[test]
fn integers_wrap_and_conversions_saturate() {
    let of_int = |x: i32| f32::from_bits(x as u32);
    for isa in Isa::available() {
        for width in WIDTHS {
            let ints = |seed: u32| -> Vec<i32> {
                let edges = [0, 1, -1, i32::MAX, i32::MIN, 65_536, -65_537];
                let int = |i: usize| match i % 3 {
                    0 => edges[(i / 3 + seed as usize) % edges.len()],
                    _ => scramble(i as u32 * 2 + seed) as i32,
                };
                (0..width).map(int).collect()
            };
            let (a, b) = (ints(1), ints(2));
            let lanes = |x: &[i32]| -> Vec<f32> { x.iter().map(|&x| of_int(x)).collect() };
            for op in IntegerOp::ALL {
                let model = |a: i32, b: i32| match op {
                    IntegerOp::Add => a.wrapping_add(b),
                    IntegerOp::Sub => a.wrapping_sub(b),
                    IntegerOp::Mul => a.wrapping_mul(b),
                };
                let same = |inst: Inst, inputs: &[&[f32]], expected: Vec<i32>| {
                    let got: Vec<u32> = apply(isa, inst, inputs).into_iter().map(f32::to_bits).collect();
                    let expected: Vec<u32> = expected.into_iter().map(|x| x as u32).collect();
                    assert_eq!(got, expected, "{op:?} x {width} on {}", isa.name());
                };
                let expected = a.iter().zip(&b).map(|(&a, &b)| model(a, b)).collect();
                let (left, right) = (lanes(&a), lanes(&b));
                same(Inst::Integer { op, dst: TILE, a: Src::Arg(0), b: Src::Arg(1) }, &[&left, &right], expected);
                let inst = Inst::Integer { op, dst: TILE, a: Src::ConstInt(-77_777), b: Src::Arg(0) };
                same(inst, &[&left], a.iter().map(|&a| model(-77_777, a)).collect());
            }
            let edges = [0.5, 1.5, -0.5, -2.5, 2_097_153.0, 8_388_607.5, 2.0e9, 2_147_483_520.0, 2_147_483_648.0, 1e30];
            let float = |i: usize| match i % 4 {
                0 => edges[i / 4 % edges.len()],
                1 => -edges[i / 4 % edges.len()],
                2 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0][i / 4 % 4],
                _ => (scramble(i as u32) as i32) as f32 / 16_384.0,
            };
            let x: Vec<f32> = (0..width).map(float).collect();
            let inst = Inst::Unary { op: TileUnary::FloatToInt, dst: TILE, a: Src::Arg(0) };
            let got: Vec<i32> = apply(isa, inst, &[&x]).into_iter().map(|x| x.to_bits() as i32).collect();
            let expected: Vec<i32> = x.iter().map(|x| x.round_ties_even() as i32).collect();
            assert_eq!(got, expected, "to i32 x {width} on {}", isa.name());
        }
    }
}

#[test]
fn indices_count() {
    for isa in Isa::available() {
        for width in WIDTHS {
            let ints: Vec<f32> = (0..width).map(|i| f32::from_bits(scramble(i as u32))).collect();
            let expected: Vec<f32> = ints.iter().map(|x| x.to_bits() as i32 as f32).collect();
            let inst = Inst::Unary { op: TileUnary::IntToFloat, dst: TILE, a: Src::Arg(0) };
            assert_same(&apply(isa, inst, &[&ints]), &expected, isa.name());
            let expected: Vec<f32> = (0..width).map(|i| f32::from_bits(i as u32)).collect();
            assert_same(&apply(isa, Inst::ColumnIndex { dst: TILE }, &[&ints]), &expected, isa.name());
        }
    }
}

/// A function gives the same bits at every column of every width: whole vectors, tails, and scalars agree.
#[test]
fn a_function_does_not_depend_on_the_column() {
    for isa in Isa::available() {
        let values = mixed(4096, 11);
        for op in all_unary() {
            let inst = Inst::Unary { op, dst: TILE, a: Src::Arg(0) };
            let expected = apply(isa, inst, &[&values]);
            for width in WIDTHS {
                let what = format!("{op:?} x {width} on {}", isa.name());
                assert_same(&apply(isa, inst, &[&values[..width]]), &expected[..width], &what);
                let shifted = &values[values.len() - width..];
                assert_same(&apply(isa, inst, &[shifted]), &expected[values.len() - width..], &what);
            }
            assert_same(&scalar_results(isa, op, &values[..300]), &expected[..300], &format!("scalar {op:?}"));
        }
    }
}

/// `op` of one element per row, done in row work.
fn scalar_results(isa: Isa, op: TileUnary, values: &[f32]) -> Vec<f32> {
    let row = vec![
        Inst::Load { dst: Dst::Scalar(0), arg: 0 },
        Inst::Unary { op, dst: Dst::Scalar(1), a: Src::Scalar(0) },
        Inst::Store { arg: 1, a: Src::Scalar(1) },
    ];
    let args = vec![per_row(Dtype::F32, false), per_row(Dtype::F32, true)];
    let program = rows_program(5, args, vec![Pass { row, strip: vec![] }]);
    let mut input = Buffer::of(values, 4);
    let mut output = Buffer::new(4 * values.len(), 0);
    let rows = values.len();
    run_all(isa, &program, &[input.rows(rows, 1), output.rows(rows, 1)], rows);
    output.assert_red_zones();
    output.floats()
}

#[test]
fn scalar_work_matches_the_model() {
    let rows = 40;
    let (a, b) = (mixed(rows, 21), mixed(rows, 22));
    let insts = |dst| {
        [
            Inst::Binary { op: BinaryOp::Div, dst, a: Src::Scalar(0), b: Src::Scalar(1) },
            Inst::Binary { op: BinaryOp::Max, dst, a: Src::Const(0.25), b: Src::Scalar(1) },
            Inst::Compare { op: CompareOp::Lt, kind: LaneKind::Float, dst, a: Src::Scalar(0), b: Src::Scalar(1) },
            Inst::Select { dst, cond: Src::Scalar(0), a: Src::Scalar(1), b: Src::Const(-2.0) },
        ]
    };
    let model = |which: usize, a: f32, b: f32| match which {
        0 => a / b,
        1 => binary_model(BinaryOp::Max, 0.25, b),
        2 => compare_model(CompareOp::Lt, a, b),
        _ if a != 0.0 => b,
        _ => -2.0,
    };
    for isa in Isa::available() {
        for (which, inst) in insts(Dst::Scalar(2)).into_iter().enumerate() {
            let row = vec![
                Inst::Load { dst: Dst::Scalar(0), arg: 0 },
                Inst::Load { dst: Dst::Scalar(1), arg: 1 },
                inst,
                Inst::Store { arg: 2, a: Src::Scalar(2) },
            ];
            let args = vec![per_row(Dtype::F32, false), per_row(Dtype::F32, false), per_row(Dtype::F32, true)];
            let program = rows_program(0, args, vec![Pass { row, strip: vec![] }]);
            let (mut left, mut right) = (Buffer::of(&a, 0), Buffer::of(&b, 0));
            let mut output = Buffer::new(4 * rows, 1);
            run_all(isa, &program, &[left.rows(rows, 1), right.rows(rows, 1), output.rows(rows, 1)], rows);
            let expected: Vec<f32> = a.iter().zip(&b).map(|(&a, &b)| model(which, a, b)).collect();
            assert_same(&output.floats(), &expected, &format!("{inst:?} on {}", isa.name()));
            output.assert_red_zones();
        }
    }
}

#[test]
fn row_coordinates_divide_and_wrap() {
    let row = vec![
        Inst::RowIndex { dst: Dst::Scalar(0), axis: 0 },
        Inst::RowIndex { dst: Dst::Scalar(1), axis: 1 },
        Inst::Store { arg: 0, a: Src::Scalar(0) },
        Inst::Store { arg: 1, a: Src::Scalar(1) },
    ];
    let args = vec![per_row(Dtype::I32, true), per_row(Dtype::I32, true)];
    let mut program = rows_program(3, args, vec![Pass { row, strip: vec![] }]);
    program.axes = 2;
    let rows = 24;
    let axes = [Axis { divide: 4, modulo: 3 }, Axis { divide: 1, modulo: 4 }];
    for isa in Isa::available() {
        let (mut outer, mut inner) = (Buffer::new(4 * rows, 0), Buffer::new(4 * rows, 0));
        let args = [outer.rows(rows, 1), inner.rows(rows, 1)];
        try_run(isa, &program, &args, &axes, rows).expect("nothing is gathered");
        assert_eq!(outer.bits(), (0..rows as u32).map(|row| row / 4 % 3).collect::<Vec<_>>());
        assert_eq!(inner.bits(), (0..rows as u32).map(|row| row % 4).collect::<Vec<_>>());
    }
}

/// A tile with two uses is stored as well as read on; with one use its store is folded away. Both give the same.
#[test]
fn a_stored_tile_can_be_read_on() {
    let double = Inst::Binary { op: BinaryOp::Add, dst: Dst::Tile(0), a: Src::Arg(0), b: Src::Arg(0) };
    let square = Inst::Binary { op: BinaryOp::Mul, dst: Dst::Tile(1), a: Src::Tile(0), b: Src::Tile(0) };
    let insts = vec![double, Inst::Store { arg: 1, a: Src::Tile(0) }, square, Inst::Store { arg: 2, a: Src::Tile(1) }];
    let program = flat_program(vec![reads(Dtype::F32), writes(Dtype::F32), writes(Dtype::F32)], insts);
    for isa in Isa::available() {
        for width in WIDTHS {
            for streaming in [false, true] {
                let x = mixed(width, 30);
                let mut input = Buffer::of(&x, 8);
                let (mut doubled, mut squared) = (Buffer::new(4 * width, 0), Buffer::new(4 * width, 20));
                let mut args = [input.bind(&[]), doubled.bind(&[]), squared.bind(&[])];
                args[1].streaming = streaming;
                args[2].streaming = streaming;
                run_all(isa, &program, &args, width);
                let twice: Vec<f32> = x.iter().map(|x| x + x).collect();
                assert_same(&doubled.floats(), &twice, isa.name());
                assert_same(&squared.floats(), &twice.iter().map(|x| x * x).collect::<Vec<_>>(), isa.name());
                doubled.assert_red_zones();
                squared.assert_red_zones();
            }
        }
    }
}

/// An argument may be updated in place: `x = -x`, then `y = x + 1` reads the value from before in the same strip only if
/// it comes first.
#[test]
fn a_store_is_not_moved_over_a_read_of_the_same_memory() {
    let insts = vec![
        Inst::Unary { op: TileUnary::Primitive(UnaryOp::Neg), dst: Dst::Tile(0), a: Src::Arg(0) },
        Inst::Binary { op: BinaryOp::Add, dst: Dst::Tile(1), a: Src::Arg(0), b: Src::Const(1.0) },
        Inst::Store { arg: 1, a: Src::Tile(0) },
        Inst::Store { arg: 2, a: Src::Tile(1) },
    ];
    let program = flat_program(vec![reads(Dtype::F32), writes(Dtype::F32), writes(Dtype::F32)], insts);
    for isa in Isa::available() {
        let x: Vec<f32> = (0..1500).map(|i| i as f32).collect();
        let mut shared = Buffer::of(&x, 0);
        let mut output = Buffer::new(4 * x.len(), 0);
        let args = [shared.bind(&[]), shared.bind(&[]), output.bind(&[])];
        run_all(isa, &program, &args, x.len());
        assert_same(&shared.floats(), &x.iter().map(|x| -x).collect::<Vec<_>>(), isa.name());
        assert_same(&output.floats(), &x.iter().map(|x| x + 1.0).collect::<Vec<_>>(), isa.name());
    }
}
