//! The tiles of matmuls, and how they fill a GPU.

use deuteron_codegen::cuda::{Grid, Tiling};
use deuteron_codegen::{Launch, Source};
use deuteron_plan::{Machine, Quantity};
use deuteron_report::{KernelSheet, TileSheet};

use crate::listing;

/// Maximum registers per thread.
const MOST_REGISTERS: usize = 255;

/// The variant of a kernel, as text; empty if there is only one.
pub(super) fn variant(source: &Source, launch: &Launch) -> String {
    match source {
        Source::Library(_) => "cuBLASLt".to_string(),
        Source::Cuda(_) | Source::Cpu(_) => launch.variant().name.clone(),
    }
}

/// The tiles of a tiled kernel, with its register limit.
pub(super) fn sheet(launch: &Launch, machine: &Machine) -> Option<TileSheet> {
    let tiling = launch.tiling()?;
    let grid = launch.grids()?.list.iter().find(|grid| grid.entry == tiling.entry)?;
    let &Tiling { tile: [rows, columns], stages, walked, .. } = tiling;
    let mut sheet = TileSheet {
        by: tiling.by.to_string(),
        rows,
        columns,
        stages,
        cluster: grid.cluster,
        blocks: grid.blocks.iter().map(|&blocks| u64::from(blocks)).product(),
        walked: walked.map(|tiles| tiles as u64),
        threads: grid.threads,
        shared: grid.shared,
        registers: bound(tiling, grid, machine),
        registers_from: "bound".to_string(),
        occupancy: 0.0,
        waves: 0.0,
        wave_efficiency: 0.0,
    };
    fill(&mut sheet, machine);
    Some(sheet)
}

/// Notes the registers that the compiler counts.
pub(crate) fn note_registers(kernel: &mut KernelSheet, registers: Option<u32>, machine: &Machine) {
    kernel.measured_registers = registers;
    if let (Some(tiles), Some(registers)) = (&mut kernel.tiles, registers) {
        (tiles.registers, tiles.registers_from) = (registers, "compiled".to_string());
        fill(tiles, machine);
    }
}

/// Maximum registers per thread for this number of resident blocks per multiprocessor. Registers are allocated in multiples of eight.
fn bound(tiling: &Tiling, grid: &Grid, machine: &Machine) -> u32 {
    let threads = tiling.resident * grid.threads as usize;
    (machine.count(Quantity::Registers) / threads.max(1) / 8 * 8).min(MOST_REGISTERS) as u32
}

/// The figures derived from threads, registers, shared memory and tiles.
fn fill(sheet: &mut TileSheet, machine: &Machine) {
    let resident = listing::resident_blocks(machine, sheet.threads, sheet.registers, sheet.shared);
    let places = (resident * machine.count(Quantity::Processors)).max(1) as f64;
    let tiles = sheet.walked.unwrap_or(sheet.blocks) as f64;
    sheet.occupancy = listing::occupancy(machine, sheet.threads, sheet.registers, sheet.shared);
    sheet.waves = tiles / places;
    sheet.wave_efficiency = tiles / (sheet.waves.ceil().max(1.0) * places);
}

#[cfg(test)]
mod tests {
    use deuteron_codegen::cuda::{Arch, CudaTarget};
    use deuteron_graph::Graph;
    use deuteron_kernels::{Backend, CudaCatalog, render};
    use deuteron_plan::{Strategy, Target, plan};

    use super::*;

    fn tiles(text: &str, arch: Arch, profile: &str) -> (String, Option<TileSheet>) {
        let machine = Machine::profile(profile).unwrap();
        let graph: Graph = text.parse().unwrap();
        let target = Target { machine: &machine, catalog: CudaCatalog::of(arch) };
        let plan = plan(&graph, target, Strategy::Greedy, &[]).unwrap();
        let backend = Backend::Cuda(CudaTarget::new(arch, machine.count(Quantity::Processors)));
        let kernel = render(plan.groups[0].draft(&graph, &plan.placement), &backend).unwrap();
        (variant(&kernel.source, &kernel.launch), sheet(&kernel.launch, &machine))
    }

    fn linear(rows: usize, inner: usize, columns: usize, rest: &str) -> String {
        format!("x = input bf16[{rows},{inner}] ; l = linear x w:bf16[{inner},{columns}] b:bf16[{columns}] ; {rest}")
    }

    #[test]
    fn persistent_blocks_walk_over_tiles() {
        let (variant, tiles) = tiles(&linear(8192, 768, 3072, "y = gelu l ; out y"), Arch::Sm90a, "h200");
        let tiles = tiles.unwrap();
        assert_eq!(variant, format!("tiles of 128 x 192, two warpgroups in turn, {} stages", tiles.stages.unwrap()));
        assert_eq!((tiles.rows, tiles.columns, tiles.cluster), (128, 192, 1));
        // 64 x 16 tiles for 132 blocks of 384 threads, of which one fits a multiprocessor.
        assert_eq!((tiles.blocks, tiles.walked, tiles.threads), (132, Some(1024), 384));
        assert_eq!((tiles.registers, tiles.registers_from.as_str()), (168, "bound"));
        assert_eq!(tiles.occupancy, 384.0 / 2048.0);
        assert_eq!((tiles.waves, tiles.wave_efficiency), (1024.0 / 132.0, 1024.0 / (8.0 * 132.0)));
    }

    #[test]
    fn rows_that_a_norm_needs_are_held_by_a_cluster() {
        let norm = "r = input bf16[8192,768] ; s = add l r ; y = layer_norm s g:bf16[768] h:bf16[768] eps=1e-5 ; out s ; out y";
        let (_, tiles) = tiles(&linear(8192, 768, 768, norm), Arch::Sm90a, "h200");
        let tiles = tiles.unwrap();
        assert_eq!(tiles.cluster as usize * tiles.columns, 768);
        assert!(tiles.walked.is_none() && tiles.blocks == 8192 / tiles.rows as u64 * u64::from(tiles.cluster));
    }

    #[test]
    fn blocks_of_warps_share_a_multiprocessor() {
        let (_, tiles) = tiles(&linear(8192, 768, 50257, "y = silu l ; out y"), Arch::Sm80, "a100");
        let tiles = tiles.unwrap();
        assert_eq!((tiles.threads, tiles.registers, tiles.walked), (128, 255, None));
        assert_eq!(tiles.occupancy, 2.0 * 128.0 / 2048.0);
    }

    #[test]
    fn the_library_says_nothing_of_its_tiles() {
        let (variant, tiles) = tiles(&linear(4096, 4096, 4096, "out l"), Arch::Sm80, "a100");
        assert_eq!((variant.as_str(), tiles), ("cuBLASLt", None));
    }
}
