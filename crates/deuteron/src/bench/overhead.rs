//! The overhead of a call: the host time of a launch, and the time of the first call.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deuteron_device::cuda::{CudaExecutable, Options};
use deuteron_device::{Cuda, Device, DeviceError, Executable, Launching, NoStates};
use deuteron_graph::{Activation, Dtype, Graph};
use deuteron_kernels::render;
use deuteron_plan::{Group, Strategy, plan};
use serde::Serialize;

use super::microseconds;
use crate::catalog;
use crate::engine::Engine;
use crate::error::Error;
use crate::seed;
use crate::session::{SessionOptions, Storage, compile};
use crate::tensor::Tensor;

/// Launches per round: fewer than a stream queues before it blocks the host.
const LAUNCHES: u32 = 400;

/// First calls of each kind.
const FIRST_CALLS: usize = 5;

/// The JSON form of `bench --overhead`.
#[derive(Debug, Clone, Serialize)]
pub struct OverheadRow {
    /// where it ran
    pub device: String,
    /// host microseconds of a bare call of the driver that launches a small kernel
    pub bare_launch_us: f64,
    /// host microseconds of the same launch enqueued on a stream, with all checks
    pub launch_us: f64,
    /// median milliseconds from a graph to its first result with an empty cache: plan, compile, load, run
    pub first_cold_ms: f64,
    /// the same with the kernel in the disk cache
    pub first_disk_ms: f64,
}

/// Measures them on a GPU. Compiled kernels go to folders below `scratch`, which the caller removes.
pub fn overhead(options: &Options, scratch: &Path) -> Result<OverheadRow, Error> {
    let small = catalog::ACT.with(|a| a.act = Some(Activation::Relu));
    let small = small.graph(&small.operand_types(4, 64, Dtype::F32))?;
    let gpu = open(options, None)?;
    let inputs = device_inputs(&gpu, &small)?;
    let mut executable = load(&gpu, &small)?;
    let cost = executable.launch_cost(&|index| inputs[index].memory(), LAUNCHES)?;

    let op = catalog::NORM_ACT.usual();
    let mut times: [Vec<Duration>; 2] = Default::default();
    for call in 0..FIRST_CALLS {
        // A width of its own makes a kernel that no other call has compiled.
        let graph = op.graph(&op.operand_types(1024, 768 + 8 * call, Dtype::Bf16))?;
        let folder = scratch.join(call.to_string());
        for times in &mut times {
            let gpu = open(options, Some(&folder))?;
            let inputs = device_inputs(&gpu, &graph)?;
            let start = Instant::now();
            load(&gpu, &graph)?.run(&|index| inputs[index].memory(), &mut NoStates, Launching::Eager)?;
            times.push(start.elapsed());
        }
    }
    let [cold, disk] = times.map(crate::times::median);
    Ok(OverheadRow {
        device: gpu.describe(),
        bare_launch_us: microseconds(cost.bare),
        launch_us: microseconds(cost.enqueued),
        first_cold_ms: microseconds(cold) / 1e3,
        first_disk_ms: microseconds(disk) / 1e3,
    })
}

fn open(options: &Options, cache: Option<&Path>) -> Result<Arc<Cuda>, Error> {
    let options = Options { cache: cache.map(Path::to_path_buf), ..options.clone() };
    Ok(Arc::new(Cuda::new(&options).map_err(DeviceError::from)?))
}

fn device_inputs(gpu: &Arc<Cuda>, graph: &Graph) -> Result<Vec<Tensor>, Error> {
    let engine = Engine::on(gpu.clone());
    seed::inputs(graph, 1)?.iter().map(|tensor| tensor.to_device(&engine)).collect()
}

fn load(gpu: &Cuda, graph: &Graph) -> Result<CudaExecutable, Error> {
    let plan = plan(graph, gpu.target(), Strategy::Greedy, &[])?;
    let kernel = |group: &Group| render(group.draft(graph, &plan.placement), gpu.backend());
    let rendered = plan.groups.iter().map(kernel).collect::<Result<_, _>>()?;
    let (_, job) = compile(gpu, graph, &plan, rendered, &Storage::new(graph, &SessionOptions::default())?)?;
    Ok(gpu.executable(job)?)
}
