//! `deuteron fuse`: the main job.

use std::collections::BTreeMap;

use anyhow::Result;
use clap::Args;
use deuteron::fuse::{
    Agreement, Coverage, FuseOptions, FuseReport, GroupReport, Lesson, PlanReport, Stage, fuse_on, inputs, lesson,
};
use deuteron::report::change_of_bytes;
use deuteron::{Bytes, Engine};
use deuteron_gpt2::BenchReport;
use serde::Serialize;

use crate::analyze::{MATMULS, PageArguments, matmuls_table};
use crate::device::DeviceArguments;
use crate::input::{GraphArguments, Loaded};
use crate::onnx_file::DataArguments;
use crate::{Outcome, bench_model, doctor, machine_file, show};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    graph: GraphArguments,
    #[command(flatten)]
    device: DeviceArguments,
    /// Seed of inputs and of weights, except those of box
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print every kernel, and why neighbours stay apart
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    data: DataArguments,
    #[command(flatten)]
    pages: PageArguments,
    /// Do not learn from this run. By default, predicted times are corrected by the measured times of long kernels; `doctor --forget` undoes that
    #[arg(long)]
    no_learn: bool,
    /// Print the report as JSON: graph, device, verified, within_bounds, coverage, max_error, bound, eager, unfused, fused, speedup,
    /// speedup_over_eager, groups, refusals, model; for a whole model also generation: the cost of a prompt and of one more token
    #[arg(long)]
    json: bool,
}

/// The JSON form: the report, and of a model what generating with it costs.
#[derive(Serialize)]
struct Job<'a> {
    #[serde(flatten)]
    report: &'a FuseReport,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    agreements: &'a [Agreed<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    generation: Option<&'a BenchReport>,
}

/// The comparison with results of another program.
#[derive(Serialize)]
struct Agreed<'a> {
    with: &'a str,
    #[serde(flatten)]
    agreement: &'a Agreement,
}

impl Agreed<'_> {
    fn print(&self) {
        let Agreement { outputs, worst, .. } = self.agreement;
        let verdict = if self.agreement.holds() { "Agrees" } else { "DOES NOT AGREE" };
        outln!(
            "{verdict} with {}: {outputs} outputs, largest difference {:.2e}, allowed {:.2e} (output {}).",
            self.with,
            worst.difference,
            worst.allowed,
            worst.output
        );
        let Agreement { elements, without_bound, loose, .. } = self.agreement;
        if *without_bound > 0 {
            outln!(
                "{without_bound} of {elements} elements have no bound: they may differ by a share of the largest value of their output."
            );
        }
        if *loose > 0 {
            outln!(
                "{loose} of {elements} elements have a bound above the largest value of their output: they may differ by twice that value."
            );
        }
    }
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let engine = arguments.device.engine()?;
    if !arguments.graph.is_onnx() {
        arguments.data.refuse_for(arguments.graph.name())?;
    }
    let Loaded { graph, notes, onnx } = arguments.graph.load_with(arguments.data.inputs()?)?;
    if !arguments.json {
        notes.iter().for_each(|note| outln!("note: {note}"));
    }
    let mut made = inputs(&graph, arguments.seed)?;
    // Behind the tokens.
    made.iter_mut().skip(1).zip(arguments.graph.trained(&engine)?).for_each(|(input, weight)| *input = weight);
    let tensors = match &onnx {
        Some(file) => file.tensors(&graph, made)?,
        None => made,
    };
    let checks = match &onnx {
        Some(file) => file.check(&engine, &graph, &tensors, &arguments.data)?,
        None => Vec::new(),
    };
    let options = FuseOptions {
        seed: arguments.seed,
        backward: arguments.graph.backward,
        sources: arguments.pages.html.is_some(),
        ..FuseOptions::default()
    };
    let bar = show::progress(Some(STAGES.len() as u64));
    let report = fuse_on(&engine, &graph, tensors, &options, |stage| {
        let done = STAGES.iter().position(|(known, _)| *known == stage).unwrap_or(0);
        bar.set_position(done as u64);
        bar.set_message(STAGES[done].1);
    })?;
    bar.finish_and_clear();
    arguments.pages.write(&report.analysis)?;
    let learnt = match arguments.no_learn {
        true => None,
        // What was verified and measured stands, whether or not it can be stored.
        false => learn(&engine, &report, arguments.device.uses_all_threads()).unwrap_or_else(|error| {
            errln!("note: what was measured is not stored: {error:#}");
            None
        }),
    };
    let generation = match arguments.graph.model()? {
        Some((config, batch, seq, weights)) => {
            Some(bench_model::measure(&engine, &config, batch, seq, seq.min(config.context - 1), weights)?)
        }
        None => None,
    };
    let agreements: Vec<Agreed> = checks.iter().map(|(what, agreement)| Agreed { with: what, agreement }).collect();
    if arguments.json {
        show::json(&Job { report: &report, agreements: &agreements, generation: generation.as_ref() })?;
    } else {
        print(&report, arguments.all);
        agreements.iter().for_each(Agreed::print);
        if let Some(generation) = &generation {
            outln!("\nAs generation runs it:");
            bench_model::print(generation);
        }
        if let Some(sentence) = learnt {
            outln!("{sentence}");
        }
        outln!(
            "\n{}",
            in_short(&report, agreements.iter().find(|agreed| !agreed.agreement.holds()).map(|one| one.with))
        );
    }
    let agrees = checks.iter().all(|(_, agreement)| agreement.holds());
    Ok(Outcome::of(report.within_bounds && agrees))
}

/// The stages of the command, in order.
const STAGES: [(Stage, &str); 5] = [
    (Stage::Inputs, "making inputs"),
    (Stage::Compiling, "planning and compiling"),
    (Stage::Reference, "running the f64 reference"),
    (Stage::Verifying, "verifying"),
    (Stage::Measuring, "measuring"),
];

/// Corrects predicted times by the measured ones, and prints a note. Without a place to store them, or with fewer threads than predictions are
/// for, nothing is learnt.
fn learn(engine: &Engine, report: &FuseReport, all_threads: bool) -> Result<Option<String>> {
    if !all_threads {
        return Ok(None);
    }
    let machine = engine.device().machine();
    let origin = format!("by `fuse {}` on {}", report.graph, doctor::today());
    let spread = report.unfused.spread.max(report.fused.spread);
    let mut counted = 0;
    let stored = machine_file::learn(machine, |now| {
        Ok(match lesson(&now, &report.analysis, spread, &origin)? {
            Lesson::Learnt { machine, kernels } => {
                counted = kernels;
                Some(machine)
            }
            Lesson::Nothing(_) => None,
        })
    })?;
    Ok(stored.map(|path| {
        format!(
            "Predictions on this machine now follow what {counted} long kernels took ({}; `deuteron doctor --forget` undoes it).",
            path.display()
        )
    }))
}

fn print(report: &FuseReport, all: bool) {
    outln!("{} on {}\n", report.graph, report.device);
    outln!("The fused plan{}", if all { "" } else { ", kernels of one name together" });
    let rows = if all { each_kernel(&report.groups) } else { kernels_by_name(&report.groups) };
    outln!("{}\n", show::table(&["kernel", "count", "primitives", "moved", "predicted", "time", "share"], rows, 1));
    if let Some(table) = matmuls_table(&report.analysis, all) {
        outln!("{MATMULS}\n{table}\n");
    }
    if all {
        print_refusals(report);
    }
    let plan = |name: &str, plan: &PlanReport| {
        let moved = Bytes(plan.bytes).to_string();
        let predicted = show::milliseconds(plan.predicted_ms);
        let mut row = vec![name.to_string(), plan.kernels.to_string(), moved, predicted, show::milliseconds(plan.ms)];
        row.extend(plan.graph_ms.map(show::milliseconds));
        row
    };
    let differs = (report.eager.kernels, report.eager.bytes) != (report.unfused.kernels, report.unfused.bytes);
    let rows = vec![
        plan(if differs { "eager: attention in parts" } else { "eager: as unfused" }, &report.eager),
        plan("unfused: a kernel per call", &report.unfused),
        plan("fused", &report.fused),
    ];
    let mut header = vec!["plan", "kernels", "moved", "predicted", "time"];
    if report.fused.graph_ms.is_some() {
        header.splice(4.., ["launched one by one", "as one CUDA graph"]);
    }
    outln!("{}\n", show::table(&header, rows, 1));
    outln!("{}", against("unfused", &report.unfused, &report.fused, report.speedup));
    if report.eager.kernels > report.unfused.kernels {
        outln!("{}", against("eager", &report.eager, &report.fused, report.speedup_over_eager));
    }
    outln!("{}", verdict(report));
    let Coverage { elements, without_bound, loose, .. } = &report.coverage;
    if *without_bound > 0 {
        outln!(
            "{without_bound} of {elements} elements have no bound and were not checked: they depend on a divisor that may be 0, or on an \
             undecided index."
        );
    }
    if *loose > 0 {
        outln!(
            "{loose} of {elements} elements have a bound above the largest value of their output, so little was checked there: they depend on \
             undecided roundings or comparisons, or on rows of attention whose keys are all masked."
        );
    }
}

fn verdict(report: &FuseReport) -> String {
    if let Some(output) = report.coverage.unchecked_outputs.first() {
        return format!("NOT VERIFIED against f64: no element of output {output} has a bound.");
    }
    let verdict = match (report.verified, report.within_bounds) {
        (true, _) => "Verified",
        (false, true) => "HARDLY CHECKED",
        (false, false) => "NOT VERIFIED",
    };
    format!(
        "{verdict} against f64: largest error {:.2e}, bound {:.2e} (output {}).",
        report.max_error, report.bound, report.worst_output
    )
}

/// One sentence for readers unfamiliar with plans: what was gained over the faster baseline, and whether the results are right.
fn in_short(report: &FuseReport, disagrees_with: Option<&str>) -> String {
    let time = |plan: &PlanReport| plan.graph_ms.unwrap_or(plan.ms);
    let FuseReport { graph, eager, unfused, fused, .. } = report;
    let is_apart = (eager.kernels, eager.bytes) != (unfused.kernels, unfused.bytes);
    let (baseline, name) = match is_apart && time(eager) < time(unfused) {
        true => (eager, "with one kernel per operation and attention in parts"),
        false => (unfused, "with one kernel per operation"),
    };
    let ratio = time(baseline) / time(fused).max(1e-12);
    let spread = baseline.spread.max(fused.spread);
    let (before, after) = (show::milliseconds(time(baseline)), show::milliseconds(time(fused)));
    let gain = match ratio {
        _ if (fused.kernels, fused.bytes) == (baseline.kernels, baseline.bytes) => {
            format!("{graph} has nothing to fuse on this machine and takes {after} per run")
        }
        ratio if (ratio - 1.0).abs() <= spread => {
            format!(
                "fusing {graph} makes no difference beyond the run-to-run spread: {after} per run fused, {before} {name}"
            )
        }
        ratio if ratio > 1.0 => {
            format!("fusing makes {graph} {ratio:.2} times as fast: {after} per run instead of {before} {name}")
        }
        ratio => format!(
            "fusing makes {graph} slower here, {:.2} times: {after} per run instead of {before} {name}",
            1.0 / ratio
        ),
    };
    let right = match (report.within_bounds, report.verified, disagrees_with) {
        (false, ..) if !report.coverage.is_whole() => {
            "but the results are NOT VERIFIED: an output has no error bound".to_string()
        }
        (false, ..) => "BUT THE RESULTS ARE WRONG: an output is outside of its error bound".to_string(),
        (true, true, Some(with)) => {
            format!("and all results are verified in double precision, but they DO NOT AGREE with {with}")
        }
        (true, false, Some(with)) => format!("but the results DO NOT AGREE with {with}"),
        (true, false, None) => "but the error bounds are too wide to verify the results".to_string(),
        (true, true, None) => "and all results are verified against a calculation in double precision".to_string(),
    };
    format!("In short: {gain}, {right}.")
}

/// The gain of fusing over a named baseline.
fn against(name: &str, baseline: &PlanReport, fused: &PlanReport, speedup: f64) -> String {
    let bytes = change_of_bytes(baseline.bytes, fused.bytes);
    format!("Fused against {name}: {bytes} moved, {}.", show::speed(speedup, [baseline.spread, fused.spread]))
}

fn each_kernel(groups: &[GroupReport]) -> Vec<Vec<String>> {
    let total: f64 = groups.iter().map(|group| group.ms).sum();
    groups.iter().enumerate().map(|(index, group)| row(&format!("{index}: {}", group.name), 1, group, total)).collect()
}

/// Times of kernels, summed by name, longest first.
fn kernels_by_name(groups: &[GroupReport]) -> Vec<Vec<String>> {
    let total: f64 = groups.iter().map(|group| group.ms).sum();
    let mut sums: BTreeMap<&str, (usize, GroupReport)> = BTreeMap::new();
    for group in groups {
        let entry = sums.entry(&group.name);
        let sum = entry.and_modify(|(count, sum)| {
            *count += 1;
            sum.bytes += group.bytes;
            sum.ms += group.ms;
            sum.predicted_ms += group.predicted_ms;
        });
        sum.or_insert((1, group.clone()));
    }
    let mut sums: Vec<(usize, GroupReport)> = sums.into_values().collect();
    sums.sort_by(|a, b| b.1.ms.total_cmp(&a.1.ms));
    sums.iter().map(|(count, sum)| row(&sum.name, *count, sum, total)).collect()
}

fn row(name: &str, count: usize, group: &GroupReport, total: f64) -> Vec<String> {
    vec![
        show::shorten(name, 64),
        count.to_string(),
        group.ops.to_string(),
        Bytes(group.bytes).to_string(),
        show::milliseconds(group.predicted_ms),
        show::milliseconds(group.ms),
        format!("{:.1} %", 100.0 * group.ms / total.max(1e-12)),
    ]
}

fn print_refusals(report: &FuseReport) {
    outln!("Why neighbours stay apart");
    for refusal in &report.refusals {
        let (producer, consumer) = (refusal.producer, refusal.consumer);
        outln!("  {producer} and {consumer}: {} {}", refusal.code, refusal.text);
    }
    outln!();
}
