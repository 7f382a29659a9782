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

/// The same in int8; ours gives floats as the peers do, or rows quantised again.
pub fn experts_int8(root: &Path) -> Result<String> {
    let rows = match Rows::read_or(root, "h200-experts-int8.csv", "on an H200", "bash bench/gpu.sh experts")? {
        Ok(rows) => rows,
        Err(missing) => return Ok(missing),
    };
    let mut table = Table::new([
        "experts",
        "rows",
        "`torch._int_mm` per expert, alone",
        "Triton",
        "ours",
        "over Triton",
        "ours, to int8 rows",
        "ours, MiB above operands and results",
    ]);
    for row in rows.latest(&["experts", "rows"])? {
        let (ours, triton) = (row.number("bf16_us")?, row.measured("triton_us")?);
        table.row([
            row.text("experts")?.into(),
            row.text("rows")?.into(),
            maybe(row.measured("matmuls_us")?),
            maybe(triton),
            three(ours),
            triton.map(|triton| times(triton / ours)).unwrap_or_default(),
            three(row.number("int8_us")?),
            maybe(row.measured("bf16_mib")?),
        ]);
    }
    Ok(table.end())
}

/// Designs of the matmul's kernel that were tried: the fastest variant of each, alone and with pairs of blocks.
pub fn designs(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "h200-matmul-designs.csv")?;
    let mut table =
        Table::new(["matmul", "epilogue", "design", "cuBLASLt", "ours", "ours, B fetched once for two blocks"]);
    for first in rows.latest(&["rows", "inner", "columns", "epilogue", "design"])? {
        let keys = ["rows", "inner", "columns", "epilogue", "design"];
        let values = keys.iter().map(|key| first.text(key)).collect::<Result<Vec<_>>>()?;
        let keys: Vec<(&str, &str)> = keys.into_iter().zip(values).collect();
        let mut fastest = [f64::INFINITY; 3];
        for row in rows.of(&keys) {
            let slot = match row.text("variant")? {
                "library" => 0,
                variant if variant.contains("fetched once") => 2,
                _ => 1,
            };
            fastest[slot] = fastest[slot].min(row.number("us")?);
        }
        let [library, alone, pairs] = fastest.map(|us| maybe(us.is_finite().then_some(us)));
        let what = format!("{} rows, {}", first.text("rows")?, size(first)?);
        table.row([
            what,
            epilogue(first.text("epilogue")?).into(),
            first.text("design")?.into(),
            library,
            alone,
            pairs,
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
