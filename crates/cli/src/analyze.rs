//! `deuteron analyze`: what to fuse, why, and what it is worth.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use deuteron::analyze::{AnalyzeOptions, Kernels, analyze, flips};
use deuteron::report::{
    Analysis, Candidate, KernelSheet, PlanSheet, ScoringSheet, TileSheet, diff, expect, html, next_steps, parse,
    refusals, roofline_svg, score_text,
};
use deuteron::{Backend, Bytes, Machine, Pin, Scoring};

use crate::device::{RedZones, Wanted};
use crate::input::{GraphArguments, text_file};
use crate::show;
use crate::tuning_file::Choice;
use crate::{Outcome, device, machine_file, stored_file};

/// Arguments of the command.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    graph: GraphArguments,
    /// cpu (this machine), cuda (its GPU), a100, h100, h200, rtx4090, or a machine file
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Choose among all kernel structures that the planner knows, even those that this version cannot generate; without this flag that plan is
    /// only listed, where it differs from the chosen one
    #[arg(long)]
    conceivable: bool,
    /// TOML file with the weights and thresholds of the score sheet: [weights], [thresholds] and fuse_from, the lowest score whose verdict is FUSE
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// Operations that must share a kernel, as the table of fusions names them: a,b; may be repeated
    #[arg(long, value_name = "A,B")]
    force: Vec<String>,
    /// Operations that must not share a kernel, as the table of fusions names them: a,b; may be repeated
    #[arg(long, value_name = "A,B")]
    forbid: Vec<String>,
    /// For each fusion, print the device, batch, sequence or size at which the verdict changes
    #[arg(long)]
    flip: bool,
    /// Store every forward value that the backward pass reads, instead of choosing between storing and recomputing by bytes
    #[arg(long)]
    keep_all: bool,
    /// Compile every kernel for the GPU to report its registers; needs NVRTC but no GPU
    #[arg(long)]
    compile: bool,
    /// Print every kernel and every fusion
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    pages: PageArguments,
    /// Compare with an analysis that was saved with --json
    #[arg(long, value_name = "FILE")]
    diff: Option<PathBuf>,
    /// Check lines such as `fused: layer_norm, gelu` and `not fused: matmul, layer_norm`; exit 1 if one is violated
    #[arg(long, value_name = "FILE")]
    expect: Option<PathBuf>,
    /// Print the analysis as JSON; `deuteron explain --schema` describes it
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let loaded = arguments.graph.load()?;
    let usual = usual_options(&arguments.device, &[])?;
    if arguments.compile && !matches!(usual.backend, Some(Backend::Cuda(_))) {
        bail!("--compile is for cuda, a100, h100, h200 and rtx4090; got --device {}", arguments.device);
    }
    let options = AnalyzeOptions {
        pins: pins(&arguments.force, &arguments.forbid)?,
        // A saved analysis has sources, so one that is held against it needs them too.
        sources: arguments.pages.html.is_some() || arguments.json || arguments.diff.is_some(),
        compiler: arguments.compile.then(|| device::compiler(&[])).transpose()?,
        keep_all: arguments.keep_all,
        kernels: if arguments.conceivable { Kernels::Conceivable } else { Kernels::Generated },
        scoring: arguments.weights.as_deref().map(scoring).transpose()?.unwrap_or_default(),
        ..usual
    };
    if arguments.keep_all && !arguments.graph.backward {
        bail!("--keep-all is for graphs with gradients; add --backward");
    }
    let mut analysis = analyze(&loaded.graph, &options)?;
    analysis.notes.extend(loaded.notes);
    if arguments.flip {
        analysis.flips = flips(&loaded.graph, &analysis, &options, &arguments.graph)?;
    }
    arguments.pages.write(&analysis)?;
    let changes = arguments.diff.as_deref().map(|path| read(path).map(|old| diff(&old, &analysis))).transpose()?;
    let violations = match &arguments.expect {
        Some(path) => {
            let text = text_file(path)?;
            expect(&analysis, &text).with_context(|| path.display().to_string())?
        }
        None => Vec::new(),
    };
    match (&changes, arguments.json) {
        (Some(changes), true) => show::json(changes)?,
        (Some(changes), false) => out!("{changes}"),
        (None, true) => show::json(&analysis)?,
        (None, false) => out!("{}", text(&analysis, arguments.all)?),
    }
    violations.iter().for_each(|violation| errln!("{violation}"));
    Ok(Outcome::of(violations.is_empty()))
}

/// Where to write the page and the picture, if requested.
#[derive(Args)]
pub struct PageArguments {
    /// Write the report as one page that works offline; `fuse` puts predicted beside measured
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Write the roofline plot
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl PageArguments {
    /// Writes the requested files.
    pub fn write(&self, analysis: &Analysis) -> Result<()> {
        let write = |path: &PathBuf, text: String| {
            stored_file::write_named(path, &text).with_context(|| format!("cannot write {}", path.display()))
        };
        self.html.as_ref().map_or(Ok(()), |path| write(path, html(analysis)))?;
        self.svg.as_ref().map_or(Ok(()), |path| write(path, roofline_svg(analysis)))
    }
}

fn read(path: &Path) -> Result<Analysis> {
    let text = text_file(path)?;
    parse(&text).with_context(|| path.display().to_string())
}

/// A file of weights.
fn scoring(path: &Path) -> Result<Scoring> {
    Scoring::parse(&text_file(path)?).with_context(|| path.display().to_string())
}

/// The machine to analyse for (a profile, this machine, or a file) and the kernels that can be generated for it.
pub fn usual_options(device: &str, packages: &[PathBuf]) -> Result<AnalyzeOptions> {
    Ok(match device::parse(device)? {
        Some(Wanted::Auto | Wanted::Cpu) => AnalyzeOptions::on(machine_file::load("cpu").unwrap_or_else(Machine::cpu)),
        Some(Wanted::Cuda(ordinal)) => {
            let engine = device::gpu(ordinal, RedZones::Off, &Choice::Stored, packages)?;
            let gpu = engine.device();
            AnalyzeOptions { backend: Some(gpu.backend().clone()), ..AnalyzeOptions::on(gpu.machine().clone()) }
        }
        None => AnalyzeOptions::on(described(device)?),
    })
}

/// A machine that need not be present: a profile or a file.
fn described(device: &str) -> Result<Machine> {
    let lower = device.to_ascii_lowercase();
    if Machine::PROFILES.contains(&lower.as_str()) {
        return Ok(Machine::profile(&lower)?);
    }
    if !Path::new(device).is_file() {
        let profiles: Vec<&str> = Machine::PROFILES.into_iter().filter(|&name| name != "cpu").collect();
        bail!("unknown device `{device}`; expected cpu, cuda, cuda:N, {}, or a machine file", profiles.join(", "));
    }
    let text = text_file(Path::new(device))?;
    Machine::parse(&text).with_context(|| device.to_string())
}

fn pins(force: &[String], forbid: &[String]) -> Result<Vec<Pin>> {
    let names = |text: &String| -> Result<Vec<String>> {
        let names: Vec<String> = text.split([',', '+']).map(|name| name.trim().to_string()).collect();
        if names.len() < 2 || names.iter().any(String::is_empty) {
            bail!("expected two operations or more, such as layer_norm,gelu; got `{text}`");
        }
        Ok(names)
    };
    let forced = force.iter().map(|text| names(text).map(Pin::Force));
    forced.chain(forbid.iter().map(|text| names(text).map(Pin::Forbid))).collect()
}

/// An analysis as text, short or with every kernel and fusion.
pub fn text(analysis: &Analysis, all: bool) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let (search, ms) = (capital(&analysis.search.text), analysis.planning_ms);
    writeln!(out, "{} on {}{}\n", analysis.graph, analysis.device, basis(&analysis.machine.basis))?;
    writeln!(out, "{}\n{search}; planned in {ms:.0} ms.\n", analysis.verdict)?;
    writeln!(out, "{}\n{}\n", plans_table(analysis), show::wrapped(PLANS))?;
    writeln!(out, "The chosen plan\n{}\n", kernels_table(analysis, all))?;
    if let Some(table) = matmuls_table(analysis, all) {
        writeln!(out, "{MATMULS}\n{table}\n")?;
    }
    let which = if all { "" } else { ", the most important first" };
    writeln!(
        out,
        "Fusions considered{which}\n{}\n{}\n",
        candidates_table(analysis, all),
        score_line(&analysis.scoring)
    )?;
    let mut section = |title: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            out.push_str(&format!("{title}\n  {}\n\n", lines.join("\n  ")));
        }
    };
    let refused = refusals(analysis, all).into_iter();
    let say = |one: &Candidate| format!("{} {}: {}", one.reason.code, one.ops.join(" + "), one.reason.text);
    section("Refused, and why", refused.map(say).collect());
    section("Score and plan disagree", analysis.disagreements.iter().map(|item| item.text.clone()).collect());
    section("Pins", analysis.pins.iter().map(|pin| pin.text.clone()).collect());
    section("What if", analysis.flips.iter().map(|flip| flip.text.clone()).collect());
    if let Some(recompute) = &analysis.recompute {
        let peak = |bytes: u64| Bytes(bytes).to_string();
        let memory = format!(
            "Peak of intermediates {} (storing everything: {}).",
            peak(recompute.peak_bytes),
            peak(recompute.peak_bytes_before)
        );
        section("Store or recompute", vec![recompute.text.clone(), memory]);
    }
    section("Notes", analysis.notes.clone());
    section("What to do next", next_steps(analysis));
    writeln!(
        out,
        "--html FILE writes the whole report, --all prints every kernel and fusion, `deuteron explain CODE` a reason."
    )?;
    Ok(out)
}

/// The origin of the machine's numbers, if they are not those of its profile.
fn basis(basis: &str) -> &'static str {
    match basis {
        "calibrated" => " (numbers calibrated on this machine)",
        "learnt" => " (numbers corrected by what `fuse` measured here)",
        "guessed" => " (numbers estimated from another machine; `deuteron doctor --calibrate` measures this one)",
        _ => "",
    }
}

/// Weights, thresholds and verdict threshold of the score, in a few lines.
fn score_line(scoring: &ScoringSheet) -> String {
    let criteria = scoring.criteria.iter().map(|one| format!("{} x {} ({})", one.weight, one.name, one.asks));
    let text = format!(
        "Score = {}; each from 0 to 1; + meets its threshold, - misses it. The verdict is FUSE from {}; the plan goes by predicted time. \
         Worth: time of the best plan without the fusion minus that of the best plan with it.",
        criteria.collect::<Vec<_>>().join(" + "),
        scoring.fuse_from
    );
    show::wrapped(&text)
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().chain(chars).collect())
}

/// What the names of the plans mean.
const PLANS: &str = "naive: one kernel per primitive; eager: one per operation, attention in parts; unfused: one per operation; greedy: \
                     neighbours merged in order; chosen: the fastest plan found. Predicted times; moved: bytes read and written.";

fn plans_table(analysis: &Analysis) -> String {
    let plans = &analysis.plans;
    let named = [
        ("naive", Some(&plans.naive)),
        ("eager", Some(&plans.eager)),
        ("unfused", Some(&plans.unfused)),
        ("recomputed", plans.recomputed.as_ref()),
        ("greedy", plans.greedy.as_ref()),
        ("chosen", Some(&plans.chosen)),
        ("conceivable", plans.conceivable.as_ref()),
    ];
    let row = |name: &str, plan: &PlanSheet| {
        let ratio = plans.unfused.us / plan.us.max(1e-12);
        vec![
            name.to_string(),
            plan.kernels.to_string(),
            Bytes(plan.bytes).to_string(),
            show::milliseconds(plan.us / 1e3),
            format!("{ratio:.2}x"),
            Bytes(plan.peak_bytes).to_string(),
        ]
    };
    let rows = named.into_iter().filter_map(|(name, plan)| plan.map(|plan| row(name, plan))).collect();
    show::table(&["plan", "kernels", "moved", "predicted", "vs unfused", "peak"], rows, 1)
}

fn kernels_table(analysis: &Analysis, all: bool) -> String {
    let mut kernels: Vec<_> = analysis.after.iter().collect();
    let total: f64 = kernels.iter().map(|kernel| kernel.cost.us * kernel.launches.len() as f64).sum();
    if !all {
        kernels.sort_by(|a, b| (b.cost.us * b.launches.len() as f64).total_cmp(&(a.cost.us * a.launches.len() as f64)));
        kernels.truncate(14);
    }
    let gpu = analysis.machine.kind == "gpu";
    let rows = kernels.iter().map(|kernel| {
        let cost = &kernel.cost;
        let mut row = vec![
            show::shorten(&kernel.name, 56),
            kernel.launches.len().to_string(),
            kernel.size.clone(),
            Bytes(cost.read + cost.written).to_string(),
            format!("{:.1}", cost.intensity),
            show::milliseconds(cost.us / 1e3),
            format!("{:.1} %", 100.0 * cost.us * kernel.launches.len() as f64 / total.max(1e-12)),
            kernel.gain_us.map_or("-".into(), |us| show::milliseconds(us * kernel.launches.len() as f64 / 1e3)),
            cost.bound.clone(),
        ];
        if gpu {
            // A library does not say what its kernels take.
            let is_library = kernel.variant == LIBRARY && kernel.tiles.is_none();
            let registers = match (kernel.measured_registers, &kernel.tiles) {
                (None, None) if is_library => "-".to_string(),
                (Some(compiled), _) => format!("{compiled} ({} predicted)", cost.registers),
                (None, Some(tiles)) => registers(tiles),
                (None, None) => cost.registers.to_string(),
            };
            let occupancy = kernel.tiles.as_ref().map_or(cost.occupancy, |tiles| tiles.occupancy);
            let occupancy = if is_library { "-".to_string() } else { format!("{:.0} %", 100.0 * occupancy) };
            row.extend([registers, occupancy]);
        }
        row
    });
    let mut header = vec!["kernel", "count", "size", "moved", "flop/B", "predicted", "share", "saves", "bound"];
    if gpu {
        header.extend(["registers", "occupancy"]);
    }
    show::table(&header, rows.collect(), 1)
}

/// The variant of a kernel of NVIDIA's library.
const LIBRARY: &str = "cuBLASLt";

/// The heading of [`matmuls_table`].
pub const MATMULS: &str = "How its matmuls fill the GPU";

/// How the chosen plan tiles its matmuls on a GPU, if it has any, slowest first.
pub fn matmuls_table(analysis: &Analysis, all: bool) -> Option<String> {
    let time = |kernel: &KernelSheet| kernel.cost.us * kernel.launches.len() as f64;
    let of_matmul = |kernel: &&KernelSheet| kernel.kind == "matmul" && !kernel.variant.is_empty();
    let mut kernels: Vec<&KernelSheet> = analysis.after.iter().filter(of_matmul).collect();
    kernels.sort_by(|a, b| time(b).total_cmp(&time(a)));
    kernels.truncate(if all { usize::MAX } else { 14 });
    let rows: Vec<Vec<String>> = kernels.into_iter().map(matmul_row).collect();
    let header = [
        "kernel",
        "size",
        "computed by",
        "tile",
        "stages",
        "cluster",
        "registers",
        "occupancy",
        "waves",
        "wave efficiency",
    ];
    (!rows.is_empty()).then(|| show::table(&header, rows, 3))
}

fn matmul_row(kernel: &KernelSheet) -> Vec<String> {
    let mut row = vec![show::shorten(&kernel.name, 40), kernel.size.clone()];
    let Some(tiles) = &kernel.tiles else {
        row.push(kernel.variant.clone());
        row.extend(std::iter::repeat_n("-".to_string(), 7));
        return row;
    };
    let share = |share: f64| format!("{:.0} %", 100.0 * share);
    row.extend([
        format!("{}{}", tiles.by, if tiles.walked.is_some() { ", persistent blocks" } else { "" }),
        format!("{} x {}", tiles.rows, tiles.columns),
        tiles.stages.map_or("-".to_string(), |stages| stages.to_string()),
        tiles.cluster.to_string(),
        registers(tiles),
        share(tiles.occupancy),
        format!("{:.2}", tiles.waves),
        share(tiles.wave_efficiency),
    ]);
    row
}

/// Registers as compiled, or the limit that the kernel sets for the compiler.
fn registers(tiles: &TileSheet) -> String {
    match tiles.registers_from.as_str() {
        "compiled" => tiles.registers.to_string(),
        _ => format!("at most {}", tiles.registers),
    }
}

fn candidates_table(analysis: &Analysis, all: bool) -> String {
    let weight = |candidate: &Candidate| candidate.worth_us.unwrap_or(0.0).abs() * candidate.count as f64;
    let mut candidates: Vec<&Candidate> =
        analysis.candidates.iter().filter(|one| one.reason.code == "OK" || all).collect();
    if !all {
        candidates.sort_by(|a, b| weight(b).total_cmp(&weight(a)));
        candidates.truncate(12);
    }
    let rows = candidates.iter().map(|candidate| {
        let name = show::shorten(&candidate.ops.join(" + "), 40);
        let mut row = vec![name, candidate.size.clone(), candidate.count.to_string()];
        let criteria = candidate.criteria.list().into_iter().zip(candidate.passes.list());
        row.extend(criteria.map(|(score, passes)| format!("{score:.2}{}", if passes { '+' } else { '-' })));
        row.extend([
            score_text(candidate.score, analysis.scoring.fuse_from),
            candidate.verdict.clone(),
            if candidate.chosen { "fused" } else { "apart" }.to_string(),
            format!("{:.0} %", 100.0 * candidate.values.bandwidth_saving),
            candidate.worth_us.map_or("-".into(), |us| show::milliseconds(us / 1e3)),
            candidate.reason.code.clone(),
        ]);
        row
    });
    let header = [
        "fusion",
        "size",
        "count",
        "bandwidth",
        "launch",
        "registers",
        "complexity",
        "maintain.",
        "score",
        "verdict",
        "plan",
        "bytes saved",
        "worth",
        "code",
    ];
    show::table(&header, rows.collect(), 1)
}
