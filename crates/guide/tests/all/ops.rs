//! One page of the guide per op of the catalogue, made from the catalogue, the planner and the sources of both languages.
//!
//! `DEUTERON_BLESS=1 cargo test -p deuteron-guide --test all ops` writes them anew; then `cargo xtask benchmarks` fills in what is measured.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use deuteron::cuda::{Arch, CudaCatalog};
use deuteron::{Dtype, Error, FusedOp, Graph, Machine, Strategy, Target, plan};

/// The size of the example: eight sequences of GPT-2.
const ROWS: usize = 8192;
const COLS: usize = 768;

/// Characters of the longest bar.
const BAR: u64 = 48;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Kernels and bytes of a graph on an H200.
fn planned(graph: &Graph, strategy: Strategy) -> (usize, u64) {
    let machine = Machine::profile("h200").unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
    let plan = plan(graph, target, strategy, &[]).unwrap();
    (plan.groups.len(), plan.bytes().0)
}

/// The traffic of plans as bars, which the book draws.
fn traffic(graph: &Graph, plans: &[(&str, Strategy)]) -> String {
    let planned: Vec<(&str, (usize, u64))> =
        plans.iter().map(|(name, strategy)| (*name, planned(graph, *strategy))).collect();
    let most = planned.iter().map(|(_, (_, bytes))| *bytes).max().unwrap().max(1);
    let mut out = String::from("```text,bars\n");
    for (name, (kernels, bytes)) in planned {
        let bar = "#".repeat((bytes * BAR).div_ceil(most) as usize);
        let word = if kernels == 1 { "kernel" } else { "kernels" };
        writeln!(out, "{name:8} {kernels:3} {word:7} {:8.1} MB {bar}", bytes as f64 / 1e6).unwrap();
    }
    out + "```\n"
}

/// What an attribute takes: the words of the error that refuses another.
fn values(op: &FusedOp, attribute: &str) -> String {
    match format!("{} {attribute}=?", op.name()).parse::<FusedOp>() {
        Err(Error::Operands { expected, .. }) => expected,
        other => panic!("{attribute} of {op:?}: {other:?}"),
    }
}

/// The signature of a Rust function, and the example in its comment, which is a test.
fn rust(sources: &str, name: &str) -> (String, String) {
    let start = sources.find(&format!("\npub fn {name}(")).unwrap_or_else(|| panic!("ops has no {name}")) + 1;
    let end = start + sources[start..].find(" {\n").unwrap();
    let (_, comment) = sources[..start].rsplit_once("\n\n").unwrap();
    let (_, example) = comment.split_once("/// ```\n").unwrap_or_else(|| panic!("{name} has no example"));
    let lines = example.lines().filter_map(|line| line.strip_prefix("/// "));
    let shown: Vec<&str> = lines.filter(|line| !line.starts_with("# ") && *line != "```").collect();
    (sources[start..end].to_string(), shown.join("\n"))
}

/// The call that computes an op's gradients from Rust, by the inputs of its graph.
fn gradients(op: &FusedOp, backward: &Graph) -> String {
    let operands = op.operands();
    let inputs: Vec<String> = backward.inputs().iter().map(|&id| backward.label(id)).collect();
    let others = || inputs.iter().filter(|name| !operands.contains(&name.as_str()));
    let saved = others().filter(|name| !name.starts_with("d_")).map(|name| format!("(\"{name}\", &{name})"));
    let incoming = others().filter_map(|name| Some(format!("(\"{}\", &{name})", name.strip_prefix("d_")?)));
    let given: Vec<String> = operands.iter().map(|name| format!("&{name}")).collect();
    let results: Vec<&str> = backward.outputs().iter().map(|output| output.name.trim_start_matches("d_")).collect();
    let name = op.name();
    format!(
        "let op: FusedOp = \"{name}\".parse()?;\n// of {}\nlet gradients = ops::backward(&engine, &op, &[{}], &[{}], &[{}])?;",
        results.join(", "),
        given.join(", "),
        saved.collect::<Vec<_>>().join(", "),
        incoming.collect::<Vec<_>>().join(", ")
    )
}

/// The signature of a Python function, and what it says of itself.
fn python(source: &str, name: &str) -> (String, String) {
    let start = source.find(&format!("\ndef {name}(")).unwrap_or_else(|| panic!("functions.py has no {name}")) + 1;
    let (signature, rest) = source[start..].split_once(":\n    \"\"\"").unwrap();
    let text = rest.split_once("\"\"\"").unwrap().0;
    (
        signature.to_string(),
        text.lines().map(|line| line.strip_prefix("    ").unwrap_or(line).trim_end().to_string() + "\n").collect(),
    )
}

fn page(op: &FusedOp, sources: &str, functions: &str) -> String {
    let name = op.name();
    let types = op.operand_types(ROWS, COLS, Dtype::Bf16);
    let graph = op.graph(&types).unwrap();
    let mut out = format!("# `{name}`\n\n```text\n{}\n```\n\n", op.formula());
    writeln!(out, "| operand | {ROWS} rows of {COLS}, bf16 |\n|---|---|").unwrap();
    for (operand, (dtype, shape)) in op.operands().iter().zip(&types) {
        writeln!(out, "| `{operand}` | `{}{shape}` |", dtype.name()).unwrap();
    }
    let outputs: Vec<String> = op.outputs().iter().map(|output| format!("`{output}`")).collect();
    writeln!(out, "\nResults: {}.\n", outputs.join(", ")).unwrap();
    if !op.attribute_names().is_empty() {
        out.push_str("| attribute | values |\n|---|---|\n");
        for attribute in op.attribute_names() {
            writeln!(out, "| `{attribute}` | {} |", values(op, attribute)).unwrap();
        }
        out.push('\n');
    }
    let strategies = [("eager", Strategy::Eager), ("unfused", Strategy::Unfused), ("op", Strategy::Greedy)];
    writeln!(
        out,
        "## Traffic\n\nPredicted bytes read and written on an H200 at that size. `eager` is what textbook code runs, `unfused` one kernel per call, `op` the plan of this op:\n\n{}",
        traffic(&graph, &strategies)
    )
    .unwrap();
    let backward = match op.backward_graph(&types) {
        Ok(backward) => Some(backward),
        Err(Error::NoBackward(_)) => None,
        Err(error) => panic!("{name}: {error}"),
    };
    match &backward {
        Some(backward) => writeln!(out, "Its gradient:\n\n{}", traffic(backward, &strategies)).unwrap(),
        None => out.push_str("It has no gradient.\n\n"),
    }
    let (signature, says) = python(functions, name);
    let (declared, example) = rust(sources, name);
    writeln!(out, "## Rust\n\n`deuteron::ops::{name}`:\n\n```text\n{declared}\n```\n\n```text\n{example}\n```\n")
        .unwrap();
    if let Some(backward) = &backward {
        writeln!(out, "Its gradient:\n\n```text\n{}\n```\n", gradients(op, backward)).unwrap();
    }
    writeln!(out, "## Python\n\n```text\n{signature}\n```\n").unwrap();
    let (prose, example) = says.split_once("\n>>> ").unwrap();
    writeln!(out, "{}\n\n```text\n>>> {}\n```\n", prose.trim_end(), example.trim_end()).unwrap();
    write!(out, "## Measured\n\n<!-- rows op {name} -->\n<!-- end -->\n\n").unwrap();
    writeln!(
        out,
        "`deuteron bench {name}` times it on your machine, `deuteron kernel {name}` prints its kernels, `deuteron check --catalog --op {name}` \
         checks it."
    )
    .unwrap();
    out
}

/// A page without what `cargo xtask benchmarks` fills in.
fn without_rows(text: &str) -> String {
    let Some((before, rest)) = text.split_once("<!-- rows ") else { return text.to_string() };
    let (name, rest) = rest.split_once(" -->\n").unwrap();
    let (_, after) = rest.split_once("<!-- end -->").unwrap();
    format!("{before}<!-- rows {name} -->\n<!-- end -->{after}")
}

#[test]
fn ops_have_pages_that_are_what_the_catalogue_says() {
    let sources = read("crates/deuteron/src/ops.rs") + &read("crates/deuteron/src/ops/products.rs");
    let functions = read("python/deuteron/functions.py");
    let summary = read("docs/guide/src/SUMMARY.md");
    let mut stale = Vec::new();
    for op in FusedOp::catalog() {
        let file = format!("docs/guide/src/op-{}.md", op.name());
        let made = page(&op, &sources, &functions);
        let found = fs::read_to_string(root().join(&file)).unwrap_or_default();
        match without_rows(&found) == made {
            true => {}
            false if std::env::var_os("DEUTERON_BLESS").is_some() => fs::write(root().join(&file), made).unwrap(),
            false => stale.push(file),
        }
        let entry = format!("  - [{0}](op-{0}.md)\n", op.name());
        assert!(summary.contains(&entry), "SUMMARY.md has no line {entry:?}");
    }
    let hint = "run `DEUTERON_BLESS=1 cargo test -p deuteron-guide --test all ops`, then `cargo xtask benchmarks`";
    assert!(stale.is_empty(), "{stale:?} differ from the catalogue: {hint}");
}
