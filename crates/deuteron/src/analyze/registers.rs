//! Registers as reported by the compiler, beside the planner's estimate. No GPU is needed.

use std::collections::HashMap;

use deuteron_codegen::Source;
use deuteron_codegen::cuda::CudaTarget;
use deuteron_device::cuda::nvrtc::Compiler;
use deuteron_graph::Graph;
use deuteron_kernels::{Backend, render};
use deuteron_plan::{Assessment, Machine};
use deuteron_report::Analysis;

use crate::analyze::tiles;
use crate::error::Error;
use crate::listing;

/// Compiles every kernel of both plans that can be generated, each text once, and notes its registers.
pub(super) fn fill(
    analysis: &mut Analysis,
    graph: &Graph,
    assessment: &Assessment,
    (compiler, target): (&Compiler, &CudaTarget),
    machine: &Machine,
) -> Result<(), Error> {
    let backend = Backend::Cuda(target.clone());
    let mut known: HashMap<String, Option<u32>> = HashMap::new();
    let sides = [(&mut analysis.before, &assessment.apart), (&mut analysis.after, &assessment.chosen)];
    for (sheets, plan) in sides {
        for sheet in sheets.iter_mut().filter(|sheet| sheet.realizable) {
            let Some(group) = sheet.launches.first().and_then(|&launch| plan.groups.get(launch)) else { continue };
            let Source::Cuda(source) = render(group.draft(graph, &plan.placement), &backend)?.source else { continue };
            let registers = match known.get(&source.text) {
                Some(&registers) => registers,
                None => {
                    let usage = listing::usage(compiler, &source, target)?;
                    let registers = usage.iter().map(|entry| entry.registers).max();
                    *known.entry(source.text).or_insert(registers)
                }
            };
            tiles::note_registers(sheet, registers, machine);
        }
    }
    Ok(())
}
