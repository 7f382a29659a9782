//! What was measured of one op of the catalogue, for its page in the guide.

use std::path::Path;

use anyhow::Result;

use super::gpu::{self, Op};
use super::layers;
use super::matmul;
use super::rows::{Rows, Table, three, times};

/// All tables that have rows of the op.
pub fn measured(root: &Path, name: &str) -> Result<String> {
    let tables = [beside_peers(root, name)?, against_unfused(root, name)?, on_a_cpu(root, name)?];
    let tables: Vec<String> = tables.into_iter().flatten().collect();
    if tables.is_empty() {
        return Ok("No row of this op is committed yet; [all measurements](../../benchmarks.md).\n".into());
    }
    Ok(format!(
        "{}\nA ratio above one means that ours is faster; [all measurements](../../benchmarks.md).\n",
        tables.join("\n")
    ))
}

fn link(file: &str) -> String {
    format!("[rows](../../../bench/results/{file})")
}

fn beside_peers(root: &Path, name: &str) -> Result<Option<String>> {
    let (file, about, table) = match name {
        "attention" => ("h200-attention-peers.csv", "causal, bf16", gpu::attention(root)?),
        "attention_add_norm" | "attention_block" => {
            ("h200-launches-peers.csv", "causal, bf16, 12 heads of 64", gpu::launches(root, &[name])?)
        }
        "moe" => ("h200-experts.csv", "bf16, experts of 4096 to 4096", matmul::experts(root)?),
        "moe_int8" => {
            let file = "h200-experts-int8.csv";
            if !Rows::exists(root, file) {
                return Ok(None);
            }
            (file, "int8, experts of 4096 to 4096", matmul::experts_int8(root)?)
        }
        "norm_linear" | "ffn" | "linear_cross_entropy" => {
            ("h200-layers.csv", "as layers from Python", layers::of(root, name)?)
        }
        _ => {
            let ops = Op::all(&Rows::read(root, "h200.csv")?)?;
            let ops: Vec<&Op> = ops.iter().filter(|op| op.name == name).collect();
            if ops.is_empty() {
                return Ok(None);
            }
            let mut table = Table::new(["shape", "direction", "torch eager", "torch.compile", "ours", "over the best"]);
            for op in ops {
                let [torch, compiled, ours] = [op.torch, op.compiled, op.ours].map(three);
                table.row([op.shape.clone(), op.direction.clone(), torch, compiled, ours, times(op.ratio())]);
            }
            ("h200.csv", "bf16, as CUDA graphs", table.end())
        }
    };
    Ok(Some(format!("On an H200 beside its peers, {about}, microseconds ({}):\n\n{table}", link(file))))
}

fn against_unfused(root: &Path, name: &str) -> Result<Option<String>> {
    let rows = Rows::read(root, "h200-fusion.csv")?;
    let mut table = Table::new(["shape", "dtype", "direction", "unfused", "fused", "speed-up", "of copy speed"]);
    let mut count = 0;
    for row in rows.of(&[("op", name)]) {
        let shape = format!("{}x{}", row.text("rows")?, row.text("cols")?);
        let [dtype, direction] = ["dtype", "direction"].map(|column| row.text(column).map(String::from));
        let [unfused, fused] = ["unfused_graph_us", "fused_graph_us"].map(|column| row.number(column).map(three));
        let of_copy = super::rows::percent(row.number("fraction_of_copy")?);
        table.row([shape, dtype?, direction?, unfused?, fused?, times(row.number("speedup")?), of_copy]);
        count += 1;
    }
    let text = || {
        format!(
            "On an H200 against its unfused kernels, microseconds ({}):\n\n{}",
            link("h200-fusion.csv"),
            table.end()
        )
    };
    Ok((count > 0).then(text))
}

fn on_a_cpu(root: &Path, name: &str) -> Result<Option<String>> {
    let rows = Rows::read(root, "xeon-2core-products.csv")?;
    let mut table = Table::new(["rows", "columns", "dtype", "unfused", "fused", "speed-up"]);
    let mut count = 0;
    for row in rows.of(&[("op", name)]) {
        let [tall, wide, dtype] = ["rows", "cols", "dtype"].map(|column| row.text(column).map(String::from));
        let (unfused, fused) = (row.number("unfused_us")?, row.number("fused_us")?);
        table.row([tall?, wide?, dtype?, three(unfused / 1e3), three(fused / 1e3), times(unfused / fused)]);
        count += 1;
    }
    let file = link("xeon-2core-products.csv");
    let text =
        || format!("On two cores of a Xeon against its unfused kernels, milliseconds ({file}):\n\n{}", table.end());
    Ok((count > 0).then(text))
}
