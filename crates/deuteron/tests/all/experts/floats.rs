//! Rows of floats routed to experts, one or several per row, with weights or without.

use deuteron::{
    Activation, Dtype, Engine, Error, ExpertSizes, FusedOp, Graph, Isa, Session, Shape, Sizes, Strategy, Tensor, ops,
    seed,
};

use super::{Routing, indices, run};
use crate::support::{assert_holds, cpu, expected, set};

/// Rows, inner size, columns, experts, experts of each row.
type Size = [usize; 5];

const SIZES: [Size; 9] = [
    [1, 1, 1, 1, 1],
    [3, 70, 33, 5, 2],
    [8, 129, 64, 2, 1],
    [9, 64, 131, 1, 3],
    [40, 65, 70, 3, 2],
    [129, 127, 66, 8, 3],
    [600, 33, 65, 2, 1],
    [5, 0, 7, 2, 2],
    [0, 16, 9, 3, 2],
];

/// The experts of each row, in order.
fn chosen(way: Routing, shape: &Shape, experts: usize) -> Tensor {
    let all = shape.elements();
    let list: Vec<i32> = (0..all).map(|place| way.of(place, all, experts) as i32).collect();
    indices(shape.clone(), &list)
}

fn variants() -> impl Iterator<Item = FusedOp> {
    FusedOp::variants().into_iter().filter(|op| op.name() == "moe")
}

/// The op at a size, with inputs routed in some way. Without weights, a row has one expert.
fn routed(op: &FusedOp, size: Size, dtype: Dtype, way: Routing) -> (Graph, Vec<Tensor>) {
    let [rows, inner, columns, count, choices] = size;
    let experts = ExpertSizes { count, columns: Some(columns), choices };
    let types = op.operand_types_of(&Sizes { experts, ..Sizes::new(rows, inner, dtype) });
    let graph = op.graph(&types).unwrap();
    let mut inputs = seed::inputs(&graph, 7).unwrap();
    inputs[1] = chosen(way, &types[1].1, count);
    (graph, inputs)
}

#[test]
fn experts_of_floats_are_within_their_bound_under_every_plan_with_any_number_of_threads() {
    for op in variants() {
        for dtype in Dtype::FLOATS {
            for (size, way) in SIZES.into_iter().zip(Routing::ALL.into_iter().cycle()) {
                let (graph, inputs) = routed(&op, size, dtype, way);
                let expected = expected(&graph, &inputs);
                for strategy in Strategy::ALL {
                    let [got, other] =
                        [1, 4].map(|threads| run(&cpu(threads, Isa::detect()), &graph, strategy, &inputs));
                    assert_holds(&expected, &graph, &got, format_args!("{op:?} {dtype} {size:?} {way:?} {strategy}"));
                    let same = got.iter().zip(&other).all(|(one, other)| one.is_bitwise(other));
                    assert!(same, "{op:?} {dtype} {size:?} {way:?} {strategy}");
                }
            }
        }
    }
}

#[test]
fn every_instruction_set_routes_alike() {
    let op = FusedOp::find("moe").unwrap().with(|a| a.weighted = true);
    for isa in Isa::available() {
        for way in Routing::ALL {
            let (graph, inputs) = routed(&op, [40, 65, 70, 3, 2], Dtype::F32, way);
            let got = run(&cpu(3, isa), &graph, Strategy::Greedy, &inputs);
            assert_holds(&expected(&graph, &inputs), &graph, &got, format_args!("{} {way:?}", isa.name()));
        }
    }
}

/// A row that is no number spoils its own result alone, whatever rows its expert has besides.
#[test]
fn nan_stays_in_its_row() {
    let op = FusedOp::find("moe").unwrap().with(|a| a.weighted = true);
    let size @ [rows, inner, columns, ..] = [40, 65, 70, 3, 2];
    for dtype in Dtype::FLOATS {
        let (graph, mut inputs) = routed(&op, size, dtype, Routing::One);
        set(&mut inputs[0], 7 * inner + 3, f32::NAN);
        let got = run(&Engine::cpu(), &graph, Strategy::Greedy, &inputs).remove(0).to_f32().unwrap();
        let spoiled = |row: usize| got[row * columns..(row + 1) * columns].iter().filter(|x| x.is_nan()).count();
        assert!((0..rows).all(|row| spoiled(row) == if row == 7 { columns } else { 0 }), "{dtype}");
    }
}

/// Bias, activation and the weight of an only choice are in the launch of the products; several choices are added by one more. No plan
/// that fuses within calls has the weights of rows in memory.
#[test]
fn experts_are_one_kernel_and_one_that_adds_choices() {
    let engine = Engine::cpu();
    for op in variants() {
        for (rows, choices) in [(1, 1), (1, 2), (8, 3), (64, 1), (1024, 2)] {
            let experts = ExpertSizes { choices, ..ExpertSizes::default() };
            let types = op.operand_types_of(&Sizes { experts, ..Sizes::new(rows, 96, Dtype::Bf16) });
            let graph = op.graph(&types).unwrap();
            let session = Session::new(&engine, &graph, Strategy::Greedy).unwrap();
            let adds = op.attributes().weighted && choices > 1;
            let kernels = session.plan().groups.len();
            assert_eq!(kernels, 1 + usize::from(adds), "{op:?} {rows}\n{}", session.plan().explain());
            for strategy in [Strategy::Eager, Strategy::Unfused] {
                let session = Session::new(&engine, &graph, strategy).unwrap();
                // Two values at a time, each from a multiple of some bytes on.
                let most = 2 * (rows * choices * 96 * 2).next_multiple_of(1024);
                assert!(session.plan().arena.bytes <= most, "{op:?} {rows} {strategy}\n{}", session.plan().explain());
            }
        }
    }
}

#[test]
fn an_expert_that_is_not_there_is_an_error_that_names_the_place() {
    let op = FusedOp::find("moe").unwrap().with(|a| a.weighted = true);
    let size = [20, 16, 9, 3, 2];
    for (place, index) in [(0, -1), (7, 3), (39, i32::MAX)] {
        let (graph, mut inputs) = routed(&op, size, Dtype::Bf16, Routing::Spread);
        let mut list: Vec<i32> = (0..40).map(|place| Routing::Spread.of(place, 40, 3) as i32).collect();
        list[place] = index;
        inputs[1] = indices([20, 2], &list);
        for strategy in Strategy::ALL {
            let mut session = Session::new(&Engine::cpu(), &graph, strategy).unwrap();
            let error = session.run(&inputs.iter().collect::<Vec<_>>()).unwrap_err().to_string();
            assert!(error.contains(&format!("row {place}")) && error.contains(&index.to_string()), "{error}");
        }
    }
}

/// A layer with two projections: hidden rows of each choice, which the second adds.
#[test]
fn two_projections_of_several_choices() {
    let engine = Engine::cpu();
    let (rows, inner, hidden, experts, choices) = (13, 40, 96, 4, 2);
    let filled = |shape: Shape, seed: usize| {
        let count = shape.elements();
        Tensor::build(Dtype::F32, shape, count, |i| ((i * 37 + seed) % 101) as f64 / 50.0 - 1.0).unwrap()
    };
    let x = filled([rows, inner].into(), 1);
    let (w1, b1) = (filled([experts, hidden, inner].into(), 2), filled([experts, hidden].into(), 3));
    let (w2, b2) = (filled([experts, inner, hidden].into(), 4), filled([experts, inner].into(), 5));
    let shares = filled([rows, choices].into(), 6);
    let picked = chosen(Routing::Spread, &[rows, choices].into(), experts);
    let first = ops::Experts { weight: &w1, bias: &b1 };
    let second = ops::Experts { weight: &w2, bias: &b2 };
    let wide = ops::moe(&engine, &x, &picked, first, Some(Activation::Silu), None).unwrap();
    assert_eq!(wide.shape(), &Shape::from([rows, choices, hidden]));
    let y = ops::moe(&engine, &wide, &picked, second, None, Some(&shares)).unwrap();
    assert_eq!((y.dtype(), y.shape()), (Dtype::F32, &Shape::from([rows, inner])));
    let text = format!(
        "x = input f32[{rows},{inner}] ; e = input i32[{rows},{choices}] ; w = weight f32[{experts},{hidden},{inner}] ; b = weight f32[{experts},{hidden}]
v = weight f32[{experts},{inner},{hidden}] ; c = weight f32[{experts},{inner}] ; g = input f32[{rows},{choices}]
h = routed_linear x e w b ; a = silu h ; l = routed_linear a e v c ; y = weighted_sum l g ; out y"
    );
    let graph: Graph = text.parse().unwrap();
    let inputs = [x.clone(), picked.clone(), w1.clone(), b1.clone(), w2.clone(), b2.clone(), shares];
    assert_holds(&expected(&graph, &inputs), &graph, &[y], "two projections");
    let wrong = ops::moe(&engine, &x, &picked, second, None, None);
    assert!(matches!(wrong, Err(Error::Graph(_))), "{wrong:?}");
    assert!(matches!(FusedOp::find("moe").unwrap().backward_graph(&[]), Err(Error::NoBackward("moe"))));
}
