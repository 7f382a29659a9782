//! Losses without logits on Hopper, and their gradients: right by f64, the same bits in every run, whatever the sizes, the dtype, smoothing,
//! targets that are ignored and classes at a time.

use deuteron::{Dtype, Engine, Graph, Session, SessionOptions, Strategy, Tensor};
use deuteron_kernels::Backend;
use deuteron_matmul::cuda::cross_entropy::BackwardKernel;
use deuteron_plan::plan;

use super::hopper::hopper;
use crate::support::{assert_holds, expected, parsed, seeded, twice};

/// Rows, classes, inner size.
const SIZES: [[usize; 3]; 5] = [[1, 16, 8], [127, 129, 64], [129, 1500, 72], [300, 50_257, 64], [1500, 640, 768]];

fn operands([rows, classes, inner]: [usize; 3]) -> String {
    format!("x = input float[{rows},{inner}] ; w = weight float[{classes},{inner}] ; t = input i32[{rows}]")
}

/// A session of a graph of one kernel, of which a check of its name is made.
fn session(engine: &Engine, graph: &Graph, name: &str) -> Session {
    let session = Session::new(engine, graph, Strategy::Greedy).unwrap();
    let [group] = session.plan().groups.as_slice() else { panic!("not one kernel: {}", session.plan()) };
    assert_eq!(group.structure.name(), name);
    session
}

#[test]
fn losses_of_rows() {
    let Some(engine) = hopper() else { return };
    for (at, sizes) in SIZES.into_iter().enumerate() {
        let dtype = if at % 2 == 0 { Dtype::Bf16 } else { Dtype::F16 };
        for attributes in ["", " smoothing=0.1 ignored=3"] {
            let text = format!("{} ; l, s = linear_cross_entropy x w t{attributes} ; out l ; out s", operands(sizes));
            let graph = parsed(&text, dtype);
            let (inputs, expected) = seeded(&graph, 21);
            let mut session = session(&engine, &graph, "cross entropy without logits");
            assert_holds(&expected, &graph, &twice(&mut session, &inputs), format_args!("{dtype}\n{text}"));
        }
    }
}

#[test]
fn gradients_of_losses() {
    let Some(engine) = hopper() else { return };
    let Backend::Cuda(target) = engine.device().backend() else { panic!("a GPU") };
    for (at, sizes) in SIZES.into_iter().enumerate() {
        let (dtype, rows) = (if at % 2 == 0 { Dtype::Bf16 } else { Dtype::F16 }, sizes[0]);
        for smoothing in [0.0, 0.1] {
            let per_row = format!("s = input f32[{rows},1] ; a = input f32[{rows},1] ; d = input f32[{rows},1]");
            let text = format!(
                "{} ; {per_row} ; dx, dw = linear_cross_entropy_gradient x w t s a d smoothing={smoothing:?} ; out dx ; out dw",
                operands(sizes)
            );
            let graph = parsed(&text, dtype);
            let (mut inputs, _) = seeded(&graph, 22);
            // Probabilities are below 1.
            inputs[3] = Tensor::filled(Dtype::F32, [rows, 1], (sizes[1] as f64).ln() + 1.0).unwrap();
            let expected = expected(&graph, &inputs);
            let whole = session(&engine, &graph, "cross entropy backward");
            let plan = plan(&graph, engine.device().target(), Strategy::Greedy, &[]).unwrap();
            let kernel =
                BackwardKernel::of(&plan.groups[0].draft(&graph, &plan.placement), target).expect("a gradient");
            let some = SessionOptions::from(Strategy::Greedy).kernels([kernel.kernel_of(128.min(sizes[1]), target)]);
            for mut session in [whole, Session::new(&engine, &graph, some).unwrap()] {
                assert_holds(&expected, &graph, &twice(&mut session, &inputs), format_args!("{dtype}\n{text}"));
            }
        }
    }
}

/// A frozen weight, or frozen rows: only the other gradient is made.
#[test]
fn gradients_of_one_operand() {
    let Some(engine) = hopper() else { return };
    for (at, sizes @ [rows, classes, _]) in SIZES.into_iter().enumerate() {
        let dtype = if at % 2 == 0 { Dtype::Bf16 } else { Dtype::F16 };
        for gradient in ["dx", "dw"] {
            let per_row = format!("s = input f32[{rows},1] ; a = input f32[{rows},1] ; d = input f32[{rows},1]");
            let text = format!(
                "{} ; {per_row} ; dx, dw = linear_cross_entropy_gradient x w t s a d ; out {gradient}",
                operands(sizes)
            );
            let graph = parsed(&text, dtype);
            let (mut inputs, _) = seeded(&graph, 24);
            inputs[3] = Tensor::filled(Dtype::F32, [rows, 1], (classes as f64).ln() + 1.0).unwrap();
            let expected = expected(&graph, &inputs);
            let mut session = session(&engine, &graph, "cross entropy backward");
            assert_holds(&expected, &graph, &twice(&mut session, &inputs), format_args!("{dtype}\n{text}"));
        }
    }
}

#[test]
fn a_target_that_is_no_class() {
    let Some(engine) = hopper() else { return };
    let text = format!("{} ; l, s = linear_cross_entropy x w t ignored=-100 ; out l ; out s", operands([300, 500, 64]));
    let graph = parsed(&text, Dtype::Bf16);
    let (mut inputs, _) = seeded(&graph, 23);
    let mut session = session(&engine, &graph, "cross entropy without logits");
    for (target, holds) in [(499, true), (-100, true), (500, false), (-1, false)] {
        let mut targets = vec![7; 300];
        targets[200] = target;
        inputs[2] = Tensor::from_i32([300], &targets).unwrap();
        let result = session.run(&inputs.iter().collect::<Vec<_>>());
        assert_eq!(result.is_ok(), holds, "{target}: {result:?}");
        if let Err(error) = result {
            let error = error.to_string();
            assert!(error.contains(&target.to_string()) && error.contains("from 0 to 499"), "{error}");
        }
    }
}

/// Logits with infinities and NaN give what the graph gives.
#[test]
fn extreme_logits() {
    let Some(engine) = hopper() else { return };
    let text = format!("{} ; l, s = linear_cross_entropy x w t ; out l ; out s", operands([4, 200, 8]));
    let graph = parsed(&text, Dtype::Bf16);
    let (mut inputs, _) = seeded(&graph, 24);
    let mut x = vec![0.0; 32];
    (x[0], x[8], x[16]) = (f32::NAN, 3e38, 1e4);
    inputs[0] = Tensor::from_f32(Dtype::Bf16, [4, 8], &x).unwrap();
    let expected = expected(&graph, &inputs);
    let mut session = session(&engine, &graph, "cross entropy without logits");
    assert_holds(&expected, &graph, &twice(&mut session, &inputs), "extreme logits");
}
