//! Ladders without a GPU: every rung goes through the real compiler, and none spills.

use std::io::Write as _;

use deuteron::cuda::{self, Arch, Compiler, Search};
use deuteron::{Dtype, FusedOp, Machine, Strategy, Target, plan};
use deuteron_codegen::cuda::{CudaCatalog, CudaTarget, grids};
use deuteron_codegen::kernels::row::ladder::Ladder;
use deuteron_codegen::{Backend, Source, render};
use deuteron_device::cuda::nvrtc::Request;
use deuteron_testkit::hardware;

fn compiler() -> Option<Compiler> {
    match cuda::compiler(&Search { cuda_home: hardware::cuda_home(), environments: hardware::environments() }) {
        Ok(compiler) => Some(compiler),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "skipped: rungs are not compiled: {error}");
            None
        }
    }
}

#[test]
fn every_rung_compiles_and_none_spills() {
    let Some(compiler) = compiler() else { return };
    let machine = Machine::profile("h200").unwrap();
    for (name, cols) in [("add_act", 1024), ("norm_act", 768), ("norm_act", 4096)] {
        let ladder = Ladder::of(name).unwrap();
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for arch in [Arch::Sm75, Arch::Sm80, Arch::Sm90a] {
                let op = FusedOp::find(name).unwrap();
                let graph = op.graph(&op.operand_types(1000, cols, dtype)).unwrap();
                let target = Target { machine: &machine, catalog: &CudaCatalog };
                let plan = plan(&graph, target, Strategy::Greedy, &[]).unwrap();
                let cuda_target = CudaTarget::new(arch, 132);
                let backend = Backend::Cuda(cuda_target.clone());
                let (source, launch) = render(&plan.groups[0].draft(&graph, &plan.placement), &backend);
                let Source::Cuda(generated) = source else { panic!("{name} is no CUDA kernel") };
                for rung in ladder.rungs() {
                    let source = ladder.source(rung, &generated, dtype).unwrap();
                    let request = Request { name: rung.name, text: &source.text, arch: arch.name(), options: &[] };
                    let cubin = compiler.compile(&request).unwrap_or_else(|error| panic!("{error}"));
                    let entry = cubin.entry("row").unwrap();
                    // The whole row of 4096 columns does not fit a warp's registers: that is what the rung shows.
                    let fits = cols < 4096 || rung.name != "l5_row_in_registers";
                    assert!(!fits || entry.spill_stores == 0, "{} {dtype} {arch}: {entry:?}", rung.name);
                    let grid = &grids(&source, &launch, &cuda_target).list[0];
                    assert!(grid.blocks[0] as usize * grid.threads as usize >= 1000, "{}: {grid:?}", rung.name);
                }
                assert!(ladder.source(&ladder.rungs()[0], &generated, Dtype::F16).is_none());
            }
        }
    }
}
