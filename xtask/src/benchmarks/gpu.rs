//! Blocks about an H200.

use std::path::Path;

use anyhow::{Context, Result};

use super::cpu::title;
use super::rows::{Row, Rows, Table, least, maybe, median, percent, three, times};

/// The shapes that the table of ops shows; the rows have more.
const SHAPES: [&str; 2] = ["65536x768", "16384x4096"];

/// An op beside its peers, each as a node of a CUDA graph.
pub struct Op {
    pub name: String,
    pub shape: String,
    pub direction: String,
    pub torch: f64,
    pub compiled: f64,
    pub ours: f64,
}

impl Op {
    /// Every op, shape and direction that was measured beside its peers.
    pub fn all(rows: &Rows) -> Result<Vec<Op>> {
        let ours = rows.of(&[("variant", "deuteron graph"), ("dtype", "bf16")]);
        let measured = ours.map(|row| Self::of(rows, row)).collect::<Result<Vec<Option<Op>>>>()?;
        Ok(measured.into_iter().flatten().collect())
    }

    /// Nothing where no peer was measured.
    fn of(rows: &Rows, ours: Row<'_>) -> Result<Option<Op>> {
        if ours.text("baseline")?.is_empty() {
            return Ok(None);
        }
        let [name, shape, direction] = ["kernel", "shape", "direction"].map(|column| ours.text(column));
        let (name, shape, direction) = (name?, shape?, direction?);
        let peer = |variant: &str| {
            let keys =
                [("kernel", name), ("shape", shape), ("direction", direction), ("dtype", "bf16"), ("variant", variant)];
            rows.newest(&keys)?.number("median_us")
        };
        let (torch, compiled) = (peer("torch eager graph")?, peer("torch.compile graph")?);
        let ours = ours.number("median_us")?;
        Ok(Some(Op { name: name.into(), shape: shape.into(), direction: direction.into(), torch, compiled, ours }))
    }

    /// Above one, we are faster than the best peer.
    pub fn ratio(&self) -> f64 {
        self.torch.min(self.compiled) / self.ours
    }

    pub fn title(&self) -> String {
        let both = if self.direction == "forward" { "" } else { ", forward and backward" };
        format!("{}{both}", title(&self.name))
    }
}

pub fn ops(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "h200.csv")?;
    let mut table = Table::new(["op", "shape", "torch eager", "torch.compile", "ours", "over the best"]);
    for op in Op::all(&rows)?.iter().filter(|op| SHAPES.contains(&op.shape.as_str())) {
        let [torch, compiled, ours] = [op.torch, op.compiled, op.ours].map(three);
        table.row([op.title(), op.shape.clone(), torch, compiled, ours, times(op.ratio())]);
    }
    Ok(table.end())
}

/// Where a peer is faster, worst first.
pub fn losses(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "h200.csv")?;
    let all = Op::all(&rows)?;
    let mut lost: Vec<&Op> = all.iter().filter(|op| op.ratio() < 1.0).collect();
    lost.sort_by(|a, b| a.ratio().total_cmp(&b.ratio()));
    let mut table = Table::new(["op", "shape", "best of torch", "ours", "over the best"]);
    for op in &lost {
        table.row([op.title(), op.shape.clone(), three(op.torch.min(op.compiled)), three(op.ours), times(op.ratio())]);
    }
    Ok(format!(
        "A peer is faster in {} of {} rows of that file, worst first:\n\n{}",
        lost.len(),
        all.len(),
        table.end()
    ))
}

/// Six rows for the first page, one of them a loss.
pub fn summary(root: &Path) -> Result<String> {
    let mut table = Table::new(["", "torch", "torch.compile", "ours", ""]);
    let mut add = |label: String, torch: f64, compiled: f64, ours: f64, ratio: f64| {
        table.row([label, three(torch), three(compiled), three(ours), times(ratio)]);
    };
    let ops = Op::all(&Rows::read(root, "h200.csv")?)?;
    for (name, link) in [("norm_act", " ([rows](bench/results/h200.csv))"), ("add_norm", "")] {
        let op = ops.iter().find(|op| op.name == name && op.shape == SHAPES[0] && op.direction == "forward");
        let op = op.with_context(|| format!("h200.csv has no {name}"))?;
        add(format!("{}, {}, us{link}", op.title(), op.shape), op.torch, op.compiled, op.ours, op.ratio());
    }
    let rows = Rows::read(root, "h200-launches-peers.csv")?;
    let (torch, compiled, _, one) = launch(&rows, "attention_add_norm", "8", "1024")?;
    let label =
        "attention + residual + LayerNorm, eight sequences of 1024, us ([rows](bench/results/h200-launches-peers.csv))";
    add(label.into(), torch, compiled, one, torch.min(compiled) / one);
    let rows = Rows::read(root, "h200-gpt2-peers.csv")?;
    let link = " ([rows](bench/results/h200-gpt2-peers.csv))";
    for (phase, words, link) in [("prefill", "prompt of 1024", link), ("decode", "one token", "")] {
        let row = rows.newest(&[("weights", "bf16"), ("phase", phase), ("batch", "1")])?;
        let [torch, compiled, ours] = ["torch_ms", "torch.compile_ms", "deuteron_ms"].map(|column| row.number(column));
        // Of times before they were rounded to the digits of the row.
        let ratio = row.number("best_peer_over_ours")?;
        add(format!("GPT-2 124M, {words}, ms{link}"), torch?, compiled?, ours?, ratio);
    }
    let rows = Rows::read(root, "h200-python-peers.csv")?;
    let [torch, compiled, ours] = ["torch", "torch.compile", "ours"]
        .map(|who| rows.newest(&[("what", "GPT-2 forward, 8 x 1024"), ("contender", who)])?.number("value"));
    let link = "([rows](bench/results/h200-python-peers.csv))";
    let label = format!("GPT-2 124M of Hugging Face from Python, eight sequences, ms, no graphs {link}");
    let (torch, compiled, ours) = (torch?, compiled?, ours?);
    add(label, torch, compiled, ours, torch.min(compiled) / ours);
    Ok(table.end())
}

/// What `ncu` counted beside what was predicted. The bounds are those of `bench/ncu_table.py`: what is smaller stays in the L2 cache.
pub fn counters(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "h200-ncu.csv")?;
    let deviation = |measured: &str, predicted: &str, least: f64| -> Result<f64> {
        let mut values = Vec::new();
        for row in rows.all() {
            let (measured, predicted) = (row.number(measured)?, row.number(predicted)?);
            if measured > least && predicted > least {
                values.push((predicted / measured - 1.0).abs());
            }
        }
        median(values)
    };
    Ok(format!(
        "Beside `ncu`, over {} kernels, predictions are off by {:.1} % (median) for bytes read, {:.1} % for bytes written by kernels that write more \
         than 1 GiB, and {:.1} % for time ([rows](../bench/results/h200-ncu.csv), `python3 bench/ncu_table.py`).\n",
        rows.all().count(),
        deviation("read_bytes", "predicted_read", f64::from(1 << 20))? * 100.0,
        deviation("written_bytes", "predicted_written", f64::from(1 << 30))? * 100.0,
        deviation("time_us", "predicted_us", 0.0)? * 100.0
    ))
}

pub fn gpt2(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "h200-gpt2-peers.csv")?;
    let mut table = Table::new(["", "torch", "torch.compile", "ours", "over the best", "ours, int8 weights"]);
    for (phase, batch, words) in [
        ("prefill", "1", "prompt of 1024"),
        ("prefill", "8", "eight of them"),
        ("decode", "1", "token after 128"),
        ("decode", "8", "one token for each of eight"),
    ] {
        let of = |weights: &str| rows.newest(&[("weights", weights), ("phase", phase), ("batch", batch)]);
        let row = of("bf16")?;
        let ms = |column: &str| row.number(column).map(three);
        let ratio = times(row.number("best_peer_over_ours")?);
        // Bytes have no peer on a GPU, and not every run measured them.
        let bytes = of("int8").ok().map(|row| row.number("deuteron_ms")).transpose()?;
        table.row([words.into(), ms("torch_ms")?, ms("torch.compile_ms")?, ms("deuteron_ms")?, ratio, maybe(bytes)]);
    }
    Ok(table.end())
}

/// Calls from Python, and the host's part of them.
pub fn python(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "h200-python-peers.csv")?;
    let value = |what: &str, who: &str| rows.newest(&[("what", what), ("contender", who)])?.number("value");
    let mut table = Table::new(["", "unit", "torch", "torch.compile", "ours", "over the best"]);
    for row in rows.of(&[("contender", "ours")]) {
        let what = row.text("what")?;
        let (torch, ours) = (value(what, "torch")?, row.number("value")?);
        let compiled = value(what, "torch.compile").ok();
        let best = least(compiled.into_iter().chain([torch]));
        let compiled = compiled.map(three).unwrap_or_default();
        table.row([what.into(), row.text("unit")?.into(), three(torch), compiled, three(ours), times(best / ours)]);
    }
    let (plain, autograd) = ("host time of a call", "host time of a call with autograd");
    let overhead = Rows::read(root, "h200-overhead.csv")?;
    Ok(format!(
        "{}\nThe host's part of a call is {} us with one operand, {} us for LayerNorm + GELU and {} us with autograd; torch's `layer_norm` alone \
         takes {} us and {} us. A bare launch takes {} us ([row](../bench/results/h200-overhead.csv)).\n",
        table.end(),
        three(value(plain, "act, one operand")?),
        three(value(plain, "norm_act")?),
        three(value(autograd, "norm_act")?),
        three(value(plain, "torch layer_norm")?),
        three(value(autograd, "torch layer_norm")?),
        three(overhead.newest(&[])?.number("bare_launch_us")?)
    ))
}

/// Attention and its gradient.
pub fn attention(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "h200-attention-peers.csv")?;
    let header = [
        "sequences x heads x positions x features",
        "flash",
        "cuDNN",
        "ours",
        "over the best",
        "gradient: flash",
        "cuDNN",
        "ours",
        "over the best",
    ];
    let mut table = Table::new(header);
    for forward in rows.of(&[("direction", "forward")]) {
        let sizes =
            ["batch", "heads", "positions", "width"].map(|column| (column, forward.text(column).unwrap_or_default()));
        let backward = rows.newest(&[&[("direction", "backward")], &sizes[..]].concat())?;
        let ([a, b, c, d], [e, f, g, h]) = (beside_torch(forward)?, beside_torch(backward)?);
        table.row([sizes.map(|(_, size)| size).join(" x "), a, b, c, d, e, f, g, h]);
    }
    Ok(table.end())
}

/// Times of torch's two kernels and of ours, and how many times as fast as the faster of theirs ours is.
fn beside_torch(row: Row<'_>) -> Result<[String; 4]> {
    let (flash, cudnn, ours) = (row.number("flash_us")?, row.number("cudnn_us")?, row.number("us")?);
    Ok([three(flash), three(cudnn), three(ours), times(flash.min(cudnn) / ours)])
}

/// Attention of heads that share keys and of other widths, alone and with its gradient.
pub fn heads(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "h200-heads.csv")?;
    let header = [
        "sequences x heads x positions x features",
        "heads of keys",
        "mask",
        "flash",
        "cuDNN",
        "ours",
        "over the best",
        "with gradient: flash",
        "cuDNN",
        "ours",
        "over the best",
    ];
    let mut table = Table::new(header);
    for forward in rows.of(&[("direction", "forward")]) {
        let sizes = ["batch", "heads", "positions", "width", "key_heads", "causal"]
            .map(|column| (column, forward.text(column).unwrap_or_default()));
        let both = rows.newest(&[&[("direction", "forward and gradient")], &sizes[..]].concat())?;
        let ([a, b, c, d], [e, f, g, h]) = (beside_torch(forward)?, beside_torch(both)?);
        let [shape @ .., (_, key_heads), (_, causal)] = sizes;
        let mask = if causal == "True" { "causal" } else { "none" };
        table.row([shape.map(|(_, size)| size).join(" x "), key_heads.into(), mask.into(), a, b, c, d, e, f, g, h]);
    }
    Ok(table.end())
}

/// Times of torch, torch.compile, ours apart and ours in one launch.
fn launch(rows: &Rows, op: &str, batch: &str, positions: &str) -> Result<(f64, f64, f64, f64)> {
    let of = |contender: &str| {
        rows.newest(&[("op", op), ("batch", batch), ("positions", positions), ("contender", contender)])?.number("us")
    };
    let apart = if op == "attention_add_norm" { "ours 2 launches" } else { "ours 3 launches" };
    let torch = of("torch eager flash")?.min(of("torch eager cuDNN")?);
    Ok((torch, of("torch.compile cuDNN")?, of(apart)?, of("ours one launch")?))
}

/// Both ops that continue after attention.
pub fn all_launches(root: &Path) -> Result<String> {
    launches(root, &["attention_add_norm", "attention_block"])
}

pub fn launches(root: &Path, ops: &[&str]) -> Result<String> {
    let rows = Rows::read(root, "h200-launches-peers.csv")?;
    let mut table =
        Table::new(["", "sequences", "torch", "torch.compile", "ours, apart", "one launch", "over torch.compile"]);
    for &op in ops {
        let words =
            if op == "attention_block" { "with the output projection" } else { "attention, residual, LayerNorm" };
        for (batch, positions) in [("1", "1024"), ("8", "1024"), ("32", "1024"), ("4", "4096")] {
            let (torch, compiled, apart, one) = launch(&rows, op, batch, positions)?;
            let [torch, other, apart, ours] = [torch, compiled, apart, one].map(three);
            table.row([
                words.into(),
                format!("{batch} x {positions}"),
                torch,
                other,
                apart,
                ours,
                times(compiled / one),
            ]);
        }
    }
    Ok(table.end())
}

/// When one launch is better than several, and what it saves in memory traffic.
pub fn crossover(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "h200-crossover.csv")?;
    let outcome = |op: &str| -> Result<(usize, usize, f64, f64)> {
        let (mut wins, mut count, mut worst, mut best) = (0, 0, 0.0_f64, 0.0_f64);
        for row in rows.all().filter(|row| row.text("op").is_ok_and(|name| name == op)) {
            let over = row.number("one_us")? / row.number("apart_us")? - 1.0;
            (wins, count) = (wins + usize::from(over < 0.0), count + 1);
            (worst, best) = (worst.max(over), best.max(-over));
        }
        Ok((wins, count, worst, best))
    };
    let (wins, count, worst, _) = outcome("attention_add_norm")?;
    let (projected, projections, _, best) = outcome("attention_block")?;
    let traffic = Rows::read(root, "h200-launches-ncu.csv")?;
    let megabytes = |plan: &str| -> Result<f64> {
        let row =
            traffic.newest(&[("op", "attention_add_norm"), ("batch", "8"), ("caches", "cold"), ("plan", plan)])?;
        Ok((row.number("read_bytes")? + row.number("written_bytes")?) / 1e6)
    };
    Ok(format!(
        "Residual and norm are faster in the launch of their attention at {wins} of {count} sizes, and at most {} slower at the others. With the \
         projection one launch is faster at {projected} of {projections} sizes, by at most {}, so the planner keeps the projection separate; `attention_block` \
         has it in one launch. Eight sequences of 1024 move {:.0} MB from and to memory in one launch, {:.0} MB with one kernel per step \
         ([rows](../bench/results/h200-launches-ncu.csv), by `ncu`).\n",
        percent(worst),
        percent(best),
        megabytes("fused")?,
        megabytes("eager")?
    ))
}

/// One token for each of many sequences: reading keys and values is all there is to do.
pub fn decode(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "h200-attention.csv")?;
    let row = rows.newest(&[("dtype", "bf16"), ("batch", "64"), ("queries", "1"), ("keys", "1024")])?;
    let sizes = ["batch", "heads", "keys", "head"].map(|column| row.number(column));
    let bytes = sizes.into_iter().product::<Result<f64>>()? * 4.0;
    let us = row.number("us")?;
    Ok(format!(
        "One token for each of {} sequences of {} reads {:.0} MB of keys and values in {} us: {} TB/s \
         ([row](../bench/results/h200-attention.csv), with the command).\n",
        row.text("batch")?,
        row.text("keys")?,
        bytes / 1e6,
        three(us),
        three(bytes / us / 1e6)
    ))
}
