//! `deuteron check`: random graphs against f64.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use deuteron::check::{
    Breadth, CatalogReport, CheckReport, MOST_ELEMENTS, Part, RandomGraphs, check, check_catalog, cpu_engines,
};
use deuteron::{Engine, FusedOp, MachineKind};

use crate::Outcome;
use crate::device::{DeviceArguments, RedZones};
use crate::doctor::today;
use crate::show;

#[derive(Args)]
pub struct Arguments {
    /// Number of random graphs
    #[arg(long, default_value_t = 200)]
    cases: usize,
    /// Seed of the first graph; case i has this seed plus i
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Largest target size of a graph's first input, in elements; small graphs are checked many times faster
    #[arg(long, value_name = "COUNT", default_value_t = MOST_ELEMENTS, conflicts_with = "catalog", value_parser = elements)]
    elements: usize,
    /// Start no new graph after this many seconds
    #[arg(long, value_name = "SECONDS", conflicts_with = "catalog")]
    seconds: Option<u64>,
    /// Check every op of the catalogue instead, in both directions, all dtypes, odd shapes and several layouts
    #[arg(long, conflicts_with_all = ["cases", "seed"])]
    catalog: bool,
    /// With --catalog, only these ops
    #[arg(long = "op", requires = "catalog", value_name = "NAME", value_delimiter = ',')]
    ops: Vec<String>,
    /// With --catalog, only a handful of cases per op
    #[arg(long, requires = "catalog")]
    small: bool,
    /// With --catalog, check only part I of N, such as 2/8, so that N processes can share the work
    #[arg(long, requires = "catalog", value_name = "I/N", value_parser = part, default_value = "1/1", hide_default_value = true)]
    part: Part,
    /// With --catalog, run each op this many times while the device does other work; all runs must give the same bits
    #[arg(long, requires = "catalog", value_name = "TIMES", default_value_t = 0, hide_default_value = true)]
    repeat: usize,
    /// On a GPU, surround every buffer with guard bytes that are checked after each run
    #[arg(long)]
    red_zones: bool,
    #[command(flatten)]
    device: DeviceArguments,
    /// Append a row per dtype to this file: a histogram of errors as shares of their bounds
    #[arg(long, value_name = "FILE", conflicts_with = "catalog")]
    csv: Option<PathBuf>,
    /// Print {cases, failures, worst_ratio, op_counts, ..} as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let red_zones = if arguments.red_zones { RedZones::On } else { RedZones::Off };
    let engine = arguments.device.engine_with(red_zones)?;
    match arguments.catalog {
        true => run_catalog(&engine, arguments),
        false => run_random(engine, arguments),
    }
}

fn run_random(engine: Engine, arguments: &Arguments) -> Result<Outcome> {
    if arguments.cases == 0 {
        bail!("--cases must be at least 1, got 0");
    }
    let engines = match engine.device().machine().kind {
        MachineKind::Cpu => cpu_engines(),
        MachineKind::Gpu => vec![engine],
    };
    let bar = show::progress(Some(arguments.cases as u64));
    let graphs = RandomGraphs {
        elements: arguments.elements,
        limit: arguments.seconds.map(Duration::from_secs),
        ..RandomGraphs::new(arguments.cases, arguments.seed)
    };
    let report = check(&engines, graphs, |done| bar.set_position(done as u64))?;
    bar.finish_and_clear();
    if let Some(file) = &arguments.csv {
        append(file, &report).with_context(|| format!("could not append to {}", file.display()))?;
    }
    show::report(&report, arguments.json, print)?;
    Ok(Outcome::of(report.failures == 0))
}

const CSV_HEADER: &str = "date,devices,seed,graphs,failures,largest,dtype,exact,to_1/16,to_1/8,to_1/4,to_1/2,to_3/4,to_1,wrong,no_bound,elements\n";

/// Appends a row per dtype, below a header if the file is new.
fn append(file: &Path, report: &CheckReport) -> std::io::Result<()> {
    let mut file = File::options().append(true).create(true).open(file)?;
    // One header, however many append at once; where a file system has no locks, there may be two.
    let _ = file.lock();
    let mut text = if file.metadata()?.len() == 0 { CSV_HEADER.to_string() } else { String::new() };
    let CheckReport { seed, cases, elements, failures, worst_ratio, .. } = report;
    // Names of devices have commas of their own.
    let devices = report.devices.join("; ").replace(',', "");
    for (dtype, shares) in &report.shares {
        let counts = [shares.exact].into_iter().chain(shares.within.iter().copied());
        let counts = counts.chain([shares.wrong, shares.unbounded]).map(|count| count.to_string());
        let counts = counts.collect::<Vec<_>>().join(",");
        text +=
            &format!("{},{devices},{seed},{cases},{failures},{worst_ratio:.3},{dtype},{counts},{elements}\n", today());
    }
    file.write_all(text.as_bytes())
}

/// The smallest target size of random graphs: 512 elements.
fn elements(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 512..=MOST_ELEMENTS) => Ok(count),
        _ => Err(format!("expected a number from 512 to {MOST_ELEMENTS}")),
    }
}

/// `I/N`, from 1.
fn part(text: &str) -> Result<Part, String> {
    let numbers = text.split_once('/').and_then(|(i, n)| Some((i.parse::<usize>().ok()?, n.parse().ok()?)));
    match numbers {
        Some((index, count)) if (1..=count).contains(&index) => Ok(Part { index: index - 1, count }),
        _ => Err("expected I/N with I from 1 to N, as in 2/8".into()),
    }
}

fn run_catalog(engine: &Engine, arguments: &Arguments) -> Result<Outcome> {
    let breadth = match (arguments.repeat, arguments.small) {
        (0, false) => Breadth::All,
        (0, true) => Breadth::Small,
        (times, _) => Breadth::Repeated(times),
    };
    let names: Vec<&str> =
        arguments.ops.iter().map(|name| FusedOp::find(name).map(|op| op.name())).collect::<Result<_, _>>()?;
    let report = show::counted("", |progress| check_catalog(engine, breadth, &names, arguments.part, progress))?;
    show::report(&report, arguments.json, print_catalog)?;
    Ok(Outcome::of(report.failures == 0))
}

fn print_catalog(report: &CatalogReport) {
    let rows = report.ops.iter().map(|(name, row)| {
        vec![name.clone(), row.cases.to_string(), row.failures.to_string(), format!("{:.2}", row.worst_ratio)]
    });
    outln!("{}", show::table(&["op", "cases", "failures", "largest error / bound"], rows.collect(), 1));
    outln!("{} cases over {} shapes on {}", report.cases, report.shapes, report.device);
    if report.repeats > 0 {
        outln!(
            "each case ran {} times while the device did other work, with equal bits unless a failure is listed",
            report.repeats
        );
    }
    outln!(
        "{} expansions against their formulas, {} gradients ({} elements) against central differences of the formulas",
        report.formulas,
        report.gradients,
        report.gradient_elements
    );
    outln!("{} failures in {:.1} s", report.failures, report.seconds);
    outln!("largest error: {:.2} of its bound ({})", report.worst_ratio, report.worst_case);
    for failure in &report.failed {
        outln!("\n{}: {}", failure.case, failure.what);
    }
}

/// Columns of the table of errors.
const SHARES: [&str; 10] =
    ["dtype", "exact", "to 1/16", "to 1/8", "to 1/4", "to 1/2", "to 3/4", "to 1", "wrong", "no bound"];

fn print(report: &CheckReport) {
    let mut counts: Vec<(&String, &usize)> = report.op_counts.iter().collect();
    counts.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
    let most = counts.first().map_or(1, |(_, count)| **count).max(1);
    outln!("calls in the graphs");
    for (name, count) in counts {
        outln!("  {name:<24} {count:>6} {}", "#".repeat((count * 40).div_ceil(most)));
    }
    let dtypes: Vec<String> = report.dtypes.iter().map(|(dtype, count)| format!("{count} {dtype}")).collect();
    outln!("\n{} graphs ({}), {} with gradients", report.cases, dtypes.join(", "), report.backward);
    outln!("median {} calls per graph, {} kernels in all", report.median_ops, report.kernels);
    outln!("on {}", report.devices.join("; "));
    outln!("{} failures in {:.1} s", report.failures, report.seconds);
    outln!("largest error: {:.2} of its bound (seed {})", report.worst_ratio, report.worst_seed);
    outln!("\nelements of results by error as a share of its bound");
    let rows = report.shares.iter().map(|(dtype, shares)| {
        let within = shares.within.iter().copied();
        let counts = [shares.exact].into_iter().chain(within).chain([shares.wrong, shares.unbounded]);
        [dtype.clone()].into_iter().chain(counts.map(|count| count.to_string())).collect()
    });
    outln!("{}", show::table(&SHARES, rows.collect(), 1));
    for failure in &report.failed {
        outln!("\nseed {}, plan {}, {}: {}", failure.seed, failure.plan, failure.device, failure.what);
        outln!("{}", failure.graph);
    }
}
