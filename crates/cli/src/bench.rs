//! `deuteron bench`: fused ops against their unfused selves.

use anyhow::{Result, bail};
use clap::Args;
use deuteron::bench::{BenchCase, BenchRow, bench};
use deuteron::{Activation, FusedOp};

use crate::Outcome;
use crate::input::{DeviceArguments, float};
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
    #[command(flatten)]
    device: DeviceArguments,
    /// Print an array of {op, direction, rows, cols, dtype, device, fused_us, unfused_us, speedup, bytes_fused,
    /// bytes_unfused, gbps, copy_gbps, fraction_of_copy, kernels_fused, unfused_kernels}
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let engine = arguments.device.engine()?;
    let cases = cases(arguments)?;
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

fn cases(arguments: &Arguments) -> Result<Vec<BenchCase>> {
    let dtype = float(&arguments.dtype)?;
    let ops = match arguments.ops.is_empty() {
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
    let lines = rows.iter().map(|row| {
        vec![
            row.op.clone(),
            format!("{}x{}", row.rows, row.cols),
            row.dtype.clone(),
            show::milliseconds(row.unfused_us / 1e3),
            show::milliseconds(row.fused_us / 1e3),
            format!("{:.2}x", row.speedup),
            format!("{:.2}x", row.bytes_unfused as f64 / row.bytes_fused.max(1) as f64),
            format!("{:.1}", row.gbps),
            format!("{:.1}", row.copy_gbps),
            format!("{:.0} %", 100.0 * row.fraction_of_copy),
        ]
    });
    let header = ["op", "size", "dtype", "unfused", "fused", "speed-up", "bytes ratio", "GB/s", "copy GB/s", "of copy"];
    println!("{}", show::table(&header, lines.collect(), 3));
    if let Some(row) = rows.first() {
        println!("{} on {}, medians, variants in turn.", row.direction, row.device);
    }
}
