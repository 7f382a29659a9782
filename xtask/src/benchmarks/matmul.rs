//! Blocks about matmuls.

use std::path::Path;

use anyhow::Result;

use super::rows::{Row, Rows, Table, least, maybe, percent, three, times};

/// Matmuls of GPT-2's sizes on an H200, and how far cuBLASLt is ahead where rows are few.
pub fn gpu(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "h200-matmul.csv")?;
    let mut table = Table::new([
        "rows",
        "matmul",
        "epilogue",
        "cuBLASLt",
        "torch eager",
        "torch.compile",
        "ours",
        "over the best",
        "the plan's choice",
    ]);
    let (mut lost, mut count, mut behind) = (0, 0, 0.0_f64);
    for row in rows.all() {
        let (ours, library) = (row.number("kernel_us")?, row.measured("library_us")?);
        let (torch, compiled) = (row.number("torch_us")?, row.number("compile_us")?);
        let ratio = least(library.into_iter().chain([torch, compiled])) / ours;
        count += 1;
        lost += usize::from(ratio < 1.0);
        if row.number("rows")? <= 2048.0 {
            behind = library.map_or(behind, |library| behind.max(ours / library - 1.0));
        }
        table.row([
            row.text("rows")?.into(),
            size(row)?,
            epilogue(row.text("epilogue")?).into(),
            maybe(library),
            three(torch),
            three(compiled),
            three(ours),
            times(ratio),
            three(row.number("chosen_us")?),
        ]);
    }
    Ok(format!(
        "{}\nOurs loses to the best of the three in {lost} of {count} rows. At 1024 and 2048 rows each multiprocessor has one or two tiles, so no \
         other tile's work hides its first loads and its epilogue; cuBLASLt is ahead by up to {}.\n",
        table.end(),
        percent(behind)
    ))
}

fn size(row: Row<'_>) -> Result<String> {
    Ok(format!("{} to {}", row.text("inner")?, row.text("columns")?))
}

fn epilogue(word: &str) -> &str {
    match word {
        "residual" => "bias + residual",
        "norm" => "bias + residual + LayerNorm",
        "gelu" => "bias + GELU",
        word => word,
    }
}

/// From naive to shipped, at the larger size.
pub fn ladder(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "h200-matmul-ladder.csv")?;
    let mut table = Table::new(["rung", "what it adds", "microseconds", "TFLOP/s"]);
    for row in rows.of(&[("rows", "8192")]) {
        let rung = row.text("rung")?;
        table.row([rung.into(), row.text("about")?.into(), three(row.number("us")?), three(row.number("tflops")?)]);
    }
    Ok(table.end())
}

/// Rows routed to experts. The best is of those that do the whole work: torch's loop over experts and the Triton kernel.
pub fn experts(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "h200-experts.csv")?;
    let mut table = Table::new([
        "experts",
        "rows",
        "torch, expert by expert",
        "its matmuls alone",
        "its grouped matmul",
        "Triton",
        "ours",
        "over the best",
    ]);
    for row in rows.all() {
        let us = |column: &str| row.number(column).map(three);
        let best = row.number("triton_us")?.min(row.number("loop_us")?);
        table.row([
            row.text("experts")?.into(),
            row.text("rows")?.into(),
            us("loop_us")?,
            us("matmuls_us")?,
            us("grouped_us")?,
            us("triton_us")?,
            us("moe_us")?,
            times(best / row.number("moe_us")?),
        ]);
    }
    Ok(table.end())
}

/// Matmuls of GPT-2's sizes on a CPU.
pub fn cpu(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "xeon-2core-matmul-peers.csv")?;
    let mut table = Table::new(["rows", "matmul", "torch", "ONNX Runtime", "ours", "over the best"]);
    for row in rows.all() {
        let ms = |column: &str| row.number(column).map(|us| three(us / 1000.0));
        table.row([
            row.text("rows")?.into(),
            size(row)?,
            ms("torch_us")?,
            ms("onnxruntime_us")?,
            ms("deuteron_us")?,
            times(row.number("best_peer_over_ours")?),
        ]);
    }
    Ok(table.end())
}
