//! The ladder of matmul, from a naive kernel to ours, beside the vendor's library: every rung is checked against f64, then all are timed in turn.

use deuteron_codegen::Kernel;
use deuteron_codegen::cuda::CudaTarget;
use deuteron_graph::Dtype;
use deuteron_kernels::ladder::{Ladder, Rung};
use deuteron_kernels::{Backend, render};
use deuteron_matmul::cuda::variant::MatmulVariant;
use deuteron_plan::Draft;
use serde::Serialize;

use super::super::microseconds;
use super::super::turns::in_turn;
use super::{CHECKED_ROWS, Matmul, MatmulCase, MatmulEpilogue, on_cpu, tflops};
use crate::engine::Engine;
use crate::error::Error;
use crate::seed;

/// Inner size and columns at which rungs are checked as well: no row starts at a multiple of 16 bytes, and no tile is full.
pub(super) const CHECKED_WEIGHTS: (usize, usize) = (133, 131);

/// One rung of the ladder of a matmul. The JSON form of `bench matmul --ladder` is an array of these.
#[derive(Debug, Clone, Serialize)]
pub struct MatmulRung {
    /// rows of the left operand and of the result
    pub rows: usize,
    /// the inner size
    pub inner: usize,
    /// columns of the result
    pub columns: usize,
    /// storage type of all operands
    pub dtype: String,
    /// where it ran
    pub device: String,
    /// the rung's file or name, `generated` if plans choose none of them, or `library`
    pub rung: String,
    /// the improvement over the previous rung
    pub about: String,
    /// its tiles on a GPU, its kernels and threads on a CPU; empty for the library
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
    /// speed-up over the first rung
    pub speedup: f64,
    /// speed-up over the vendor's library; none if it does not support these sizes
    pub over_library: Option<f64>,
    /// registers per thread; none for the library
    pub registers: Option<u32>,
}

/// One rung that ran once. The JSON form of `bench matmul --ladder --once` is an array of these.
#[derive(Debug, Clone, Serialize)]
pub struct MatmulRungCheck {
    /// as in [`MatmulRung`]
    pub rung: String,
    /// whether it is within its bound of the f64 reference
    pub verified: bool,
    /// the largest error as a share of its bound
    pub worst_ratio: f64,
}

/// A step of the ladder.
#[derive(Clone, Copy)]
enum Step {
    /// a kernel of the ladder
    Rung(&'static Rung),
    /// the kernel that plans choose, if it is none of these
    Generated,
    /// the vendor's library
    Library,
}

impl Step {
    fn name(self) -> &'static str {
        match self {
            Step::Rung(rung) => rung.name,
            Step::Generated => "generated",
            Step::Library => "library",
        }
    }

    fn about(self) -> &'static str {
        match self {
            Step::Rung(rung) => rung.about,
            Step::Generated => "what plans take at this size",
            Step::Library => "cuBLASLt",
        }
    }

    /// Its kernel, if it supports the matmul.
    fn kernel(self, engine: &Engine, draft: &Draft, target: &CudaTarget) -> Result<Option<Kernel>, Error> {
        Ok(match self {
            Step::Rung(rung) => rung.kernel(draft, target),
            Step::Generated => Some(render(*draft, engine.device().backend())?),
            Step::Library => MatmulVariant::Library.kernel(draft, target),
        })
    }
}

/// The steps for a matmul, the library last. A rung that does not support these sizes is left out.
fn steps(engine: &Engine, matmul: &Matmul, target: &CudaTarget) -> Result<Vec<(Step, Kernel)>, Error> {
    let draft = matmul.draft()?;
    let rungs = Ladder::Matmul.rungs().iter().filter(|rung| rung.is_for(target.arch)).map(Step::Rung);
    let mut steps: Vec<(Step, Kernel)> = Vec::new();
    for step in rungs.chain([Step::Library, Step::Generated]) {
        let Some(kernel) = step.kernel(engine, &draft, target)? else { continue };
        if !matches!(step, Step::Generated) || steps.iter().all(|(_, known)| *known != kernel) {
            steps.push((step, kernel));
        }
    }
    steps.sort_by_key(|(step, _)| matches!(step, Step::Library));
    Ok(steps)
}

/// The sizes, if the ladder supports them.
fn taken(case: &MatmulCase) -> Result<&MatmulCase, Error> {
    let got = match case {
        MatmulCase { transposed: true, .. } => "weights that lie transposed".to_string(),
        MatmulCase { dtype: Dtype::F16 | Dtype::Bf16, epilogue: MatmulEpilogue::None, .. } => return Ok(case),
        MatmulCase { dtype: Dtype::F16 | Dtype::Bf16, epilogue, .. } => format!("the epilogue {}", epilogue.name()),
        MatmulCase { dtype, .. } => dtype.to_string(),
    };
    Err(Error::NoMatmulLadder { got })
}

/// Checks every rung of the ladder of a matmul at few rows and at odd sizes, and times it in turn with the others and the library.
///
/// On a CPU it is the ladder of `gelu(x w)` in f32.
pub fn matmul_ladder(engine: &Engine, case: &MatmulCase) -> Result<Vec<MatmulRung>, Error> {
    let target = match engine.device().backend() {
        Backend::Cuda(target) => target,
        Backend::Cpu => return on_cpu::ladder(engine, case),
    };
    let case = taken(case)?;
    let (inner, columns) = CHECKED_WEIGHTS;
    let few = MatmulCase { rows: CHECKED_ROWS, ..*case };
    let small = [Matmul::new(engine, &few)?, Matmul::new(engine, &MatmulCase { inner, columns, ..few })?];
    let large = Matmul::new(engine, case)?;
    let chosen = render(large.draft()?, engine.device().backend())?;
    let (mut rungs, mut sessions) = (Vec::new(), Vec::new());
    for (step, kernel) in steps(engine, &large, target)? {
        let mut worst_ratio: f64 = 0.0;
        for small in &small {
            // What does not take odd sizes has no kernel there.
            let Some(kernel) = step.kernel(engine, &small.draft()?, target)? else { continue };
            let ratio = small.worst_ratio(engine, kernel)?;
            // Once NaN, it stays NaN.
            if ratio.is_nan() || ratio > worst_ratio {
                worst_ratio = ratio;
            }
        }
        rungs.push((step, kernel == chosen, kernel.launch.variant().name.clone(), worst_ratio));
        sessions.push(large.session(engine, kernel)?);
    }
    let turns = in_turn(engine, &mut sessions, &seed::inputs(&large.graph, 1)?)?;
    let times: Vec<f64> = turns.times.into_iter().map(microseconds).collect();
    let library = rungs.iter().position(|rung| matches!(rung.0, Step::Library));
    let mut rows = Vec::new();
    for (index, (step, chosen, variant, worst_ratio)) in rungs.into_iter().enumerate() {
        let us = times[index];
        rows.push(MatmulRung {
            rows: case.rows,
            inner: case.inner,
            columns: case.columns,
            dtype: case.dtype.to_string(),
            device: engine.device().describe(),
            rung: step.name().to_string(),
            about: step.about().to_string(),
            variant,
            chosen,
            verified: worst_ratio <= 1.0,
            worst_ratio,
            us,
            tflops: tflops(case, us),
            speedup: times[0] / us.max(1e-6),
            over_library: library.map(|library| times[library] / us.max(1e-6)),
            registers: sessions[index].registers(),
        });
    }
    Ok(rows)
}

/// Runs every rung of the ladder of a matmul once, at the requested sizes: for memory checkers, under which timing would take too long.
pub fn check_matmul_ladder(engine: &Engine, case: &MatmulCase) -> Result<Vec<MatmulRungCheck>, Error> {
    let target = match engine.device().backend() {
        Backend::Cuda(target) => target,
        Backend::Cpu => return on_cpu::check(engine, case),
    };
    let matmul = Matmul::new(engine, taken(case)?)?;
    let mut checks = Vec::new();
    for (step, kernel) in steps(engine, &matmul, target)? {
        let worst_ratio = matmul.worst_ratio(engine, kernel)?;
        checks.push(MatmulRungCheck { rung: step.name().to_string(), verified: worst_ratio <= 1.0, worst_ratio });
    }
    Ok(checks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ladder_is_of_plain_16_bit_matmuls() {
        let plain = MatmulCase {
            rows: 8,
            inner: 8,
            columns: 8,
            transposed: false,
            epilogue: MatmulEpilogue::None,
            dtype: Dtype::Bf16,
        };
        assert!(taken(&plain).is_ok() && taken(&MatmulCase { dtype: Dtype::F16, ..plain }).is_ok());
        let said = |case: MatmulCase| taken(&case).unwrap_err().to_string();
        assert!(said(MatmulCase { transposed: true, ..plain }).ends_with("got weights that lie transposed"));
        assert!(said(MatmulCase { dtype: Dtype::F32, ..plain }).ends_with("got f32"));
        assert!(said(MatmulCase { epilogue: MatmulEpilogue::Gelu, ..plain }).ends_with("got the epilogue gelu"));
    }
}
