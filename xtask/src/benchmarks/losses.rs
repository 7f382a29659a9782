//! Where other systems are faster than ours: the worst ratios of every file of rows with peers.

use std::path::Path;

use anyhow::Result;

use super::cpu;
use super::gpu::Op;
use super::rows::{Row, Rows, Table, three, times};

/// Rows of a file that are shown.
const SHOWN: usize = 2;

/// What was measured beside a peer, in one unit.
struct Case {
    what: String,
    best: f64,
    peer: String,
    ours: f64,
}

impl Case {
    fn ratio(&self) -> f64 {
        self.best / self.ours
    }

    /// The fastest of some peers; those that were not measured have no time.
    fn new(what: String, ours: f64, peers: &[(&str, Option<f64>)]) -> Option<Case> {
        let measured = peers.iter().filter_map(|&(peer, time)| Some((peer, time?)));
        let (peer, best) = measured.min_by(|a, b| a.1.total_cmp(&b.1))?;
        Some(Case { what, best, peer: peer.into(), ours })
    }
}

/// A file, and the cases that it has.
type File = (&'static str, fn(&Path) -> Result<Vec<Case>>);

const FILES: [File; 9] = [
    ("h200.csv", ops),
    ("h200-matmul.csv", matmuls),
    ("h200-layers.csv", layers),
    ("h200-experts.csv", experts),
    ("h200-experts-int8.csv", experts_int8),
    ("h200-attention-peers.csv", attention),
    ("h200-heads.csv", heads),
    ("xeon-2core.csv", cpu_ops),
    ("xeon-2core-gpt2-peers.csv", cpu_gpt2),
];

/// The worst ratios of each file, where they are below one.
pub fn worst(root: &Path) -> Result<String> {
    let mut table = Table::new(["case", "best peer", "ours", "ours over it", "rows"]);
    for (file, cases) in FILES {
        let mut lost: Vec<Case> = cases(root)?.into_iter().filter(|case| case.ratio() < 1.0).collect();
        lost.sort_by(|a, b| a.ratio().total_cmp(&b.ratio()));
        for case in lost.iter().take(SHOWN) {
            table.row([
                case.what.clone(),
                format!("{}, {}", three(case.best), case.peer),
                three(case.ours),
                times(case.ratio()),
                format!("[{file}](../../../bench/results/{file})"),
            ]);
        }
    }
    Ok(table.end())
}

fn ops(root: &Path) -> Result<Vec<Case>> {
    let rows = Rows::read(root, "h200.csv")?;
    let case = |op: &Op| {
        let peers = [("torch", Some(op.torch)), ("torch.compile", Some(op.compiled))];
        Case::new(format!("{}, {}, us", op.title(), op.shape), op.ours, &peers)
    };
    Ok(Op::all(&rows)?.iter().filter_map(case).collect())
}

fn matmuls(root: &Path) -> Result<Vec<Case>> {
    let rows = Rows::read(root, "h200-matmul.csv")?;
    let case = |row: Row<'_>| {
        let [rows, inner, columns, epilogue] =
            [row.text("rows")?, row.text("inner")?, row.text("columns")?, row.text("epilogue")?];
        let what = format!("matmul of {rows} rows, {inner} to {columns}, epilogue: {epilogue}, us");
        let peers = [
            ("cuBLASLt", row.measured("library_us")?),
            ("torch", row.measured("torch_us")?),
            ("torch.compile", row.measured("compile_us")?),
        ];
        Ok(Case::new(what, row.number("kernel_us")?, &peers))
    };
    collected(rows.all().map(case))
}

fn experts(root: &Path) -> Result<Vec<Case>> {
    let rows = Rows::read(root, "h200-experts.csv")?;
    let case = |row: Row<'_>| {
        let what =
            format!("experts of 4096 to 4096, {} of them, rows: {}, us", row.text("experts")?, row.text("rows")?);
        let peers = [("torch, expert by expert", row.measured("loop_us")?), ("Triton", row.measured("triton_us")?)];
        Ok(Case::new(what, row.number("moe_us")?, &peers))
    };
    collected(rows.all().map(case))
}

fn experts_int8(root: &Path) -> Result<Vec<Case>> {
    let file = "h200-experts-int8.csv";
    if !Rows::exists(root, file) {
        return Ok(Vec::new());
    }
    let rows = Rows::read(root, file)?;
    let case = |row: Row<'_>| {
        let what =
            format!("experts of 4096 to 4096, int8, {} of them, rows: {}, us", row.text("experts")?, row.text("rows")?);
        Ok(Case::new(what, row.number("bf16_us")?, &[("Triton", row.measured("triton_us")?)]))
    };
    collected(rows.latest(&["experts", "rows"])?.into_iter().map(case))
}

fn layers(root: &Path) -> Result<Vec<Case>> {
    let rows = Rows::read(root, "h200-layers.csv")?;
    let case = |row: Row<'_>| {
        let [layer, rows, inner, columns] = ["layer", "rows", "inner", "columns"].map(|column| row.text(column));
        let what = format!("{} of {} rows, {} to {}, us", layer?, rows?, inner?, columns?);
        let peers = [("torch", row.measured("torch_us")?), ("torch.compile", row.measured("compile_us")?)];
        Ok(Case::new(what, row.number("ours_us")?, &peers))
    };
    collected(rows.latest(&["layer", "rows", "inner", "columns", "dtype"])?.into_iter().map(case))
}

fn attention(root: &Path) -> Result<Vec<Case>> {
    attention_of(root, "h200-attention-peers.csv", |_| Ok(String::new()))
}

fn heads(root: &Path) -> Result<Vec<Case>> {
    attention_of(root, "h200-heads.csv", |row| {
        let mask = if row.text("causal")? == "True" { "" } else { ", no mask" };
        Ok(format!(", {} heads of keys{mask}", row.text("key_heads")?))
    })
}

fn attention_of(root: &Path, file: &str, more: fn(Row<'_>) -> Result<String>) -> Result<Vec<Case>> {
    let rows = Rows::read(root, file)?;
    let case = |row: Row<'_>| {
        let direction = match row.text("direction")? {
            "forward" => "",
            "backward" => ", gradient",
            _ => " with gradient",
        };
        let [batch, heads, positions, width] =
            [row.text("batch")?, row.text("heads")?, row.text("positions")?, row.text("width")?];
        let what = format!("attention{direction}, {batch} x {heads} x {positions} x {width}{}, us", more(row)?);
        let peers = [("flash", row.measured("flash_us")?), ("cuDNN", row.measured("cudnn_us")?)];
        Ok(Case::new(what, row.number("us")?, &peers))
    };
    collected(rows.all().map(case))
}

fn cpu_ops(root: &Path) -> Result<Vec<Case>> {
    let rows = Rows::read(root, "xeon-2core.csv")?;
    let case = |ours: Row<'_>| {
        let (op, shape, baseline) = (ours.text("kernel")?, ours.text("shape")?, ours.text("baseline")?);
        let best = rows.newest(&[("kernel", op), ("shape", shape), ("variant", baseline)])?.number("median_ms")?;
        let what = format!("{} on a CPU, {shape}, ms", cpu::title(op));
        Ok(Case::new(what, ours.number("median_ms")?, &[(baseline, Some(best))]))
    };
    let latest = rows.latest(&["kernel", "shape", "variant"])?;
    let ours = latest.into_iter().filter(|row| row.text("variant").is_ok_and(|variant| variant == "deuteron"));
    collected(ours.map(case))
}

fn cpu_gpt2(root: &Path) -> Result<Vec<Case>> {
    let rows = Rows::read(root, "xeon-2core-gpt2-peers.csv")?;
    let mut cases = Vec::new();
    for weights in ["f32", "bf16", "int8"] {
        for (phase, context, words) in
            [("prefill", "0", "prompt"), ("decode", "128", "token after 128"), ("decode", "1000", "token after 1000")]
        {
            let row = rows.newest(&[("weights", weights), ("phase", phase), ("context", context)])?;
            let peers = [
                ("torch", row.measured("torch_ms")?),
                ("torch.compile", row.measured("torch.compile_ms")?),
                ("ONNX Runtime", row.measured("onnxruntime_ms")?),
                ("llama.cpp", row.measured("llama.cpp_ms")?),
                ("CTranslate2", row.measured("ctranslate2_ms")?),
            ];
            cases.extend(Case::new(
                format!("GPT-2 on a CPU, {weights}, {words}, ms"),
                row.number("deuteron_ms")?,
                &peers,
            ));
        }
    }
    Ok(cases)
}

fn collected(cases: impl Iterator<Item = Result<Option<Case>>>) -> Result<Vec<Case>> {
    cases.filter_map(Result::transpose).collect()
}
