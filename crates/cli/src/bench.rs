//! `deuteron bench`: fused ops against their unfused selves.

use anyhow::{Result, bail};
use clap::Args;
use deuteron::bench::{BenchCase, BenchRow, LadderRow, OnceRow, bench, ladder, once};
use deuteron::{Activation, Bytes, Engine, FusedOp};

use crate::Outcome;
use crate::device::DeviceArguments;
use crate::input::float;
use crate::show;

#[derive(Args)]
pub struct Arguments {
    /// Ops of the catalogue [default: all]
    ops: Vec<String>,
    /// Rows, one or more
    #[arg(long, value_delimiter = ',', default_value = "1024,65536")]
    rows: Vec<usize>,
    /// Columns, one or more
    #[arg(long, value_delimiter = ',', default_value = "768")]
    cols: Vec<usize>,
    /// Elements of a tensor of 1024 columns, instead of rows and columns
    #[arg(long, value_delimiter = ',', conflicts_with_all = ["rows", "cols"])]
    elements: Vec<usize>,
    /// f32, f16 or bf16
    #[arg(long, default_value = "f32")]
    dtype: String,
    /// Activation of the ops that have one: gelu, gelu_erf, silu, relu
    #[arg(long, default_value = "gelu")]
    act: String,
    /// The gradients instead of the ops
    #[arg(long)]
    backward: bool,
    /// Run the unfused and the fused plan exactly once each and print their kernels in order: for a profiler
    #[arg(long)]
    once: bool,
    /// Time every step from a scalar kernel to the generated one instead: add_act and norm_act
    #[arg(long, conflicts_with = "once")]
    ladder: bool,
    #[command(flatten)]
    device: DeviceArguments,
    /// Print an array of {op, direction, rows, cols, dtype, device, fused_us, fused_graph_us, unfused_us,
    /// unfused_graph_us, speedup, predicted_us, predicted_unfused_us, bytes_fused, bytes_unfused, bytes_read,
    /// bytes_written, registers, gbps, copy_gbps, fraction_of_copy, kernels_fused, unfused_kernels}; with --once of {op,
    /// direction, rows, cols, dtype, plans}
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let engine = arguments.device.engine()?;
    let cases = cases(arguments)?;
    if arguments.once {
        return run_once(&engine, &cases, arguments.json);
    }
    if arguments.ladder {
        return run_ladder(&engine, &cases, arguments.json);
    }
    let bar = show::progress(Some(cases.len() as u64));
    let mut rows = Vec::new();
    for case in &cases {
        bar.set_message(case.op.name());
        rows.push(bench(&engine, case)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    if arguments.json {
        show::json(&rows)?;
    } else {
        print(&rows);
    }
    Ok(Outcome::Good)
}

fn run_once(engine: &Engine, cases: &[BenchCase], json: bool) -> Result<Outcome> {
    let rows: Vec<OnceRow> = cases.iter().map(|case| once(engine, case)).collect::<Result<_, _>>()?;
    if json {
        show::json(&rows)?;
        return Ok(Outcome::Good);
    }
    for row in &rows {
        println!("{} {} {}x{} {}", row.op, row.direction, row.rows, row.cols, row.dtype);
        for plan in &row.plans {
            for kernel in &plan.kernels {
                let moved = Bytes(kernel.bytes_read + kernel.bytes_written);
                println!("  {:<8} {}  [{moved}] {}", plan.plan, kernel.name, kernel.launches.join(" "));
            }
        }
    }
    Ok(Outcome::Good)
}

fn run_ladder(engine: &Engine, cases: &[BenchCase], json: bool) -> Result<Outcome> {
    let bar = show::progress(Some(cases.len() as u64));
    let mut rows: Vec<LadderRow> = Vec::new();
    for case in cases {
        bar.set_message(case.op.name());
        rows.extend(ladder(engine, case)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let outcome = if rows.iter().all(|row| row.verified) { Outcome::Good } else { Outcome::Failed };
    if json {
        show::json(&rows)?;
        return Ok(outcome);
    }
    let lines = rows.iter().map(|row| {
        vec![
            format!("{} {}x{} {}", row.op, row.rows, row.cols, row.dtype),
            row.rung.clone(),
            row.about.clone(),
            show::milliseconds(row.us / 1e3),
            format!("{:.2}x", row.speedup),
            format!("{:.1}", row.gbps),
            format!("{:.0} %", 100.0 * row.fraction_of_copy),
            row.registers.map_or("-".into(), |registers| registers.to_string()),
            format!("{:.2}{}", row.worst_ratio, if row.verified { "" } else { " WRONG" }),
        ]
    });
    let header =
        ["op", "rung", "what is new", "time", "of first", "GB/s", "of copy", "registers", "error of its bound"];
    println!("{}", show::table(&header, lines.collect(), 3));
    if let Some(row) = rows.first() {
        println!("{}, medians, rungs in turn.", row.device);
    }
    Ok(outcome)
}

fn cases(arguments: &Arguments) -> Result<Vec<BenchCase>> {
    let dtype = float(&arguments.dtype)?;
    let ops = match arguments.ops.is_empty() {
        true if arguments.ladder => vec![FusedOp::find("add_act")?, FusedOp::find("norm_act")?],
        true => FusedOp::catalog(),
        false => arguments.ops.iter().map(|name| FusedOp::find(name)).collect::<Result<_, _>>()?,
    };
    let Some(act) = Activation::ALL.into_iter().find(|act| act.name() == arguments.act) else {
        bail!("unknown activation `{}`; expected gelu, gelu_erf, silu or relu", arguments.act);
    };
    let mut sizes = Vec::new();
    for &elements in &arguments.elements {
        sizes.push((elements.div_ceil(1024), 1024.min(elements)));
    }
    if arguments.elements.is_empty() {
        for &rows in &arguments.rows {
            sizes.extend(arguments.cols.iter().map(|&cols| (rows, cols)));
        }
    }
    if sizes.iter().any(|&(rows, cols)| rows == 0 || cols == 0) {
        bail!("rows, columns and elements must be at least 1");
    }
    let mut cases = Vec::new();
    for op in ops {
        for &(rows, cols) in &sizes {
            if !arguments.backward || op.has_backward() {
                cases.push(BenchCase { op: op.with_activation(act), rows, cols, dtype, backward: arguments.backward });
            }
        }
    }
    Ok(cases)
}

fn print(rows: &[BenchRow]) {
    let from_graphs = rows.iter().any(|row| row.fused_graph_us.is_some());
    let lines = rows.iter().map(|row| {
        let time = |us: f64| show::milliseconds(us / 1e3);
        let mut line = vec![row.op.clone(), format!("{}x{}", row.rows, row.cols), row.dtype.clone()];
        line.extend([time(row.unfused_us), time(row.fused_us)]);
        if from_graphs {
            let graph = |us: Option<f64>| us.map_or("-".to_string(), time);
            line.extend([graph(row.unfused_graph_us), graph(row.fused_graph_us)]);
        }
        line.extend([
            time(row.predicted_us),
            format!("{:.2}x", row.speedup),
            format!("{:.2}x", row.bytes_unfused as f64 / row.bytes_fused.max(1) as f64),
            format!("{:.1}", row.gbps),
            format!("{:.1}", row.copy_gbps),
            format!("{:.0} %", 100.0 * row.fraction_of_copy),
        ]);
        line
    });
    let mut header = vec!["op", "size", "dtype", "unfused", "fused"];
    if from_graphs {
        header.extend(["unfused graph", "fused graph"]);
    }
    header.extend(["predicted", "speed-up", "bytes ratio", "GB/s", "copy GB/s", "of copy"]);
    println!("{}", show::table(&header, lines.collect(), 3));
    if let Some(row) = rows.first() {
        println!("{} on {}, medians, variants in turn.", row.direction, row.device);
    }
}
