//! Times on a CPU, from call to return.

use std::time::{Duration, Instant};

use deuteron_device::CopyProbe;

use super::Measured;
use crate::error::Error;
use crate::session::Session;
use crate::tensor::Tensor;
use crate::times::median;

/// Approximate length of a burst of one variant.
const BURST: Duration = Duration::from_millis(4);

/// Approximate time to spend on one case.
const BUDGET: Duration = Duration::from_millis(1200);

/// Runs fused, unfused and copies in turn, and takes medians of each.
pub(super) fn measure(
    unfused: &mut Session,
    fused: &mut Session,
    inputs: &[&Tensor],
    probe: &mut dyn CopyProbe,
) -> Result<Measured, Error> {
    let samples = sample(unfused, fused, inputs, probe)?;
    Ok(Measured {
        fused: median(samples.fused),
        fused_graph: None,
        unfused: median(samples.unfused),
        unfused_graph: None,
        kernels: samples.kernels.into_iter().map(|times| Some(median(times))).collect(),
        copy: samples.copies.into_iter().map(median).min().unwrap_or_default(),
    })
}

/// Times of one case, in bursts.
struct Samples {
    fused: Vec<Duration>,
    unfused: Vec<Duration>,
    kernels: Vec<Vec<Duration>>,
    copies: [Vec<Duration>; 2],
}

impl Samples {
    /// Records a sample, unless it is the first of a burst, which warms the caches. A burst of one is
    /// used for a kernel that does not fit the caches.
    fn keep(&mut self, repeat: usize, burst: usize, record: impl FnOnce(&mut Samples)) {
        if repeat > 0 || burst == 1 {
            record(self);
        }
    }
}

fn sample(
    unfused: &mut Session,
    fused: &mut Session,
    inputs: &[&Tensor],
    probe: &mut dyn CopyProbe,
) -> Result<Samples, Error> {
    let mut samples = Samples {
        fused: Vec::new(),
        unfused: Vec::new(),
        kernels: vec![Vec::new(); unfused.plan().groups.len()],
        copies: [Vec::new(), Vec::new()],
    };
    // Bursts of each in turn: long enough that a small kernel finds its own data in the cache, as it would in a loop
    // of its own, and short enough that what disturbs the machine disturbs all.
    let start = Instant::now();
    fused.run(inputs)?;
    unfused.run(inputs)?;
    let once = start.elapsed() / 2;
    let burst = (BURST.as_secs_f64() / once.as_secs_f64().max(1e-9)).clamp(1.0, 64.0) as usize;
    let repeats = if burst == 1 { 1 } else { burst + 1 };
    let begin = Instant::now();
    while samples.fused.len() < 5 || (begin.elapsed() < BUDGET && samples.fused.len() < 4001) {
        for repeat in 0..repeats {
            let start = Instant::now();
            fused.run(inputs)?;
            samples.keep(repeat, burst, |samples| samples.fused.push(start.elapsed()));
        }
        for repeat in 0..repeats {
            let start = Instant::now();
            let times = unfused.run_timed(inputs)?;
            samples.keep(repeat, burst, |samples| {
                samples.unfused.push(start.elapsed());
                samples.kernels.iter_mut().zip(times).for_each(|(all, &time)| all.push(time));
            });
        }
        for repeat in 0..repeats {
            let ordinary = probe.ordinary()?;
            samples.keep(repeat, burst, |samples| samples.copies[0].push(ordinary));
        }
        for repeat in 0..repeats {
            let streaming = probe.streaming()?;
            samples.keep(repeat, burst, |samples| samples.copies[1].push(streaming));
        }
    }
    Ok(samples)
}
