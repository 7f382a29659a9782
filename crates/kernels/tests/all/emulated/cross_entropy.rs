//! Losses of logits that are not stored, and their gradients.

use std::fmt::Write;

use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget};
use deuteron_codegen::{Kernel, Source};
use deuteron_graph::{Dtype, Graph};
use deuteron_kernels::{Backend, render};
use deuteron_matmul::cuda::cross_entropy::BackwardKernel;

use super::{Lanes, Mistake, TileProgram, compiler, greedy, with_mistakes, written};

/// A loss or its gradient.
#[derive(Debug, Clone, Copy)]
struct Loss {
    /// rows, classes, inner size
    sizes: [usize; 3],
    dtype: Dtype,
    smoothing: f64,
    ignored: Option<i32>,
    /// classes whose slopes are stored at a time; none: it is no gradient
    gradient: Option<usize>,
}

impl Loss {
    const fn new(sizes: [usize; 3]) -> Loss {
        Loss { sizes, dtype: Dtype::Bf16, smoothing: 0.0, ignored: None, gradient: None }
    }

    const fn gradient(self, width: usize) -> Loss {
        Loss { gradient: Some(width), ..self }
    }

    fn graph(&self) -> Graph {
        let &Loss { sizes: [rows, classes, inner], dtype, smoothing, ignored, gradient } = self;
        let operands = format!(
            "x = input {dtype}[{rows},{inner}] ; w = weight {dtype}[{classes},{inner}] ; t = input i32[{rows}]"
        );
        let text = if gradient.is_some() {
            format!(
                "{operands} ; s = input f32[{rows},1] ; a = input f32[{rows},1] ; d = input f32[{rows},1]
                 dx, dw = linear_cross_entropy_gradient x w t s a d smoothing={smoothing:?} ; out dx ; out dw"
            )
        } else {
            let ignored = ignored.map_or(String::new(), |ignored| format!(" ignored={ignored}"));
            format!("{operands} ; l, s = linear_cross_entropy x w t smoothing={smoothing:?}{ignored} ; out l ; out s")
        };
        text.parse().unwrap_or_else(|error| panic!("{error:?}\n{text}"))
    }

    /// Its kernel: one, whatever is around it in the plan.
    fn kernel(&self, graph: &Graph, processors: usize) -> Kernel {
        let plan = greedy(graph);
        let [group] = plan.groups.as_slice() else { panic!("not one kernel: {plan}") };
        let draft = group.draft(graph, &plan.placement);
        let target = CudaTarget::new(Arch::Sm90a, processors);
        match self.gradient {
            Some(width) => BackwardKernel::of(&draft, &target).expect("a gradient").kernel_of(width, &target),
            None => render(draft, &Backend::Cuda(target)).unwrap(),
        }
    }

    /// Its text, and its launch as `emulator/cross_entropy.cpp` reads it.
    fn launch(&self, processors: usize) -> (CudaSource, String) {
        let graph = self.graph();
        let Kernel { source, launch } = self.kernel(&graph, processors);
        let Source::Cuda(source) = source else { panic!("{source}") };
        let grids = launch.grids().expect("grids");
        let &Loss { sizes: [rows, classes, inner], dtype, smoothing, ignored, gradient } = self;
        let names: Vec<&str> =
            launch.arguments().iter().map(|arg| graph.given_name(arg.base).expect("a name")).collect();
        let mut text = format!(
            "loss {rows} {classes} {inner} {} {} {} {}\narguments {} {}\nworkspace {} grids {}\n",
            if dtype == Dtype::F16 { 1 } else { 2 },
            u8::from(gradient.is_some()),
            (smoothing * 1000.0).round(),
            ignored.map_or(i64::MIN, i64::from),
            names.len(),
            names.join(" "),
            grids.workspace,
            grids.list.len(),
        );
        for grid in &grids.list {
            write!(text, "{}\n{}", grid.entry, written(grid)).unwrap();
        }
        (source, text)
    }
}

const SMOOTHED: Loss = Loss { smoothing: 0.125, ignored: Some(-100), ..Loss::new([130, 201, 72]) };
const ONE_ROW: Loss = Loss { dtype: Dtype::F16, ..Loss::new([1, 17, 8]) };

/// Odd sizes, one row, all classes at once and some at a time, both types.
#[test]
fn losses_without_logits() {
    let Some(compiler) = compiler() else { return };
    let cases = [
        ("loss", Loss::new([129, 500, 64]), 2),
        ("loss_smoothed", SMOOTHED, 2),
        ("loss_of_a_row", ONE_ROW, 1),
        ("loss_gradient", Loss::new([129, 300, 72]).gradient(128), 2),
        ("loss_gradient_smoothed", SMOOTHED.gradient(201), 2),
        ("loss_gradient_of_a_row", ONE_ROW.gradient(17), 1),
    ];
    for (name, loss, processors) in cases {
        let (source, launch) = loss.launch(processors);
        let program = TileProgram::compile(compiler, name, "cross_entropy.cpp", "", &source.text);
        let (ok, said) = program.run(&launch, processors, Lanes::Together, 1..3, 0);
        assert!(ok, "{name}:\n{said}");
    }
}

/// Every mistake of a list is noticed, alone.
fn check_mistakes(name: &str, loss: Loss, mistakes: &[Mistake]) {
    let Some(compiler) = compiler() else { return };
    let (source, launch) = loss.launch(2);
    let text = with_mistakes(&source.text, mistakes);
    let program = TileProgram::compile(compiler, name, "cross_entropy.cpp", "", &text);
    for mistake in 0..=mistakes.len() {
        let (ok, said) = program.run(&launch, 2, Lanes::Together, 1..3, mistake);
        assert_eq!(ok, mistake == 0, "mistake {mistake}:\n{said}");
    }
}

#[test]
fn mistakes_of_losses() {
    let mistakes: [Mistake; 4] = [
        ("if (end < COLUMNS) hide_from(pairs, end);", "", "a sum of columns that are not there"),
        ("if (any_of_warp(hit)) pick(p, own, pairs, wanted);", "", "no logit of a target"),
        ("atomicMin(p.fault, row * 256 + p.position);", "", "no fault"),
        (
            "finish_half(p, tile, tile.row + 64 * half, pairs[half]);",
            "finish_half(p, tile, tile.row, pairs[half]);",
            "rows",
        ),
    ];
    check_mistakes("mistakes_of_losses", Loss::new([129, 201, 64]), &mistakes);
}

#[test]
fn mistakes_of_gradients() {
    let mistakes: [Mistake; 3] = [
        ("if (HITS && hit == 8 * j + i) slopes[i] -= kept;", "", "no slope of a target"),
        ("p.tail.first != 0", "false", "shares are lost"),
        (
            "(i64)p.tail.targets[row] - (i64)p.tail.first - first",
            "(i64)p.tail.targets[row] - first",
            "columns of a share",
        ),
    ];
    check_mistakes("mistakes_of_gradients", Loss::new([129, 300, 72]).gradient(128), &mistakes);
}
