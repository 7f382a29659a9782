//! Launch shapes by measurement: every candidate of every row kernel of a plan is compiled, compared with the suggested one
//! or f64, and timed beside it. The fastest ones can be stored as a [`Tuning`] and passed to a GPU when it is opened.

mod proof;
mod trial;
mod values;

use std::collections::HashSet;
use std::sync::Arc;

use deuteron_codegen::cuda::{CudaTarget, RowConfig, Tuning};
use deuteron_codegen::{Argument, Kernel, Launch};
use deuteron_device::{CompiledKernel, CudaError, DeviceError};
use deuteron_graph::Graph;
use deuteron_kernels::{Backend, NoKernel, candidates, render};
use deuteron_plan::{Group, Plan, Strategy, Target, plan};

use self::values::Values;
use crate::engine::Engine;
use crate::error::Error;
use crate::parallel;
use crate::session::refuse_opaque;

/// The result.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TuneReport {
    /// each distinct row kernel
    pub kernels: Vec<TunedKernel>,
}

/// One kernel and its launch shapes.
#[derive(Debug, Clone, PartialEq)]
pub struct TunedKernel {
    /// what it is
    pub name: String,
    /// the key of its launch shape
    pub key: String,
    /// the suggested launch shape
    pub suggested: Timed,
    /// the launch shape to use: the suggested one, unless another is clearly faster
    pub chosen: Timed,
    /// number of candidates, including the suggested one
    pub tried: usize,
    /// candidates rejected before timing
    pub dropped: Vec<Dropped>,
}

/// A launch shape and its time.
#[derive(Debug, Clone, PartialEq)]
pub struct Timed {
    /// the launch shape
    pub config: RowConfig,
    /// median microseconds
    pub us: f64,
}

/// A rejected launch shape.
#[derive(Debug, Clone, PartialEq)]
pub struct Dropped {
    /// the launch shape
    pub config: RowConfig,
    /// why
    pub reason: DropReason,
}

/// Why a launch shape was rejected.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DropReason {
    /// it does not compile
    #[error("does not compile: {0}")]
    NotCompiled(String),
    /// it spills this many bytes per thread
    #[error("spills {0} bytes")]
    Spilled(u32),
    /// it cannot be launched
    #[error("does not run: {0}")]
    NotRun(String),
    /// its results differ
    #[error("gives wrong results: {0}")]
    Wrong(String),
}

impl TuneReport {
    /// The launch shapes to use, those that were confirmed among them: frozen, all stay as they were measured.
    pub fn tuning(&self) -> Tuning {
        let mut tuning = Tuning::default();
        for kernel in &self.kernels {
            tuning.insert(&kernel.key, RowConfig { why: "measured".into(), ..kernel.chosen.config.clone() });
        }
        tuning
    }
}

impl TunedKernel {
    /// Whether another launch shape than the suggested one won.
    pub fn is_changed(&self) -> bool {
        !self.chosen.config.is_same(&self.suggested.config)
    }
}

/// Tunes the kernels of one plan. `progress` gets how many candidates are done, and how many there are.
pub fn tune(
    engine: &Engine,
    graph: &Graph,
    strategy: Strategy,
    progress: impl FnMut(usize, usize),
) -> Result<TuneReport, Error> {
    tune_all(engine, &[(graph, strategy)], progress)
}

/// Tunes the kernels of several plans, each distinct one once; all candidates are compiled together.
pub fn tune_all(
    engine: &Engine,
    plans: &[(&Graph, Strategy)],
    mut progress: impl FnMut(usize, usize),
) -> Result<TuneReport, Error> {
    let device = engine.device();
    let Backend::Cuda(target) = device.backend() else {
        return Err(Error::NotTunable { device: device.describe() });
    };
    let mut planned = Vec::new();
    for &(graph, strategy) in plans {
        refuse_opaque(graph)?;
        planned.push((graph, plan(graph, device.target(), strategy, &[])?));
    }
    let mut known: HashSet<String> = HashSet::new();
    let subjects = planned.iter().map(|(graph, plan)| {
        let all = row_kernels(graph, plan, target);
        all.into_iter().filter(|subject| known.insert(subject.key.clone())).collect()
    });
    let subjects: Vec<Vec<Subject>> = subjects.collect();
    let rendered = subjects.iter().flatten().flat_map(|subject| subject.render(target));
    let rendered: Vec<Kernel> = rendered.collect::<Result<_, _>>()?;
    let (all, mut done) = (rendered.len(), 0);
    progress(done, all);
    let mut kernels = compile(engine, rendered)?.into_iter();
    let mut report = TuneReport::default();
    for subjects in &subjects {
        let values = Values::new(engine, subjects)?;
        for subject in subjects {
            let kernels = kernels.by_ref().take(subject.configs.len()).collect();
            report.kernels.push(trial::measure(engine, subject, &values, kernels)?);
            done += subject.configs.len();
            progress(done, all);
        }
    }
    Ok(report)
}

/// The row kernels of a plan for a GPU that need not be there, each distinct one once: the key of each, and the launch
/// shapes worth measuring, the suggested one first.
pub fn launch_shapes(
    graph: &Graph,
    strategy: Strategy,
    target: Target<'_>,
    cuda: &CudaTarget,
) -> Result<Vec<(String, Vec<RowConfig>)>, Error> {
    let plan = plan(graph, target, strategy, &[])?;
    Ok(row_kernels(graph, &plan, cuda).into_iter().map(|kernel| (kernel.key, kernel.configs)).collect())
}

/// A row kernel of a plan, to be tuned.
struct Subject<'a> {
    graph: &'a Graph,
    plan: &'a Plan,
    group: &'a Group,
    key: String,
    /// the same whatever the launch shape
    arguments: Vec<Argument>,
    configs: Vec<RowConfig>,
}

/// A kernel with one launch shape, compiled.
#[derive(Clone)]
struct Shaped {
    kernel: Arc<CompiledKernel>,
    launch: Launch,
}

/// A compiled kernel, or why there is none.
type Made = Result<Shaped, DropReason>;

impl Subject<'_> {
    /// The kernel with each of its launch shapes, as if that were the only one that was ever measured.
    fn render(&self, target: &CudaTarget) -> Vec<Result<Kernel, NoKernel>> {
        let draft = self.group.draft(self.graph, &self.plan.placement);
        let with = |config: &RowConfig| {
            let mut tuning = Tuning::default();
            tuning.insert(&self.key, config.clone());
            render(draft, &Backend::Cuda(CudaTarget { tuning, ..target.clone() }))
        };
        self.configs.iter().map(with).collect()
    }
}

fn row_kernels<'a>(graph: &'a Graph, plan: &'a Plan, target: &CudaTarget) -> Vec<Subject<'a>> {
    let untuned = CudaTarget { tuning: Tuning::default(), ..target.clone() };
    let backend = Backend::Cuda(untuned.clone());
    let mut subjects: Vec<Subject> = Vec::new();
    for group in &plan.groups {
        let draft = group.draft(graph, &plan.placement);
        let configs = candidates(&draft, &untuned);
        let Some(Kernel { launch, .. }) = render(draft, &backend).ok().filter(|_| !configs.is_empty()) else {
            continue;
        };
        let (key, arguments) = (launch.variant().key.clone(), launch.arguments().to_vec());
        if subjects.iter().all(|known| known.key != key) {
            subjects.push(Subject { graph, plan, group, key, arguments, configs });
        }
    }
    subjects
}

/// Compiles all sources at once. Only if one of them does not compile, each on its own.
fn compile(engine: &Engine, rendered: Vec<Kernel>) -> Result<Vec<Made>, Error> {
    let device = engine.device();
    let (sources, launches): (Vec<_>, Vec<_>) =
        rendered.into_iter().map(|Kernel { source, launch }| (source, launch)).unzip();
    let shaped = |(kernel, launch)| Shaped { kernel, launch };
    match device.compile(sources.clone()) {
        Ok(kernels) => return Ok(kernels.into_iter().zip(launches).map(shaped).map(Ok).collect()),
        Err(error) if !is_of_one_kernel(&error) => return Err(error.into()),
        Err(_) => {}
    }
    let mut kernels: Vec<Option<Result<Arc<CompiledKernel>, DeviceError>>> = sources.iter().map(|_| None).collect();
    let one = |index: usize| device.compile(vec![sources[index].clone()]).map(|mut kernels| kernels.swap_remove(0));
    parallel::for_each(sources.len(), one, |index, kernel| kernels[index] = Some(kernel));
    let kernels = kernels.into_iter().flatten().zip(launches).map(|(kernel, launch)| match kernel {
        Ok(kernel) => Ok(Ok(shaped((kernel, launch)))),
        Err(error) if is_of_one_kernel(&error) => Ok(Err(DropReason::NotCompiled(in_a_line(&error)))),
        Err(error) => Err(error.into()),
    });
    kernels.collect()
}

/// Whether a failure concerns one kernel only, so that the next may work.
fn is_of_one_kernel(error: &DeviceError) -> bool {
    matches!(
        error,
        DeviceError::Cuda(CudaError::Compile { .. } | CudaError::Unsupported { .. } | CudaError::Driver { .. })
    )
}

/// What went wrong, without the source.
fn in_a_line(error: &DeviceError) -> String {
    let text = match error {
        DeviceError::Cuda(CudaError::Compile { log, .. }) => log.clone(),
        other => other.to_string(),
    };
    let mut lines = text.lines();
    let error = lines.clone().find(|line| line.contains("error"));
    error.or_else(|| lines.next()).unwrap_or_default().trim().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_has_no_launch_shapes() {
        let graph: Graph = "x = input f32[4,4] ; y = relu x ; out y".parse().unwrap();
        let error = tune(&Engine::cpu(), &graph, Strategy::Greedy, |_, _| {}).unwrap_err();
        assert!(error.to_string().starts_with("expected a GPU"), "{error}");
    }

    #[test]
    fn a_compile_error_is_told_in_a_line() {
        let error = CudaError::Compile {
            kernel: "row".into(),
            arch: "sm_90a".into(),
            log: "row(3): warning: unused\nrow(9): error: too many registers\n".into(),
            source: "x\n".repeat(100),
        };
        assert!(is_of_one_kernel(&error.clone().into()));
        assert_eq!(in_a_line(&error.into()), "row(9): error: too many registers");
        assert!(!is_of_one_kernel(&CudaError::NoDevice.into()));
    }
}
