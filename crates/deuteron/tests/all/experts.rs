//! Rows of bytes routed to experts: exact under every plan, on every instruction set, with any number of threads.

mod floats;

use deuteron::{
    Activation, Dtype, Engine, Error, ExpertSizes, FusedOp, Graph, Isa, Session, Shape, Sizes, Strategy, Tensor, ops,
    seed,
};

use crate::support::{assert_holds, cpu, expected, outputs, ran};

/// (rows, inner size, columns, experts)
type Size = (usize, usize, usize, usize);

const SIZES: [Size; 9] = [
    (1, 1, 1, 1),
    (3, 70, 33, 5),
    (8, 129, 64, 2),
    (9, 64, 131, 1),
    (40, 65, 70, 3),
    (129, 127, 200, 8),
    (600, 33, 65, 2),
    (5, 0, 7, 2),
    (0, 16, 9, 3),
];

/// What goes where.
#[derive(Clone, Copy, Debug)]
enum Routing {
    /// In turn, so that neighbours part.
    Spread,
    /// All to the last expert; the others are empty.
    One,
    /// In runs, a few rows to the last expert.
    Uneven,
}

impl Routing {
    const ALL: [Routing; 3] = [Routing::Spread, Routing::One, Routing::Uneven];

    fn of(self, row: usize, rows: usize, experts: usize) -> usize {
        match self {
            Routing::Spread => (row * 7 + 3) % experts,
            Routing::One => experts - 1,
            Routing::Uneven if row + 3 > rows => experts - 1,
            Routing::Uneven => row / 11 % experts.div_ceil(2),
        }
    }
}

fn bytes(count: usize, seed: usize) -> Vec<i8> {
    (0..count).map(|index| ((index * 131 + index / 7 + seed) % 256) as u8 as i8).collect()
}

fn tensor(shape: impl Into<Shape>, bytes: &[i8]) -> Tensor {
    let raw: Vec<u8> = bytes.iter().map(|&byte| byte as u8).collect();
    Tensor::from_bytes(Dtype::I8, shape, &raw).unwrap()
}

fn indices(shape: impl Into<Shape>, values: &[i32]) -> Tensor {
    let raw: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Tensor::from_bytes(Dtype::I32, shape, &raw).unwrap()
}

fn routing(routing: Routing, (rows, _, _, experts): Size) -> Vec<i32> {
    (0..rows).map(|row| routing.of(row, rows, experts) as i32).collect()
}

fn layer((rows, inner, columns, experts): Size, bias: bool, dtype: Dtype) -> Graph {
    let (bias, b) =
        if bias { (format!("b = weight {dtype}[{experts},{columns}] ; "), "b") } else { (String::new(), "") };
    let text = format!(
        "x = input i8[{rows},{inner}] ; x_scale = input f32[{rows},1] ; chosen = input i32[{rows}]
w = weight i8[{experts},{columns},{inner}] ; w_scale = weight f32[{experts},{columns}]
{bias}y = expert_linear x x_scale chosen w w_scale {b} {dtype} ; out y"
    );
    text.parse().unwrap()
}

fn run(engine: &Engine, graph: &Graph, strategy: Strategy, inputs: &[Tensor]) -> Vec<Tensor> {
    outputs(&ran(engine, graph, strategy, inputs))
}

#[test]
fn sums_are_exact_on_every_instruction_set_and_any_number_of_threads() {
    for size @ (rows, inner, columns, experts) in SIZES {
        let graph = layer(size, false, Dtype::F32);
        let (x, weight) = (bytes(rows * inner, 3), bytes(experts * columns * inner, 8));
        for way in Routing::ALL {
            let chosen = routing(way, size);
            let expected: Vec<f32> = (0..rows * columns)
                .map(|index| {
                    let (row, column) = (index / columns, index % columns);
                    let place = (chosen[row] as usize * columns + column) * inner;
                    let term = |i: usize| i64::from(x[row * inner + i]) * i64::from(weight[place + i]);
                    (0..inner).map(term).sum::<i64>() as f32
                })
                .collect();
            // Scales of 1 leave the sums as they are.
            let inputs = [
                tensor([rows, inner], &x),
                Tensor::from_f32(Dtype::F32, [rows, 1], &vec![1.0; rows]).unwrap(),
                indices([rows], &chosen),
                tensor([experts, columns, inner], &weight),
                Tensor::from_f32(Dtype::F32, [experts, columns], &vec![1.0; experts * columns]).unwrap(),
            ];
            for isa in Isa::available() {
                for threads in [1, 3] {
                    let engine = cpu(threads, isa);
                    for strategy in [Strategy::Naive, Strategy::Unfused, Strategy::Fused] {
                        let got = run(&engine, &graph, strategy, &inputs).remove(0).to_f32().unwrap();
                        assert_eq!(got, expected, "{} {threads} {strategy} {size:?} {way:?}", isa.name());
                    }
                }
            }
        }
    }
}

/// Products whose weights are picked by hand, handed out as they are: no other row is written.
#[test]
fn sums_alone_are_stored_where_they_belong() {
    for size @ (rows, inner, columns, experts) in SIZES {
        let text = format!(
            "x = input i8[{rows},{inner}] ; chosen = input i32[{rows}] ; w = weight i8[{experts},{columns},{inner}]
t = reshape w [{experts},{}] ; g = gather t chosen ; p = reshape g [{rows},{columns},{inner}]
r = reshape x [{rows},1,{inner}] ; sums = matmul r p transpose_b ; out sums",
            columns * inner
        );
        let graph: Graph = text.parse().unwrap();
        let mut inputs = seed::inputs(&graph, 7).unwrap();
        for way in Routing::ALL {
            inputs[1] = indices([rows], &routing(way, size));
            let expected = run(&Engine::cpu(), &graph, Strategy::Naive, &inputs).remove(0);
            let got = run(&Engine::cpu(), &graph, Strategy::Greedy, &inputs).remove(0);
            assert!(got.is_bitwise(&expected), "{size:?} {way:?}");
        }
        let plan = Session::new(&Engine::cpu(), &graph, Strategy::Greedy).unwrap();
        assert_eq!(plan.plan().groups.len(), 1, "{size:?}\n{}", plan.plan().explain());
    }
}

#[test]
fn a_projection_is_within_its_bound_under_every_plan_with_any_number_of_threads() {
    for op in FusedOp::variants().into_iter().filter(|op| op.name() == "moe_int8") {
        for dtype in Dtype::FLOATS {
            for size @ (rows, inner, columns, experts) in SIZES {
                let mut types = op.operand_types(rows, inner, dtype);
                types[3].1 = Shape::from([experts, columns, inner]);
                types[4..].iter_mut().for_each(|(_, shape)| *shape = Shape::from([experts, columns]));
                let graph = op.graph(&types).unwrap();
                let mut inputs = seed::inputs(&graph, 7).unwrap();
                inputs[2] = indices([rows], &routing(Routing::Uneven, size));
                let expected = expected(&graph, &inputs);
                for strategy in Strategy::ALL {
                    let [got, other] = [1, 4].map(|threads| {
                        let engine = cpu(threads, Isa::detect());
                        run(&engine, &graph, strategy, &inputs)
                    });
                    assert_holds(&expected, &graph, &got, format_args!("{op:?} {dtype} {size:?} {strategy}"));
                    let same = got.iter().zip(&other).all(|(one, other)| one.is_bitwise(other));
                    assert!(same, "{op:?} {dtype} {size:?} {strategy}");
                }
            }
        }
    }
}

#[test]
fn a_projection_is_a_product_kernel_and_one_that_quantises() {
    for op in FusedOp::variants().into_iter().filter(|op| op.name() == "moe_int8") {
        let requantize = op.attributes().requantize;
        for rows in [1, 8, 64, 1024] {
            let experts = ExpertSizes { columns: Some(384), ..ExpertSizes::default() };
            let sizes = Sizes { experts, ..Sizes::new(rows, 96, Dtype::F32) };
            let graph = op.graph(&op.operand_types_of(&sizes)).unwrap();
            let session = Session::new(&Engine::cpu(), &graph, Strategy::Fused).unwrap();
            let kernels = session.plan().groups.len();
            assert_eq!(kernels, 1 + usize::from(requantize), "{op:?} {rows}\n{}", session.plan().explain());
        }
    }
}

#[test]
fn an_expert_that_is_not_there_is_an_error_that_names_the_row() {
    let size = (20, 16, 9, 3);
    let graph = layer(size, true, Dtype::F32);
    for (row, index) in [(0, -1), (7, 3), (19, i32::MAX)] {
        let mut inputs = seed::inputs(&graph, 7).unwrap();
        let mut chosen = routing(Routing::Spread, size);
        chosen[row] = index;
        inputs[2] = indices([chosen.len()], &chosen);
        for strategy in Strategy::ALL {
            let mut session = Session::new(&Engine::cpu(), &graph, strategy).unwrap();
            let error = session.run(&inputs.iter().collect::<Vec<_>>()).unwrap_err().to_string();
            assert!(error.contains(&format!("row {row}")) && error.contains(&index.to_string()), "{strategy}: {error}");
        }
    }
}

#[test]
fn two_projections_are_two_calls() {
    let engine = Engine::cpu();
    let (rows, hidden, inner, experts) = (13, 40, 96, 4);
    let x = Tensor::build(Dtype::F32, [rows, hidden].into(), rows * hidden, |i| (i * 37 % 101) as f64 / 50.0 - 1.0)
        .unwrap();
    let graph: Graph =
        format!("x = input f32[{rows},{hidden}] ; q, scale = quantize_int8 x ; out q scale").parse().unwrap();
    let mut results = run(&engine, &graph, Strategy::Fused, &[x]);
    let scale = results.remove(1);
    let x = ops::QuantizedRows { q: results.remove(0), scale, s: None };
    let chosen = indices([rows], &routing(Routing::Spread, (rows, hidden, inner, experts)));
    let weights = |columns: usize, inner: usize| {
        let weight = tensor([experts, columns, inner], &bytes(experts * columns * inner, columns));
        let scale = Tensor::from_f32(Dtype::F32, [experts, columns], &vec![0.01; experts * columns]).unwrap();
        let bias = Tensor::from_f32(Dtype::Bf16, [experts, columns], &vec![0.5; experts * columns]).unwrap();
        (weight, scale, bias)
    };
    let ((w1, s1, b1), (w2, s2, b2)) = (weights(inner, hidden), weights(hidden, inner));
    let first = ops::QuantizedExperts { weight: &w1, scale: &s1, bias: &b1 };
    let second = ops::QuantizedExperts { weight: &w2, scale: &s2, bias: &b2 };
    let wide = ops::moe_int8(&engine, &x, &chosen, first, Some(Activation::Silu)).unwrap();
    assert_eq!((wide.q.dtype(), wide.q.shape()), (Dtype::I8, &Shape::from([rows, inner])));
    let y = ops::moe_int8_dequantized(&engine, &wide, &chosen, second, None).unwrap();
    assert_eq!((y.dtype(), y.shape()), (Dtype::Bf16, &Shape::from([rows, hidden])));
    let wrong = ops::moe_int8(&engine, &x, &chosen, second, None);
    assert!(matches!(wrong, Err(Error::Graph(_))), "{wrong:?}");
    assert!(matches!(FusedOp::find("moe_int8").unwrap().backward_graph(&[]), Err(Error::NoBackward("moe_int8"))));
}
