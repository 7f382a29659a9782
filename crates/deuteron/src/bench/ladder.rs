//! The ladder from a scalar kernel to ours, or from many launches to one: every rung is checked against one reference, then all are timed in turn.

use std::sync::Arc;

use deuteron_codegen::cpu::STREAM_FROM;
use deuteron_codegen::cpu::family::touched;
use deuteron_codegen::cpu::machine::LargeResults;
use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cuda::{CudaTarget, without_library};
use deuteron_codegen::{Kernel, Source};
use deuteron_device::Cpu;
use deuteron_graph::{Graph, Mask};
use deuteron_kernels::ladder::cpu::scalar;
use deuteron_kernels::ladder::{Ladder, Rung, WIDEST, with_ordinary_stores};
use deuteron_kernels::{Backend, render};
use deuteron_plan::{Draft, Plan, PlanError, Quantity, Strategy, plan};
use serde::Serialize;

use super::cuts::{Chain, Cut};
use super::turns::{Turns, in_turn};
use super::{BenchCase, gbps, graph, microseconds};
use crate::catalog;
use crate::engine::Engine;
use crate::error::Error;
use crate::seed;
use crate::session::{Session, SessionOptions};
use crate::tensor::Tensor;
use crate::verify::Expected;

/// Rows at which rungs are checked; they are timed at the requested rows.
const CHECKED_ROWS: usize = 517;

/// Rows and columns at which those of attention are checked as well: two sequences of two heads.
const CHECKED_SEQUENCES: (usize, usize) = (2048, 128);

/// One rung. The JSON form of `bench --ladder` is an array of these.
#[derive(Debug, Clone, Serialize)]
pub struct LadderRow {
    /// name in the catalogue
    pub op: String,
    /// rows of the main operand
    pub rows: usize,
    /// its columns
    pub cols: usize,
    /// its storage type
    pub dtype: String,
    /// where it ran
    pub device: String,
    /// the rung's file, `generated`, the number of launches, or what tells it from the rung before
    pub rung: String,
    /// the improvement over the previous rung
    pub about: String,
    /// kernels of its plan
    pub kernels: usize,
    /// kernel launches in the CUDA graph of a run, counted by the driver; none on a device without CUDA graphs
    pub launches: Option<usize>,
    /// other nodes of the CUDA graph
    pub other_nodes: Option<usize>,
    /// whether it is within its bound of the f64 reference
    pub verified: bool,
    /// the largest error as a share of its bound
    pub worst_ratio: f64,
    /// median microseconds
    pub us: f64,
    /// compulsory bytes of the op a second, those of its plan with the fewest, in GB/s
    pub gbps: f64,
    /// bytes a second of a copy of as many bytes, in the same run
    pub copy_gbps: f64,
    /// the ratio of the two
    pub fraction_of_copy: f64,
    /// multiplications and additions of attention's two matmuls per second, counting only visible keys, in TFLOP/s
    pub tflops: Option<f64>,
    /// speed-up over the first rung
    pub speedup: f64,
    /// registers per thread, on a GPU
    pub registers: Option<u32>,
}

/// One rung that ran once. The JSON form of `bench --ladder --once` is an array of these.
#[derive(Debug, Clone, Serialize)]
pub struct LadderCheck {
    /// name in the catalogue
    pub op: String,
    /// as in [`LadderRow`]
    pub rung: String,
    /// whether it is within its bound of the f64 reference
    pub verified: bool,
    /// the largest error as a share of its bound
    pub worst_ratio: f64,
}

/// The kernels of a rung as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RungText {
    /// as in [`LadderRow`]
    pub rung: String,
    /// as in [`LadderRow`]
    pub about: String,
    /// the sources of its kernels, each after a line with its name
    pub text: String,
}

/// A rung ready to be timed.
struct Step {
    name: String,
    about: String,
    worst_ratio: f64,
    session: Session,
}

/// Runs the ladder of an op, the generated kernel last.
pub fn ladder(engine: &Engine, case: &BenchCase) -> Result<Vec<LadderRow>, Error> {
    let graph = graph(case)?;
    let tensors = seed::inputs(&graph, 1)?;
    let (mut rungs, mut sessions) = (Vec::new(), Vec::new());
    for Step { name, about, worst_ratio, session } in steps(engine, case, &checks(case)?, &graph)? {
        rungs.push((name, about, worst_ratio));
        sessions.push(session);
    }
    let turns = in_turn(engine, &mut sessions, &tensors)?;
    let rows = rungs.into_iter().zip(&sessions).enumerate();
    rows.map(|(index, (rung, session))| row(engine, case, rung, session, &turns, index)).collect()
}

/// Runs every rung of the ladder of an op once, at the requested rows and columns: for memory checkers, under which timing would take too long.
pub fn check_ladder(engine: &Engine, case: &BenchCase) -> Result<Vec<LadderCheck>, Error> {
    let check = check(case)?;
    // Checked here, on the session that each step has anyway.
    let checked = |step: Step| {
        let worst_ratio = check.worst_ratio(step.session)?;
        Ok(LadderCheck { op: case.op.name().to_string(), rung: step.name, verified: worst_ratio <= 1.0, worst_ratio })
    };
    steps(engine, case, &[], &check.graph)?.into_iter().map(checked).collect()
}

/// The kernels of every rung of the ladder of an op on a device, without a run.
pub fn ladder_texts(engine: &Engine, case: &BenchCase) -> Result<Vec<RungText>, Error> {
    let steps = steps(engine, case, &[], &graph(case)?)?;
    Ok(steps.into_iter().map(|Step { name, about, session, .. }| text_of(name, about, &session)).collect())
}

/// The kernels of a session as text.
pub(super) fn text_of(rung: String, about: String, session: &Session) -> RungText {
    let (groups, count) = (&session.plan().groups, session.kernels().len());
    let kernels = groups.iter().zip(session.kernels()).enumerate().map(|(index, (group, kernel))| {
        let source = match &kernel.source {
            Source::Cuda(source) => without_library(&source.text),
            source => source.to_string(),
        };
        format!("// kernel {index} of {count}: {}\n{}\n", group.name, source.trim_end())
    });
    RungText { rung, about, text: kernels.collect() }
}

fn steps(engine: &Engine, case: &BenchCase, checks: &[Check], graph: &Graph) -> Result<Vec<Step>, Error> {
    let chain = Chain::of(graph, engine.device().target())?;
    let mut steps = match engine.device().backend() {
        Backend::Cpu => naive_steps(engine, checks, graph)?,
        Backend::Cuda(target) => written_steps(engine, target, case, checks, graph, chain.is_some())?,
    };
    steps.extend(match (&chain, engine.device().backend()) {
        (Some(chain), _) => cut_steps(engine, chain, checks, graph)?,
        (None, Backend::Cpu) => fused_steps(engine, checks, graph)?,
        (None, Backend::Cuda(_)) => Vec::new(),
    });
    Ok(steps)
}

/// Plans with fewer and fewer launches; those that the device has no kernels for are left out.
fn cut_steps(engine: &Engine, chain: &Chain, checks: &[Check], graph: &Graph) -> Result<Vec<Step>, Error> {
    let mut steps = Vec::new();
    for together in 1..=chain.steps() {
        // Another size may have other operations: one head needs no order of its own.
        let make = |graph: &Graph| {
            let chain = Chain::of(graph, engine.device().target())?;
            let pins = chain.map_or(Vec::new(), |chain| chain.cut(together).pins);
            Session::new(engine, graph, SessionOptions::default().pins(pins))
        };
        let Cut { name, about, .. } = chain.cut(together);
        match step(name, about, checks, graph, make) {
            Err(Error::Plan(PlanError::Pin { .. })) => {}
            made => steps.push(made?),
        }
    }
    Ok(steps)
}

/// The first rungs on a CPU: one kernel per primitive; one element at a time, then vectors on one thread, narrow to wide, then all threads.
fn naive_steps(engine: &Engine, checks: &[Check], graph: &Graph) -> Result<Vec<Step>, Error> {
    let mut steps = vec![scalar_step(checks, graph)?];
    for isa in Isa::available().into_iter().rev() {
        let alone = Engine::on(Arc::new(Cpu::with(1, isa)));
        let about = format!("one kernel per primitive, vectors of {}, one thread", isa.name());
        let make = |graph: &Graph| Session::new(&alone, graph, Strategy::Naive);
        steps.push(step(isa.name().to_string(), about, checks, graph, make)?);
    }
    let make = |graph: &Graph| Session::new(engine, graph, Strategy::Naive);
    steps.push(step("threads".into(), "the same on all threads".into(), checks, graph, make)?);
    Ok(steps)
}

/// The rung without vectors. The few kernels that have no scalar form, such as copies, have the narrowest vectors instead.
fn scalar_step(checks: &[Check], graph: &Graph) -> Result<Step, Error> {
    let isa = Isa::available().into_iter().next_back().unwrap_or_else(Isa::detect);
    let alone = Engine::on(Arc::new(Cpu::with(1, isa)));
    let kernels = |graph: &Graph| -> Result<Vec<(Kernel, bool)>, Error> {
        let plan = plan(graph, alone.device().target(), Strategy::Naive, &[])?;
        let kernel = |draft: Draft<'_>| match scalar(&draft) {
            Some(kernel) => Ok((kernel, true)),
            None => Ok((render(draft, alone.device().backend())?, false)),
        };
        plan.groups.iter().map(|group| kernel(group.draft(graph, &plan.placement))).collect()
    };
    let all = kernels(graph)?;
    let about = match all.iter().filter(|(_, is_scalar)| !is_scalar).count() {
        0 => "one kernel per primitive, one element at a time, one thread".to_string(),
        others => format!(
            "one kernel per primitive, one element at a time, one thread; {others} of {} kernels with vectors of {}",
            all.len(),
            isa.name()
        ),
    };
    let make = |graph: &Graph| {
        let kernels = kernels(graph)?.into_iter().map(|(kernel, _)| kernel).collect::<Vec<_>>();
        Session::new(&alone, graph, SessionOptions::from(Strategy::Naive).kernels(kernels))
    };
    step("scalar".into(), about, checks, graph, make)
}

/// The last rungs on a CPU: the fused plan; before it with ordinary stores, where it stores its results differently.
fn fused_steps(engine: &Engine, checks: &[Check], graph: &Graph) -> Result<Vec<Step>, Error> {
    let mut steps = Vec::new();
    let (name, about) = match large_results(engine, graph)? {
        None => ("fused", "one kernel: what `deuteron kernel` prints".to_string()),
        Some(how) => {
            let make = |graph: &Graph| {
                let kernel = one_kernel(engine, graph)?
                    .and_then(|plan| with_ordinary_stores(&plan.groups[0].draft(graph, &plan.placement)));
                let options = SessionOptions::from(Strategy::Greedy).kernels(kernel.into_iter().collect::<Vec<_>>());
                Session::new(engine, graph, options)
            };
            steps.push(step("fused".into(), "one kernel, ordinary stores".into(), checks, graph, make)?);
            match how {
                LargeResults::Fetched => (
                    "prefetched_stores",
                    "results written to prefetched lines: what `deuteron kernel` prints".to_string(),
                ),
                LargeResults::PastCaches => (
                    "streaming_stores",
                    "results written past the caches, by streaming stores: what `deuteron kernel` prints".to_string(),
                ),
            }
        }
    };
    let make = |graph: &Graph| Session::new(engine, graph, Strategy::Greedy);
    steps.push(step(name.into(), about, checks, graph, make)?);
    Ok(steps)
}

/// How the only kernel of a graph writes its results, if it is row work whose results count as too large for the caches.
fn large_results(engine: &Engine, graph: &Graph) -> Result<Option<LargeResults>, Error> {
    let Some(plan) = one_kernel(engine, graph)? else { return Ok(None) };
    let draft = plan.groups[0].draft(graph, &plan.placement);
    if with_ordinary_stores(&draft).is_none() {
        return Ok(None);
    }
    let device = engine.device();
    let kernel = render(draft, device.backend())?;
    if touched(kernel.launch.arguments()) < STREAM_FROM {
        return Ok(None);
    }
    // What is interpreted streams, whatever the number of threads.
    Ok(Some(match device.machine_code(&kernel.launch) {
        Some(Ok(_)) => LargeResults::of(device.machine().count(Quantity::Processors)),
        _ => LargeResults::PastCaches,
    }))
}

/// Rungs on a GPU: hand-written kernels, then the generated one. If an op is also divided into launches, the last division is the shipped one.
fn written_steps(
    engine: &Engine,
    target: &CudaTarget,
    case: &BenchCase,
    checks: &[Check],
    graph: &Graph,
    is_cut: bool,
) -> Result<Vec<Step>, Error> {
    let refused = || Error::NoLadder { op: case.op.name(), widest: WIDEST };
    let is_written = case.op.is_usual() && !case.backward;
    let ladder = match Ladder::of(case.op.name()).filter(|_| is_written) {
        Some(ladder) => ladder,
        None if is_cut => return Ok(Vec::new()),
        None => return Err(refused()),
    };
    let by_rows = matches!(ladder, Ladder::NormAct | Ladder::Softmax);
    if by_rows && (case.cols > WIDEST || !case.cols.is_multiple_of(8)) {
        return Err(refused());
    }
    let kernel = |rung: &Rung, graph: &Graph| -> Result<Option<Kernel>, Error> {
        Ok(one_kernel(engine, graph)?.and_then(|plan| rung_kernel(rung, graph, &plan, target)))
    };
    let mut steps = Vec::new();
    for rung in ladder.rungs().iter().filter(|rung| rung.is_for(target.arch)) {
        // The cuts that follow are of other types and widths too, and end with the kernel that is shipped.
        if is_cut && (rung.text().is_none() || kernel(rung, graph)?.is_none()) {
            continue;
        }
        let make = |graph: &Graph| {
            let kernel = kernel(rung, graph)?.ok_or_else(refused)?;
            Session::new(engine, graph, SessionOptions::from(Strategy::Greedy).kernels([kernel]))
        };
        steps.push(step(rung.name.to_string(), rung.about.to_string(), checks, graph, make)?);
    }
    if !is_cut && !ends_with_generated(engine, target, ladder.rungs(), graph)? {
        let make = |graph: &Graph| Session::new(engine, graph, Strategy::Greedy);
        steps.push(step("generated".into(), "what `deuteron kernel` prints".into(), checks, graph, make)?);
    }
    Ok(steps)
}

/// The plan of a graph; none if it does not have exactly one kernel.
fn one_kernel(engine: &Engine, graph: &Graph) -> Result<Option<Plan>, Error> {
    let plan = plan(graph, engine.device().target(), Strategy::Greedy, &[])?;
    Ok(Some(plan).filter(|plan| plan.groups.len() == 1))
}

/// A rung in place of the only kernel of a plan.
fn rung_kernel(rung: &Rung, graph: &Graph, plan: &Plan, target: &CudaTarget) -> Option<Kernel> {
    rung.kernel(&plan.groups.first()?.draft(graph, &plan.placement), target)
}

/// Whether the highest rung that this GPU supports is the generated kernel itself.
fn ends_with_generated(engine: &Engine, target: &CudaTarget, rungs: &[Rung], graph: &Graph) -> Result<bool, Error> {
    let Some(plan) = one_kernel(engine, graph)? else { return Ok(false) };
    let highest = rungs.iter().rfind(|rung| rung.is_for(target.arch));
    let highest = highest.and_then(|rung| rung_kernel(rung, graph, &plan, target));
    let generated = render(plan.groups[0].draft(graph, &plan.placement), engine.device().backend())?;
    Ok(highest.is_some_and(|highest| highest.source == generated.source))
}

/// The reference of all rungs: a small graph, its inputs and its results in f64.
pub(super) struct Check {
    pub(super) graph: Graph,
    tensors: Vec<Tensor>,
    expected: Expected,
}

fn checks(case: &BenchCase) -> Result<Vec<Check>, Error> {
    let mut cases = vec![BenchCase { rows: CHECKED_ROWS, ..*case }];
    if case.op.attends() {
        let (rows, cols) = CHECKED_SEQUENCES;
        cases.push(BenchCase { rows, cols, ..*case });
    }
    cases.iter().map(check).collect()
}

fn check(case: &BenchCase) -> Result<Check, Error> {
    Check::of(graph(case)?)
}

impl Check {
    /// That of a graph.
    pub(super) fn of(graph: Graph) -> Result<Check, Error> {
        let tensors = seed::inputs(&graph, 3)?;
        let arrays: Vec<_> = tensors.iter().map(Tensor::to_array).collect::<Result<_, _>>()?;
        let expected = Expected::new(&graph, &arrays)?;
        Ok(Check { graph, tensors, expected })
    }

    /// The largest error of a rung, as a share of its bound.
    pub(super) fn worst_ratio(&self, mut session: Session) -> Result<f64, Error> {
        session.poison()?;
        session.run(&self.tensors.iter().collect::<Vec<_>>())?;
        let outputs = 0..self.graph.outputs().len();
        let outputs = outputs.map(|index| session.output(index)).collect::<Result<Vec<_>, _>>()?;
        let verification = self.expected.verify(&self.graph, &outputs)?;
        Ok(verification.worst().map_or(0.0, |worst| worst.comparison.ratio))
    }
}

/// Checks a rung at few rows, and prepares it for all rows.
fn step(
    name: String,
    about: String,
    checks: &[Check],
    full: &Graph,
    make: impl Fn(&Graph) -> Result<Session, Error>,
) -> Result<Step, Error> {
    let worst_ratio = worst_of(checks, &make)?;
    Ok(Step { name, about, worst_ratio, session: make(full)? })
}

/// The largest error of a rung over some checks.
pub(super) fn worst_of(checks: &[Check], make: impl Fn(&Graph) -> Result<Session, Error>) -> Result<f64, Error> {
    let mut worst_ratio: f64 = 0.0;
    for check in checks {
        let ratio = check.worst_ratio(make(&check.graph)?)?;
        // Once NaN, it stays NaN.
        if ratio.is_nan() || ratio > worst_ratio {
            worst_ratio = ratio;
        }
    }
    Ok(worst_ratio)
}

fn row(
    engine: &Engine,
    case: &BenchCase,
    (rung, about, worst_ratio): (String, String, f64),
    session: &Session,
    turns: &Turns,
    index: usize,
) -> Result<LadderRow, Error> {
    let recorded = session.recorded_launches()?;
    let copy_gbps = gbps(turns.copy_bytes as u64, turns.copy);
    let (first, time) = (turns.times[0], turns.times[index]);
    let gbps = gbps(turns.copy_bytes as u64, time);
    Ok(LadderRow {
        op: case.op.name().to_string(),
        rows: case.rows,
        cols: case.cols,
        dtype: case.dtype.to_string(),
        device: engine.device().describe(),
        rung,
        about,
        kernels: session.plan().groups.len(),
        launches: recorded.map(|recorded| recorded.kernels),
        other_nodes: recorded.map(|recorded| recorded.others),
        verified: worst_ratio <= 1.0,
        worst_ratio,
        us: microseconds(time),
        gbps,
        copy_gbps,
        fraction_of_copy: gbps / copy_gbps,
        tflops: flops(case).map(|flops| flops / time.as_secs_f64().max(1e-12) / 1e12),
        speedup: microseconds(first) / microseconds(time).max(1e-6),
        registers: session.registers(),
    })
}

/// Multiplications and additions of the two matmuls of causal attention: a query sees the keys up to its own position.
fn flops(case: &BenchCase) -> Option<f64> {
    if !case.op.is(catalog::ATTENTION) || case.op.attributes().mask != Mask::Causal {
        return None;
    }
    let types = case.operand_types();
    let &[batch, heads, queries, width] = types.first()?.1.dims() else { return None };
    let pairs = (batch * heads) as f64 * (queries * (queries + 1) / 2) as f64;
    Some(pairs * 4.0 * width as f64)
}

#[cfg(test)]
mod tests {
    use deuteron_graph::Dtype;

    use super::*;
    use crate::catalog::{ExpertSizes, FusedOp, Heads};

    #[test]
    fn attention_counts_the_pairs_that_are_seen() {
        let attention = FusedOp::find("attention").unwrap();
        let (dtype, heads, experts) = (Dtype::Bf16, Heads::default(), ExpertSizes::default());
        let case = |op, rows| BenchCase { op, rows, cols: 768, dtype, backward: false, heads, experts };
        assert_eq!(flops(&case(attention, 2)), Some(3.0 * 12.0 * 64.0 * 4.0));
        assert_eq!(flops(&case(attention, 8192)), Some(8.0 * 12.0 * 524_800.0 * 256.0));
        assert_eq!(flops(&case(FusedOp::find("norm_act").unwrap(), 2)), None);
    }
}
