//! Matmuls of bytes on a GPU: sums are exact and the same in every run, whatever the cut, the sizes and what follows; rows routed to
//! experts go where they belong, and an index that picks no expert is an error.

use deuteron::{Dtype, Engine, Graph, Session, SessionOptions, Strategy, Tensor, seed};
use deuteron_codegen::Source;
use deuteron_kernels::Backend;
use deuteron_matmul::cuda::hopper::HopperKernel;
use deuteron_plan::plan;

use crate::support::{assert_holds, guarded_gpu, parsed, seeded, twice};

/// With red zones around all memory.
fn gpu_is_hopper(engine: &Engine) -> bool {
    matches!(engine.device().backend(), Backend::Cuda(target) if target.arch.has_wgmma())
}

fn gpu_is_ampere(engine: &Engine) -> bool {
    matches!(engine.device().backend(), Backend::Cuda(target) if target.arch.is_ampere())
}

/// What follows from nothing to much.
fn graphs([m, k, n]: [usize; 3]) -> [String; 6] {
    let operands = format!("x = input i8[{m},{k}] ; w = weight i8[{n},{k}]");
    let scaled = format!("{operands} ; s = input f32[{m},1] ; t = weight f32[{n}]");
    [
        format!("{operands} ; y = matmul x w transpose_b ; out y"),
        format!("{scaled} ; y = quantized_linear x s w t f32 ; out y"),
        format!("{scaled} ; l = quantized_linear x s w t c:bf16[{n}] bf16 ; y = gelu l ; out y"),
        format!(
            "{scaled} ; r = input f16[{m},{n}] ; l = quantized_linear x s w t c:f16[{n}] f16 ; g = silu l ; y = add g r ; out y"
        ),
        format!(
            "{scaled} ; l = quantized_linear x s w t c:bf16[{n}] bf16 ; g = gelu l ; q, u = quantize_int8 g ; out q u"
        ),
        format!(
            "{scaled} ; r = input f32[{m},{n}] ; l = quantized_linear x s w t f32 ; a = add l r ; y = rms_norm a o:f32[{n}] ; out a y"
        ),
    ]
}

/// Under the greedy plan, and whether that is one kernel.
fn check(engine: &Engine, text: &str) -> bool {
    let graph = parsed(text, Dtype::F32);
    let (inputs, expected) = seeded(&graph, 11);
    let mut session = Session::new(engine, &graph, Strategy::Greedy).unwrap();
    assert_holds(&expected, &graph, &twice(&mut session, &inputs), format_args!("{text}"));
    session.plan().groups.len() == 1
}

#[test]
fn every_cut_of_bytes() {
    let Some(engine) = guarded_gpu().filter(gpu_is_hopper) else { return };
    let Backend::Cuda(target) = engine.device().backend() else { panic!("a GPU") };
    for (at, text) in graphs([300, 784, 264]).iter().enumerate() {
        let graph = parsed(text, Dtype::F32);
        let plan = plan(&graph, engine.device().target(), Strategy::Greedy, &[]).unwrap();
        let [group] = plan.groups.as_slice() else { panic!("{} kernels: {plan}", plan.groups.len()) };
        let kernel = HopperKernel::of(&group.draft(&graph, &plan.placement), target).expect("a matmul for Hopper");
        let (inputs, expected) = seeded(&graph, 11);
        for tile in kernel.tiles(target, f64::INFINITY).into_iter().skip(at % 3).step_by(3) {
            let kernel = kernel.clone().with_tile(tile).kernel(target);
            let options = SessionOptions::from(Strategy::Greedy).kernels([kernel]);
            let mut session = Session::new(&engine, &graph, options).unwrap();
            assert_holds(&expected, &graph, &twice(&mut session, &inputs), format_args!("{tile}\n{text}"));
        }
    }
}

#[test]
fn sizes_of_bytes() {
    let Some(engine) = guarded_gpu() else { return };
    // Inner sizes of whole 16 bytes, then others; few rows and many.
    for size in [[1, 16, 16], [127, 64, 129], [129, 1504, 1500], [1500, 144, 51], [9, 127, 33], [130, 70, 17]] {
        for text in graphs(size) {
            let one = check(&engine, &text);
            // Whole rows are pairs of columns.
            let apart = size[1] % 16 != 0 || (size[2] % 2 != 0 && (text.contains("out q u") || text.contains("norm")));
            assert!(one || apart || !gpu_is_hopper(&engine), "{text}");
        }
    }
}

#[test]
fn few_rows_of_bytes() {
    let Some(engine) = guarded_gpu() else { return };
    for size in [[1, 1, 1], [1, 768, 2304], [2, 127, 129], [3, 1500, 51], [8, 3072, 768], [5, 77, 1000]] {
        for text in graphs(size) {
            let rows = text.contains("quantize_int8") || text.contains("norm");
            assert!(check(&engine, &text) || rows, "{text}");
        }
    }
}

/// The largest sums there are: they do not fit 24 bits.
#[test]
fn extreme_bytes() {
    let Some(engine) = guarded_gpu() else { return };
    for (m, k) in [(1, 4096), (8, 4096), (200, 4096), (200, 65536)] {
        let graph: Graph =
            format!("x = input i8[{m},{k}] ; w = weight i8[40,{k}] ; y = matmul x w transpose_b ; out y")
                .parse()
                .unwrap();
        let fill =
            |rows: usize, byte: i8| Tensor::from_bytes(Dtype::I8, [rows, k], &vec![byte as u8; rows * k]).unwrap();
        for (x, w) in [(-128, -128), (-128, 127), (127, 127)] {
            let mut session = Session::new(&engine, &graph, Strategy::Greedy).unwrap();
            session.run(&[&fill(m, x), &fill(40, w)]).unwrap();
            let sum = (i64::from(x) * i64::from(w) * k as i64) as f32;
            assert!(session.output(0).unwrap().to_f32().unwrap().iter().all(|&found| found == sum), "{m} {k} {x} {w}");
        }
    }
}

/// Rows of the result are floats, or bytes again.
fn experts([rows, inner, columns, experts]: [usize; 4], dtype: Dtype, again: bool) -> Graph {
    let results = if again { "q, u = quantize_int8 y ; out q u" } else { "out y" };
    let text = format!(
        "x = input i8[{rows},{inner}] ; s = input f32[{rows},1] ; chosen = input i32[{rows}]
w = weight i8[{experts},{columns},{inner}] ; t = weight f32[{experts},{columns}] ; b = weight {dtype}[{experts},{columns}]
l = expert_linear x s chosen w t b {dtype} ; y = silu l ; {results}"
    );
    text.parse().unwrap()
}

fn indices(values: &[i32]) -> Tensor {
    let raw: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Tensor::from_bytes(Dtype::I32, [values.len()], &raw).unwrap()
}

/// Spread evenly, all to one, in runs with most experts empty.
fn routings(rows: usize, experts: usize) -> [Vec<i32>; 3] {
    let list = |of: &dyn Fn(usize) -> usize| (0..rows).map(|row| of(row) as i32).collect();
    [list(&|row| (row * 7 + 3) % experts), list(&|_| experts - 1), list(&|row| row / 150 * 5 % experts)]
}

#[test]
fn rows_of_experts() {
    let Some(engine) = guarded_gpu() else { return };
    for size in [[1, 16, 16, 1], [129, 272, 200, 8], [700, 144, 51, 3], [64, 1504, 136, 64], [300, 33, 65, 2]] {
        for (dtype, again) in Dtype::FLOATS.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
            let graph = experts(size, dtype, again);
            for chosen in routings(size[0], size[3]) {
                let mut inputs = seed::inputs(&graph, 7).unwrap();
                inputs[2] = indices(&chosen);
                let expected = crate::support::expected(&graph, &inputs);
                let mut session = Session::new(&engine, &graph, Strategy::Greedy).unwrap();
                let is_routed = |source: &Source| matches!(source, Source::Cuda(source) if source.name == "routed");
                let routed = session.kernels().iter().any(|kernel| is_routed(&kernel.source));
                assert!(routed || !gpu_is_ampere(&engine), "{size:?}: {}", session.plan());
                assert_holds(&expected, &graph, &twice(&mut session, &inputs), format_args!("{size:?}, {dtype}"));
            }
        }
    }
}

#[test]
fn an_expert_that_is_not_there() {
    let Some(engine) = guarded_gpu() else { return };
    let graph = experts([200, 32, 48, 3], Dtype::Bf16, false);
    for (row, index) in [(0, -1), (7, 3), (199, i32::MAX)] {
        let mut inputs = seed::inputs(&graph, 7).unwrap();
        let mut chosen = vec![1; 200];
        chosen[row] = index;
        inputs[2] = indices(&chosen);
        let mut session = Session::new(&engine, &graph, Strategy::Greedy).unwrap();
        let error = session.run(&inputs.iter().collect::<Vec<_>>()).unwrap_err().to_string();
        assert!(error.contains(&format!("row {row}")) && error.contains(&index.to_string()), "{error}");
    }
}
