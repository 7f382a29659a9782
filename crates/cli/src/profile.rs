//! `deuteron profile`: hardware counters of the kernels before and after fusing.

mod nsight;

use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use deuteron::fuse::inputs;
use deuteron::profile::{Profile, ProfileOptions, Side, profile, run_once};
use deuteron::report::{CounterSheet, KernelSheet};
use deuteron::{Bytes, MachineKind};

use crate::analyze::PageArguments;
use crate::device::DeviceArguments;
use crate::input::{GraphArguments, Loaded};
use crate::{Outcome, show};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    graph: GraphArguments,
    #[command(flatten)]
    device: DeviceArguments,
    /// Source of the counters: auto uses Nsight Compute on a GPU if it is installed and permitted, and otherwise says why not; driver uses
    /// only numbers of the compiler and the driver. CPU counters are read if the system permits it
    #[arg(long, value_enum, default_value_t = By::Auto)]
    by: By,
    /// Seed of weights and inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print every kernel
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    pages: PageArguments,
    /// Print {graph, device, by, text, before_us, after_us, notes, plans} as JSON; a plan has {plan, us, kernels}, a kernel {name, kind,
    /// size, count, measured_us, predicted_us, compulsory_read, compulsory_written, counters}, and counters {us, read, written, missed,
    /// cache_hits, occupancy, registers, shared, tensor, issue, instructions_per_cycle}: null if not counted
    #[arg(long)]
    json: bool,
    /// Run this plan once and print nothing: for the profiler that watches this process
    #[arg(long, hide = true, value_parser = side)]
    once: Option<Side>,
}

/// The source of counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum By {
    /// the best available
    Auto,
    /// Nsight Compute, or an error
    Ncu,
    /// numbers available to this process
    Driver,
}

fn side(word: &str) -> Result<Side, String> {
    Side::find(word).ok_or_else(|| "expected unfused or fused".to_string())
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let engine = arguments.device.engine()?;
    let Loaded { graph, notes, onnx } = arguments.graph.load()?;
    let made = inputs(&graph, arguments.seed)?;
    let tensors = match &onnx {
        Some(file) => file.tensors(&graph, made)?,
        None => made,
    };
    if let Some(side) = arguments.once {
        run_once(&engine, &graph, &tensors, side)?;
        return Ok(Outcome::Good);
    }
    let on_gpu = engine.device().machine().kind == MachineKind::Gpu;
    if !on_gpu && arguments.by != By::Auto {
        bail!("--by is for a GPU; got {}", engine.device().describe());
    }
    let options = ProfileOptions { budget: BUDGET, sources: arguments.pages.html.is_some() };
    let mut profile = show::spinning("timing", || profile(&engine, &graph, &tensors, &options))?;
    notes.into_iter().for_each(|note| profile.note(note));
    // The watched process needs the memory and the time of the GPU.
    drop((tensors, engine));
    if on_gpu && arguments.by != By::Driver {
        let counted = show::spinning("counting with Nsight Compute", || count(&mut profile));
        match counted {
            Ok(()) => {}
            Err(error) if arguments.by == By::Auto => {
                profile.note(format!("not counted by Nsight Compute: {error:#}"));
            }
            Err(error) => return Err(error),
        }
    }
    arguments.pages.write(&profile.analysis)?;
    if arguments.json {
        show::json(&profile.report())?;
    } else {
        print(&profile, arguments.all);
    }
    Ok(Outcome::Good)
}

/// The approximate time to spend on timing.
const BUDGET: Duration = Duration::from_millis(1500);

/// Profiles both plans with Nsight Compute, each in its own process.
fn count(profile: &mut Profile) -> Result<()> {
    let ncu = nsight::find().context("expected `ncu` on the path or in the CUDA toolkit; install Nsight Compute")?;
    let [before, after] = [Side::Before, Side::After].map(|side| nsight::watch(&ncu, &["--once", side.name()]));
    let (before, after) = (before?, after?);
    profile.count([&before.table, &after.table])?;
    for metric in before.unknown.iter().chain(&after.unknown).collect::<std::collections::BTreeSet<_>>() {
        profile.note(format!("this version of Nsight Compute does not count {metric} on this GPU"));
    }
    Ok(())
}

fn print(profile: &Profile, all: bool) {
    let analysis = &profile.analysis;
    outln!("{} on {}\n", analysis.graph, profile.device);
    for (title, sheets) in [("Before fusing", &analysis.before), ("After fusing", &analysis.after)] {
        outln!("{title}\n{}\n", table(sheets, all));
    }
    let Some(profiled) = &analysis.profiled else { return };
    let (before, after) = (profiled.before_us, profiled.after_us);
    outln!(
        "Without the profiler, a run takes {} before fusing and {} after: {:.2}x the speed.",
        show::milliseconds(before / 1e3),
        show::milliseconds(after / 1e3),
        before / after.max(1e-9)
    );
    outln!("{}", show::wrapped(&profiled.text));
    profiled.notes.iter().for_each(|note| outln!("{}", show::wrapped(&format!("note: {note}"))));
}

/// One column: its title, and its cell where it is known.
type Column = (&'static str, fn(&CounterSheet) -> Option<String>);

/// The columns of a profile; those without any value are hidden.
const COLUMNS: [Column; 11] = [
    ("profiled", |one| one.us.map(|us| show::milliseconds(us / 1e3))),
    ("read", |one| one.read.map(bytes)),
    ("written", |one| one.written.map(bytes)),
    ("missed", |one| one.missed.map(bytes)),
    ("cache hits", |one| one.cache_hits.map(percent)),
    ("occupancy", |one| one.occupancy.map(percent)),
    ("registers", |one| one.registers.map(|count| format!("{count:.0}"))),
    ("shared", |one| one.shared.map(bytes)),
    ("tensor", |one| one.tensor.map(percent)),
    ("issue", |one| one.issue.map(percent)),
    ("instr/cycle", |one| one.instructions_per_cycle.map(|count| format!("{count:.2}"))),
];

fn bytes(count: f64) -> String {
    Bytes(count.max(0.0) as u64).to_string()
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

fn table(sheets: &[KernelSheet], all: bool) -> String {
    let known = |column: &&Column| {
        sheets.iter().filter_map(|sheet| sheet.counters.as_ref()).any(|counters| (column.1)(counters).is_some())
    };
    let columns: Vec<&Column> = COLUMNS.iter().filter(known).collect();
    let time = |sheet: &KernelSheet| sheet.measured_us.unwrap_or(0.0) * sheet.launches.len() as f64;
    let mut sheets: Vec<&KernelSheet> = sheets.iter().collect();
    if !all {
        sheets.sort_by(|a, b| time(b).total_cmp(&time(a)));
        sheets.truncate(14);
    }
    let rows = sheets.into_iter().map(|sheet| {
        let mut row = vec![
            show::shorten(&sheet.name, 48),
            sheet.launches.len().to_string(),
            sheet.measured_us.map_or("-".to_string(), |us| show::milliseconds(us / 1e3)),
            Bytes(sheet.cost.read + sheet.cost.written).to_string(),
        ];
        let unknown = CounterSheet::default();
        let counters = sheet.counters.as_ref().unwrap_or(&unknown);
        row.extend(columns.iter().map(|column| (column.1)(counters).unwrap_or("-".to_string())));
        row
    });
    let mut header = vec!["kernel", "count", "time", "must move"];
    header.extend(columns.iter().map(|column| column.0));
    show::table(&header, rows.collect(), 1)
}
