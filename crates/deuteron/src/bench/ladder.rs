//! The road from a scalar kernel to ours: every rung checked against one reference, then timed in turn.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::kernels::row::ladder::{Ladder, Rung, WIDEST};
use deuteron_codegen::{Backend, Source, render};
use deuteron_device::{Cpu, Launching};
use deuteron_graph::Graph;
use deuteron_plan::{Layout, Strategy, plan};
use serde::Serialize;

use super::device::{Sets, repeats, rotation};
use super::{BenchCase, gbps, graph, microseconds};
use crate::catalog::{Activation, FusedOp, Norm};
use crate::engine::Engine;
use crate::error::Error;
use crate::fuse::median;
use crate::seed;
use crate::session::Session;
use crate::tensor::Tensor;
use crate::verify::Expected;

/// Rows at which rungs are checked; they are timed at the rows that were asked for.
const CHECKED_ROWS: usize = 517;

/// Samples of each rung, taken in turn.
const ROUNDS: usize = 7;

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
    /// the rung's file, or `generated`
    pub rung: String,
    /// what it does better than the one before
    pub about: String,
    /// whether it is within its bound of the f64 reference
    pub verified: bool,
    /// the largest error as a share of its bound
    pub worst_ratio: f64,
    /// median microseconds
    pub us: f64,
    /// compulsory bytes a second, in GB/s
    pub gbps: f64,
    /// bytes a second of a copy of as many bytes, in the same run
    pub copy_gbps: f64,
    /// the ratio of the two
    pub fraction_of_copy: f64,
    /// over the first rung
    pub speedup: f64,
    /// registers a thread, on a GPU
    pub registers: Option<u32>,
}

/// A rung made ready to be timed.
struct Step {
    name: String,
    about: String,
    worst_ratio: f64,
    session: Session,
    times: Vec<Duration>,
}

/// Runs the ladder of an op, the generated kernel last.
pub fn ladder(engine: &Engine, case: &BenchCase) -> Result<Vec<LadderRow>, Error> {
    let graph = graph(case)?;
    let tensors = seed::inputs(&graph, 1)?;
    let measured = match engine.device().backend() {
        Backend::Cpu => time_on_host(engine, cpu_steps(engine, case, &graph)?, &tensors)?,
        Backend::Cuda(_) => time_on_device(engine, cuda_steps(engine, case, &graph)?, &tensors)?,
    };
    Ok(rows(engine, case, measured))
}

/// Rungs of a CPU: instruction sets on one thread, narrow to wide, then all threads.
fn cpu_steps(engine: &Engine, case: &BenchCase, graph: &Graph) -> Result<Vec<Step>, Error> {
    let mut steps = Vec::new();
    for isa in Isa::available().into_iter().rev() {
        let alone = Engine::on(Arc::new(Cpu::with(1, isa)));
        let about = format!("vectors of {}, one thread", isa.name());
        let make = |graph: &Graph| Session::new(&alone, graph, Strategy::Greedy);
        steps.push(step(isa.name().to_string(), about, case, graph, make)?);
    }
    let make = |graph: &Graph| Session::new(engine, graph, Strategy::Greedy);
    steps.push(step("generated".into(), "all threads".into(), case, graph, make)?);
    Ok(steps)
}

/// Rungs of a GPU: kernels written by hand, then the generated one.
fn cuda_steps(engine: &Engine, case: &BenchCase, graph: &Graph) -> Result<Vec<Step>, Error> {
    let refused = || Error::NoLadder { op: case.op.name(), widest: WIDEST };
    let is_written = match case.op {
        FusedOp::AddAct { act } => act == Activation::GeluTanh,
        FusedOp::NormAct { norm, act, .. } => norm == Norm::Layer && act == Activation::GeluTanh,
        _ => false,
    };
    let ladder = Ladder::of(case.op.name()).filter(|_| is_written && !case.backward).ok_or_else(refused)?;
    if ladder == Ladder::NormAct && (case.cols > WIDEST || !case.cols.is_multiple_of(8)) {
        return Err(refused());
    }
    let mut steps = Vec::new();
    for rung in ladder.rungs() {
        let make = |graph: &Graph| rung_session(engine, graph, ladder, rung, case)?.ok_or_else(refused);
        steps.push(step(rung.name.to_string(), rung.about.to_string(), case, graph, make)?);
    }
    let make = |graph: &Graph| Session::new(engine, graph, Strategy::Greedy);
    steps.push(step("generated".into(), "what `deuteron kernel` prints".into(), case, graph, make)?);
    Ok(steps)
}

/// A session that runs a rung in place of the generated kernel.
fn rung_session(
    engine: &Engine,
    graph: &Graph,
    ladder: Ladder,
    rung: &Rung,
    case: &BenchCase,
) -> Result<Option<Session>, Error> {
    let device = engine.device();
    let plan = plan(graph, device.target(), Strategy::Greedy, &[])?;
    let [group] = plan.groups.as_slice() else { return Ok(None) };
    let (source, launch) = render(&group.draft(graph, &plan.placement), device.backend());
    let Source::Cuda(generated) = source else { return Ok(None) };
    let Some(source) = ladder.source(rung, &generated, case.dtype) else { return Ok(None) };
    let inputs = graph.inputs().iter();
    let layouts: Vec<Layout> = inputs.map(|&input| Layout::contiguous(&graph.node(input).shape)).collect();
    Session::of(engine, graph, plan, vec![(Source::Cuda(source), launch)], &layouts, &[]).map(Some)
}

/// Checks a rung at few rows, and makes it for all.
fn step(
    name: String,
    about: String,
    case: &BenchCase,
    full: &Graph,
    make: impl Fn(&Graph) -> Result<Session, Error>,
) -> Result<Step, Error> {
    let small = graph(&BenchCase { rows: CHECKED_ROWS, ..*case })?;
    let tensors = seed::inputs(&small, 3)?;
    let arrays: Vec<_> = tensors.iter().map(Tensor::to_array).collect::<Result<_, _>>()?;
    let expected = Expected::new(&small, &arrays, false)?;
    let mut session = make(&small)?;
    session.poison()?;
    session.run(&tensors.iter().collect::<Vec<_>>())?;
    let outputs = (0..small.outputs().len()).map(|index| session.output(index)).collect::<Result<Vec<_>, _>>()?;
    let verification = expected.verify(&small, &outputs)?;
    let worst_ratio = verification.worst().map_or(0.0, |worst| worst.comparison.ratio);
    Ok(Step { name, about, worst_ratio, session: make(full)?, times: Vec::new() })
}

/// Steps with their times, and the time and bytes of a copy.
struct Measured {
    steps: Vec<Step>,
    copy: Duration,
    copy_bytes: usize,
}

fn time_on_device(engine: &Engine, mut steps: Vec<Step>, tensors: &[Tensor]) -> Result<Measured, Error> {
    let Some(first) = steps.first() else {
        return Ok(Measured { steps, copy: Duration::ZERO, copy_bytes: 0 });
    };
    let mut probe = engine.device().copy_probe(first.session.plan().bytes().0 as usize / 2)?;
    let sets: Sets = rotation(engine, &first.session, tensors)?;
    let runs: Vec<usize> = steps.iter_mut().map(|step| repeats(&mut step.session, &sets)).collect::<Result<_, _>>()?;
    let mut copies: [Vec<Duration>; 2] = Default::default();
    for _ in 0..ROUNDS {
        for (step, &runs) in steps.iter_mut().zip(&runs) {
            step.times.push(step.session.time(&sets, runs, Launching::Graph)?);
        }
        copies[0].push(probe.ordinary()?);
        copies[1].push(probe.streaming()?);
    }
    let copy = copies.into_iter().map(median).min().unwrap_or_default();
    Ok(Measured { steps, copy, copy_bytes: probe.bytes() })
}

fn time_on_host(engine: &Engine, mut steps: Vec<Step>, tensors: &[Tensor]) -> Result<Measured, Error> {
    let bytes = steps.first().map_or(0, |step| step.session.plan().bytes().0 as usize);
    let mut probe = engine.device().copy_probe(bytes / 2)?;
    let inputs: Vec<&Tensor> = tensors.iter().collect();
    let mut copies: [Vec<Duration>; 2] = Default::default();
    for _ in 0..ROUNDS {
        for step in &mut steps {
            // The first run finds the caches full of another's data.
            for repeat in 0..3 {
                let start = Instant::now();
                step.session.run(&inputs)?;
                if repeat > 0 {
                    step.times.push(start.elapsed());
                }
            }
        }
        copies[0].push(probe.ordinary()?);
        copies[1].push(probe.streaming()?);
    }
    let copy = copies.into_iter().map(median).min().unwrap_or_default();
    Ok(Measured { steps, copy, copy_bytes: probe.bytes() })
}

fn rows(engine: &Engine, case: &BenchCase, measured: Measured) -> Vec<LadderRow> {
    let copy_gbps = gbps(measured.copy_bytes as u64, measured.copy);
    let first = measured.steps.first().map_or(0.0, |step| microseconds(median(step.times.clone())));
    let row = |step: Step| {
        let (registers, bytes) = (step.session.registers(), step.session.plan().bytes().0);
        let time = median(step.times);
        let gbps = gbps(bytes, time);
        LadderRow {
            op: case.op.name().to_string(),
            rows: case.rows,
            cols: case.cols,
            dtype: case.dtype.to_string(),
            device: engine.device().describe(),
            rung: step.name,
            about: step.about,
            verified: step.worst_ratio <= 1.0,
            worst_ratio: step.worst_ratio,
            us: microseconds(time),
            gbps,
            copy_gbps,
            fraction_of_copy: gbps / copy_gbps,
            speedup: first / microseconds(time).max(1e-6),
            registers,
        }
    };
    measured.steps.into_iter().map(row).collect()
}
