//! Several plans of one graph, timed in turn beside copies.

use std::time::{Duration, Instant};

use deuteron_device::Launching;
use deuteron_kernels::Backend;

use super::device::{Sets, repeats, rotation};
use crate::engine::Engine;
use crate::error::Error;
use crate::session::Session;
use crate::tensor::Tensor;
use crate::times::median;

/// Samples of each plan.
const ROUNDS: usize = 7;

/// A run on a CPU that takes longer than this is sampled once per round.
const LONG: Duration = Duration::from_millis(200);

/// Medians.
pub(super) struct Turns {
    /// of each session
    pub times: Vec<Duration>,
    /// of the faster kind of copy
    pub copy: Duration,
    /// bytes that a copy reads and writes: as many as the session that moves the fewest
    pub copy_bytes: usize,
}

/// Times sessions on the same inputs; on a GPU from CUDA graphs, over sets of buffers that do not fit the cache.
pub(super) fn in_turn(engine: &Engine, sessions: &mut [Session], tensors: &[Tensor]) -> Result<Turns, Error> {
    let Some(first) = sessions.first() else {
        return Ok(Turns { times: Vec::new(), copy: Duration::ZERO, copy_bytes: 0 });
    };
    let least = sessions.iter().map(|session| session.plan().bytes().0).min().unwrap_or_default();
    let mut probe = engine.device().copy_probe(least as usize / 2)?;
    let mut sampler = match engine.device().backend() {
        Backend::Cpu => Sampler::Host(tensors.iter().collect()),
        Backend::Cuda(_) => {
            let sets = rotation(engine, first, tensors)?;
            let runs = sessions.iter_mut().map(|session| repeats(session, &sets)).collect::<Result<_, _>>()?;
            Sampler::Device { sets, runs }
        }
    };
    let mut times = vec![Vec::new(); sessions.len()];
    let mut copies: [Vec<Duration>; 2] = Default::default();
    for _ in 0..ROUNDS {
        for (index, session) in sessions.iter_mut().enumerate() {
            sampler.sample(session, index, &mut times[index])?;
        }
        copies[0].push(probe.ordinary()?);
        copies[1].push(probe.streaming()?);
    }
    let copy = copies.into_iter().map(median).min().unwrap_or_default();
    Ok(Turns { times: times.into_iter().map(median).collect(), copy, copy_bytes: probe.bytes() })
}

enum Sampler<'a> {
    Host(Vec<&'a Tensor>),
    Device {
        sets: Sets,
        /// of a sample of each session
        runs: Vec<usize>,
    },
}

impl Sampler<'_> {
    fn sample(&mut self, session: &mut Session, index: usize, times: &mut Vec<Duration>) -> Result<(), Error> {
        match self {
            Sampler::Device { sets, runs } => times.push(session.time(sets, runs[index], Launching::Graph)?),
            Sampler::Host(inputs) => {
                // The first run finds the caches full of another's data, which matters little to a long one.
                for repeat in 0..3 {
                    let start = Instant::now();
                    session.run(inputs)?;
                    let time = start.elapsed();
                    if repeat > 0 || time > LONG {
                        times.push(time);
                    }
                    if time > LONG {
                        break;
                    }
                }
            }
        }
        Ok(())
    }
}
