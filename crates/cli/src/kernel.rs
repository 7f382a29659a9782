//! `deuteron kernel`: the generated source.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use deuteron::cuda::Arch;
use deuteron::listing::{KernelListing, OfflineGpu, kernels, kernels_for};
use deuteron::{Bytes, Graph, Machine, Strategy};

use crate::Outcome;
use crate::device::{self, RedZones, Wanted};
use crate::input::GraphArguments;
use crate::show;
use crate::tuning_file::{Choice, TuningArguments};

/// Words of the command.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    graph: GraphArguments,
    /// cpu, cuda (the GPU at hand), an instruction set (sm_75, sm_80, sm_86, sm_89, sm_90a, sm_100, sm_120) or a profile
    /// (a100, h100, h200, rtx4090); the last two need no GPU, only NVRTC
    #[arg(long, default_value = "cpu")]
    device: String,
    #[command(flatten)]
    tuning: TuningArguments,
    /// naive, eager, unfused or fused
    #[arg(long, default_value = "fused")]
    plan: String,
    /// Print the graph in text form instead
    #[arg(long)]
    text: bool,
    /// Print an array of {name, kind, bytes_read, bytes_written, source}; for a CPU with {tiles, kept_rows, passes}, for a
    /// GPU with {registers, predicted_registers, spill_bytes, shared_bytes, occupancy, config, key}
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let strategy: Strategy = arguments.plan.parse()?;
    let graph = arguments.graph.graph()?;
    if arguments.text {
        out!("{graph}");
        return Ok(Outcome::Good);
    }
    let listings = listings(&arguments.device, arguments.tuning.choice()?, &graph, strategy, &[])?;
    if arguments.json {
        show::json(&listings)?;
        return Ok(Outcome::Good);
    }
    out!("{}", text(&listings)?);
    Ok(Outcome::Good)
}

/// Kernels in words.
pub fn text(listings: &[KernelListing]) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    for (index, listing) in listings.iter().enumerate() {
        let (read, written) = (Bytes(listing.bytes_read), Bytes(listing.bytes_written));
        writeln!(out, "kernel {index}: {}  [{}; reads {read}, writes {written}]", listing.name, listing.kind)?;
        if let Some(compiled) = &listing.compiled {
            if !compiled.config.is_empty() {
                writeln!(out, "{}", compiled.config)?;
            }
            writeln!(
                out,
                "{} registers ({} predicted), {} bytes spilled, {} shared memory a block, {:.0} % occupancy",
                compiled.registers,
                compiled.predicted_registers,
                compiled.spill_bytes,
                Bytes(compiled.shared_bytes.into()),
                100.0 * compiled.occupancy
            )?;
        }
        writeln!(out, "{}", listing.source)?;
    }
    Ok(out)
}

/// The kernels of a graph for a device, by its words.
pub fn listings(
    device: &str,
    tuning: Choice,
    graph: &Graph,
    strategy: Strategy,
    packages: &[PathBuf],
) -> Result<Vec<KernelListing>> {
    let engine = match device::parse(device)? {
        Some(Wanted::Auto | Wanted::Cpu) => device::cpu(None)?,
        Some(Wanted::Cuda(ordinal)) => device::gpu(ordinal, RedZones::Off, &tuning, packages)?,
        None => {
            let gpu = match Arch::of_profile(device) {
                Some(arch) => OfflineGpu::new(arch, Machine::profile(device)?, device::compiler(packages)?),
                None => OfflineGpu::of_arch(device.parse()?, device::compiler(packages)?)?,
            };
            return Ok(kernels_for(&gpu.with_tuning(tuning.of_none()), graph, strategy)?);
        }
    };
    Ok(kernels(&engine, graph, strategy)?)
}
