//! Ready-made ops around products, as a user calls them.

use deuteron::ops::{self, AttentionOptions, Dropout, Linear, LossOptions, NormWeights};
use deuteron::{
    Activation, Dtype, Engine, FusedOp, Graph, Mask, Reduction, Session, Strategy, Tensor, View, differentiate,
};
use deuteron_codegen::cuda::Arch;
use deuteron_kernels::CudaCatalog;
use deuteron_plan::{Machine, Target, plan};

/// Values between -1 and 1 that repeat after more than any axis here.
fn tensor(shape: &[usize], salt: usize) -> Tensor {
    let count = shape.iter().product();
    Tensor::build(Dtype::F32, shape.into(), count, |at| (((at * 37 + salt * 101) % 211) as f64 - 105.0) / 105.0)
        .unwrap()
}

fn close(ours: &Tensor, theirs: &Tensor, bound: f32) {
    assert_eq!(ours.shape(), theirs.shape());
    for (a, b) in ours.to_f32().unwrap().iter().zip(&theirs.to_f32().unwrap()) {
        assert!((a - b).abs() <= bound * (1.0 + b.abs()), "{a} is not {b}");
    }
}

#[test]
fn heads_are_views_of_one_projection() {
    let engine = Engine::cpu();
    let (x, weight, bias) = (tensor(&[2, 5, 12], 1), tensor(&[12, 32], 2), tensor(&[32], 3));
    let linear = Linear { weight: &weight, bias: &bias };
    let heads = ops::qkv(&engine, &x, linear, 4, 2).unwrap();
    let whole = ops::linear_act(&engine, &x, linear, Activation::Relu, None).unwrap();
    assert_eq!(heads.q.shape()[..], [2, 4, 5, 4]);
    assert_eq!(heads.v.shape()[..], [2, 2, 5, 4]);
    let all = whole.view(&View::Reshape([2, 5, 8, 4].into())).unwrap();
    for (part, start, length) in [(&heads.q, 0, 4), (&heads.k, 4, 2), (&heads.v, 6, 2)] {
        let same = all.view(&View::Slice { axis: 2, start, length }).unwrap();
        let same = same.view(&View::Transpose(vec![0, 2, 1, 3])).unwrap();
        let pairs = part.to_f32().unwrap().into_iter().zip(same.to_f32().unwrap());
        pairs.for_each(|(part, positive)| assert_eq!(part.max(0.0), positive));
    }
    assert!(ops::qkv(&engine, &x, linear, 3, 2).unwrap_err().to_string().contains("7 heads"));
}

#[test]
fn groups_of_heads_share_keys() {
    let engine = Engine::cpu();
    let (q, k, v) = (tensor(&[2, 6, 7, 8], 1), tensor(&[2, 2, 9, 8], 2), tensor(&[2, 2, 9, 8], 3));
    let shared = ops::attention(&engine, &q, &k, &v, AttentionOptions::default()).unwrap();
    // The same heads of keys, each written out three times.
    let repeated = |tensor: &Tensor| {
        let values = tensor.to_f32().unwrap();
        let heads = values.chunks_exact(9 * 8).flat_map(|head| [head; 3]).flatten().copied().collect::<Vec<f32>>();
        Tensor::from_f32(Dtype::F32, [2, 6, 9, 8], &heads).unwrap()
    };
    let apart = ops::attention(&engine, &q, &repeated(&k), &repeated(&v), AttentionOptions::default()).unwrap();
    close(&shared, &apart, 1e-6);
    let three = tensor(&[2, 4, 9, 8], 2);
    assert!(ops::attention(&engine, &q, &three, &three, AttentionOptions::default()).is_err());
}

#[test]
fn attention_takes_masks_and_dropout() {
    let engine = Engine::cpu();
    let (q, mask) = (tensor(&[1, 2, 6, 8], 1), tensor(&[6, 6], 4));
    let seed = Tensor::from_i32([], &[7]).unwrap();
    let with = |mask, mask_tensor, dropout| {
        ops::attention(&engine, &q, &q, &q, AttentionOptions { mask, mask_tensor, dropout }).unwrap()
    };
    let zeros = Tensor::filled(Dtype::F32, [6, 6], 0.0).unwrap();
    close(&with(Mask::Additive, Some(&zeros), None), &with(Mask::Full, None, None), 1e-6);
    let masked = with(Mask::Additive, Some(&mask), None);
    assert_ne!(masked.to_f32().unwrap(), with(Mask::Full, None, None).to_f32().unwrap());
    let dropped = with(Mask::Full, None, Some(Dropout { p: 0.5, seed: &seed }));
    assert_ne!(dropped.to_f32().unwrap(), with(Mask::Full, None, None).to_f32().unwrap());
}

#[test]
fn a_block_is_its_parts() {
    let engine = Engine::cpu();
    let (q, r) = (tensor(&[2, 3, 5, 4], 1), tensor(&[2, 5, 12], 2));
    let (w, b) = (tensor(&[12], 3), tensor(&[12], 4));
    let weights = NormWeights { w: &w, b: Some(&b), eps: 1e-5 };
    let attended = ops::attention(&engine, &q, &q, &q, AttentionOptions::default()).unwrap();
    let merged = attended.view(&View::Transpose(vec![0, 2, 1, 3])).unwrap();
    let merged = Tensor::from_f32(Dtype::F32, [2, 5, 12], &merged.to_f32().unwrap()).unwrap();
    let parts = ops::add_norm(&engine, &merged, &r, weights).unwrap();
    let whole = ops::attention_add_norm(&engine, [&q, &q, &q], &r, Mask::Causal, weights).unwrap();
    close(&whole.s, &parts.s, 1e-6);
    close(&whole.y, &parts.y, 1e-5);
    let (weight, bias) = (tensor(&[12, 12], 5), tensor(&[12], 6));
    let linear = Linear { weight: &weight, bias: &bias };
    let whole = ops::attention_block(&engine, [&q, &q, &q], linear, &r, Mask::Causal, weights).unwrap();
    let projected = ops::linear_act(&engine, &merged, linear, Activation::Relu, None).unwrap();
    let negated = |tensor: &Tensor| {
        let values: Vec<f32> = tensor.to_f32().unwrap().iter().map(|value| -value).collect();
        Tensor::from_f32(Dtype::F32, tensor.shape().clone(), &values).unwrap()
    };
    // relu(x) - relu(-x) is x.
    let (minus, minus_bias) = (negated(&weight), negated(&bias));
    let minus = Linear { weight: &minus, bias: &minus_bias };
    let other = ops::linear_act(&engine, &merged, minus, Activation::Relu, None).unwrap();
    let pairs = projected.to_f32().unwrap().into_iter().zip(other.to_f32().unwrap());
    let difference: Vec<f32> = pairs.map(|(positive, negative)| positive - negative).collect();
    let difference = Tensor::from_f32(Dtype::F32, [2, 5, 12], &difference).unwrap();
    let parts = ops::add_norm(&engine, &difference, &r, weights).unwrap();
    close(&whole.s, &parts.s, 1e-5);
    close(&whole.y, &parts.y, 1e-4);
}

/// The loss of all rows at once, and its gradients by differentiation.
fn whole_loss(rows: usize, hidden: usize, classes: usize) -> Graph {
    let text = format!(
        "x = input f32[{rows},{hidden}] ; weight = weight f32[{classes},{hidden}] ; targets = input i32[{rows}]
logits = matmul x weight transpose_b ; loss, sum = cross_entropy logits targets ; out loss"
    );
    let graph: Graph = text.parse().unwrap();
    differentiate(&graph, &graph.inputs()[..2]).unwrap().graph
}

#[test]
fn a_loss_without_logits_has_their_loss_and_gradients() {
    let engine = Engine::cpu();
    for (rows, classes) in [(1, 301), (255, 301), (600, 40_003)] {
        let hidden = 24;
        let (x, weight) = (tensor(&[rows, hidden], 1), tensor(&[classes, hidden], 2));
        let targets: Vec<i32> = (0..rows).map(|row| (row * 17 % classes) as i32).collect();
        let targets = Tensor::from_i32([rows], &targets).unwrap();
        let whole = whole_loss(rows, hidden, classes);
        let mut session = Session::new(&engine, &whole, Strategy::Unfused).unwrap();
        let one = Tensor::filled(Dtype::F32, [], 1.0).unwrap();
        let by_name = |name: &str| match name {
            "x" => &x,
            "weight" => &weight,
            "targets" => &targets,
            _ => &one,
        };
        let inputs: Vec<&Tensor> = whole.inputs().iter().map(|&id| by_name(&whole.label(id))).collect();
        session.run(&inputs).unwrap();
        let ours = ops::linear_cross_entropy(&engine, &x, &weight, &targets, LossOptions::default()).unwrap();
        close(&ours.loss, &session.output(0).unwrap(), 1e-5);
        let saved = [("logsumexp", &ours.logsumexp)];
        let op = FusedOp::find("linear_cross_entropy").unwrap();
        let gradients = ops::backward(&engine, &op, &[&x, &weight, &targets], &saved, &[("loss", &one)]).unwrap();
        for (index, gradient) in gradients.iter().enumerate() {
            assert_eq!(gradient.operand, ["x", "weight"][index]);
            close(&gradient.value, &session.output(index + 1).unwrap(), 1e-6);
        }
    }
}

/// Logits of 4096 rows and 20,001 classes would take 328 MB; a chunk of them takes 64.
#[test]
fn logits_are_never_all_there() {
    let engine = Engine::cpu();
    let op = FusedOp::find("linear_cross_entropy").unwrap();
    let mut types = op.operand_types(4096, 8, Dtype::F32);
    types[1].1 = [20_001, 8].into();
    for backward in [false, true] {
        let graph = if backward { op.backward_graph(&types) } else { op.graph(&types) }.unwrap();
        let session = Session::new(&engine, &graph, Strategy::Greedy).unwrap();
        let (arena, logits) = (session.plan().arena.bytes, 4096 * 20_001 * 4);
        assert!(arena < logits / 2, "{backward}: {arena} of {logits}\n{}", session.plan().explain());
    }
}

/// On Hopper both directions are one kernel and the little work around it, whatever the options.
#[test]
fn hopper_takes_a_loss_whole() {
    let machine = Machine::profile("h200").unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
    let usual = FusedOp::find("linear_cross_entropy").unwrap();
    let smoothed = usual.with(|a| (a.reduction, a.smoothing, a.ignored) = (Reduction::None, 0.1, Some(-100)));
    for op in [usual, usual.with(|a| a.ignored = Some(-100)), smoothed] {
        let types = op.operand_types(1024, 64, Dtype::Bf16);
        for (graph, name) in [
            (op.graph(&types).unwrap(), "cross entropy without logits"),
            (op.backward_graph(&types).unwrap(), "cross entropy backward"),
        ] {
            let plan = plan(&graph, target, Strategy::Greedy, &[]).unwrap();
            let names: Vec<&str> = plan.groups.iter().map(|group| group.structure.name()).collect();
            assert!(names.contains(&name) && names.len() <= 4, "{op:?}: {names:?}");
        }
    }
}

#[test]
fn a_target_that_is_no_class_is_refused() {
    let engine = Engine::cpu();
    let (x, weight) = (tensor(&[2, 8], 1), tensor(&[5, 8], 2));
    let options = LossOptions { ignored: Some(-100), ..LossOptions::default() };
    for (target, holds) in [(4, true), (-100, true), (5, false), (-1, false)] {
        let targets = Tensor::from_i32([2], &[1, target]).unwrap();
        let result = ops::linear_cross_entropy(&engine, &x, &weight, &targets, options);
        assert_eq!(result.is_ok(), holds, "{target}");
        assert!(result.err().is_none_or(|error| error.to_string().contains("below 5")), "{target}");
    }
}
