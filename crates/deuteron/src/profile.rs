//! Times and hardware counters of the kernels of a graph, before and after fusing.
//!
//! [`profile`] times both plans and reads what this process can: on a GPU what compiler and driver report per kernel, on a CPU the
//! hardware counters. A GPU's counters are read by Nsight Compute, which profiles another process: [`run_once`] is what that process
//! runs, and [`Profile::count`] reads the table that `ncu` writes.

pub mod ncu;

use std::time::Duration;

use deuteron_device::Moment;
use deuteron_device::cpu::counters::{Counters, Reading};
use deuteron_graph::{Graph, named};
use deuteron_kernels::render;
use deuteron_plan::{Group, MachineKind, Strategy};
use deuteron_report::{Analysis, CounterSheet, KernelSheet, ProfiledSheet};
use serde::Serialize;

use crate::analyze::{AnalyzeOptions, Kernels, analyze};
use crate::engine::Engine;
use crate::error::Error;
use crate::fuse::{self, PlanTimes};
use crate::listing::{Compiled, launches};
use crate::session::Session;
use crate::tensor::Tensor;
use ncu::NcuError;

named! {
    /// One of the two plans.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Side {
        /// a kernel per builder call: what fusing starts from
        Before = "unfused",
        /// the cheapest plan
        After = "fused",
    }
}

impl Side {
    fn strategy(self) -> Strategy {
        match self {
            Side::Before => Strategy::Unfused,
            Side::After => Strategy::Fused,
        }
    }
}

/// How to profile.
#[derive(Debug, Clone, Copy)]
pub struct ProfileOptions {
    /// approximate time to spend on timing
    pub budget: Duration,
    /// whether the analysis holds the source of every kernel
    pub sources: bool,
}

/// The result.
pub struct Profile {
    /// the analysis, with times and counters of every kernel
    pub analysis: Analysis,
    /// where it ran
    pub device: String,
    /// functions that each kernel launches, of both plans; none where a library chooses them
    entries: [Vec<Vec<String>>; 2],
}

/// Profiles a graph on inputs, as far as this process can.
pub fn profile(engine: &Engine, graph: &Graph, inputs: &[Tensor], options: &ProfileOptions) -> Result<Profile, Error> {
    let question = AnalyzeOptions {
        backend: Some(engine.device().backend().clone()),
        sources: options.sources,
        // Both plans run the graph as it is, so that they can be compared kernel by kernel.
        keep_all: true,
        kernels: Kernels::Generated,
        ..AnalyzeOptions::on(engine.device().machine().clone())
    };
    let mut analysis = analyze(graph, &question)?;
    let mut sessions = [Side::Before, Side::After]
        .into_iter()
        .map(|side| Session::new(engine, graph, side.strategy()))
        .collect::<Result<Vec<Session>, Error>>()?;
    let times = fuse::measure(engine, &mut sessions, inputs, options.budget)?;
    let us = |times: &PlanTimes| times.best().as_secs_f64() * 1e6;
    let mut profiled = ProfiledSheet {
        by: "clock".into(),
        text: "Timed by the clock of the host.".into(),
        before_us: times.first().map_or(0.0, us),
        after_us: times.last().map_or(0.0, us),
        notes: Vec::new(),
    };
    let counted = match engine.device().machine().kind {
        MachineKind::Gpu => {
            profiled.by = "driver".into();
            profiled.text =
                "Timed by events between kernels; registers and shared memory are those of the compiled kernels, and \
                             occupancy is what these let a multiprocessor hold."
                    .into();
            sessions.iter().map(|session| compiled(engine, session)).collect::<Result<Vec<_>, Error>>()?
        }
        MachineKind::Cpu => by_counters(&mut sessions, inputs, &mut profiled)?,
    };
    let machine = engine.device().machine();
    let sides = [&mut analysis.before, &mut analysis.after];
    for (((sheets, session), times), counters) in sides.into_iter().zip(&sessions).zip(&times).zip(&counted) {
        fuse::fill_measured(sheets, &times.shares(), session, machine);
        fill(sheets, counters);
    }
    let names = |session: &Session| -> Vec<Vec<String>> {
        let of = |group: &Group| launches(&group.draft(graph, &session.plan().placement), engine.device().backend());
        session.plan().groups.iter().map(of).collect()
    };
    let entries = [0, 1].map(|side| sessions.get(side).map_or(Vec::new(), names));
    analysis.profiled = Some(profiled);
    Ok(Profile { analysis, device: engine.device().describe(), entries })
}

/// Runs one of the plans once, for a profiler that watches this process.
pub fn run_once(engine: &Engine, graph: &Graph, inputs: &[Tensor], side: Side) -> Result<(), Error> {
    let mut session = Session::new(engine, graph, side.strategy())?;
    let inputs = inputs.iter().map(|tensor| tensor.to_device(engine)).collect::<Result<Vec<_>, _>>()?;
    session.run(&inputs.iter().collect::<Vec<_>>())
}

impl Profile {
    /// Takes what `ncu` counted while [`run_once`] ran both plans: the tables that it wrote, unfused and fused.
    pub fn count(&mut self, tables: [&str; 2]) -> Result<(), NcuError> {
        let mut both = Vec::with_capacity(2);
        for (table, entries) in tables.into_iter().zip(&self.entries) {
            both.push(ncu::matched(&ncu::parse(table)?, entries)?);
        }
        for (sheets, counters) in [&mut self.analysis.before, &mut self.analysis.after].into_iter().zip(&both) {
            fill(sheets, counters);
        }
        if let Some(profiled) = &mut self.analysis.profiled {
            profiled.by = "ncu".into();
            profiled.text = "Counted by Nsight Compute, each launch from cold caches and at the clocks that the GPU had; its times are \
                             longer than those of a run, which finds in the cache what the kernel before has left there."
                .into();
        }
        Ok(())
    }

    /// Notes what could not be counted.
    pub fn note(&mut self, text: String) {
        self.analysis.profiled.iter_mut().for_each(|profiled| profiled.notes.push(text.clone()));
    }

    /// The JSON form.
    pub fn report(&self) -> ProfileReport<'_> {
        let plan = |side: Side, sheets: &'_ [KernelSheet], us: f64| PlanProfile {
            plan: side.name(),
            us,
            kernels: sheets.iter().map(KernelProfile::of).collect(),
        };
        let us = |of: fn(&ProfiledSheet) -> f64| self.analysis.profiled.as_ref().map_or(0.0, of);
        ProfileReport {
            graph: &self.analysis.graph,
            device: &self.device,
            profiled: self.analysis.profiled.as_ref(),
            plans: [
                plan(Side::Before, &self.analysis.before, us(|one| one.before_us)),
                plan(Side::After, &self.analysis.after, us(|one| one.after_us)),
            ],
        }
    }
}

/// The JSON form of `profile`.
#[derive(Debug, Serialize)]
pub struct ProfileReport<'a> {
    /// name of the graph
    pub graph: &'a str,
    /// where it ran
    pub device: &'a str,
    /// the source of counters, and what could not be counted
    #[serde(flatten)]
    pub profiled: Option<&'a ProfiledSheet>,
    /// unfused, fused
    pub plans: [PlanProfile; 2],
}

/// One plan.
#[derive(Debug, Serialize)]
pub struct PlanProfile {
    /// `unfused` or `fused`
    pub plan: &'static str,
    /// microseconds of a run without the profiler
    pub us: f64,
    /// equal ones once
    pub kernels: Vec<KernelProfile>,
}

/// A kernel, and all kernels equal to it. Numbers are of one launch of it.
#[derive(Debug, Serialize)]
pub struct KernelProfile {
    /// what it is
    pub name: String,
    /// its kind
    pub kind: String,
    /// rows and columns, or m x n x k
    pub size: String,
    /// how many there are in the plan
    pub count: usize,
    /// median microseconds without the profiler
    pub measured_us: Option<f64>,
    /// what the planner predicts
    pub predicted_us: f64,
    /// compulsory bytes read
    pub compulsory_read: u64,
    /// compulsory bytes written
    pub compulsory_written: u64,
    /// what was counted
    pub counters: CounterSheet,
}

impl KernelProfile {
    fn of(sheet: &KernelSheet) -> KernelProfile {
        KernelProfile {
            name: sheet.name.clone(),
            kind: sheet.kind.clone(),
            size: sheet.size.clone(),
            count: sheet.launches.len(),
            measured_us: sheet.measured_us,
            predicted_us: sheet.cost.us,
            compulsory_read: sheet.cost.read,
            compulsory_written: sheet.cost.written,
            counters: sheet.counters.clone().unwrap_or_default(),
        }
    }
}

/// Gives each sheet the mean of its launches.
fn fill(sheets: &mut [KernelSheet], counters: &[CounterSheet]) {
    for sheet in sheets {
        let own: Vec<&CounterSheet> = sheet.launches.iter().filter_map(|&launch| counters.get(launch)).collect();
        sheet.counters = Some(mean(&own));
    }
}

/// The mean of each number, over those that have it.
fn mean(sheets: &[&CounterSheet]) -> CounterSheet {
    let of = |number: fn(&CounterSheet) -> Option<f64>| {
        let known: Vec<f64> = sheets.iter().filter_map(|sheet| number(sheet)).collect();
        (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
    };
    CounterSheet {
        us: of(|sheet| sheet.us),
        read: of(|sheet| sheet.read),
        written: of(|sheet| sheet.written),
        missed: of(|sheet| sheet.missed),
        cache_hits: of(|sheet| sheet.cache_hits),
        occupancy: of(|sheet| sheet.occupancy),
        registers: of(|sheet| sheet.registers),
        shared: of(|sheet| sheet.shared),
        tensor: of(|sheet| sheet.tensor),
        issue: of(|sheet| sheet.issue),
        instructions_per_cycle: of(|sheet| sheet.instructions_per_cycle),
    }
}

/// What compiler and driver report per kernel. Nothing is known about a library's kernels.
fn compiled(engine: &Engine, session: &Session) -> Result<Vec<CounterSheet>, Error> {
    let (graph, plan, device) = (session.graph(), session.plan(), engine.device());
    let of = |(group, kernel): (&Group, &std::sync::Arc<deuteron_device::CompiledKernel>)| {
        if kernel.usage().is_empty() {
            return Ok(CounterSheet::default());
        }
        let launch = render(group.draft(graph, &plan.placement), device.backend())?.launch;
        let known = Compiled::new(&launch, kernel.usage(), device.machine(), group.cost.resources.registers);
        Ok(CounterSheet {
            occupancy: Some(known.occupancy),
            registers: Some(f64::from(known.registers)),
            shared: Some(f64::from(known.shared_bytes)),
            ..CounterSheet::default()
        })
    };
    plan.groups.iter().zip(session.kernels()).map(of).collect()
}

/// Runs that are counted on a CPU, after one that is not.
const COUNTED_RUNS: usize = 3;

/// Bytes of a cache line.
const LINE: f64 = 64.0;

/// The CPU's counters per kernel; a note if there are none.
fn by_counters(
    sessions: &mut [Session],
    inputs: &[Tensor],
    profiled: &mut ProfiledSheet,
) -> Result<Vec<Vec<CounterSheet>>, Error> {
    // Threads have run by now, so that each has its counters.
    let counters = match Counters::open() {
        Ok(counters) => counters,
        Err(error) => {
            profiled.notes.push(format!("no hardware counters, only times: {error}"));
            return Ok(sessions.iter().map(|session| vec![CounterSheet::default(); session.kernels().len()]).collect());
        }
    };
    profiled.by = "perf".into();
    profiled.text = "Counted by the CPU (perf_event_open), user code of all threads; traffic is the lines of 64 bytes that missed the \
                     last-level cache, without those that the hardware prefetched."
        .into();
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    sessions.iter_mut().map(|session| counted(session, &inputs, &counters)).collect()
}

/// The counters of each kernel, means of a few runs.
fn counted(session: &mut Session, inputs: &[&Tensor], counters: &Counters) -> Result<Vec<CounterSheet>, Error> {
    let mut sums = vec![Reading::default(); session.kernels().len()];
    session.run(inputs)?;
    let mut begin = Reading::default();
    for _ in 0..COUNTED_RUNS {
        session.run_watched(inputs, &mut |moment| {
            // A counter that opened can be read; what cannot counts nothing.
            let now = counters.read().unwrap_or(begin);
            match moment {
                Moment::Before(_) => begin = now,
                Moment::After(step) => sums[step] = sums[step].plus(&now.since(&begin)),
            }
        })?;
    }
    Ok(sums.iter().map(|sum| sheet_of(sum, COUNTED_RUNS as f64)).collect())
}

fn sheet_of(sum: &Reading, runs: f64) -> CounterSheet {
    let ratio = |part: f64, whole: f64| (whole > 0.0).then(|| part / whole);
    CounterSheet {
        missed: Some(sum.misses * LINE / runs),
        cache_hits: ratio((sum.references - sum.misses).max(0.0), sum.references),
        instructions_per_cycle: ratio(sum.instructions, sum.cycles),
        ..CounterSheet::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_a_cpu_become_bytes_and_ratios() {
        let sum = Reading { cycles: 300.0, instructions: 600.0, references: 40.0, misses: 30.0 };
        let sheet = sheet_of(&sum, 3.0);
        assert_eq!((sheet.missed, sheet.cache_hits), (Some(640.0), Some(0.25)));
        assert_eq!(sheet.instructions_per_cycle, Some(2.0));
        assert_eq!(sheet_of(&Reading::default(), 3.0).cache_hits, None);
    }

    #[test]
    fn a_mean_is_over_what_is_known() {
        let of = |us, tensor| CounterSheet { us: Some(us), tensor, ..CounterSheet::default() };
        let mean = mean(&[&of(2.0, None), &of(4.0, Some(0.5))]);
        assert_eq!((mean.us, mean.tensor, mean.issue), (Some(3.0), Some(0.5), None));
    }
}
