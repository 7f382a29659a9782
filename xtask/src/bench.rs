//! Measures the bars of the catalogue with the release binary and appends a row per case to `bench/results/NAME-fusion.csv`; and the
//! ladders of a CPU, a row per rung in `bench/results/NAME-ladder.csv`, those of a matmul in `bench/results/NAME-matmul-ladder.csv`.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{printed, succeed};

const HEADER: &str = "date,commit,machine,kernel,shape,dtype,direction,variant,baseline,median_us,baseline_us,speedup,\
bytes,gbps,copy_gbps,fraction_of_copy,device";

/// (ops, size arguments, least speed-up over unfused): the sizes at which the arrays pass the caches, and one inside them.
const CASES: [(&[&str], &[&str], &[f64]); 4] = [
    (&["add_act", "act_dropout_add"], &["--elements", "100000000"], &[1.5, 1.8]),
    (&["norm_act", "add_norm", "norm_quantize"], &["--rows", "65536", "--cols", "768"], &[1.6, 1.5, 2.0]),
    (&["act", "layer_norm", "rms_norm", "softmax", "swiglu"], &["--rows", "65536", "--cols", "768"], &[0.0; 5]),
    (
        &["add_act", "act_dropout_add", "norm_act", "add_norm", "norm_quantize", "bias_act", "swiglu"],
        &["--rows", "1024", "--cols", "768"],
        &[1.0; 7],
    ),
];

const LADDER_HEADER: &str = "date,commit,machine,op,rows,cols,dtype,rung,about,kernels,us,speedup,gbps,copy_gbps,fraction_of_copy,worst_ratio,device";

/// (ops, size arguments): tensors of 201 MB each for row work, one sequence for attention.
const LADDERS: [(&[&str], &[&str]); 2] = [
    (&["add_act", "norm_act", "softmax"], &["--rows", "65536", "--cols", "768", "--dtype", "f32"]),
    (&["attention", "attention_add_norm"], &["--rows", "1024", "--cols", "768", "--dtype", "f32"]),
];

const MATMUL_HEADER: &str =
    "date,commit,machine,rows,inner,columns,dtype,rung,about,variant,us,tflops,speedup,worst_ratio,device";

/// The sizes of the ladder of a matmul: the first linear layer of a feed-forward network of GPT-2.
const MATMUL: [&str; 8] = ["--ladder", "--device", "cpu", "--rows", "256", "--weights", "768x3072", "--dtype=f32"];

/// Appends the ladders of a CPU.
pub fn ladders(machine: &str) -> Result<()> {
    prepare(machine)?;
    let mut lines = String::new();
    for rung in bench("matmul", &MATMUL)?.as_array().context("a ladder is an array")? {
        writeln!(lines, "{}", matmul_csv(machine, rung)?)?;
        let us = rung["us"].as_f64().unwrap_or(0.0);
        println!("{:<20} {:<18} {us:>12.1} us", "matmul", text(rung, "rung"));
    }
    append(&format!("{machine}-matmul-ladder.csv"), MATMUL_HEADER, &lines)?;
    lines.clear();
    for (ops, size) in LADDERS {
        for op in ops {
            let rungs = bench(op, &[&["--ladder", "--device", "cpu"], size].concat())?;
            for rung in rungs.as_array().context("a ladder is an array")? {
                writeln!(lines, "{}", ladder_csv(machine, rung)?)?;
                let us = rung["us"].as_f64().unwrap_or(0.0);
                println!("{:<20} {:<18} {us:>12.1} us", text(rung, "op"), text(rung, "rung"));
            }
        }
    }
    append(&format!("{machine}-ladder.csv"), LADDER_HEADER, &lines)
}

/// Checks a machine's name and builds what measures.
fn prepare(machine: &str) -> Result<()> {
    if machine.is_empty() || !machine.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') {
        bail!("a machine's name has letters, digits, `-` and `_`, got `{machine}`");
    }
    succeed(Command::new("cargo").args(["build", "--release", "--quiet"]), "the release build")
}

pub fn run(machine: &str) -> Result<()> {
    prepare(machine)?;
    let mut lines = String::new();
    let mut missed = Vec::new();
    for (ops, size, bars) in CASES {
        for (op, bar) in ops.iter().zip(bars) {
            let row = measure(op, size)?;
            missed.extend(judge(&row, *bar));
            writeln!(lines, "{}", csv(machine, &row)?)?;
            println!("{}", summary(&row));
        }
    }
    append(&format!("{machine}-fusion.csv"), HEADER, &lines)?;
    for miss in &missed {
        println!("missed: {miss}");
    }
    if missed.is_empty() { Ok(()) } else { bail!("{} bars missed", missed.len()) }
}

fn measure(op: &str, size: &[&str]) -> Result<Value> {
    bench(op, size)?.get(0).cloned().context("bench printed no row")
}

/// What `deuteron bench` prints with `--json`.
fn bench(op: &str, words: &[&str]) -> Result<Value> {
    let output = Command::new("target/release/deuteron").args(["bench", op, "--json"]).args(words).output()?;
    if !output.status.success() {
        bail!("bench {op}: {}", String::from_utf8_lossy(&output.stderr));
    }
    serde_json::from_slice(&output.stdout).context("bench printed no JSON")
}

/// The bars that a row misses. Dropout is bound by its random numbers, not by memory, so it is not held to the copy.
fn judge(row: &Value, least_speedup: f64) -> Vec<String> {
    let name = format!("{} {}x{}", row["op"], row["rows"], row["cols"]).replace('"', "");
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let mut missed = Vec::new();
    let speedup = number(&row["speedup"]);
    if speedup < least_speedup {
        missed.push(format!("{name}: {speedup:.2}x unfused, bar {least_speedup}x"));
    }
    if number(&row["rows"]) < 65536.0 {
        return missed;
    }
    let kernels = row["unfused_kernels"].as_array().cloned().unwrap_or_default();
    let fused = (name.clone(), number(&row["fraction_of_copy"]));
    let each = kernels.iter().map(|k| (format!("{name}, unfused {}", k["name"]), number(&k["fraction_of_copy"])));
    for (kernel, fraction) in [fused].into_iter().chain(each) {
        if fraction < 0.8 && !kernel.contains("dropout") {
            missed.push(format!("{kernel}: {:.0} % of copy, bar 80 %", 100.0 * fraction));
        }
    }
    missed
}

fn summary(row: &Value) -> String {
    let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
    let kernels = row["unfused_kernels"].as_array().cloned().unwrap_or_default();
    let fractions: Vec<String> = kernels
        .iter()
        .map(|k| format!("{} {:.0} %", k["name"], 100.0 * k["fraction_of_copy"].as_f64().unwrap_or(0.0)))
        .collect();
    format!(
        "{:<18} {:>7}x{:<5} fused {:>10.0} us  {:.2}x unfused  {:>3.0} % of copy  [unfused: {}]",
        row["op"].as_str().unwrap_or(""),
        row["rows"],
        row["cols"],
        number("fused_us"),
        number("speedup"),
        100.0 * number("fraction_of_copy"),
        fractions.join(", ").replace('"', ""),
    )
}

/// A value as a cell.
fn text(row: &Value, key: &str) -> String {
    let text = row[key].to_string().replace('"', "");
    if text.contains(',') { format!("\"{text}\"") } else { text }
}

fn fixed(row: &Value, key: &str) -> String {
    format!("{:.3}", row[key].as_f64().unwrap_or(0.0))
}

/// Date and commit.
fn stamp() -> Result<[String; 2]> {
    let commit = printed(Command::new("git").args(["rev-parse", "--short", "HEAD"]))?;
    Ok([printed(Command::new("date").arg("+%Y-%m-%d"))?, commit])
}

fn ladder_csv(machine: &str, rung: &Value) -> Result<String> {
    let mut cells = stamp()?.to_vec();
    cells.push(machine.to_string());
    cells.extend(["op", "rows", "cols", "dtype", "rung", "about", "kernels"].map(|key| text(rung, key)));
    cells.extend(["us", "speedup", "gbps", "copy_gbps", "fraction_of_copy", "worst_ratio"].map(|key| fixed(rung, key)));
    cells.push(text(rung, "device"));
    Ok(cells.join(","))
}

fn matmul_csv(machine: &str, rung: &Value) -> Result<String> {
    let mut cells = stamp()?.to_vec();
    cells.push(machine.to_string());
    let texts = ["rows", "inner", "columns", "dtype", "rung", "about", "variant"];
    cells.extend(texts.map(|key| text(rung, key)));
    cells.push(fixed(rung, "us"));
    cells.push(format!("{:.5}", rung["tflops"].as_f64().unwrap_or(0.0)));
    cells.extend(["speedup", "worst_ratio"].map(|key| fixed(rung, key)));
    cells.push(text(rung, "device"));
    Ok(cells.join(","))
}

fn csv(machine: &str, row: &Value) -> Result<String> {
    let (text, fixed) = (|key: &str| text(row, key), |key: &str| fixed(row, key));
    let [date, commit] = stamp()?;
    let shape = format!("{}x{}", text("rows"), text("cols"));
    let cells = [
        date,
        commit,
        machine.to_string(),
        text("op"),
        shape,
        text("dtype"),
        text("direction"),
        "fused".into(),
        "unfused".into(),
        fixed("fused_us"),
        fixed("unfused_us"),
        fixed("speedup"),
        text("bytes_fused"),
        fixed("gbps"),
        fixed("copy_gbps"),
        fixed("fraction_of_copy"),
        text("device"),
    ];
    Ok(cells.join(","))
}

fn append(file: &str, header: &str, lines: &str) -> Result<()> {
    let path = Path::new("bench/results").join(file);
    let before = std::fs::read_to_string(&path).unwrap_or_else(|_| format!("{header}\n"));
    std::fs::write(&path, before + lines).with_context(|| path.display().to_string())?;
    println!("appended to {}", path.display());
    Ok(())
}
