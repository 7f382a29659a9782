//! What accesses cost: patterns whose sectors and wavefronts are known.

use std::path::Path;

use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget};
use deuteron_codegen::{Kernel, Source};
use deuteron_emulator::{Accesses, Lanes, Schedule, Traffic};
use deuteron_graph::Graph;
use deuteron_kernels::ladder::Ladder;

use super::greedy;

/// One warp, on the parameters of `add_act`. What it stores keeps all it loads alive.
const PATTERNS: &str = "
struct Parameters { const float* g_x; const float* g_r; float* g_y; long long count, fault, workspace; };
extern \"C\" __global__ void row(const __grid_constant__ Parameters p) {
    __shared__ float s_padded[32][33], s_square[32][32];
    if (blockIdx.x > 0 || threadIdx.x >= 32) return;
    const int lane = threadIdx.x;
    for (int i = 0; i <= lane % 2; ++i) s_padded[lane][i] = 1.0f;  // 1 wavefront for all lanes, 1 for every other one
    __syncwarp();
    s_square[lane][0] = 2.0f;                                      // 32: all in one bank
    __syncwarp();
    float sum = s_square[0][2 * lane % 32];                        // 1: 16 words of 16 banks
    sum += ((float*)s_square)[2 * lane];                           // 2
    sum += s_padded[5][0];                                         // 1: one word
    const float4 four = ((float4*)s_square)[lane];                 // 4, which are the least
    sum += four.x + four.y + four.z + four.w;
    if (lane < 8) sum += s_square[lane][0];                        // 8
    sum += p.g_x[lane];                                            // 4 sectors, 128 bytes
    sum += p.g_x[8 * lane];                                        // 32 sectors, 128 bytes
    sum += p.g_x[3];                                               // 1 sector, 4 bytes
    p.g_y[2 * lane] = sum;                                         // 8 sectors, 128 bytes
}
";

#[test]
fn accesses_cost_what_they_should() {
    // Headers that were compiled before are of programs that do not count.
    let Some(compiler) = super::compiler() else { return };
    let graph: Graph =
        "x = input f32[1,1024] ; r = input f32[1,1024] ; s = add x r ; y = gelu s ; out y".parse().unwrap();
    let plan = greedy(&graph);
    let draft = plan.groups[0].draft(&graph, &plan.placement);
    let one_launch = Ladder::AddAct.rungs().iter().find(|rung| rung.name == "l2_scalar").unwrap();
    let kernel = one_launch.kernel(&draft, &CudaTarget::new(Arch::Sm90a, 2)).unwrap();
    let kernel = Kernel::new(Source::Cuda(CudaSource::new("row", PATTERNS.to_string())), kernel.launch);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated/accesses");
    let bytes = vec![0; 4096];
    let schedule = Schedule { resident: 2, lanes: Lanes::Together, seeds: 1..3 };
    let ran =
        deuteron_emulator::run(&compiler.clone().counting(), &folder, &kernel, &[&bytes[..]; 3], &schedule).unwrap();
    let expected = Accesses {
        global_reads: Traffic { accesses: 3, served: 37, least: 3, wanted: 260 },
        global_writes: Traffic { accesses: 1, served: 8, least: 1, wanted: 128 },
        shared_reads: Traffic { accesses: 5, served: 16, least: 8, wanted: 0 },
        shared_writes: Traffic { accesses: 3, served: 34, least: 3, wanted: 0 },
    };
    assert_eq!(ran.accesses, Some(expected));
}
