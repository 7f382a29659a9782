//! Timed kernels: several sessions of one graph in turn, so that disturbances affect all of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deuteron_graph::{Dtype, Gelu, Graph};
use deuteron_plan::{Catalog, Draft, Machine, Plan, Seconds, Strategy, Structure, Work, cost};

use crate::engine::Engine;
use crate::error::Error;
use crate::seed;
use crate::session::Session;
use crate::tensor::Tensor;

/// Approximate length of a burst of one variant.
const BURST: Duration = Duration::from_millis(2);

/// A kernel whose time measures the current speed of the machine: speeds of shared machines drift from one minute to
/// the next by half and more, all kernels together.
pub(crate) struct Anchor {
    session: Session,
    input: Tensor,
}

impl Anchor {
    pub fn new(engine: &Engine) -> Result<Anchor, Error> {
        let mut graph = Graph::new("anchor");
        let x = graph.input("x", Dtype::F32, [256, 1024])?;
        let y = graph.gelu(x, Gelu::Tanh)?;
        graph.output("y", y)?;
        let input = seed::inputs(&graph, 1)?.swap_remove(0);
        Ok(Anchor { session: Session::new(engine, &graph, Strategy::Unfused)?, input })
    }

    /// Its current time.
    pub fn now(&mut self) -> Result<Seconds, Error> {
        let mut times = Vec::with_capacity(ANCHORS);
        for _ in 0..ANCHORS {
            let start = Instant::now();
            self.session.run(&[&self.input])?;
            times.push(start.elapsed());
        }
        Ok(undisturbed(times))
    }
}

/// Runs of the anchor per measurement: about 3 ms.
const ANCHORS: usize = 40;

/// One kernel: its work and its time.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    graph: Arc<Graph>,
    plan: Arc<Plan>,
    group: usize,
    work: Work,
    /// its time, if it was timed on its own
    pub measured: Option<Seconds>,
}

impl Sample {
    /// A kernel of a plan.
    pub fn new(
        catalog: &dyn Catalog,
        graph: Arc<Graph>,
        plan: Arc<Plan>,
        group: usize,
        measured: Option<Seconds>,
    ) -> Sample {
        let work = catalog.work(&plan.groups[group].draft(&graph, &plan.placement));
        Sample { graph, plan, group, work, measured }
    }

    /// Its name in reports.
    pub fn name(&self) -> String {
        format!("{} {}", self.plan.strategy, self.plan.groups[self.group].name)
    }

    /// Its predicted time on a machine.
    pub fn predict(&self, machine: &Machine) -> Seconds {
        let draft = self.plan.groups[self.group].draft(&self.graph, &self.plan.placement);
        cost(&draft, machine, &Counted(&self.work)).total
    }
}

/// A catalogue of one kernel, whose work was counted before.
struct Counted<'a>(&'a Work);

impl Catalog for Counted<'_> {
    fn offers_structure(&self, _structure: &Structure) -> bool {
        true
    }

    fn offers(&self, _draft: &Draft) -> bool {
        true
    }

    fn offers_everything(&self) -> bool {
        true
    }

    fn work(&self, _draft: &Draft) -> Work {
        self.0.clone()
    }
}

/// One plan of a graph, timed.
pub(crate) struct Timed {
    /// every kernel
    pub kernels: Vec<Sample>,
    /// all of them, from call to return
    pub measured: Seconds,
}

impl Timed {
    /// The predicted time of all kernels on a machine.
    pub fn predict(&self, machine: &Machine) -> Seconds {
        self.kernels.iter().map(|sample| sample.predict(machine)).sum()
    }
}

/// Times the plans of some strategies, side by side.
pub(crate) fn time<const N: usize>(
    engine: &Engine,
    graph: &Graph,
    strategies: [Strategy; N],
    budget: Duration,
) -> Result<[Timed; N], Error> {
    let tensors = seed::inputs(graph, 1)?;
    let inputs: Vec<&Tensor> = tensors.iter().collect();
    let mut sessions = Vec::with_capacity(N);
    for strategy in strategies {
        sessions.push(Session::new(engine, graph, strategy)?);
    }
    let mut walls: [Vec<Duration>; N] = std::array::from_fn(|_| Vec::new());
    let mut kernels: [Vec<Vec<Duration>>; N] =
        std::array::from_fn(|at| vec![Vec::new(); sessions[at].plan().groups.len()]);
    let start = Instant::now();
    sessions.iter_mut().try_for_each(|session| session.run(&inputs))?;
    let once = start.elapsed().as_secs_f64() / N.max(1) as f64;
    // The first run of a burst warms the caches for the others. A kernel that needs the whole burst is too large for them.
    let burst = (BURST.as_secs_f64() / once.max(1e-9)).clamp(1.0, 48.0) as usize;
    let begin = Instant::now();
    while walls[0].len() < 5 || (begin.elapsed() < budget && walls[0].len() < 2001) {
        for (at, session) in sessions.iter_mut().enumerate() {
            for repeat in 0..=burst {
                let start = Instant::now();
                let times = session.run_timed(&inputs)?;
                let wall = start.elapsed();
                if repeat > 0 {
                    walls[at].push(wall);
                    kernels[at].iter_mut().zip(times).for_each(|(all, &time)| all.push(time));
                }
            }
        }
    }
    let graph = Arc::new(graph.clone());
    let catalog = engine.device().catalog();
    let mut timed = sessions.iter().zip(walls).zip(kernels).map(|((session, walls), kernels)| {
        let plan = Arc::new(session.plan().clone());
        let samples = kernels
            .into_iter()
            .enumerate()
            .map(|(group, times)| Sample::new(catalog, graph.clone(), plan.clone(), group, Some(undisturbed(times))));
        Timed { kernels: samples.collect(), measured: undisturbed(walls) }
    });
    Ok(std::array::from_fn(|_| timed.next().unwrap_or(Timed { kernels: Vec::new(), measured: Seconds(0.0) })))
}

/// The tenth percentile of the times: disturbances only make runs longer.
fn undisturbed(mut times: Vec<Duration>) -> Seconds {
    times.sort_unstable();
    Seconds(times.get(times.len() / 10).map_or(0.0, Duration::as_secs_f64))
}
