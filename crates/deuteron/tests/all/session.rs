//! Sessions and ready-made ops: same bits for any threads, strides, empty tensors, extremes, typed errors.

use std::sync::Arc;

use deuteron::reference::{Array, Rounding, interpret};
use deuteron::verify::Expected;
use deuteron::{
    Activation, Cpu, Dtype, Engine, Error, FusedOp, Gelu, Graph, Isa, Launching, Layout, Mask, Pin, PlanError, Session,
    SessionOptions, Shape, Strategy, Tensor, View, differentiate, ops, seed,
};

fn run(engine: &Engine, graph: &Graph, strategy: Strategy, inputs: &[&Tensor]) -> Vec<Vec<u32>> {
    let mut session = Session::new(engine, graph, strategy).unwrap();
    session.poison().unwrap();
    session.run(inputs).unwrap();
    let bits = |tensor: Tensor| tensor.to_f32().unwrap().into_iter().map(f32::to_bits).collect();
    (0..graph.outputs().len()).map(|index| bits(session.output(index).unwrap())).collect()
}

/// Forward and backward of a small block with every kind of kernel.
fn block(dtype: Dtype) -> Graph {
    let text = "x = input f32[3,67,96] ; w = weight f32[96] ; b = weight f32[96] ; seed = input i32[]
h, mean, rstd = layer_norm x w b eps=1e-5
q = linear h wq[96,96] bq[96]
q4 = reshape q [3,67,4,24] ; qh = transpose q4 [0,2,1,3]
a = attention qh qh qh mask=causal
at = transpose a [0,2,1,3] ; am = reshape at [3,67,96]
d = dropout am seed p=0.2 offset=5
y = add d x
out y";
    let text = text.replace("f32[", &format!("{dtype}[")).replace("wq[", &format!("wq:{dtype}["));
    let graph: Graph = text.replace("bq[", &format!("bq:{dtype}[")).parse().unwrap();
    let wrt: Vec<_> = graph.inputs().iter().filter(|&&id| graph.node(id).dtype.is_float()).copied().collect();
    differentiate(&graph, &wrt).unwrap().graph
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for dtype in Dtype::FLOATS {
        let graph = block(dtype);
        let tensors = seed::inputs(&graph, 3).unwrap();
        let inputs: Vec<&Tensor> = tensors.iter().collect();
        for isa in Isa::available() {
            for strategy in [Strategy::Unfused, Strategy::Fused] {
                let engine = |threads| Engine::on(Arc::new(Cpu::with(threads, isa)));
                let one = run(&engine(1), &graph, strategy, &inputs);
                for threads in [2, 3, 7] {
                    let many = run(&engine(threads), &graph, strategy, &inputs);
                    assert!(one == many, "{dtype} {} {strategy} {threads} threads", isa.name());
                }
            }
        }
    }
}

#[test]
fn a_second_run_gives_the_same_bits_and_other_rows_the_same_kernels() {
    let cpu = Arc::new(Cpu::new());
    let engine = Engine::on(cpu.clone());
    let op = FusedOp::find("add_norm").unwrap();
    let graph = op.graph(&op.operand_types(100, 768, Dtype::F32)).unwrap();
    let tensors = seed::inputs(&graph, 3).unwrap();
    let inputs: Vec<&Tensor> = tensors.iter().collect();
    assert_eq!(run(&engine, &graph, Strategy::Fused, &inputs), run(&engine, &graph, Strategy::Fused, &inputs));
    assert_eq!(cpu.compiled(), 0, "no session uses a kernel any more");
    let session = |rows: usize, cols: usize| {
        let graph = op.graph(&op.operand_types(rows, cols, Dtype::F32)).unwrap();
        Session::new(&engine, &graph, Strategy::Fused).unwrap()
    };
    let _sessions = [1, 7, 1000].map(|rows| session(rows, 768));
    assert_eq!(cpu.compiled(), 1, "a new number of rows compiles nothing");
    let _other = session(7, 767);
    assert_eq!(cpu.compiled(), 2, "a new number of columns compiles one kernel");
}

#[test]
fn a_cpu_records_nothing() {
    let op = FusedOp::find("norm_act").unwrap();
    let graph = op.graph(&op.operand_types(7, 33, Dtype::F32)).unwrap();
    let tensors = seed::inputs(&graph, 3).unwrap();
    let mut session = Session::new(&Engine::cpu(), &graph, Strategy::Greedy).unwrap();
    session.set_launching(Launching::Graph);
    (0..2).for_each(|_| session.run(&tensors.iter().collect::<Vec<_>>()).unwrap());
    assert_eq!(session.recorded_launches().unwrap(), None);
}

#[test]
fn leading_strides_are_followed() {
    let engine = Engine::cpu();
    let whole = Tensor::from_array(Dtype::F32, &Array::normal([5, 6, 2 * 33], 1)).unwrap();
    let w = Tensor::from_array(Dtype::F32, &Array::normal([33], 2)).unwrap();
    // Every other half row, axes exchanged: [6, 5, 33] with strides (66, 396, 1) and an offset.
    let slice = whole.view(&View::Slice { axis: 2, start: 33, length: 33 }).unwrap();
    let x = slice.view(&View::Transpose(vec![1, 0, 2])).unwrap();
    let copy = Tensor::from_array(Dtype::F32, &x.to_array().unwrap()).unwrap();
    for act in Activation::ALL {
        let weights = ops::NormWeights { w: &w, b: Some(&w), eps: 1e-5 };
        let strided = ops::norm_act(&engine, &x, weights, act).unwrap();
        let packed = ops::norm_act(&engine, &copy, weights, act).unwrap();
        assert_eq!(strided.to_f32().unwrap(), packed.to_f32().unwrap());
        assert_eq!(
            ops::add_act(&engine, &x, &copy, act).unwrap().to_f32().unwrap(),
            ops::add_act(&engine, &copy, &x, act).unwrap().to_f32().unwrap()
        );
    }
    // A last axis that is not contiguous is refused, with the way out.
    let turned = whole.view(&View::Transpose(vec![2, 1, 0])).unwrap();
    let options = ops::SoftmaxOptions::default();
    let error = ops::softmax(&engine, &turned, options).unwrap_err().to_string();
    assert!(error.contains("a last axis of stride 1") && error.contains("copy it to a contiguous tensor"), "{error}");
    let copy = turned.contiguous().unwrap();
    assert_eq!(copy.to_f32().unwrap(), turned.to_f32().unwrap());
    ops::softmax(&engine, &copy, options).unwrap();
    // An operand that repeats.
    let row = w.view(&View::Broadcast(Shape::from([4, 33]))).unwrap();
    let doubled = ops::add_act(&engine, &row, &row, Activation::Relu).unwrap().to_f32().unwrap();
    assert_eq!(doubled[..33], doubled[99..]);
}

#[test]
fn empty_tensors_are_fine() {
    let engine = Engine::cpu();
    for op in FusedOp::variants() {
        if ["attention_scores", "embed_norm"].contains(&op.name()) {
            continue;
        }
        if op.name() == "linear_cross_entropy" {
            let error = op.graph(&op.operand_types(0, 48, Dtype::Bf16)).unwrap_err().to_string();
            assert!(error.contains("at least 1"), "{error}");
            continue;
        }
        let graph = op.graph(&op.operand_types(0, 48, Dtype::Bf16)).unwrap();
        let tensors = seed::inputs(&graph, 1).unwrap();
        let inputs: Vec<&Tensor> = tensors.iter().collect();
        for strategy in Strategy::ALL {
            let outputs = run(&engine, &graph, strategy, &inputs);
            assert!(outputs.iter().all(Vec::is_empty), "{op:?}");
        }
        if op.has_backward() {
            let graph = op.backward_graph(&op.operand_types(0, 48, Dtype::Bf16)).unwrap();
            let tensors = seed::inputs(&graph, 1).unwrap();
            let outputs = run(&engine, &graph, Strategy::Fused, &tensors.iter().collect::<Vec<_>>());
            assert!(outputs.iter().flatten().all(|&bits| bits == 0), "{op:?}: a sum over no rows is 0");
        }
    }
}

#[test]
fn nan_and_infinity_propagate_as_in_the_reference() {
    let engine = Engine::cpu();
    let specials = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 3.0e38, -3.0e38, 1e-40, 0.0, -0.0];
    for op in FusedOp::variants() {
        let types = op.operand_types(9, 40, Dtype::F32);
        if ["embed_norm", "norm_quantize"].contains(&op.name()) {
            continue;
        }
        let graph = op.graph(&types).unwrap();
        let mut arrays: Vec<Array> =
            seed::inputs(&graph, 5).unwrap().iter().map(Tensor::to_array).collect::<Result<_, _>>().unwrap();
        // One special value in each row but the last.
        let cols = arrays[0].cols();
        for (row, special) in specials.iter().enumerate() {
            let position = row * cols + (7 * row) % cols;
            if position < arrays[0].values.len() {
                arrays[0].values[position] = *special;
            }
        }
        let tensors = deuteron::check::tensors(&graph, &arrays).unwrap();
        let inputs: Vec<&Tensor> = tensors.iter().collect();
        let unfused = run(&engine, &graph, Strategy::Unfused, &inputs);
        let fused = run(&engine, &graph, Strategy::Fused, &inputs);
        for (a, b) in unfused.iter().flatten().zip(fused.iter().flatten()) {
            let (a, b) = (f32::from_bits(*a), f32::from_bits(*b));
            assert_eq!(a.is_nan(), b.is_nan(), "{op:?}: {a} and {b}");
            assert_eq!(a.is_infinite(), b.is_infinite(), "{op:?}: {a} and {b}");
        }
    }
}

#[test]
fn a_fully_masked_row_gives_zeros() {
    let engine = Engine::cpu();
    let x = Tensor::filled(Dtype::F32, [2, 5], f64::NEG_INFINITY).unwrap();
    let y = ops::softmax(&engine, &x, ops::SoftmaxOptions::default()).unwrap();
    assert_eq!(y.to_f32().unwrap(), [0.0; 10]);
}

#[test]
fn ready_made_backward_takes_saved_statistics() {
    let engine = Engine::cpu();
    let x = Tensor::from_array(Dtype::F32, &Array::normal([20, 50], 1)).unwrap();
    let w = Tensor::from_array(Dtype::F32, &Array::normal([50], 2)).unwrap();
    let dy = Tensor::from_array(Dtype::F32, &Array::normal([20, 50], 3)).unwrap();
    let op = FusedOp::find("layer_norm").unwrap();
    let forward = ops::layer_norm(&engine, &x, &w, &w, 1e-5).unwrap();
    let saved = [("mean", &forward.mean), ("rstd", &forward.rstd)];
    let gradients = ops::backward(&engine, &op, &[&x, &w, &w], &saved, &[("y", &dy)]).unwrap();
    let names: Vec<&str> = gradients.iter().map(|gradient| gradient.operand.as_str()).collect();
    assert_eq!(names, ["x", "w", "b"]);
    let types: Vec<_> = [&x, &w, &w].iter().map(|t| (t.dtype(), t.shape().clone())).collect();
    let graph = op.backward_graph(&types).unwrap();
    let by_name = |name: &str| match name {
        "x" => &x,
        "w" | "b" => &w,
        "mean" => &forward.mean,
        "rstd" => &forward.rstd,
        _ => &dy,
    };
    let arrays: Vec<Array> = graph.inputs().iter().map(|&id| by_name(&graph.label(id)).to_array().unwrap()).collect();
    let expected = Expected::new(&graph, &arrays).unwrap();
    let outputs: Vec<Tensor> = gradients.into_iter().map(|gradient| gradient.value).collect();
    assert!(expected.verify(&graph, &outputs).unwrap().holds());
    let missing = ops::backward(&engine, &op, &[&x, &w, &w], &[], &[("y", &dy)]).unwrap_err();
    assert!(missing.to_string().contains("a tensor for `"), "{missing}");
}

#[test]
fn misuse_gets_a_typed_error() {
    let engine = Engine::cpu();
    let x = Tensor::filled(Dtype::F32, [4, 8], 1.0).unwrap();
    let y = Tensor::filled(Dtype::F16, [4, 8], 1.0).unwrap();
    let r = Tensor::filled(Dtype::F32, [5], 1.0).unwrap();
    let message = |result: Result<Tensor, Error>| result.unwrap_err().to_string();
    let text = message(ops::add_act(&engine, &x, &r, Activation::Relu));
    assert_eq!(text, "add: expected shapes that broadcast (equal sizes, or 1), got x f32[4,8], r f32[5]");
    let text = message(ops::add_act(&engine, &x, &y, Activation::Relu));
    assert_eq!(text, "add: expected operands of one dtype (cast one of them), got x f32[4,8], r f16[4,8]");
    let seed = Tensor::from_i32([], &[1]).unwrap();
    let text = message(ops::act_dropout(&engine, &x, Activation::Silu, ops::Dropout { p: 1.0, seed: &seed }));
    assert_eq!(text, "dropout: p must be in [0, 1), got 1");
    assert!(matches!(Tensor::from_f32(Dtype::F32, [3], &[1.0]), Err(Error::TensorSize { expected: 3, got: 1, .. })));
    let upload = Tensor::upload(&engine, Dtype::F16, [2, 2], &[0; 6]);
    assert!(matches!(upload, Err(Error::TensorSize { expected: 4, got: 3, .. })));
    assert!(matches!(Tensor::filled(Dtype::F32, [usize::MAX, 2], 0.0), Err(Error::TensorTooLarge(_))));
    assert!(ops::geglu_packed(&engine, &seed, Gelu::Erf).is_err());
    assert!(ops::softmax(&engine, &x, ops::SoftmaxOptions { mask: Mask::Additive, ..Default::default() }).is_err());
}

#[test]
fn a_target_that_is_no_class_is_an_error() {
    let text = "x = input f32[3,4] ; w = weight f32[5,4] ; t = input i32[1,3] ; r = reshape t [3]
l = linear_cross_entropy x w r IGNORED; out l";
    let engine = Engine::cpu();
    let x = Tensor::filled(Dtype::F32, [3, 4], 1.0).unwrap();
    let w = Tensor::filled(Dtype::F32, [5, 4], 1.0).unwrap();
    let run = |ignored: &str, targets: [i32; 3]| {
        let graph: Graph = text.replace("IGNORED", ignored).parse().unwrap();
        let mut session = Session::new(&engine, &graph, Strategy::Fused).unwrap();
        session.run(&[&x, &w, &Tensor::from_i32([1, 3], &targets).unwrap()])?;
        session.output(0)?.to_f32()
    };
    let message = run("", [0, 4, 5]).unwrap_err().to_string();
    assert_eq!(message, "input `t`: expected a class from 0 to 4, got 5 in row 2");
    let message = run("ignored=-100 ", [0, -1, -100]).unwrap_err().to_string();
    assert_eq!(message, "input `t`: expected a class from 0 to 4 or -100, which is ignored, got -1 in row 1");
    let loss = run("ignored=-100 ", [0, 4, -100]).unwrap();
    assert!((loss[0] - 5f32.ln()).abs() < 1e-5 && (loss[1] - 5f32.ln()).abs() < 1e-5 && loss[2] == 0.0, "{loss:?}");
}

#[test]
fn an_index_outside_of_the_table_is_an_error() {
    let graph: Graph = "t = input i32[3] ; w = weight f32[4,8] ; y = gather w t ; out y".parse().unwrap();
    let engine = Engine::cpu();
    let w = Tensor::filled(Dtype::F32, [4, 8], 1.0).unwrap();
    let mut session = Session::new(&engine, &graph, Strategy::Fused).unwrap();
    for bad in [-1, 4, i32::MAX] {
        let t = Tensor::from_i32([3], &[0, bad, 3]).unwrap();
        let error = session.run(&[&t, &w]).unwrap_err().to_string();
        assert!(error.contains(&format!("expected an index in 0..4, got {bad}")), "{error}");
    }
    let t = Tensor::from_i32([3], &[0, 1, 3]).unwrap();
    session.run(&[&t, &w]).unwrap();
    let text = session.run(&[&w, &t]).unwrap_err().to_string();
    assert_eq!(text, "input `t`: expected i32[3], got f32[4,8]");
    let text = session.run(&[&w]).unwrap_err().to_string();
    assert!(text.ends_with("expected 2 inputs (t, w), got 1"), "{text}");
}

#[test]
fn backward_of_attention_and_a_norm_takes_their_sum() {
    let engine = Engine::cpu();
    let tensor = |shape: &[usize], seed| Tensor::from_array(Dtype::F32, &Array::normal(shape, seed)).unwrap();
    let [q, k, v] = [1, 2, 3].map(|seed| tensor(&[2, 3, 10, 8], seed));
    let [r, dy, ds] = [4, 5, 6].map(|seed| tensor(&[2, 10, 24], seed));
    let (w, b) = (tensor(&[24], 7), tensor(&[24], 8));
    let (weight, bias) = (tensor(&[24, 24], 9), tensor(&[24], 10));
    let [alone, projected] = ["attention_add_norm", "attention_block"].map(|name| FusedOp::find(name).unwrap());
    let projected = (projected, vec![&q, &k, &v, &weight, &bias, &r, &w, &b]);
    let alone = (alone, vec![&q, &k, &v, &r, &w, &b]);
    for (op, operands) in [alone, projected] {
        let results = ops::forward(&engine, &op, &operands).unwrap();
        let gradients = [("y", &dy), ("s", &ds)];
        let got = ops::backward(&engine, &op, &operands, &[("s", &results[1])], &gradients).unwrap();
        // The same from the operands alone.
        let types: Vec<_> = operands.iter().map(|t| (t.dtype(), t.shape().clone())).collect();
        let graph = op.graph(&types).unwrap();
        let joint = differentiate(&graph, graph.inputs()).unwrap().graph;
        let named = |name: &str| op.operands().iter().position(|known| *known == name).map(|at| operands[at]);
        let given = |name: &str| named(name).unwrap_or(if name == "d_y" { &dy } else { &ds });
        let arrays: Vec<Array> = joint.inputs().iter().map(|&id| given(&joint.label(id)).to_array().unwrap()).collect();
        let exact = interpret(&joint, &arrays, Rounding::Exact).unwrap().outputs;
        for (index, gradient) in got.iter().enumerate() {
            let expected = &exact[graph.outputs().len() + index];
            for (&a, &b) in gradient.value.to_array().unwrap().values.iter().zip(&expected.values) {
                assert!((a - b).abs() <= 2e-4 * (1.0 + b.abs()), "{} of {}: {a} and {b}", gradient.operand, op.name());
            }
        }
        assert_eq!(got.len(), operands.len());
        let missing = ops::backward(&engine, &op, &operands, &[], &gradients).unwrap_err().to_string();
        assert!(missing.contains("`s`"), "{missing}");
    }
    // Attention is gone through for its gradient alone.
    let (op, types) = (FusedOp::find("attention_add_norm").unwrap(), [&q, &k, &v, &r, &w, &b]);
    let types: Vec<_> = types.iter().map(|t| (t.dtype(), t.shape().clone())).collect();
    let session = Session::new(&engine, &op.backward_graph(&types).unwrap(), Strategy::Greedy).unwrap();
    assert_eq!(session.plan().groups.len(), 2, "{}", session.plan());
}

#[test]
fn options_that_would_do_nothing_are_refused() {
    let engine = Engine::cpu();
    let graph: Graph = "y, m, s = layer_norm x[4,8] w[8] b[8] ; z = gelu y ; out z".parse().unwrap();
    let pin = Pin::Force(vec!["layer_norm".into(), "gelu".into()]);
    let session = |strategy| Session::new(&engine, &graph, SessionOptions::from(strategy).pins([pin.clone()]));
    assert_eq!(session(Strategy::Fused).unwrap().plan().groups.len(), 1);
    let refused = session(Strategy::Greedy).map(|_| ());
    assert!(matches!(refused, Err(Error::Pins(Strategy::Greedy))), "{refused:?}");
    let one = SessionOptions::default().layouts([Layout::contiguous(&Shape::from([4, 8]))]);
    let refused = Session::new(&engine, &graph, one).map(|_| ());
    assert!(matches!(refused, Err(Error::Plan(PlanError::InputLayouts { expected: 3, got: 1 }))), "{refused:?}");
}
