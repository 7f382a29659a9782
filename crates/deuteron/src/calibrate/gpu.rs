//! The numbers of a GPU: copies and launches measured as they are, the rest fitted to plans timed as CUDA graphs over memory
//! that is not in the cache.

use std::sync::Arc;
use std::time::Duration;

use deuteron_device::Launching;
use deuteron_graph::{Dtype, Graph};
use deuteron_plan::{Machine, Quantity, Seconds, Strategy};

use super::measure::{Sample, Timed};
use super::{Calibration, TimeErrors, cases, fitted, rounded};
use crate::bench::{repeats, rotation};
use crate::catalog::FusedOp;
use crate::engine::Engine;
use crate::error::Error;
use crate::parallel;
use crate::seed;
use crate::session::Session;
use crate::times::median;

/// Samples of each plan, taken in turn.
const ROUNDS: usize = 5;

/// Bytes of the copy that says how fast memory is: far beyond any cache.
const COPY: usize = 1 << 30;

/// The numbers to fit, and the factor by which each may differ from its start: bandwidth and launches start from what was
/// measured, the others from the profile.
pub(super) const FITTED: [(Quantity, f64); 10] = [
    (Quantity::DramGbps, 1.1),
    (Quantity::LaunchUs, 3.0),
    (Quantity::CacheGbps, 3.0),
    (Quantity::FullOccupancy, 4.0),
    (Quantity::VectorTflops, 8.0),
    (Quantity::Matrix16Tflops, 1.25),
    (Quantity::Matrix32Tflops, 8.0),
    (Quantity::Exposed, 10.0),
    (Quantity::CorrectCopy, 8.0),
    (Quantity::CorrectScatterAdd, 8.0),
];

/// Rows and columns of the calibration: few rows, many, wide ones, very long ones.
const SIZES: [[usize; 2]; 4] = [[96, 512], [6000, 1024], [50000, 640], [1500, 12288]];

/// The sizes of the validation.
const VALIDATED: [[usize; 2]; 4] = [[300, 896], [9000, 768], [36000, 1280], [700, 20480]];

/// Graphs of one kernel that is no row kernel.
const OTHERS: [(&str, &[[usize; 2]]); 7] = [
    ("x = input bf16[R,C] ; y = transpose x [1,0] ; out y", &[[512, 640], [8000, 4096]]),
    ("x = input f32[R,8,C] ; y = transpose x [1,0,2] ; out y", &[[4000, 64]]),
    ("a = input bf16[R,C] ; b = input bf16[R,C] ; y = concat a b axis=1 ; out y", &[[20000, 800]]),
    ("i = input i32[R] ; u = input f32[R,C] ; y = scatter_add i u rows=50257 ; out y", &[[8192, 768]]),
    ("a = input bf16[R,C] ; b = input bf16[C,2048] ; y = matmul a b ; out y", &[[512, 1024], [4096, 4096]]),
    ("a = input f32[R,C] ; b = input f32[C,1024] ; y = matmul a b ; out y", &[[2048, 1024]]),
    ("a = input bf16[96,R,C] ; b = input bf16[96,R,C] ; y = matmul a b transpose_b ; out y", &[[512, 64]]),
];

/// Measures a GPU and fits the numbers of its profile.
pub(super) fn calibrate(engine: &Engine, date: &str, progress: impl FnMut(usize, usize)) -> Result<Calibration, Error> {
    let own = engine.device().machine();
    // From the profile that ships, so that the result depends on nothing but the measurements.
    let before = Machine::profile(&own.name).unwrap_or_else(|_| own.clone().without_learnt());
    let copied = copy_gbps(engine)?;
    let launched = launch_us(engine)?;
    let started = before
        .clone()
        .with(Quantity::DramGbps, rounded(copied), &format!("a copy of {} GiB, {date}", COPY >> 30))?
        .with(Quantity::LaunchUs, rounded(launched), &format!("a small kernel of a CUDA graph, {date}"))?;
    let timed = time_all(engine, &graphs()?, progress)?;
    let plans: Vec<Timed> = timed.into_iter().flatten().collect();
    let origin = format!("fitted by doctor --calibrate to {} plans timed as CUDA graphs, {date}", plans.len());
    let machine = fitted(&started, &FITTED, &origin, |machine| pairs(&plans, machine))?;
    let errors = TimeErrors::of(pairs(&plans, &machine).into_iter());
    let kernels = plans.iter().map(|plan| plan.kernels.len()).sum();
    let changed = FITTED.iter().map(|&(quantity, _)| quantity).collect();
    Ok(Calibration { before, machine, kernels, errors, fitted: changed })
}

/// Every graph of the calibration.
fn graphs() -> Result<Vec<Graph>, Error> {
    let mut graphs = catalogue(&SIZES)?;
    for (text, sizes) in OTHERS {
        for &[rows, cols] in sizes {
            graphs.push(cases::text_graph(text, rows, cols)?);
        }
    }
    Ok(graphs)
}

/// Every graph of the validation, and whether it is one of the catalogue.
pub(super) fn validation() -> Result<Vec<(Graph, bool)>, Error> {
    let mut graphs: Vec<(Graph, bool)> = catalogue(&VALIDATED)?.into_iter().map(|graph| (graph, true)).collect();
    graphs.extend(cases::gpu_decisions()?.into_iter().map(|graph| (graph, false)));
    Ok(graphs)
}

/// The catalogue, forward and backward, at some sizes; dtypes take turns.
fn catalogue(sizes: &[[usize; 2]]) -> Result<Vec<Graph>, Error> {
    let mut graphs = Vec::new();
    for op in FusedOp::catalog().into_iter().filter(FusedOp::is_rows) {
        for (turn, &[rows, cols]) in sizes.iter().enumerate() {
            if op.is_square() && cols > 2048 {
                continue;
            }
            for backward in [false, true].into_iter().filter(|backward| !backward || op.has_backward()) {
                let dtype = [Dtype::Bf16, Dtype::F32][(turn + backward as usize) % 2];
                graphs.push(cases::catalog_graph(&op, rows, cols, dtype, backward)?);
            }
        }
    }
    Ok(graphs)
}

/// The unfused and the greedy plan of every graph, timed. All are compiled first, on all cores.
pub(super) fn time_all(
    engine: &Engine,
    graphs: &[Graph],
    mut progress: impl FnMut(usize, usize),
) -> Result<Vec<[Timed; 2]>, Error> {
    type Pair = Result<[Session; 2], Error>;
    let mut pairs: Vec<Option<Pair>> = graphs.iter().map(|_| None).collect();
    let compile = |index: usize| -> Pair {
        let make = |strategy| Session::new(engine, &graphs[index], strategy);
        Ok([make(Strategy::Unfused)?, make(Strategy::Greedy)?])
    };
    parallel::for_each(graphs.len(), compile, |index, pair| pairs[index] = Some(pair));
    let mut timed = Vec::with_capacity(graphs.len());
    for (done, pair) in pairs.into_iter().flatten().enumerate() {
        progress(done, graphs.len());
        timed.push(time_pair(engine, pair?)?);
    }
    progress(graphs.len(), graphs.len());
    Ok(timed)
}

fn time_pair(engine: &Engine, mut sessions: [Session; 2]) -> Result<[Timed; 2], Error> {
    let tensors = seed::inputs(sessions[0].graph(), 1)?;
    let sets = rotation(engine, &sessions[1], &tensors)?;
    let mut runs = [0; 2];
    for (runs, session) in runs.iter_mut().zip(&mut sessions) {
        *runs = repeats(session, &sets)?;
    }
    let mut times: [Vec<Duration>; 2] = Default::default();
    for _ in 0..ROUNDS {
        for ((times, session), runs) in times.iter_mut().zip(&mut sessions).zip(runs) {
            times.push(session.time(&sets, runs, Launching::Graph)?);
        }
    }
    let graph = Arc::new(sessions[0].graph().clone());
    let mut times = times.into_iter();
    Ok(sessions.map(|session| {
        let measured = Seconds(times.next().map_or(0.0, |times| median(times).as_secs_f64()));
        Timed::whole(engine.device().catalog(), graph.clone(), session.plan(), measured)
    }))
}

fn copy_gbps(engine: &Engine) -> Result<f64, Error> {
    let mut probe = engine.device().copy_probe(COPY)?;
    let mut times: [Vec<Duration>; 2] = Default::default();
    for _ in 0..ROUNDS {
        times[0].push(probe.ordinary()?);
        times[1].push(probe.streaming()?);
    }
    let best = times.into_iter().map(median).min().unwrap_or_default();
    Ok(probe.bytes() as f64 / best.as_secs_f64().max(1e-12) / 1e9)
}

/// The time of a nearly empty kernel between two others.
fn launch_us(engine: &Engine) -> Result<f64, Error> {
    let graph = cases::text_graph("x = input f32[R,C] ; y = add x 1 ; out y", 4, 64)?;
    let mut session = Session::new(engine, &graph, Strategy::Greedy)?;
    let sets = rotation(engine, &session, &seed::inputs(&graph, 1)?)?;
    let runs = repeats(&mut session, &sets)?;
    let times = (0..ROUNDS).map(|_| session.time(&sets, runs, Launching::Graph));
    Ok(median(times.collect::<Result<_, _>>()?).as_secs_f64() * 1e6)
}

/// A machine's predictions for plans, beside the measurements.
fn pairs(plans: &[Timed], machine: &Machine) -> Vec<(Seconds, Seconds)> {
    plans.iter().map(|plan| (plan.predict(machine), plan.measured)).collect()
}

impl Timed {
    /// A plan of which only the total was timed; with one kernel, that is the kernel's time.
    fn whole(
        catalog: &dyn deuteron_plan::Catalog,
        graph: Arc<Graph>,
        plan: &deuteron_plan::Plan,
        measured: Seconds,
    ) -> Timed {
        let plan = Arc::new(plan.clone());
        let alone = plan.groups.len() == 1;
        let kernels = (0..plan.groups.len())
            .map(|group| Sample::new(catalog, graph.clone(), plan.clone(), group, alone.then_some(measured)));
        Timed { kernels: kernels.collect(), measured }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plans for an H200, "measured" by a machine with other numbers.
    fn planted(truth: &Machine) -> Vec<Timed> {
        let catalog = deuteron_kernels::CudaCatalog::of(deuteron_codegen::cuda::Arch::Sm90a);
        let target = deuteron_plan::Target { machine: truth, catalog };
        let mut plans = Vec::new();
        for graph in graphs().unwrap() {
            for strategy in [Strategy::Unfused, Strategy::Greedy] {
                let plan = deuteron_plan::plan(&graph, target, strategy, &[]).unwrap();
                let mut timed = Timed::whole(catalog, Arc::new(graph.clone()), &plan, Seconds(0.0));
                timed.measured = timed.predict(truth);
                plans.push(timed);
            }
        }
        plans
    }

    #[test]
    fn planted_numbers_of_a_gpu_are_found() {
        let before = Machine::profile("h200").unwrap();
        let plant = |machine: Machine, quantity: Quantity, factor: f64| {
            let value = machine.get(quantity) * factor;
            machine.with(quantity, value, "planted").unwrap()
        };
        let truth = [(Quantity::LaunchUs, 1.6), (Quantity::CacheGbps, 0.8), (Quantity::VectorTflops, 0.5)];
        let truth =
            truth.into_iter().fold(before.clone(), |machine, (quantity, factor)| plant(machine, quantity, factor));
        let plans = planted(&truth);
        assert!(plans.len() > 200, "{}", plans.len());
        let found = fitted(&before, &FITTED, "fitted", |machine| pairs(&plans, machine)).unwrap();
        let errors = TimeErrors::of(pairs(&plans, &found).into_iter());
        assert!(errors.median < 0.01 && errors.ninetieth_percentile < 0.05, "{errors:?}");
        assert_eq!(Machine::parse(&found.to_string()).unwrap(), found);
        let launch = found.get(Quantity::LaunchUs) / truth.get(Quantity::LaunchUs);
        assert!((launch - 1.0).abs() < 0.05, "{launch}");
    }

    #[test]
    fn no_size_of_the_calibration_is_validated() {
        assert!(SIZES.iter().all(|size| !VALIDATED.contains(size)));
        assert!(validation().unwrap().len() > 150);
    }
}
