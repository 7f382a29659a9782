//! Blocks about the two cores of a Xeon, and about the planner.

use std::path::Path;

use anyhow::{Context, Result};

use super::rows::{Rows, Table, maybe, percent, three, times};

/// Names of ops as tables show them.
pub fn title(op: &str) -> &str {
    match op {
        "add_act" => "add + GELU",
        "act" => "GELU",
        "bias_act" => "bias + GELU",
        "act_dropout_add" => "GELU + dropout + add",
        "norm_act" => "LayerNorm + GELU",
        "add_norm" => "residual + LayerNorm",
        "norm_quantize" => "LayerNorm + int8 rows",
        "bias_dropout_add" => "bias + dropout + add",
        "dropout_add_norm" => "bias + dropout + add + LayerNorm",
        "embed_norm" => "embedding + LayerNorm",
        "layer_norm" => "LayerNorm",
        "rms_norm" => "RMSNorm",
        "swiglu" => "SwiGLU",
        op => op,
    }
}

/// Every op and shape that was measured beside its peers.
pub fn ops(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "xeon-2core.csv")?;
    let mut table = Table::new(["op, f32", "shape", "torch", "torch.compile", "ONNX Runtime", "ours", "over the best"]);
    let latest = rows.latest(&["kernel", "shape", "variant"])?;
    for ours in latest.into_iter().filter(|row| row.text("variant").is_ok_and(|variant| variant == "deuteron")) {
        let (op, shape) = (ours.text("kernel")?, ours.text("shape")?);
        let peer =
            |variant: &str| rows.newest(&[("kernel", op), ("shape", shape), ("variant", variant)])?.number("median_ms");
        let us = ours.number("median_ms")?;
        let best = peer(ours.text("baseline")?)?;
        table.row([
            title(op).into(),
            shape.into(),
            three(peer("torch eager")?),
            three(peer("torch.compile")?),
            three(peer("ONNX Runtime")?),
            three(us),
            times(best / us),
        ]);
    }
    Ok(table.end())
}

/// Against our own unfused kernels.
pub fn fusion(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "xeon-2core-fusion.csv")?;
    let mut table = Table::new(["op, f32", "size", "unfused", "fused", "speed-up", "of copy speed"]);
    for row in rows.latest(&["kernel", "shape", "dtype", "direction"])? {
        table.row([
            title(row.text("kernel")?).into(),
            row.text("shape")?.into(),
            three(row.number("baseline_us")? / 1000.0),
            three(row.number("median_us")? / 1000.0),
            times(row.number("speedup")?),
            percent(row.number("fraction_of_copy")?),
        ]);
    }
    Ok(table.end())
}

/// GPT-2 beside what people run it with.
pub fn gpt2(root: &Path) -> Result<String> {
    gpt2_of(root, &["f32", "bf16", "int8"])
}

/// The same in f32 alone.
pub fn gpt2_f32(root: &Path) -> Result<String> {
    gpt2_of(root, &["f32"])
}

fn gpt2_of(root: &Path, weights: &[&str]) -> Result<String> {
    let rows = Rows::read(root, "xeon-2core-gpt2-peers.csv")?;
    let header =
        ["weights", "", "torch", "torch.compile", "ONNX Runtime", "llama.cpp", "CTranslate2", "ours", "over the best"];
    let mut table = Table::new(header);
    for &weights in weights {
        for (phase, context, words) in
            [("prefill", "0", "prompt"), ("decode", "128", "token after 128"), ("decode", "1000", "token after 1000")]
        {
            let row = rows.newest(&[("weights", weights), ("phase", phase), ("context", context)])?;
            let ms = |column: &str| row.measured(column).map(maybe);
            table.row([
                weights.to_string(),
                words.into(),
                ms("torch_ms")?,
                ms("torch.compile_ms")?,
                ms("onnxruntime_ms")?,
                ms("llama.cpp_ms")?,
                ms("ctranslate2_ms")?,
                ms("deuteron_ms")?,
                row.measured("best_peer_over_ours")?.map(times).unwrap_or_default(),
            ]);
        }
    }
    Ok(table.end())
}

/// Its tokens and its memory.
pub fn gpt2_facts(root: &Path) -> Result<String> {
    let parity = Rows::read(root, "xeon-2core-gpt2-parity.csv")?;
    let memory = Rows::read(root, "xeon-2core-gpt2-memory.csv")?;
    let (parity, memory) = (parity.newest(&[])?, memory.newest(&[])?);
    let megabytes = |column: &str| memory.number(column).map(|bytes| format!("{:.0}", bytes / 1e6));
    Ok(format!(
        "Of {} greedy tokens after {} prompts, {} differ from those of transformers {} with the same checkpoint \
         ([row](../bench/results/xeon-2core-gpt2-parity.csv), `python3 bench/parity_gpt2.py`). A prompt of {} tokens in {} takes {} MB of memory, {} MB of \
         them weights ([row](../bench/results/xeon-2core-gpt2-memory.csv)); `deuteron generate` reports it after each run.\n",
        parity.text("tokens")?,
        parity.text("prompts")?,
        parity.text("wrong")?,
        parity.text("transformers")?,
        memory.text("prompt_tokens")?,
        memory.text("weights")?,
        megabytes("peak_memory_bytes")?,
        megabytes("weight_bytes")?
    ))
}

/// The newest measurement of every graph.
pub fn planner(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "xeon-2core-planner.csv")?;
    let mut graphs: Vec<&str> = Vec::new();
    for row in rows.all() {
        let graph = row.text("graph")?;
        if !graphs.contains(&graph) {
            graphs.push(graph);
        }
    }
    let mut table = Table::new(["graph, planned for an H200", "kernels", "planning time, ms", "optimal", "commit"]);
    for graph in graphs {
        let row = rows.newest(&[("graph", graph)])?;
        let optimal = if row.text("optimal")? == "True" { "yes" } else { "no, a beam" };
        table.row([
            format!("`{graph}`"),
            format!("{} to {}", row.text("unfused_kernels")?, row.text("chosen_kernels")?),
            three(row.number("planning_ms")?),
            optimal.into(),
            row.text("commit")?.into(),
        ]);
    }
    Ok(table.end())
}

/// How well the cost model predicts this CPU.
pub fn model(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "xeon-2core-model.csv")?;
    let row = rows.all().last().context("xeon-2core-model.csv is empty")?;
    let decided = row.number("decisions")? - row.number("ties")?;
    Ok(format!(
        "Predicted times are off by {} (median) and {} (90th percentile) over {} plans of the catalogue at sizes that the model was not fitted to. \
         Its choice to fuse or not was right in {} of {decided} cases; fusing loses in {} of all cases.\n",
        percent(row.number("median_error")?),
        percent(row.number("p90_error")?),
        row.text("plans")?,
        row.text("right")?,
        percent(row.number("losing")? / row.number("decisions")?)
    ))
}
