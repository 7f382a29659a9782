//! `deuteron bench --crossover`: at which sizes attention with its residual and norm is faster as one launch than as several.

use anyhow::{Context, Result};
use deuteron::bench::{BenchCase, Crossing, CrossoverRow, crossover};
use deuteron::{Dtype, Engine, ExpertSizes, FusedOp, Heads, MachineKind};

use crate::Outcome;
use crate::show;

/// Batches, sequence lengths and columns to measure on a GPU, and on a CPU.
const GPU_SIZES: [&[usize]; 3] = [&[1, 8, 32], &[128, 1024, 4096], &[768, 1600]];
const CPU_SIZES: [&[usize]; 3] = [&[1, 4], &[64, 256], &[256, 768]];
/// Larger products of batch and sequence are left out.
const MOST_ROWS: usize = 32768;

/// An op at sizes from small to large.
pub fn cases(engine: &Engine, op: FusedOp, dtype: Dtype, width: usize) -> Vec<BenchCase> {
    let [batches, sequences, columns] = match engine.device().machine().kind {
        MachineKind::Gpu => GPU_SIZES,
        MachineKind::Cpu => CPU_SIZES,
    };
    let mut cases = Vec::new();
    for &cols in columns {
        for &positions in sequences {
            let heads = Heads { positions, width };
            let rows = batches.iter().map(|batch| batch * positions).filter(|&rows| rows <= MOST_ROWS);
            let experts = ExpertSizes::default();
            cases.extend(rows.map(|rows| BenchCase { op, rows, cols, dtype, backward: false, heads, experts }));
        }
    }
    cases
}

/// Measures all sizes and prints the results.
pub fn run(engine: &Engine, cases: &[BenchCase], json: bool) -> Result<Outcome> {
    let measured = |case: &BenchCase| {
        let name = case.op.name();
        crossover(engine, case)?.with_context(|| {
            format!(
                "expected attention_add_norm or attention_block; got {name}, which has no kernel of attention with later work"
            )
        })
    };
    let rows = show::each(cases, |case| case.op.name(), measured)?;
    show::report(&rows, json, |rows| print(rows))?;
    Ok(Outcome::Good)
}

fn print(rows: &[CrossoverRow]) {
    let header = [
        "op",
        "batch x sequence x columns",
        "kernels",
        "apart",
        "predicted",
        "one launch",
        "predicted",
        "gain",
        "predicted",
    ];
    let header = [&header[..], &["the plan takes", "over the best"]].concat();
    outln!("{}", show::table(&header, rows.iter().map(line).collect(), 2));
    if let Some(row) = rows.first() {
        outln!("{}, medians, both in turn. Kernels are those of the best plan without the one launch.", row.device);
    }
}

fn line(row: &CrossoverRow) -> Vec<String> {
    let Crossing { apart_us, apart_predicted_us, one_us, one_predicted_us, takes_one, over_best, .. } = row.crossing;
    let time = |us: f64| show::milliseconds(us / 1e3);
    let or_none = |us: Option<f64>| us.map_or("-".into(), time);
    let gain = |apart: f64, one: Option<f64>| one.map_or("-".into(), |one| format!("{:.2}x", apart / one.max(1e-6)));
    vec![
        row.op.clone(),
        format!("{}x{}x{} {}", row.batch, row.sequence, row.hidden, row.dtype),
        row.crossing.apart_kernels.to_string(),
        time(apart_us),
        time(apart_predicted_us),
        or_none(one_us),
        or_none(one_predicted_us),
        gain(apart_us, one_us),
        gain(apart_predicted_us, one_predicted_us),
        if takes_one { "one launch" } else { "apart" }.to_string(),
        format!("{:.1} %", 100.0 * (over_best - 1.0)),
    ]
}
