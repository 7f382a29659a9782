//! What to fuse on a GPU that is not here: plan a graph for an H200, and say why neighbours stay apart.
//!
//! `cargo run --release --package deuteron-guide --example plan_for_gpu`

use deuteron::cuda::{Arch, CudaCatalog};
use deuteron::{Graph, Machine, Strategy, Target, plan};

const BLOCK: &str = "
    graph block
    x = input bf16[8192,768] ; r = input bf16[8192,768]
    w = weight bf16[768,768] ; c = weight bf16[768]
    g = weight bf16[768] ; b = weight bf16[768]
    h = linear x w c
    s = add h r
    y = layer_norm s g b
    out s y";

/// Runs the example.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let graph: Graph = BLOCK.parse()?;
    let machine = Machine::profile("h200")?;
    for strategy in [Strategy::Unfused, Strategy::Fused] {
        let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
        let plan = plan(&graph, target, strategy, &[])?;
        println!("{strategy:?}: {} kernels, {} moved", plan.groups.len(), plan.bytes());
        println!("{}", plan.explain());
    }
    Ok(())
}
