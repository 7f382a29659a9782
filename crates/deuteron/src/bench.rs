//! Ready-made fused ops against their unfused selves, beside the speed of a copy of the same bytes.

use std::time::{Duration, Instant};

use deuteron_graph::{Dtype, Graph};
use deuteron_plan::{GroupKind, Strategy};
use serde::Serialize;

use crate::catalog::FusedOp;
use crate::engine::Engine;
use crate::error::Error;
use crate::fuse::median;
use crate::seed;
use crate::session::Session;
use crate::tensor::Tensor;

/// One op at one size. The JSON form is an array of these.
#[derive(Debug, Clone, Serialize)]
pub struct BenchRow {
    /// name in the catalogue
    pub op: String,
    /// `forward` or `backward`
    pub direction: String,
    /// rows of the main operand
    pub rows: usize,
    /// its columns
    pub cols: usize,
    /// its storage type
    pub dtype: String,
    /// where it ran
    pub device: String,
    /// median microseconds, fused
    pub fused_us: f64,
    /// median microseconds, a kernel a builder call
    pub unfused_us: f64,
    /// the ratio of the two
    pub speedup: f64,
    /// compulsory bytes, fused
    pub bytes_fused: u64,
    /// compulsory bytes, unfused
    pub bytes_unfused: u64,
    /// bytes a second of the fused kernels, in GB/s
    pub gbps: f64,
    /// bytes a second of a copy of as many bytes, in the same run
    pub copy_gbps: f64,
    /// the ratio of the two
    pub fraction_of_copy: f64,
    /// kernels of the fused plan
    pub kernels_fused: usize,
    /// each kernel of the unfused plan
    pub unfused_kernels: Vec<KernelRow>,
}

/// One kernel of the unfused plan.
#[derive(Debug, Clone, Serialize)]
pub struct KernelRow {
    /// what it is
    pub name: String,
    /// median microseconds
    pub us: f64,
    /// bytes a second
    pub gbps: f64,
    /// over the speed of a copy of as many bytes
    pub fraction_of_copy: f64,
}

/// What to measure.
#[derive(Debug, Clone, Copy)]
pub struct BenchCase {
    /// the op
    pub op: FusedOp,
    /// rows of its main operand
    pub rows: usize,
    /// columns of its main operand
    pub cols: usize,
    /// storage type
    pub dtype: Dtype,
    /// its gradient instead of itself
    pub backward: bool,
}

/// Length of a burst of one variant, about.
const BURST: Duration = Duration::from_millis(4);

/// Time spent on one case, about.
const BUDGET: Duration = Duration::from_millis(1200);

/// Measures one case: fused, unfused and copies in turn, medians of each.
pub fn bench(engine: &Engine, case: &BenchCase) -> Result<BenchRow, Error> {
    let graph = graph(case)?;
    let tensors = seed::inputs(&graph, 1)?;
    let inputs: Vec<&Tensor> = tensors.iter().collect();
    let mut unfused = Session::new(engine, &graph, Strategy::Unfused)?;
    let mut fused = Session::new(engine, &graph, Strategy::Greedy)?;
    let bytes_fused = fused.plan().bytes().0;
    let bytes_unfused = unfused.plan().bytes().0;
    let mut probe = engine.device().copy_probe(bytes_fused as usize / 2)?;
    let samples = measure(&mut unfused, &mut fused, &inputs, &mut *probe)?;
    let copy_gbps = samples.copy_gbps();
    let kernels = unfused.plan().groups.iter().zip(&samples.kernels);
    let row_kernels = kernels.filter(|(group, _)| group.kind == GroupKind::Row);
    let unfused_kernels = row_kernels.map(|(group, times)| {
        let seconds = median(times.clone()).as_secs_f64();
        let gbps = group.traffic.total().0 as f64 / seconds.max(1e-12) / 1e9;
        KernelRow { name: group.name.clone(), us: seconds * 1e6, gbps, fraction_of_copy: gbps / copy_gbps }
    });
    let (fused_us, unfused_us) = (microseconds(&samples.fused), microseconds(&samples.unfused));
    let gbps = bytes_fused as f64 / fused_us.max(1e-6) / 1e3;
    Ok(BenchRow {
        op: case.op.name().to_string(),
        direction: if case.backward { "backward" } else { "forward" }.to_string(),
        rows: case.rows,
        cols: case.cols,
        dtype: case.dtype.to_string(),
        device: engine.device().describe(),
        fused_us,
        unfused_us,
        speedup: unfused_us / fused_us.max(1e-6),
        bytes_fused,
        bytes_unfused,
        gbps,
        copy_gbps,
        fraction_of_copy: gbps / copy_gbps,
        kernels_fused: fused.plan().groups.len(),
        unfused_kernels: unfused_kernels.collect(),
    })
}

/// The graph of a case.
pub fn graph(case: &BenchCase) -> Result<Graph, Error> {
    let types = case.op.operand_types(case.rows, case.cols, case.dtype);
    if case.backward { case.op.backward_graph(&types) } else { case.op.graph(&types) }
}

struct Samples {
    fused: Vec<Duration>,
    unfused: Vec<Duration>,
    kernels: Vec<Vec<Duration>>,
    copies: [Vec<Duration>; 2],
    copy_bytes: usize,
}

impl Samples {
    /// Records a sample, unless it is the first of a burst: that one warms the caches for the others. A burst of one is
    /// of a kernel too large for them.
    fn keep(&mut self, repeat: usize, burst: usize, record: impl FnOnce(&mut Samples)) {
        if repeat > 0 || burst == 1 {
            record(self);
        }
    }

    /// The faster of the two ways to store.
    fn copy_gbps(&self) -> f64 {
        let best = self.copies.iter().map(|times| median(times.clone())).min().unwrap_or_default();
        self.copy_bytes as f64 / best.as_secs_f64().max(1e-12) / 1e9
    }
}

fn measure(
    unfused: &mut Session,
    fused: &mut Session,
    inputs: &[&Tensor],
    probe: &mut dyn deuteron_device::CopyProbe,
) -> Result<Samples, Error> {
    let mut samples = Samples {
        fused: Vec::new(),
        unfused: Vec::new(),
        kernels: vec![Vec::new(); unfused.plan().groups.len()],
        copies: [Vec::new(), Vec::new()],
        copy_bytes: probe.bytes(),
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

fn microseconds(times: &[Duration]) -> f64 {
    median(times.to_vec()).as_secs_f64() * 1e6
}
