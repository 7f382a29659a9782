//! Products of bytes: exact on every instruction set, with scales and what follows on the fly; zeros, NaN and extremes.

use deuteron::{Dtype, Engine, Graph, Isa, Session, Shape, Strategy, Tensor, seed};

use crate::support::{assert_holds, cpu, expected, outputs, ran};

const STRATEGIES: [Strategy; 3] = [Strategy::Naive, Strategy::Unfused, Strategy::Fused];

fn run(engine: &Engine, graph: &Graph, strategy: Strategy, inputs: &[Tensor]) -> Vec<Vec<f32>> {
    outputs(&ran(engine, graph, strategy, inputs)).iter().map(|output| output.to_f32().unwrap()).collect()
}

fn bytes(count: usize, seed: usize) -> Vec<i8> {
    (0..count).map(|index| ((index * 131 + index / 7 + seed) % 256) as u8 as i8).collect()
}

fn tensor(shape: [usize; 2], bytes: &[i8]) -> Tensor {
    let raw: Vec<u8> = bytes.iter().map(|&byte| byte as u8).collect();
    Tensor::from_bytes(Dtype::I8, shape, &raw).unwrap()
}

#[test]
fn sums_are_exact_on_every_instruction_set() {
    for (m, n, k) in [(1, 1, 1), (1, 33, 130), (3, 129, 63), (8, 7, 3072), (9, 64, 1500), (40, 131, 65)] {
        for transpose in [false, true] {
            let (shape, how) = if transpose { ([n, k], "transpose_b") } else { ([k, n], "") };
            let text =
                format!("a = input i8[{m},{k}] ; b = weight i8{} ; c = matmul a b {how} ; out c", Shape::from(shape));
            let graph: Graph = text.parse().unwrap();
            let (left, right) = (bytes(m * k, 3), bytes(n * k, 8));
            let at = |row: usize, column: usize| if transpose { column * k + row } else { row * n + column };
            let expected: Vec<f32> = (0..m * n)
                .map(|index| {
                    let term = |i: usize| i64::from(left[index / n * k + i]) * i64::from(right[at(i, index % n)]);
                    (0..k).map(term).sum::<i64>() as f32
                })
                .collect();
            let inputs = [tensor([m, k], &left), tensor(shape, &right)];
            for isa in Isa::available() {
                for threads in [1, 3] {
                    let engine = cpu(threads, isa);
                    let got = run(&engine, &graph, Strategy::Fused, &inputs).remove(0);
                    assert_eq!(got, expected, "{} {m}x{n}x{k} {transpose}", isa.name());
                }
            }
        }
    }
}

/// A norm, its bytes, a product with scales, bias, GELU, its bytes, a product with a residual.
fn block(rows: usize, hidden: usize, inner: usize, dtype: Dtype) -> Graph {
    let text = format!(
        "x = input {dtype}[{rows},{hidden}] ; w = weight {dtype}[{hidden}] ; b = weight {dtype}[{hidden}]
n, mean, rstd = layer_norm x w b ; fc.weight = weight i8[{inner},{hidden}] ; fc.scale = weight f32[{inner}]
fc.bias = weight {dtype}[{inner}] ; q, s = quantize_int8 n ; fc = quantized_linear q s fc.weight fc.scale fc.bias {dtype}
a = gelu fc ; proj.weight = weight i8[{hidden},{inner}] ; proj.scale = weight f32[{hidden}]
proj.bias = weight {dtype}[{hidden}] ; r, u = quantize_int8 a
proj = quantized_linear r u proj.weight proj.scale proj.bias {dtype} ; y = add x proj ; out y"
    );
    text.parse().unwrap()
}

#[test]
fn a_block_of_quantised_layers_is_within_its_bound_under_every_plan() {
    for dtype in Dtype::FLOATS {
        for (rows, hidden, inner) in [(1, 96, 200), (1, 70, 131), (5, 33, 65), (20, 70, 131)] {
            let graph = block(rows, hidden, inner, dtype);
            let mut inputs = seed::inputs(&graph, 7).unwrap();
            for (input, &id) in inputs.iter_mut().zip(graph.inputs()) {
                let node = graph.node(id);
                if node.dtype == Dtype::I8 {
                    *input = tensor([node.shape[0], node.shape[1]], &bytes(node.shape.elements(), id.index()));
                }
            }
            let expected = expected(&graph, &inputs);
            for strategy in STRATEGIES {
                let mut session = Session::new(&Engine::cpu(), &graph, strategy).unwrap();
                session.poison().unwrap();
                session.run(&inputs.iter().collect::<Vec<_>>()).unwrap();
                assert_holds(
                    &expected,
                    &graph,
                    &[session.output(0).unwrap()],
                    format_args!("{dtype} {rows}x{hidden} {strategy}"),
                );
            }
            let plan = Session::new(&Engine::cpu(), &graph, Strategy::Fused).unwrap();
            assert!(plan.plan().groups.len() <= 5, "{}", plan.plan().groups.len());
        }
    }
}

#[test]
fn rows_of_zeros_are_zeros_and_what_is_not_finite_is_nan() {
    let (hidden, columns) = (70, 9);
    let text = "x = input f32[6,70] ; w = weight i8[9,70] ; w_scale = weight f32[9] ; q, s = quantize_int8 x
y = quantized_linear q s w w_scale f32 ; out y";
    let graph: Graph = text.parse().unwrap();
    let mut rows = vec![0.0f32; 6 * hidden];
    rows[hidden + 3] = f32::NAN;
    rows[2 * hidden] = f32::INFINITY;
    rows[3 * hidden + 1] = -3.0;
    rows[4 * hidden + 69] = f32::MAX;
    rows[5 * hidden + 69] = 1e-30;
    let weights = bytes(columns * hidden, 5);
    let mut scales = vec![0.5f32; columns];
    scales[8] = 0.0;
    let inputs = [
        Tensor::from_f32(Dtype::F32, [6, hidden], &rows).unwrap(),
        tensor([columns, hidden], &weights),
        Tensor::from_f32(Dtype::F32, [columns], &scales).unwrap(),
    ];
    for isa in Isa::available() {
        for strategy in STRATEGIES {
            let engine = cpu(2, isa);
            let got = run(&engine, &graph, strategy, &inputs).remove(0);
            let row = |index: usize| &got[index * columns..(index + 1) * columns];
            assert!(row(0).iter().all(|&value| value == 0.0), "{} {strategy}: {got:?}", isa.name());
            assert!(row(1).iter().chain(row(2)).all(|value| value.is_nan()), "{} {strategy}: {got:?}", isa.name());
            for (index, at, value) in [(3, 1, -3.0f32), (4, 69, f32::MAX), (5, 69, 1e-30)] {
                for (column, &got) in row(index).iter().enumerate() {
                    let weight = f32::from(weights[column * hidden + at]);
                    let exact = f64::from(value) * f64::from(weight) * f64::from(scales[column]);
                    let near = (f64::from(got) - exact).abs() <= 4.0 * f64::from(f32::EPSILON) * exact.abs();
                    let overflows = !(value * weight).is_finite() && !got.is_finite();
                    assert!(near || overflows, "{} {strategy} {index}: {got} for {exact}", isa.name());
                }
            }
        }
    }
}
