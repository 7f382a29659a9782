//! Times all plans in turn, so that disturbances affect each of them; medians, and the run-to-run spread.

use std::time::{Duration, Instant};

use deuteron_device::Launching;
use deuteron_plan::MachineKind;

use crate::bench::{repeats, rotation};
use crate::engine::Engine;
use crate::error::Error;
use crate::session::Session;
use crate::tensor::Tensor;
use crate::times::{Rounds, median, spread};

/// Median times of one plan.
pub(crate) struct PlanTimes {
    /// one run, kernels started one by one
    pub run: Duration,
    /// one run from a CUDA graph, on a device that supports it
    pub graph: Option<Duration>,
    /// of the runs that count: from the CUDA graph if there is one, otherwise one by one
    pub spread: f64,
    /// of each kernel
    pub kernels: Vec<Duration>,
}

impl PlanTimes {
    /// Without the cost of launches, if that was measured.
    pub fn best(&self) -> Duration {
        self.graph.unwrap_or(self.run)
    }

    /// The share of each kernel in a run. Events between kernels take time themselves, so if a CUDA graph gives the total
    /// time, the kernels' times are scaled to add up to it, as the planner predicts them.
    pub fn shares(&self) -> Vec<Duration> {
        let all: Duration = self.kernels.iter().sum();
        match self.graph {
            Some(whole) if whole < all => {
                let factor = whole.as_secs_f64() / all.as_secs_f64();
                self.kernels.iter().map(|time| time.mul_f64(factor)).collect()
            }
            _ => self.kernels.clone(),
        }
    }
}

/// Runs all plans for about `budget`, the last of which moves the fewest bytes.
pub(crate) fn measure(
    engine: &Engine,
    sessions: &mut [Session],
    inputs: &[Tensor],
    budget: Duration,
) -> Result<Vec<PlanTimes>, Error> {
    match engine.device().machine().kind {
        MachineKind::Cpu => on_host(sessions, inputs, budget),
        MachineKind::Gpu => on_device(engine, sessions, inputs, budget),
    }
}

/// Samples of one plan.
#[derive(Default)]
struct Samples {
    runs: Vec<Duration>,
    graphs: Vec<Duration>,
    kernels: Vec<Vec<Duration>>,
}

impl Samples {
    fn kernels(&mut self, times: &[Duration]) {
        self.kernels.resize(times.len(), Vec::new());
        self.kernels.iter_mut().zip(times).for_each(|(all, &time)| all.push(time));
    }

    /// Those without the cost of launches, if they were measured.
    fn best(&self) -> &[Duration] {
        if self.graphs.is_empty() { &self.runs } else { &self.graphs }
    }

    fn medians(self) -> PlanTimes {
        PlanTimes {
            spread: spread(self.best()),
            run: median(self.runs),
            graph: Some(self.graphs).filter(|graphs| !graphs.is_empty()).map(median),
            kernels: self.kernels.into_iter().map(median).collect(),
        }
    }
}

fn on_host(sessions: &mut [Session], inputs: &[Tensor], budget: Duration) -> Result<Vec<PlanTimes>, Error> {
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    let mut samples: Vec<Samples> = sessions.iter().map(|_| Samples::default()).collect();
    let rounds = Rounds::new(budget, 3, 1001);
    while rounds.more(&samples.iter().map(Samples::best).collect::<Vec<_>>()) {
        for (samples, session) in samples.iter_mut().zip(sessions.iter_mut()) {
            let start = Instant::now();
            let times = session.run_timed(&inputs)?;
            samples.runs.push(start.elapsed());
            samples.kernels(times);
        }
    }
    Ok(samples.into_iter().map(Samples::medians).collect())
}

/// Whole runs over memory that is not in the cache; kernels by events within a run.
fn on_device(
    engine: &Engine,
    sessions: &mut [Session],
    inputs: &[Tensor],
    budget: Duration,
) -> Result<Vec<PlanTimes>, Error> {
    let Some(fused) = sessions.last() else { return Ok(Vec::new()) };
    let sets = rotation(engine, fused, inputs)?;
    let runs = sessions.iter_mut().map(|session| repeats(session, &sets)).collect::<Result<Vec<usize>, Error>>()?;
    let mut samples: Vec<Samples> = sessions.iter().map(|_| Samples::default()).collect();
    let rounds = Rounds::new(budget, 5, 31);
    while rounds.more(&samples.iter().map(Samples::best).collect::<Vec<_>>()) {
        for ((samples, session), &runs) in samples.iter_mut().zip(sessions.iter_mut()).zip(&runs) {
            samples.graphs.push(session.time(&sets, runs, Launching::Graph)?);
            samples.runs.push(session.time(&sets, runs, Launching::Eager)?);
            for set in &sets {
                samples.kernels(session.run_timed(&set.iter().collect::<Vec<_>>())?);
            }
        }
    }
    Ok(samples.into_iter().map(Samples::medians).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_to_the_recording() {
        let [short, long] = [3, 9].map(Duration::from_micros);
        let run = Duration::from_micros(20);
        let times = PlanTimes { run, graph: Some(Duration::from_micros(8)), spread: 0.0, kernels: vec![short, long] };
        assert_eq!(times.shares(), [2, 6].map(Duration::from_micros));
        assert_eq!(PlanTimes { graph: None, ..times }.shares(), [short, long]);
    }
}
