//! Rows of floats routed to experts on a GPU, one or several per row: within their bound, the same in every run, whatever their sizes and
//! however they are spread; an index that picks no expert is an error.

use deuteron::{Dtype, Graph, Session, Strategy, Tensor, seed};
use deuteron_codegen::Source;
use deuteron_kernels::Backend;

use crate::support::{assert_holds, expected, guarded_gpu, set, twice};

/// Rows, inner size, columns, experts, experts of each row. Rows that lie at multiples of 16 bytes and elsewhere.
const SIZES: [[usize; 5]; 7] = [
    [1, 16, 16, 1, 1],
    [129, 272, 200, 8, 2],
    [700, 144, 51, 3, 1],
    [64, 1504, 136, 64, 3],
    [300, 33, 65, 2, 2],
    [17, 127, 1, 5, 3],
    [40, 0, 7, 2, 2],
];

/// Bias, an activation, and a weighted sum over choices.
fn layer([rows, inner, columns, experts, choices]: [usize; 5], dtype: Dtype) -> Graph {
    let text = format!(
        "x = input {dtype}[{rows},{inner}] ; chosen = input i32[{rows},{choices}] ; g = input f32[{rows},{choices}]
w = weight {dtype}[{experts},{columns},{inner}] ; b = weight {dtype}[{experts},{columns}]
l = routed_linear x chosen w b ; a = silu l ; y = weighted_sum a g ; out y"
    );
    text.parse().unwrap()
}

fn indices(rows: usize, choices: usize, of: impl Fn(usize) -> i32) -> Tensor {
    let raw: Vec<u8> = (0..rows * choices).flat_map(|place| of(place).to_le_bytes()).collect();
    Tensor::from_bytes(Dtype::I32, [rows, choices], &raw).unwrap()
}

#[test]
fn rows_of_float_experts() {
    let Some(engine) = guarded_gpu() else { return };
    // Turing has units for f16 alone.
    let is_ampere = matches!(engine.device().backend(), Backend::Cuda(target) if target.arch.is_ampere());
    for size @ [rows, inner, columns, experts, choices] in SIZES {
        // Spread evenly, all to one, in runs with most experts empty.
        let routings: [&dyn Fn(usize) -> usize; 3] =
            [&|place| (place * 7 + 3) % experts, &|_| experts - 1, &|place| place / 150 * 5 % experts];
        for dtype in Dtype::FLOATS {
            let graph = layer(size, dtype);
            for routing in routings {
                let mut inputs = seed::inputs(&graph, 7).unwrap();
                inputs[1] = indices(rows, choices, |place| routing(place) as i32);
                let expected = expected(&graph, &inputs);
                let mut session = Session::new(&engine, &graph, Strategy::Greedy).unwrap();
                let is_routed = |source: &Source| matches!(source, Source::Cuda(source) if source.name == "routed");
                let routed = session.kernels().iter().any(|kernel| is_routed(&kernel.source));
                assert!(routed || !is_ampere, "{size:?}: {}", session.plan());
                assert_holds(&expected, &graph, &twice(&mut session, &inputs), format_args!("{size:?}, {dtype}"));
            }
            if inner > 0 {
                let mut inputs = seed::inputs(&graph, 7).unwrap();
                inputs[1] = indices(rows, choices, |_| 0);
                set(&mut inputs[0], inner - 1, f32::NAN);
                let mut session = Session::new(&engine, &graph, Strategy::Greedy).unwrap();
                let got = twice(&mut session, &inputs).remove(0).to_f32().unwrap();
                let (first, others) = got.split_at(columns);
                assert!(first.iter().all(|y| y.is_nan()) && !others.iter().any(|y| y.is_nan()), "{size:?}, {dtype}");
            }
        }
    }
}

#[test]
fn a_float_expert_that_is_not_there() {
    let Some(engine) = guarded_gpu() else { return };
    for dtype in Dtype::FLOATS {
        let graph = layer([100, 32, 48, 3, 2], dtype);
        for (place, index) in [(0, -1), (7, 3), (199, i32::MAX)] {
            let mut inputs = seed::inputs(&graph, 7).unwrap();
            inputs[1] = indices(100, 2, |at| if at == place { index } else { 1 });
            let mut session = Session::new(&engine, &graph, Strategy::Greedy).unwrap();
            let error = session.run(&inputs.iter().collect::<Vec<_>>()).unwrap_err().to_string();
            assert!(error.contains(&format!("row {place}")) && error.contains(&index.to_string()), "{error}");
        }
    }
}
