//! `deuteron check`: random graphs against f64.

use anyhow::{Result, bail};
use clap::Args;
use deuteron::check::{CheckReport, check};

use crate::Outcome;
use crate::show;

#[derive(Args)]
pub struct Arguments {
    /// How many random graphs
    #[arg(long, default_value_t = 200)]
    cases: usize,
    /// Seed of the first one; case i has this seed plus i
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print {cases, failures, worst_ratio, op_counts, ..} as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    if arguments.cases == 0 {
        bail!("--cases must be at least 1");
    }
    let bar = show::progress(Some(arguments.cases as u64));
    let report = check(arguments.cases, arguments.seed, |done| bar.set_position(done as u64))?;
    bar.finish_and_clear();
    if arguments.json {
        show::json(&report)?;
    } else {
        print(&report);
    }
    Ok(if report.failures == 0 { Outcome::Good } else { Outcome::Failed })
}

fn print(report: &CheckReport) {
    let mut counts: Vec<(&String, &usize)> = report.op_counts.iter().collect();
    counts.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
    let most = counts.first().map_or(1, |(_, count)| **count).max(1);
    println!("calls in the graphs");
    for (name, count) in counts {
        println!("  {name:<24} {count:>6} {}", "#".repeat((count * 40).div_ceil(most)));
    }
    let dtypes: Vec<String> = report.dtypes.iter().map(|(dtype, count)| format!("{count} {dtype}")).collect();
    println!("\n{} graphs ({}), {} with gradients", report.cases, dtypes.join(", "), report.backward);
    println!("median {} calls a graph, {} kernels in all", report.median_ops, report.kernels);
    println!("on {}", report.devices.join("; "));
    println!("{} failures in {:.1} s", report.failures, report.seconds);
    println!("largest error: {:.2} of its bound (seed {})", report.worst_ratio, report.worst_seed);
    for failure in &report.failed {
        println!("\nseed {}, plan {}, {}: {}", failure.seed, failure.plan, failure.device, failure.what);
        println!("{}", failure.graph);
    }
}
