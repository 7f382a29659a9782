//! Matmuls by every variant that a device supports: the vendor's library and our kernels, checked against f64 and timed in turn.

mod ladder;
mod on_cpu;

pub use ladder::{MatmulRung, MatmulRungCheck, check_matmul_ladder, matmul_ladder};
pub use on_cpu::matmul_texts;

use std::cell::OnceCell;
use std::str::FromStr;

use deuteron_codegen::Kernel;
use deuteron_codegen::cuda::CudaTarget;
use deuteron_graph::{Dtype, Graph};
use deuteron_kernels::{Backend, render};
use deuteron_matmul::cuda::variant::MatmulVariant;
use deuteron_plan::{Draft, Plan, Strategy, plan};
use serde::Serialize;

use super::microseconds;
use super::turns::in_turn;
use crate::engine::Engine;
use crate::error::Error;
use crate::listing::entries;
use crate::seed;
use crate::session::{Session, SessionOptions};
use crate::tensor::Tensor;
use crate::verify::Expected;

/// Maximum rows at which variants are checked; they are timed at the requested rows.
const CHECKED_ROWS: usize = 129;

/// Variants predicted slower than this, relative to the fastest of their kind, are not measured.
const WORTH_MEASURING: f64 = 1.3;

/// The epilogue of a measured matmul.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatmulEpilogue {
    /// nothing
    None,
    /// a bias along the columns
    Bias,
    /// a bias and GELU
    Gelu,
    /// a bias and a residual
    Residual,
    /// a bias, a residual, and a layer norm of the sum, which is also stored
    Norm,
}

impl MatmulEpilogue {
    /// All of them.
    pub const ALL: [MatmulEpilogue; 5] = [
        MatmulEpilogue::None,
        MatmulEpilogue::Bias,
        MatmulEpilogue::Gelu,
        MatmulEpilogue::Residual,
        MatmulEpilogue::Norm,
    ];

    /// Its name in commands and tables.
    pub fn name(self) -> &'static str {
        match self {
            MatmulEpilogue::None => "none",
            MatmulEpilogue::Bias => "bias",
            MatmulEpilogue::Gelu => "gelu",
            MatmulEpilogue::Residual => "residual",
            MatmulEpilogue::Norm => "norm",
        }
    }
}

impl FromStr for MatmulEpilogue {
    type Err = String;

    fn from_str(name: &str) -> Result<MatmulEpilogue, String> {
        let known = MatmulEpilogue::ALL.into_iter().find(|epilogue| epilogue.name() == name);
        known.ok_or_else(|| "expected none, bias, gelu, residual or norm".to_string())
    }
}

/// A matmul `[rows, inner] x [inner, columns]` to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatmulCase {
    /// rows of the left operand and of the result
    pub rows: usize,
    /// the inner size
    pub inner: usize,
    /// columns of the result
    pub columns: usize,
    /// whether the weight is stored as `[columns, inner]`
    pub transposed: bool,
    /// the epilogue
    pub epilogue: MatmulEpilogue,
    /// dtype of all operands
    pub dtype: Dtype,
}

impl MatmulCase {
    fn graph(&self) -> Result<Graph, Error> {
        let &MatmulCase { rows, inner, columns, transposed, epilogue, dtype } = self;
        let (weight, flag) =
            if transposed { (format!("{columns},{inner}"), " transposed") } else { (format!("{inner},{columns}"), "") };
        let bias = if epilogue == MatmulEpilogue::None { String::new() } else { format!(" b:{dtype}[{columns}]") };
        let linear = format!("x = input {dtype}[{rows},{inner}] ; y = linear x w:{dtype}[{weight}]{bias}{flag}");
        let text = match epilogue {
            MatmulEpilogue::None | MatmulEpilogue::Bias => format!("{linear} ; out y"),
            MatmulEpilogue::Gelu => format!("{linear} ; z = gelu y ; out z"),
            MatmulEpilogue::Residual => {
                format!("{linear} ; r = input {dtype}[{rows},{columns}] ; z = add y r ; out z")
            }
            MatmulEpilogue::Norm => format!(
                "{linear} ; r = input {dtype}[{rows},{columns}] ; z = add y r ; \
                 n = layer_norm z g:{dtype}[{columns}] h:{dtype}[{columns}] eps=1e-5 ; out z ; out n"
            ),
        };
        Ok(text.parse()?)
    }
}

/// One variant of a matmul. The JSON form of `bench matmul` is an array of these.
#[derive(Debug, Clone, Serialize)]
pub struct VariantRow {
    /// rows of the left operand and of the result
    pub rows: usize,
    /// the inner size
    pub inner: usize,
    /// columns of the result
    pub columns: usize,
    /// whether the weight is stored as `[columns, inner]`
    pub transposed: bool,
    /// the epilogue
    pub epilogue: String,
    /// storage type of all operands
    pub dtype: String,
    /// where it ran
    pub device: String,
    /// `library`, or the tiles of our kernel
    pub variant: String,
    /// whether plans choose it
    pub chosen: bool,
    /// whether it is within its bound of the f64 reference
    pub verified: bool,
    /// the largest error as a share of its bound
    pub worst_ratio: f64,
    /// median microseconds
    pub us: f64,
    /// multiplications and additions per second, in TFLOP/s
    pub tflops: f64,
}

/// One variant of a matmul that ran once. The JSON form of `bench matmul --once` is an array of these.
#[derive(Debug, Clone, Serialize)]
pub struct VariantCheck {
    /// as in [`VariantRow`]
    pub variant: String,
    /// whether it is within its bound of the f64 reference
    pub verified: bool,
    /// the largest error as a share of its bound
    pub worst_ratio: f64,
}

/// Runs every variant of a matmul once, with all tile sizes: for memory checkers, under which timing would take too long.
pub fn check_matmul(engine: &Engine, case: &MatmulCase) -> Result<Vec<VariantCheck>, Error> {
    let target = gpu(engine)?;
    let matmul = Matmul::new(engine, case)?;
    let mut checks = Vec::new();
    for variant in MatmulVariant::all(&matmul.draft()?, target, f64::INFINITY) {
        let Some(kernel) = variant.kernel(&matmul.draft()?, target) else { continue };
        let worst_ratio = matmul.worst_ratio(engine, kernel)?;
        checks.push(VariantCheck { variant: variant.to_string(), verified: worst_ratio <= 1.0, worst_ratio });
    }
    Ok(checks)
}

/// One variant of a matmul that ran once for a profiler. The JSON form of `bench matmul --once --fastest` is an array of these.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VariantRun {
    /// rows of the left operand and of the result
    pub rows: usize,
    /// the inner size
    pub inner: usize,
    /// columns of the result
    pub columns: usize,
    /// the epilogue
    pub epilogue: String,
    /// storage type of all operands
    pub dtype: String,
    /// as in [`VariantRow`]
    pub variant: String,
    /// whether plans choose it
    pub chosen: bool,
    /// the function names of its launches as a profiler shows them, in order; empty if a library chooses them
    pub launches: Vec<String>,
}

/// Runs the variants of a matmul that matter once each, at its full size and without a check: the library, and of ours the one that is predicted
/// to be the fastest and the one that plans choose.
pub fn run_fastest(engine: &Engine, case: &MatmulCase) -> Result<Vec<VariantRun>, Error> {
    let target = gpu(engine)?;
    let matmul = Matmul::new(engine, case)?;
    let choice = render(matmul.draft()?, engine.device().backend())?;
    let tensors = seed::inputs(&matmul.graph, 1)?;
    let tensors = tensors.iter().map(|tensor| tensor.to_device(engine)).collect::<Result<Vec<_>, _>>()?;
    let inputs: Vec<&Tensor> = tensors.iter().collect();
    let mut runs = Vec::new();
    for (variant, kernel) in fastest(&matmul.draft()?, target, &choice) {
        let (chosen, launches) = (kernel == choice, entries(&kernel));
        matmul.session(engine, kernel)?.run(&inputs)?;
        runs.push(VariantRun {
            rows: case.rows,
            inner: case.inner,
            columns: case.columns,
            epilogue: case.epilogue.name().to_string(),
            dtype: case.dtype.to_string(),
            variant: variant.to_string(),
            chosen,
            launches,
        });
    }
    Ok(runs)
}

/// The library first; then of ours the first that is predicted to be the fastest on the best matrix units that take the group, and the choice.
fn fastest(group: &Draft, target: &CudaTarget, choice: &Kernel) -> Vec<(MatmulVariant, Kernel)> {
    let all = MatmulVariant::all(group, target, 1.0);
    let on = |hopper: bool| {
        all.iter().position(|variant| match variant {
            MatmulVariant::Hopper(_) | MatmulVariant::Realigned => hopper,
            MatmulVariant::Mma(_) => !hopper,
            MatmulVariant::Library | MatmulVariant::FewRows | MatmulVariant::Strips => false,
        })
    };
    let ours = on(true).or_else(|| on(false));
    let made =
        all.into_iter().enumerate().filter_map(|(at, variant)| Some((at, variant, variant.kernel(group, target)?)));
    let wanted = made
        .filter(|(at, variant, kernel)| *variant == MatmulVariant::Library || Some(*at) == ours || kernel == choice);
    wanted.map(|(_, variant, kernel)| (variant, kernel)).collect()
}

/// The target of our kernels.
fn gpu(engine: &Engine) -> Result<&CudaTarget, Error> {
    match engine.device().backend() {
        Backend::Cuda(target) => Ok(target),
        Backend::Cpu => Err(Error::NotTunable { device: engine.device().describe() }),
    }
}

/// Checks and times the promising variants of a matmul, fastest first.
pub fn matmul_variants(engine: &Engine, case: &MatmulCase) -> Result<Vec<VariantRow>, Error> {
    let target = gpu(engine)?;
    let small = Matmul::new(engine, &MatmulCase { rows: case.rows.min(CHECKED_ROWS), ..*case })?;
    let large = Matmul::new(engine, case)?;
    let chosen = render(large.draft()?, engine.device().backend())?;
    let (mut rows, mut sessions) = (Vec::new(), Vec::new());
    for variant in MatmulVariant::all(&large.draft()?, target, WORTH_MEASURING) {
        let kernels = (variant.kernel(&small.draft()?, target), variant.kernel(&large.draft()?, target));
        let (Some(at_small), Some(at_large)) = kernels else { continue };
        let worst_ratio = small.worst_ratio(engine, at_small)?;
        rows.push((variant, at_large == chosen, worst_ratio));
        sessions.push(large.session(engine, at_large)?);
    }
    let turns = in_turn(engine, &mut sessions, &seed::inputs(&large.graph, 1)?)?;
    let rows = rows.into_iter().zip(turns.times).map(|((variant, chosen, worst_ratio), time)| VariantRow {
        rows: case.rows,
        inner: case.inner,
        columns: case.columns,
        transposed: case.transposed,
        epilogue: case.epilogue.name().to_string(),
        dtype: case.dtype.to_string(),
        device: engine.device().describe(),
        variant: variant.to_string(),
        chosen,
        verified: worst_ratio <= 1.0,
        worst_ratio,
        us: microseconds(time),
        tflops: tflops(case, microseconds(time)),
    });
    let mut rows: Vec<VariantRow> = rows.collect();
    rows.sort_by(|a, b| a.us.total_cmp(&b.us));
    Ok(rows)
}

/// Multiplications and additions per second, in TFLOP/s.
fn tflops(case: &MatmulCase, us: f64) -> f64 {
    2.0 * (case.rows * case.columns) as f64 * case.inner as f64 / us.max(1e-6) / 1e6
}

/// A matmul as a graph of one kernel.
struct Matmul {
    graph: Graph,
    plan: Plan,
    /// The expected result of all variants, computed once: f64 takes longer than all variants together.
    expected: OnceCell<Expected>,
}

impl Matmul {
    fn new(engine: &Engine, case: &MatmulCase) -> Result<Matmul, Error> {
        let graph = case.graph()?;
        let plan = plan(&graph, engine.device().target(), Strategy::Greedy, &[])?;
        Ok(Matmul { graph, plan, expected: OnceCell::new() })
    }

    fn draft(&self) -> Result<Draft<'_>, Error> {
        match self.plan.groups.as_slice() {
            [group] => Ok(group.draft(&self.graph, &self.plan.placement)),
            groups => Err(Error::SeveralKernels(groups.len())),
        }
    }

    fn session(&self, engine: &Engine, kernel: Kernel) -> Result<Session, Error> {
        Session::new(engine, &self.graph, SessionOptions::from(Strategy::Greedy).kernels([kernel]))
    }

    /// The largest error of a kernel, as a share of its bound.
    fn worst_ratio(&self, engine: &Engine, kernel: Kernel) -> Result<f64, Error> {
        let tensors = seed::inputs(&self.graph, 3)?;
        let mut session = self.session(engine, kernel)?;
        session.poison()?;
        session.run(&tensors.iter().collect::<Vec<_>>())?;
        let outputs: Vec<Tensor> =
            (0..self.graph.outputs().len()).map(|at| session.output(at)).collect::<Result<_, _>>()?;
        let verification = self.expected(&tensors)?.verify(&self.graph, &outputs)?;
        Ok(verification.worst().map_or(0.0, |worst| worst.comparison.ratio))
    }

    fn expected(&self, inputs: &[Tensor]) -> Result<&Expected, Error> {
        if let Some(known) = self.expected.get() {
            return Ok(known);
        }
        let arrays: Vec<_> = inputs.iter().map(Tensor::to_array).collect::<Result<_, _>>()?;
        let made = Expected::new(&self.graph, &arrays)?;
        Ok(self.expected.get_or_init(|| made))
    }
}
