//! Row reductions and column sums.

use deuteron_graph::{BinaryOp, Dtype, UnaryOp};

use super::{Buffer, WIDTHS, assert_same, mixed, ordinary, per_row, reads, rows_program, run_all, writes};
use crate::cpu::program::{Access, ArgSpec, Dst, Inst, LANES, Partial, Pass, Src, TileProgram, TileReduce, TileUnary};
use crate::cpu::simd::{Isa, Launch, Scratch, finish, run};

/// The reduction of each row of `a` (and `b`), each of `cols` elements.
fn reduce(isa: Isa, op: TileReduce, cols: usize, a: &[f32], b: &[f32]) -> Vec<f32> {
    let rows = 2;
    let strip = vec![Inst::Reduce { op, into: 0, a: Src::Arg(0), b: Src::Arg(1) }];
    let row = vec![Inst::Store { arg: 2, a: Src::Scalar(0) }];
    let passes = vec![Pass { row: vec![], strip }, Pass { row, strip: vec![] }];
    let args = vec![reads(Dtype::F32), reads(Dtype::F32), per_row(Dtype::F32, true)];
    let program = rows_program(cols, args, passes);
    let (mut left, mut right) = (Buffer::of(a, 4), Buffer::of(b, 0));
    let mut output = Buffer::new(4 * rows, 0);
    run_all(isa, &program, &[left.rows(rows, cols), right.rows(rows, cols), output.rows(rows, 1)], rows);
    output.assert_red_zones();
    output.floats()
}

/// The documented order: 64 lanes, then halves.
fn lanes_of(values: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0.0f32; LANES];
    values.enumerate().for_each(|(column, x)| lanes[column % LANES] += x);
    for half in [32, 16, 8, 4, 2, 1] {
        (0..half).for_each(|i| lanes[i] += lanes[i + half]);
    }
    lanes[0]
}

#[test]
fn a_sum_has_the_documented_order() {
    for isa in Isa::available() {
        for cols in WIDTHS {
            let a = ordinary(2 * cols, 40);
            let expected: Vec<f32> = (0..2).map(|row| lanes_of(a[row * cols..][..cols].iter().copied())).collect();
            let got = reduce(isa, TileReduce::Sum, cols, &a, &a);
            assert_same(&got, &expected, &format!("sum x {cols} on {}", isa.name()));
        }
    }
}

#[test]
fn a_dot_product_is_near_the_exact_one() {
    for isa in Isa::available() {
        for cols in WIDTHS {
            let (a, b) = (ordinary(2 * cols, 41), ordinary(2 * cols, 42));
            let got = reduce(isa, TileReduce::Dot, cols, &a, &b);
            for row in 0..2 {
                let (a, b) = (&a[row * cols..][..cols], &b[row * cols..][..cols]);
                let terms = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b));
                let size: f64 = terms.clone().map(f64::abs).sum();
                let exact: f64 = terms.sum();
                // A lane adds cols / 64 terms and the tree 6 levels, each step with half an ulp of at most `size`.
                let steps = (cols / LANES + 8) as f64;
                let bound = size * steps * f64::powi(2.0, -24);
                let error = (f64::from(got[row]) - exact).abs();
                assert!(error <= bound, "dot x {cols} on {}: {} for {exact}", isa.name(), got[row]);
            }
        }
    }
}

fn max_model(values: &[f32]) -> f32 {
    values.iter().fold(f32::NEG_INFINITY, |best, &x| if best.is_nan() || x <= best { best } else { x })
}

fn arg_max_model(values: &[f32]) -> i32 {
    let best = max_model(values);
    let found = values.iter().position(|&x| x == best || (x.is_nan() && best.is_nan()));
    found.unwrap_or(0) as i32
}

#[test]
fn maxima_match_the_model() {
    for isa in Isa::available() {
        for cols in WIDTHS {
            // With NaN, without, and all -inf.
            let numbers: Vec<f32> = mixed(2 * cols, 43).into_iter().map(|x| if x.is_nan() { 1.0 } else { x }).collect();
            let low = vec![f32::NEG_INFINITY; 2 * cols];
            let ties: Vec<f32> = ordinary(2 * cols, 44).into_iter().map(|x| x.round()).collect();
            for a in [mixed(2 * cols, 45), numbers, low, ties] {
                let rows = [&a[..cols], &a[cols..]];
                let what = format!("x {cols} on {}", isa.name());
                let normal = |xs: Vec<f32>| -> Vec<f32> { xs.into_iter().map(|x| x + 0.0).collect() };
                let expected = normal(rows.iter().map(|row| max_model(row)).collect());
                assert_same(&normal(reduce(isa, TileReduce::Max, cols, &a, &a)), &expected, &format!("max {what}"));
                let sizes: Vec<f32> = a.iter().map(|x| x.abs()).collect();
                let expected: Vec<f32> =
                    [&sizes[..cols], &sizes[cols..]].iter().map(|x| max_model(x).max(0.0)).collect();
                let nan = |row: usize| sizes[row * cols..][..cols].iter().any(|x| x.is_nan());
                let expected: Vec<f32> = (0..2).map(|r| if nan(r) { f32::NAN } else { expected[r] }).collect();
                assert_same(&reduce(isa, TileReduce::AbsMax, cols, &a, &a), &expected, &format!("absmax {what}"));
                let got: Vec<i32> =
                    reduce(isa, TileReduce::ArgMax, cols, &a, &a).iter().map(|x| x.to_bits() as i32).collect();
                let expected: Vec<i32> = rows.iter().map(|row| arg_max_model(row)).collect();
                assert_eq!(got, expected, "argmax {what}");
            }
        }
    }
}

/// `y = (x - mean) * rstd * w + b`, as the planner writes it, with the centred row kept.
pub fn layer_norm(cols: usize) -> TileProgram {
    let args = vec![reads(Dtype::F32), reads(Dtype::F32), reads(Dtype::F32), writes(Dtype::F32)];
    let scalar = |scalar, op, a, b| Inst::Binary { op, dst: Dst::Scalar(scalar), a, b };
    let share = 1.0 / cols as f32;
    let sum = Inst::Reduce { op: TileReduce::Sum, into: 0, a: Src::Arg(0), b: Src::Arg(0) };
    let centre = Inst::Binary { op: BinaryOp::Sub, dst: Dst::Kept(0), a: Src::Arg(0), b: Src::Scalar(1) };
    let squares = Inst::Reduce { op: TileReduce::Dot, into: 2, a: Src::Kept(0), b: Src::Kept(0) };
    let passes = vec![
        Pass { row: vec![], strip: vec![sum] },
        Pass { row: vec![scalar(1, BinaryOp::Mul, Src::Scalar(0), Src::Const(share))], strip: vec![centre, squares] },
        Pass {
            row: vec![
                Inst::MulAdd { dst: Dst::Scalar(3), a: Src::Scalar(2), b: Src::Const(share), c: Src::Const(1e-5) },
                Inst::Unary { op: TileUnary::Primitive(UnaryOp::Rsqrt), dst: Dst::Scalar(4), a: Src::Scalar(3) },
            ],
            strip: vec![
                Inst::Binary { op: BinaryOp::Mul, dst: Dst::Tile(0), a: Src::Kept(0), b: Src::Scalar(4) },
                Inst::MulAdd { dst: Dst::Tile(1), a: Src::Tile(0), b: Src::Arg(1), c: Src::Arg(2) },
                Inst::Store { arg: 3, a: Src::Tile(1) },
            ],
        },
    ];
    rows_program(cols, args, passes)
}

#[test]
fn layer_norm_is_near_the_exact_one() {
    for isa in Isa::available() {
        for cols in WIDTHS.into_iter().filter(|&cols| cols > 1) {
            let rows = 3;
            let (x, w, b) = (ordinary(rows * cols, 50), ordinary(cols, 51), ordinary(cols, 52));
            let mut buffers = [Buffer::of(&x, 4), Buffer::of(&w, 0), Buffer::of(&b, 0), Buffer::new(4 * x.len(), 12)];
            let [input, weight, bias, output] = &mut buffers;
            let args = [input.rows(rows, cols), weight.bind(&[]), bias.bind(&[]), output.rows(rows, cols)];
            run_all(isa, &layer_norm(cols), &args, rows);
            buffers[3].assert_red_zones();
            for (row, got) in buffers[3].floats().chunks(cols).enumerate() {
                let x: Vec<f64> = x[row * cols..][..cols].iter().map(|&x| f64::from(x)).collect();
                let mean = x.iter().sum::<f64>() / cols as f64;
                let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / cols as f64;
                let rstd = 1.0 / (variance + f64::from(1e-5f32)).sqrt();
                for c in 0..cols {
                    let exact = (x[c] - mean) * rstd * f64::from(w[c]) + f64::from(b[c]);
                    // A handful of roundings of numbers up to 4, scaled by rstd * w.
                    let bound = (16.0 * rstd * 4.0 + 16.0) * 4.0 * f64::powi(2.0, -24);
                    let error = (f64::from(got[c]) - exact).abs();
                    assert!(error <= bound, "layer norm x {cols} on {}: {} for {exact}", isa.name(), got[c]);
                }
            }
        }
    }
}

/// Sums over rows of `x` and of one scalar per row, in `chunks` spans.
fn column_sums(isa: Isa, cols: usize, rows: usize, chunks: usize, x: &[f32], dtype: Dtype) -> (Vec<u8>, f32) {
    let columns = |dtype| ArgSpec { dtype, access: Access::Columns, written: true };
    let args = vec![reads(Dtype::F32), columns(dtype), columns(Dtype::F32), per_row(Dtype::F32, false)];
    let strip = vec![Inst::ColumnAdd { partial: 0, a: Src::Arg(0) }];
    let row = vec![Inst::Load { dst: Dst::Scalar(0), arg: 3 }, Inst::ColumnAdd { partial: 1, a: Src::Scalar(0) }];
    let mut program = rows_program(cols, args, vec![Pass { row, strip }]);
    program.partials = vec![Partial { arg: 1, width: cols }, Partial { arg: 2, width: 1 }];
    let mut input = Buffer::of(x, 4);
    let mut sums = Buffer::new(dtype.bytes() * cols, 2);
    let mut total = Buffer::new(4, 0);
    let mut ones = Buffer::of(&[1.0], 0);
    let bound = [input.rows(rows, cols), sums.bind(&[]), total.bind(&[]), ones.bind(&[])];
    let launch = Launch { program: &program, args: &bound, axes: &[], window: None };
    let mut partials = vec![0.0; chunks * (cols + 1)];
    let mut scratch = Scratch::for_program(&program);
    for (chunk, partial) in partials.chunks_exact_mut(cols + 1).enumerate() {
        let span = rows * chunk / chunks..rows * (chunk + 1) / chunks;
        // SAFETY: the buffers hold `rows` rows and are used here alone.
        unsafe { run(isa, &launch, span, &mut scratch, partial) }.expect("nothing is gathered");
    }
    // SAFETY: as above.
    unsafe { finish(isa, &launch, &partials, chunks) }
    sums.assert_red_zones();
    total.assert_red_zones();
    (sums.content().to_vec(), total.floats()[0])
}

#[test]
fn column_sums_add_up() {
    for isa in Isa::available() {
        for cols in WIDTHS {
            let rows = 13;
            let x: Vec<f32> = ordinary(rows * cols, 60).into_iter().map(|x| (x * 64.0).round() / 64.0).collect();
            // Multiples of 1/64 add up exactly, in any order.
            let expected: Vec<f32> = (0..cols).map(|c| (0..rows).map(|row| x[row * cols + c]).sum()).collect();
            for chunks in [1, 2, 3, 8] {
                let (bytes, total) = column_sums(isa, cols, rows, chunks, &x, Dtype::F32);
                let got: Vec<f32> =
                    bytes.chunks_exact(4).map(|x| f32::from_ne_bytes(x.try_into().expect("4 bytes"))).collect();
                let what = format!("{cols} columns, {chunks} chunks, {}", isa.name());
                assert_eq!(got, expected, "{what}");
                assert_eq!(total, rows as f32, "{what}");
                let (bytes, _) = column_sums(isa, cols, rows, chunks, &x, Dtype::Bf16);
                for (got, expected) in bytes.chunks_exact(2).zip(&expected) {
                    let got = u16::from_ne_bytes([got[0], got[1]]);
                    assert_eq!(got, half::bf16::from_f32(*expected).to_bits(), "{what}");
                }
            }
        }
    }
}
