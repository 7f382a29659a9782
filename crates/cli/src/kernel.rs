//! `deuteron kernel`: the generated source.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use deuteron::cuda::{Arch, Compiler};
use deuteron::listing::{KernelListing, MachineCode, OfflineGpu, kernels, kernels_for};
use deuteron::{Bytes, Graph, Machine, Strategy, catalog};

use crate::Outcome;
use crate::device::{self, RedZones, Wanted};
use crate::emulate;
use crate::input::GraphArguments;
use crate::show;
use crate::tuning_file::{Choice, TuningArguments};

/// Arguments of the command.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    graph: GraphArguments,
    /// cpu, cuda (the GPU of this machine), an instruction set (sm_75, sm_80, sm_86, sm_89, sm_90a, sm_100, sm_120) or a profile
    /// (a100, h100, h200, rtx4090); the last two need no GPU, only NVRTC [default: cpu]
    #[arg(long)]
    device: Option<String>,
    #[command(flatten)]
    tuning: TuningArguments,
    /// naive, eager, unfused, greedy or fused [default: what runs: greedy for an op of the catalogue, fused for one around a linear layer and for a graph]
    #[arg(long)]
    plan: Option<String>,
    /// Print all of it: for a GPU also the device-side library that kernels share, for a CPU also the machine code that loading makes
    #[arg(long, conflicts_with_all = ["json", "text"])]
    full: bool,
    /// Print only the kernel with this number, counted from 0, as one file that a CUDA compiler accepts
    #[arg(long, value_name = "NUMBER", conflicts_with = "text")]
    only: Option<usize>,
    /// Print the graph in text form instead
    #[arg(long, conflicts_with_all = ["json", "plan"])]
    text: bool,
    /// Print the source for a GPU without compiling it: needs no NVRTC, but cannot print registers
    #[arg(long, requires = "device", conflicts_with_all = ["text", "emulate"])]
    no_compile: bool,
    /// Run the kernels for sm_90a on the CPU, check every access and barrier, and verify the results; needs a C++ compiler ($CXX or c++) and no GPU
    #[arg(long, conflicts_with_all = ["device", "tuning", "full", "only", "text", "json"])]
    emulate: bool,
    /// With --emulate, run this rung of the op's ladder instead of the generated kernel
    #[arg(long, requires = "emulate")]
    rung: Option<String>,
    /// With --emulate, run the CUDA source in this file instead: an edited output of `kernel --device sm_90a`, or with --rung of `ladder --show`
    #[arg(long, value_name = "FILE", requires = "emulate")]
    source: Option<PathBuf>,
    /// With --emulate, how many random orders of its threads each kernel runs in [default: 3]
    #[arg(long, value_name = "COUNT", requires = "emulate", value_parser = clap::value_parser!(u64).range(1..=1000))]
    schedules: Option<u64>,
    /// With --emulate, count what accesses would cost a GPU: sectors of global memory, wavefronts and bank conflicts of shared memory (not those of cp.async, TMA and wgmma)
    #[arg(long, requires = "emulate")]
    accesses: bool,
    /// Print an array of {name, kind, bytes_read, bytes_written, arguments, launches, language, source}; for a CPU with {tiles, kept_rows, passes, machine_code}, for a
    /// GPU with {registers, predicted_registers, spill_bytes, shared_bytes, occupancy, config, key}
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let graph = arguments.graph.graph()?;
    let strategy = match &arguments.plan {
        Some(plan) => plan.parse()?,
        None if arguments.graph.is_op() => catalog::strategy(&graph),
        None => Strategy::Fused,
    };
    if arguments.text {
        out!("{graph}");
        return Ok(Outcome::Good);
    }
    if arguments.emulate {
        let (rung, source) = (arguments.rung.as_deref(), arguments.source.as_ref());
        let schedules = arguments.schedules.unwrap_or(3);
        return emulate::run(&emulate::Request {
            graph: &graph,
            strategy,
            rung,
            source,
            schedules,
            accesses: arguments.accesses,
        });
    }
    let device = arguments.device.as_deref().unwrap_or("cpu");
    let mut listings = match arguments.no_compile {
        true => uncompiled(device, &graph, strategy)?,
        false => listings(device, arguments.tuning.choice()?, &graph, strategy, &[])?,
    };
    if let Some(only) = arguments.only {
        if only >= listings.len() {
            bail!("--only: expected a number from 0 to {}, got {only}", listings.len() - 1);
        }
        listings = vec![listings.swap_remove(only)];
    }
    if arguments.json {
        show::json(&listings)?;
        return Ok(Outcome::Good);
    }
    out!("{}", text(&listings, arguments.full)?);
    Ok(Outcome::Good)
}

/// Kernels as text. Everything but code is a comment, so that the text for a GPU compiles; with `full` off, the device-side library
/// that kernels share is one line per file.
pub fn text(listings: &[KernelListing], full: bool) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    for (index, listing) in listings.iter().enumerate() {
        writeln!(out, "// kernel {index} of {}: {}  [{}]", listings.len(), listing.name, listing.kind)?;
        let (read, written) = (Bytes(listing.bytes_read), Bytes(listing.bytes_written));
        writeln!(out, "// reads {read}, writes {written}")?;
        for (position, argument) in listing.arguments.iter().enumerate() {
            let verb = if argument.written { "writes" } else { "reads" };
            writeln!(out, "// argument {position} {verb} {}: {}", argument.name, argument.tensor)?;
        }
        listing.launches.iter().try_for_each(|launch| writeln!(out, "// launch {launch}"))?;
        if let Some(MachineCode::Interpreted(reason)) = &listing.machine_code {
            writeln!(out, "// interpreted, without machine code: {reason}")?;
        }
        if let Some(compiled) = &listing.compiled {
            if !compiled.config.is_empty() {
                writeln!(out, "// {}", compiled.config)?;
            }
            writeln!(
                out,
                "// {} registers ({} predicted), {} bytes spilled, {} shared memory per block, {:.0} % occupancy",
                compiled.registers,
                compiled.predicted_registers,
                compiled.spill_bytes,
                Bytes(compiled.shared_bytes.into()),
                100.0 * compiled.occupancy
            )?;
        }
        match (listing.language, full) {
            ("library call", _) => listing.source.lines().try_for_each(|line| writeln!(out, "// {line}"))?,
            (_, true) => {
                writeln!(out, "{}", listing.source)?;
                if let Some(MachineCode::Lines(lines)) = &listing.machine_code {
                    writeln!(out, "// machine code")?;
                    lines.iter().try_for_each(|line| writeln!(out, "{line}"))?;
                }
            }
            (_, false) => {
                let own = listing.own_source();
                if own != listing.source {
                    writeln!(out, "// --full prints the whole translation unit")?;
                }
                writeln!(out, "{own}")?;
            }
        }
    }
    Ok(out)
}

/// The kernels of a graph for a GPU that need not be present, as text.
fn uncompiled(device: &str, graph: &Graph, strategy: Strategy) -> Result<Vec<KernelListing>> {
    if device::parse(device)?.is_some() {
        bail!("--no-compile: expected --device with an instruction set or a profile of a GPU, got {device}");
    }
    Ok(kernels_for(&offline(device, || Ok(None))?, graph, strategy)?)
}

/// A GPU that need not be present, by name. The name is parsed before a compiler is searched.
fn offline(device: &str, compiler: impl FnOnce() -> Result<Option<Compiler>>) -> Result<OfflineGpu> {
    let device = &device.to_ascii_lowercase();
    Ok(match Arch::of_profile(device) {
        Some(arch) => OfflineGpu::new(arch, Machine::profile(device)?, compiler()?),
        None => OfflineGpu::of_arch(device.parse()?, compiler()?)?,
    })
}

/// The kernels of a graph for a named device.
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
            let gpu = offline(device, || Ok(Some(device::compiler(packages)?)))?;
            return Ok(kernels_for(&gpu.with_tuning(tuning.of_none()), graph, strategy)?);
        }
    };
    Ok(kernels(&engine, graph, strategy)?)
}
