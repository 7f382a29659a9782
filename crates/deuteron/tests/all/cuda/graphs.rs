//! Whole graphs on a GPU: against f64, against the CPU, again and again, very large, and after failures.
//! The whole op matrix and two thousand random graphs are `deuteron check --device cuda`; here a small part of both runs.

use std::time::Duration;

use deuteron::check::{Breadth, Part, RandomGraphs, beside_other_work, check, check_catalog};
use deuteron::cuda::{self, CudaError, Options, RowConfig, Search, Tuning};
use deuteron::fuse::{FuseOptions, fuse};
use deuteron::listing::kernels;
use deuteron::tune::{DropReason, tune};
use deuteron::{
    Activation, Backend, DeviceError, Dtype, Engine, Error, FusedOp, Graph, GroupKind, Launching, Recorded, Session,
    Strategy, Tensor, attention_interior, differentiate, recompute, seed,
};
use deuteron_testkit::hardware;
use half::bf16;

use crate::support::{assert_holds, gpu, guarded_gpu, outputs, parsed, ran, seeded};

fn uploaded(engine: &Engine, graph: &Graph) -> Vec<Tensor> {
    seed::inputs(graph, 5).unwrap().iter().map(|tensor| tensor.to_device(engine).unwrap()).collect()
}

fn run(engine: &Engine, graph: &Graph, inputs: &[&Tensor]) -> Vec<Tensor> {
    let mut session = Session::new(engine, graph, Strategy::Greedy).unwrap();
    session.poison().unwrap();
    session.run(inputs).unwrap();
    outputs(&session)
}

#[test]
fn the_catalogue_matches_the_reference() {
    let Some(engine) = guarded_gpu() else { return };
    let report = check_catalog(&engine, Breadth::Small, &[], Part::WHOLE, |_, _| {}).unwrap();
    assert_eq!(report.failures, 0, "{:#?}", report.failed);
    assert!(report.cases > 400, "{}", report.cases);
}

#[test]
fn random_graphs_match_the_reference() {
    let Some(engine) = guarded_gpu() else { return };
    let report = check(&[engine], RandomGraphs::new(40, 1_000_001), |_| {}).unwrap();
    assert_eq!(report.failures, 0, "{:#?}", report.failed);
}

/// Attention whose heads are slices of one tensor, with masks, dropout, shared keys, a token at a time.
const ATTENTION: [&str; 7] = [
    "x = input float[2,167,288]
q1 = slice x axis=2 start=0 length=96 ; q4 = reshape q1 [2,167,3,32] ; q = transpose q4 [0,2,1,3]
k1 = slice x axis=2 start=96 length=96 ; k4 = reshape k1 [2,167,3,32] ; k = transpose k4 [0,2,1,3]
v1 = slice x axis=2 start=192 length=96 ; v4 = reshape v1 [2,167,3,32] ; v = transpose v4 [0,2,1,3]
a = attention q k v mask=causal ; t = transpose a [0,2,1,3] ; y = reshape t [2,167,96] ; out y",
    "q = input float[2,2,100,40] ; k = input float[2,2,130,40] ; m = input f32[2,1,100,130]
a = attention q k k m mask=additive ; out a",
    "q = input float[2,3,90,64] ; seed = input i32[] ; a = attention q q q seed mask=causal p=0.4 offset=9 ; out a",
    "q = input float[2,2,3,50,16] ; k1 = input float[2,2,1,70,16] ; k = broadcast k1 [2,2,3,70,16]
a = attention q k k mask=causal ; out a",
    "q = input float[2,6,1,64] ; k1 = input float[2,1,600,64] ; v1 = input float[2,1,600,64]
k = broadcast k1 [2,6,600,64] ; v = broadcast v1 [2,6,600,64] ; a = attention q k v ; out a",
    "q = input float[1,12,1,64] ; k = input float[1,12,1500,64] ; a = attention q k k mask=causal ; out a",
    "q = input float[1,1,65,256] ; k = input float[1,1,66,256] ; a = attention q k k scale=0.3 ; out a",
];

#[test]
fn attention_is_one_kernel() {
    let Some(engine) = guarded_gpu() else { return };
    check_one_kernel(&engine, &ATTENTION);
}

/// In one kernel and in separate ones, of each storage: beside the smallest `f32` all scores are lost, and each value counts the same.
#[test]
fn rows_whose_keys_are_all_masked_are_means() {
    let Some(engine) = guarded_gpu() else { return };
    for ([queries, keys], dtype) in [[7, 7], [1, 1500], [40, 129], [129, 64]]
        .into_iter()
        .flat_map(|sizes| Dtype::FLOATS.map(|dtype| (sizes, dtype)))
    {
        let text = format!(
            "q = input float[{queries},16] ; k = input float[{keys},16] ; v = input float[{keys},16] ; m = input f32[{queries},{keys}]
a = attention q k v m mask=additive scale=0.3 ; p = attention_scores q k m mask=additive ; out a p"
        );
        let graph = parsed(&text, dtype);
        let mut inputs = seed::inputs(&graph, 5).unwrap();
        let v = inputs[2].to_f32().unwrap();
        let mean = |column: usize| v.iter().skip(column).step_by(16).sum::<f32>() / keys as f32;
        for hidden in [-1e10, -1e30, f32::MIN] {
            inputs[3] = Tensor::from_f32(Dtype::F32, [queries, keys], &vec![hidden; queries * keys]).unwrap();
            for strategy in Strategy::ALL {
                let results = outputs(&ran(&engine, &graph, strategy, &inputs));
                let [values, probabilities] = [0, 1].map(|at: usize| results[at].to_f32().unwrap());
                // Probabilities and values are rounded to their storage.
                let off = if dtype == Dtype::F32 { 1e-5 } else { 0.02 };
                let value = |(at, &x): (usize, &f32)| (x - mean(at % 16)).abs() <= off;
                let probability = |&p: &f32| (p * keys as f32 - 1.0).abs() <= off;
                let is_even = values.iter().enumerate().all(value) && probabilities.iter().all(probability);
                assert!(is_even, "{strategy} {dtype} {queries}x{keys} masked by {hidden}");
            }
        }
    }
}

/// Probabilities that are handed out: a mask that is repeated, heads that are slices of one tensor or share keys, positions, a
/// single head, rows of odd lengths, wide heads.
const SCORES: [&str; 7] = [
    "q = input float[3,2,129,64] ; k = input float[3,2,136,64] ; p = attention_scores q k mask=causal ; out p",
    "q = input float[2,4,70,32] ; k = input float[2,4,75,32] ; m = input f32[2,1,1,75]
p = attention_scores q k m mask=additive ; out p",
    "x = input float[2,167,192]
q1 = slice x axis=2 start=0 length=96 ; q4 = reshape q1 [2,167,3,32] ; q = transpose q4 [0,2,1,3]
k1 = slice x axis=2 start=96 length=96 ; k4 = reshape k1 [2,167,3,32] ; k = transpose k4 [0,2,1,3]
p = attention_scores q k mask=causal ; out p",
    "q = input float[2,6,9,64] ; k1 = input float[2,1,300,64] ; k = broadcast k1 [2,6,300,64] ; at = input i32[2]
p = attention_scores q k at mask=cached ; out p",
    "q = input float[33,48] ; k = input float[17,48] ; p = attention_scores q k scale=-0.3 ; out p",
    "q = input float[1,1,65,256] ; k = input float[1,1,66,256] ; p = attention_scores q k ; out p",
    "q = input float[2,70,129,64] ; k = input float[2,70,129,64] ; p = attention_scores q k mask=causal ; out p",
];

#[test]
fn probabilities_of_attention_are_one_kernel() {
    let Some(engine) = guarded_gpu() else { return };
    check_one_kernel(&engine, &SCORES);
}

/// Whether each text is right by every strategy, and one kernel but where the search finds others cheaper.
fn check_one_kernel(engine: &Engine, texts: &[&str]) {
    for (text, dtype) in texts.iter().flat_map(|text| Dtype::FLOATS.map(|dtype| (text, dtype))) {
        let graph = parsed(text, dtype);
        let (inputs, expected) = seeded(&graph, 11);
        for strategy in [Strategy::Unfused, Strategy::Greedy, Strategy::Fused] {
            let session = ran(engine, &graph, strategy, &inputs);
            assert_holds(&expected, &graph, &outputs(&session), format_args!("{dtype} {strategy}\n{text}"));
            let found = session.plan().groups.iter().filter(|group| group.kind == GroupKind::Attention).count();
            assert!(found == 1 || strategy == Strategy::Fused, "{dtype} {strategy}: {found}\n{text}");
        }
    }
}

/// The gradient of attention: heads that are slices of one tensor, a mask, dropout, shared keys, few rows, wide heads.
const GRADIENTS: [&str; 8] = [
    ATTENTION[0],
    "q = input float[2,2,100,40] ; k = input float[2,2,130,40] ; v = input float[2,2,130,40] ; m = input f32[2,1,100,130]
a = attention q k v m mask=additive ; out a",
    "q = input float[2,3,90,64] ; k = input float[2,3,90,64] ; v = input float[2,3,90,64] ; seed = input i32[]
a = attention q k v seed mask=causal p=0.4 offset=9 ; out a",
    "q = input float[2,2,3,50,16] ; k1 = input float[2,2,1,70,16] ; v1 = input float[2,2,1,70,16]
k = broadcast k1 [2,2,3,70,16] ; v = broadcast v1 [2,2,3,70,16] ; a = attention q k v mask=causal ; out a",
    "q = input float[1,2,2,16] ; k = input float[1,2,3,16] ; v = input float[1,2,3,16] ; a = attention q k v ; out a",
    "q = input float[1,1,65,256] ; k = input float[1,1,66,256] ; v = input float[1,1,66,256]
a = attention q k v scale=0.3 ; out a",
    "q = input float[2,70,129,64] ; k = input float[2,70,129,64] ; v = input float[2,70,129,64]
a = attention q k v mask=causal ; out a",
    SIDE_BY_SIDE,
];

/// Parts of one value of positions, whose gradient is one too.
const SIDE_BY_SIDE: &str = "x = input float[2,131,576]
q1 = slice x axis=2 start=0 length=192 ; q2 = reshape q1 [2,131,3,64] ; q = transpose q2 [0,2,1,3]
k1 = slice x axis=2 start=192 length=192 ; k2 = reshape k1 [2,131,3,64] ; k = transpose k2 [0,2,1,3]
v1 = slice x axis=2 start=384 length=192 ; v2 = reshape v1 [2,131,3,64] ; v = transpose v2 [0,2,1,3]
a = attention q k v mask=causal ; out a";

/// The same of heads that share keys, whose gradients are sums.
const GROUPED: &str = "x = input float[2,131,1024]
q1 = slice x axis=2 start=0 length=512 ; q2 = reshape q1 [2,131,2,2,128] ; q = transpose q2 [0,2,3,1,4]
k1 = slice x axis=2 start=512 length=256 ; k2 = reshape k1 [2,131,2,1,128] ; k3 = transpose k2 [0,2,3,1,4]
v1 = slice x axis=2 start=768 length=256 ; v2 = reshape v1 [2,131,2,1,128] ; v3 = transpose v2 [0,2,3,1,4]
k = broadcast k3 [2,2,2,131,128] ; v = broadcast v3 [2,2,2,131,128]
a = attention q k v mask=causal ; out a";

#[test]
fn the_gradient_of_attention_is_one_launch() {
    let Some(engine) = guarded_gpu() else { return };
    let all = GRADIENTS.iter().flat_map(|text| Dtype::FLOATS.map(|dtype| (*text, dtype)));
    // Sums over heads are made by warpgroups alone.
    let is_hopper = matches!(engine.device().backend(), Backend::Cuda(target) if target.arch.has_wgmma());
    let grouped = [Dtype::F16, Dtype::Bf16].map(|dtype| (GROUPED, dtype));
    for (text, dtype) in all.chain(grouped.into_iter().filter(|_| is_hopper)) {
        let graph = parsed(text, dtype);
        let wrt = graph
            .inputs()
            .iter()
            .copied()
            .filter(|&id| graph.node(id).dtype.is_float() && graph.given_name(id) != Some("m"));
        let joint = differentiate(&graph, &wrt.collect::<Vec<_>>()).unwrap();
        let again = attention_interior(&joint.graph, joint.first_backward);
        let graph = recompute(&joint.graph, joint.first_backward, &again).unwrap().graph;
        let (inputs, expected) = seeded(&graph, 11);
        let session = ran(&engine, &graph, Strategy::Greedy, &inputs);
        assert_holds(&expected, &graph, &outputs(&session), format_args!("{dtype}\n{text}"));
        let count = |kind: GroupKind| session.plan().groups.iter().filter(|group| group.kind == kind).count();
        let found = (count(GroupKind::Attention), count(GroupKind::Matmul));
        assert_eq!(found, (2, 0), "{dtype}: attention and its gradient\n{text}\n{}", session.plan());
        if [SIDE_BY_SIDE, GROUPED].contains(&text) {
            assert_eq!(session.plan().groups.len(), 2, "{dtype}: no copies\n{text}\n{}", session.plan());
        }
    }
}

#[test]
fn a_graph_is_fused_verified_and_timed_both_ways() {
    let Some(engine) = gpu() else { return };
    let text =
        "x = input bf16[300,640] ; r = input bf16[300,640] ; h = add x r ; n = layer_norm h w:bf16[640] b:bf16[640]
                l = linear n m:bf16[640,512] c:bf16[512] ; g = gelu l ; out g h";
    let options = FuseOptions { sources: true, ..FuseOptions::default() };
    let report = fuse(&engine, &text.parse().unwrap(), &options, |_| {}).unwrap();
    assert!(report.verified, "{} of {}: {}", report.worst_ratio, report.worst_output, report.graph);
    for plan in [&report.unfused, &report.fused] {
        assert!(plan.ms > 0.0 && plan.graph_ms.is_some_and(|time| time > 0.0));
    }
    assert!(report.fused.kernels < report.unfused.kernels);
    assert!(report.analysis.after.iter().any(|kernel| kernel.measured_registers.is_some_and(|count| count > 0)));
    let mut lines = report.analysis.after.iter().flat_map(|kernel| &kernel.source);
    assert!(lines.any(|line| line.op == "layer_norm" && line.text.contains("rsqrt1")));
}

#[test]
fn a_thousand_runs_give_the_same_bits_beside_other_work() {
    let Some(engine) = gpu() else { return };
    let cases = [
        ("norm_act", true, 1025, 768),
        ("dropout_add_norm", false, 513, 1500),
        ("embed_norm", true, 700, 129),
        ("softmax", true, 3, 50257),
    ];
    beside_other_work(&engine, || {
        for (name, backward, rows, cols) in cases {
            let op = FusedOp::find(name).unwrap();
            let types = op.operand_types(rows, cols, Dtype::Bf16);
            let graph = if backward { op.backward_graph(&types) } else { op.graph(&types) }.unwrap();
            let tensors = uploaded(&engine, &graph);
            let inputs: Vec<&Tensor> = tensors.iter().collect();
            let mut session = Session::new(&engine, &graph, Strategy::Greedy).unwrap();
            session.run(&inputs).unwrap();
            let first = outputs(&session);
            for turn in 1..1000 {
                session.set_launching(if turn % 2 == 0 { Launching::Eager } else { Launching::Graph });
                session.poison().unwrap();
                session.run(&inputs).unwrap();
                let same = outputs(&session).iter().zip(&first).all(|(again, first)| again.is_bitwise(first));
                assert!(same, "{op:?}: run {turn} gives other bits");
            }
        }
    })
    .unwrap();
}

/// Small kernels, each of what the one before it wrote: in a recording they start before it has ended. Every third product has
/// weights that a kernel just made, so that they must not be fetched early.
fn chain(links: usize) -> Graph {
    let mut text = String::from("x0 = input bf16[1,256]");
    for i in 0..links {
        let next = i + 1;
        text += &match i % 3 {
            2 => format!(
                "\nm{i} = mul a{i}:bf16[256,256] b{i}:bf16[256,256] ; y{i} = matmul x{i} m{i} ; x{next} = tanh y{i}"
            ),
            _ => format!(
                "\nn{i} = layer_norm x{i} w{i}:bf16[256] b{i}:bf16[256]
l{i} = linear n{i} m{i}:bf16[256,256] c{i}:bf16[256] ; x{next} = add x{i} l{i}"
            ),
        };
    }
    let graph = format!("{text}\ny = softmax x{links} ; out x{links} ; out y");
    graph.parse().unwrap_or_else(|error| panic!("{error}: {graph}"))
}

#[test]
fn recorded_kernels_that_start_early_give_the_bits_of_kernels_one_by_one() {
    let Some(engine) = gpu() else { return };
    let graph = chain(25);
    // What another run left behind has other bits.
    let sets = [5, 6].map(|seed| {
        let inputs = seed::inputs(&graph, seed).unwrap();
        inputs.iter().map(|tensor| tensor.to_device(&engine).unwrap()).collect::<Vec<Tensor>>()
    });
    for strategy in [Strategy::Unfused, Strategy::Greedy, Strategy::Fused] {
        let mut session = Session::new(&engine, &graph, strategy).unwrap();
        let expected = sets.each_ref().map(|set| {
            session.run(&set.iter().collect::<Vec<_>>()).unwrap();
            outputs(&session)
        });
        assert!(!expected[0][0].is_bitwise(&expected[1][0]));
        session.set_launching(Launching::Graph);
        for turn in 0..600 {
            // Runs of the same recording, then of one that was changed.
            let set = turn / 3 % 2;
            if turn % 2 == 0 {
                session.poison().unwrap();
            }
            session.run(&sets[set].iter().collect::<Vec<_>>()).unwrap();
            let same = outputs(&session).iter().zip(&expected[set]).all(|(again, first)| again.is_bitwise(first));
            assert!(same, "{strategy}: run {turn} gives other bits");
        }
    }
}

#[test]
fn a_recording_launches_the_kernels_of_its_plan() {
    let Some(engine) = gpu() else { return };
    let plans = [
        ("norm_act", Strategy::Unfused, 2),
        ("norm_act", Strategy::Greedy, 1),
        ("attention", Strategy::Greedy, 1),
        ("attention_add_norm", Strategy::Unfused, 4),
        ("attention_block", Strategy::Unfused, 5),
    ];
    for (name, strategy, count) in plans {
        let op = FusedOp::find(name).unwrap();
        let graph = op.graph(&op.operand_types(256, 128, Dtype::Bf16)).unwrap();
        let tensors = uploaded(&engine, &graph);
        let inputs: Vec<&Tensor> = tensors.iter().collect();
        let mut session = Session::new(&engine, &graph, strategy).unwrap();
        session.set_launching(Launching::Graph);
        // The first run is launched kernel by kernel.
        (0..2).for_each(|_| session.run(&inputs).unwrap());
        let recorded = session.recorded_launches().unwrap().unwrap();
        println!("{name} {strategy}: {recorded:?}");
        assert_eq!(session.plan().groups.len(), count, "{name} {strategy}");
        // What a library launches for a product is its own affair.
        match name == "attention_block" {
            true => assert!(recorded.kernels >= count, "{name} {strategy}: {recorded:?}"),
            false => assert_eq!(recorded, Recorded { kernels: count, others: 0 }, "{name} {strategy}"),
        }
    }
}

#[test]
fn masks_are_those_of_the_cpu() {
    let Some(engine) = gpu() else { return };
    for (rows, cols, offset) in [(1, 1, 0), (3, 7, 0), (129, 127, 5), (2, 50257, 0), (1000, 768, 1), (70000, 33, 9)] {
        for dtype in Dtype::FLOATS {
            let text = format!(
                "x = input {dtype}[{rows},{cols}] ; s = input i32[] ; y = dropout x s p=0.3 offset={offset} ; out y"
            );
            let graph: Graph = text.parse().unwrap();
            let ones = Tensor::filled(dtype, [rows, cols], 1.0).unwrap();
            let mask_seed = Tensor::from_i32(deuteron::Shape::scalar(), &[-123_456]).unwrap();
            let inputs = [&ones, &mask_seed];
            let (here, there) = (run(&engine, &graph, &inputs), run(&Engine::cpu(), &graph, &inputs));
            assert!(here[0].is_bitwise(&there[0]), "{rows}x{cols} {dtype}, offset {offset}");
            let dropped = here[0].to_f32().unwrap().iter().filter(|&&value| value == 0.0).count();
            let share = dropped as f64 / (rows * cols) as f64;
            assert!(rows * cols < 1000 || (share - 0.3).abs() < 0.02, "{share}");
        }
    }
}

#[test]
fn bytes_are_stored_as_the_reference_rounds_them() {
    let Some(engine) = gpu() else { return };
    for quantize in ["quantize_fp8", "quantize_int8"] {
        for (rows, cols) in [(1, 1), (5, 129), (64, 768), (3, 4099)] {
            for dtype in Dtype::FLOATS {
                let text = format!("x = input {dtype}[{rows},{cols}] ; q, s = {quantize} x ; out q s");
                let graph: Graph = text.parse().unwrap();
                let (tensors, expected) = seeded(&graph, 11);
                let got = run(&engine, &graph, &tensors.iter().collect::<Vec<_>>());
                assert_holds(&expected, &graph, &got, &text);
            }
        }
    }
}

#[test]
fn tensors_of_more_than_2_to_the_31_elements_work() {
    let Some(engine) = gpu() else { return };
    let elements = (1usize << 31) + 129;
    // One long row: every value follows from its position in the period of the inputs.
    let graph = |count: usize| -> Graph { format!("x = input bf16[{count}] ; y = gelu x ; out y").parse().unwrap() };
    let small = graph(seed::PERIOD);
    let once = run(&engine, &small, &uploaded(&engine, &small).iter().collect::<Vec<_>>())[0].to_bytes().unwrap();
    let large = graph(elements);
    let output = run(&engine, &large, &uploaded(&engine, &large).iter().collect::<Vec<_>>()).swap_remove(0);
    let bytes = output.to_bytes().unwrap();
    drop(output);
    assert_eq!(bytes.len(), 2 * elements);
    let wrong = bytes.chunks(once.len()).position(|chunk| chunk != &once[..chunk.len()]);
    assert_eq!(wrong, None, "the first period that differs");
    drop(bytes);
    // Many rows with a bias a column.
    let (rows, cols) = (elements.div_ceil(1000), 1000);
    let graph: Graph =
        format!("x = input bf16[{rows},{cols}] ; b = input bf16[{cols}] ; s = add x b ; y = relu s ; out y")
            .parse()
            .unwrap();
    let tensors = seed::inputs(&graph, 5).unwrap();
    let bias = tensors[1].to_f32().unwrap();
    let x = Tensor::from_bytes(Dtype::Bf16, [seed::PERIOD], &tensors[0].to_bytes().unwrap()[..2 * seed::PERIOD]);
    let x = x.unwrap().to_f32().unwrap();
    let on_gpu: Vec<Tensor> = tensors.iter().map(|tensor| tensor.to_device(&engine).unwrap()).collect();
    drop(tensors);
    let bytes = run(&engine, &graph, &on_gpu.iter().collect::<Vec<_>>())[0].to_bytes().unwrap();
    let last = rows * cols - 1;
    let positions = (0..2_000_000).map(|step| step * (last / 2_000_000)).chain(last - 5000..=last);
    for position in positions {
        let sum = bf16::from_f32(x[position % seed::PERIOD] + bias[position % cols]);
        let expected = if sum > bf16::ZERO { sum } else { bf16::ZERO };
        let got = bf16::from_le_bytes([bytes[2 * position], bytes[2 * position + 1]]);
        assert!(got == expected, "element {position}: expected {expected}, got {got}");
    }
}

#[test]
fn after_running_out_of_memory_a_smaller_graph_runs() {
    let Some(engine) = gpu() else { return };
    let graph: Graph = "x = input f32[4096,16777216] ; y = relu x ; out y".parse().unwrap();
    for _ in 0..3 {
        // Outputs are allocated when something asks for them.
        match Session::new(&engine, &graph, Strategy::Greedy).and_then(|mut session| session.poison()).err() {
            Some(Error::Device(DeviceError::Cuda(CudaError::OutOfMemory { bytes, .. }))) => {
                assert!(bytes >= 4096 * 16_777_216 * 4, "{bytes}");
            }
            other => panic!("expected to run out of memory, got {other:?}"),
        }
        let smaller: Graph = "x = input f32[64,100] ; y = relu x ; out y".parse().unwrap();
        let result = run(&engine, &smaller, &uploaded(&engine, &smaller).iter().collect::<Vec<_>>());
        assert!(result[0].to_f32().unwrap().iter().all(|value| *value >= 0.0));
    }
}

#[test]
fn an_index_outside_of_its_table_is_an_error_and_the_next_run_works() {
    let Some(engine) = gpu() else { return };
    let graph: Graph = "t = input f32[10,33] ; i = input i32[1,4] ; y = gather t i ; out y".parse().unwrap();
    let table = Tensor::filled(Dtype::F32, [10, 33], 2.0).unwrap();
    let mut session = Session::new(&engine, &graph, Strategy::Greedy).unwrap();
    let bad = Tensor::from_i32([1, 4], &[0, 1, 10, 2]).unwrap();
    let error = session.run(&[&table, &bad]).unwrap_err().to_string();
    assert!(error.contains("10"), "{error}");
    let good = Tensor::from_i32([1, 4], &[0, 1, 9, 2]).unwrap();
    session.run(&[&table, &good]).unwrap();
    assert!(session.output(0).unwrap().to_f32().unwrap().iter().all(|value| *value == 2.0));
}

#[test]
fn launch_shapes_are_tuned_proved_and_then_used() {
    let Some(engine) = gpu() else { return };
    // The second kernel reads what a product makes, rows of more columns than a cluster holds; the backward one adds up columns.
    let block = "x = input bf16[1000,768] ; l = linear x m:bf16[768,4096] c:bf16[4096]
                 n, mean, rstd = layer_norm l w:bf16[4096] b:bf16[4096] ; y = gelu n ; out y";
    let op = FusedOp::find("add_norm").unwrap();
    let backward = op.backward_graph(&op.operand_types(1000, 768, Dtype::Bf16)).unwrap();
    // Too large for f64: held against what is suggested.
    let large = op.graph(&op.operand_types(32768, 768, Dtype::Bf16)).unwrap();
    for graph in [block.parse().unwrap(), backward, large] {
        let (mut done, mut all) = (0, 0);
        let report = tune(&engine, &graph, Strategy::Greedy, |now, of| (done, all) = (now, of)).unwrap();
        assert!(!report.kernels.is_empty() && done == all, "{done} of {all}");
        let tuning = report.tuning();
        assert_eq!(tuning.len(), report.kernels.len());
        for kernel in &report.kernels {
            println!("{}: {:?} -> {:?}, {:?}", kernel.name, kernel.suggested, kernel.chosen, kernel.dropped);
            assert!(kernel.tried > 1 && kernel.chosen.us > 0.0 && kernel.chosen.us <= kernel.suggested.us);
            let wrong = kernel.dropped.iter().find(|dropped| matches!(dropped.reason, DropReason::Wrong(_)));
            assert_eq!(wrong, None, "{}", kernel.name);
            let stored: Tuning = tuning.to_string().parse().unwrap();
            assert!(stored.get(&kernel.key).unwrap().is_same(&kernel.chosen.config));
        }
        let search = Search { cuda_home: hardware::cuda_home(), environments: hardware::environments() };
        let tuned = cuda::open(&Options { search, tuning, ..Options::default() }).unwrap();
        let listed = kernels(&tuned, &graph, Strategy::Greedy).unwrap();
        for kernel in &report.kernels {
            let listed = listed.iter().filter_map(|listing| listing.compiled.as_ref());
            let config = listed.filter(|compiled| compiled.key == kernel.key).map(|compiled| &compiled.config);
            let used = RowConfig { why: "measured".into(), ..kernel.chosen.config.clone() };
            assert_eq!(config.collect::<Vec<_>>()[0], &used.to_string());
        }
        let inputs = uploaded(&engine, &graph);
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        for (ours, theirs) in run(&tuned, &graph, &inputs).iter().zip(&run(&engine, &graph, &inputs)) {
            let pairs = ours.to_f32().unwrap().into_iter().zip(theirs.to_f32().unwrap());
            let (error, largest) =
                pairs.fold((0f32, 0f32), |(error, most), (a, b)| (error.max((a - b).abs()), most.max(b.abs())));
            // Rounding, and sums over up to as many rows in another order.
            let bound = 4.0 * (ours.dtype().epsilon() + Dtype::F32.epsilon() * 32768f64.sqrt());
            assert!(error <= bound as f32 * largest, "{error} of {largest}");
        }
    }
}

#[test]
fn a_launch_costs_the_host_little() {
    let Some(engine) = gpu() else { return };
    let op = FusedOp::find("act").unwrap().with_activation(Activation::Relu);
    let graph = op.graph(&op.operand_types(4, 64, Dtype::F32)).unwrap();
    let mut session = Session::new(&engine, &graph, Strategy::Greedy).unwrap();
    let sets = [uploaded(&engine, &graph)];
    let mut eager = Duration::MAX;
    for _ in 0..9 {
        eager = eager.min(session.time(&sets, 2000, Launching::Eager).unwrap());
    }
    let recorded = session.time(&sets, 2000, Launching::Graph).unwrap();
    println!("a launch one by one: {eager:?}, from a recording: {recorded:?}");
    // A bare call of the driver takes 2 to 5 us.
    assert!(eager < Duration::from_micros(8), "{eager:?}");
}
