//! `deuteron bench`: fused ops against unfused kernels.

use anyhow::{Result, bail};
use clap::Args;
use deuteron::bench::{
    BenchCase, BenchRow, LadderCheck, LadderRow, OnceRow, OpPlan, bench, check_ladder, graph, ladder, once, overhead,
};
use deuteron::tune::{TunedKernel, tune_all};
use deuteron::{Activation, Backend, Bytes, Engine, FusedOp, Graph, Heads, Strategy, catalog};
use deuteron_gpt2::Config;

use crate::Outcome;
use crate::bench_crossover;
use crate::bench_matmul::MatmulArguments;
use crate::bench_model::{self, ModelArguments};
use crate::device::DeviceArguments;
use crate::input::{ExpertArguments, float};
use crate::show;

#[derive(Args)]
pub struct Arguments {
    /// Ops of the catalogue [default: all], with attributes in quotes: "moe weighted=true"; or a model: gpt2, gpt2-medium, gpt2-large, gpt2-xl; or matmul, which times every variant that the GPU supports, or its ladder
    ops: Vec<String>,
    /// Rows, one or more sizes [default: 1024,65536; 1024,8192 for the ladder of attention and for matmul; 256 for matmul on a CPU]
    #[arg(long, value_delimiter = ',')]
    rows: Vec<usize>,
    /// Columns, one or more
    #[arg(long, value_delimiter = ',', default_value = "768")]
    cols: Vec<usize>,
    /// Elements per tensor, as rows of 1024 columns; instead of --rows and --cols
    #[arg(long, value_delimiter = ',', conflicts_with_all = ["rows", "cols"])]
    elements: Vec<usize>,
    /// f32, f16 or bf16; for a model also int8, which stores weights as bytes [default: f32; bf16 for the ladder of attention and for matmul on a GPU]
    #[arg(long)]
    dtype: Option<String>,
    #[command(flatten)]
    model: ModelArguments,
    #[command(flatten)]
    matmul: MatmulArguments,
    /// Features per head, for attention ops
    #[arg(long, default_value_t = 64)]
    head: usize,
    #[command(flatten)]
    experts: ExpertArguments,
    /// Activation of the ops that have one: gelu, gelu_erf, silu, relu [default: gelu]
    #[arg(long)]
    act: Option<String>,
    /// Time the gradients instead of the forward ops
    #[arg(long)]
    backward: bool,
    /// Run each plan exactly once and print its kernels in order, for a profiler; for a ladder or matmul, run and check every rung or variant once
    #[arg(long)]
    once: bool,
    /// Plans to run once, in this order: eager (attention with its scores in memory), unfused, fused
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = op_plan,
        default_value = "unfused,fused",
        requires = "once",
        conflicts_with = "ladder"
    )]
    plan: Vec<OpPlan>,
    /// Time the ladder of an op from a naive kernel to the shipped one: of add_act, norm_act and softmax if no op is named, of attention
    /// and matmul (on a CPU followed by GELU); of attention_add_norm and attention_block also from many launches to one
    #[arg(long)]
    ladder: bool,
    /// Time attention_add_norm and attention_block as one launch and by the best plan with more, over batches, sequence lengths and columns,
    /// and print the planner's prediction and choice; with --rows, at the given sizes only
    #[arg(long, conflicts_with_all = ["once", "ladder", "tune", "backward"])]
    crossover: bool,
    /// On a GPU, first measure the launch shapes of all kernels of both plans, and store the fastest for later commands
    #[arg(long, conflicts_with_all = ["once", "ladder"])]
    tune: bool,
    /// On a GPU, measure the overhead of a call instead: of a launch, and of the very first call
    #[arg(long, conflicts_with_all = ["once", "ladder", "tune", "ops"])]
    overhead: bool,
    #[command(flatten)]
    device: DeviceArguments,
    /// Print JSON: an array of {op, direction, rows, cols, dtype, device, fused_us, fused_graph_us, unfused_us,
    /// unfused_graph_us, eager_us, bytes_eager, speedup, predicted_us, predicted_unfused_us, bytes_fused, bytes_unfused, bytes_read,
    /// bytes_written, registers, gbps, copy_gbps, fraction_of_copy, kernels_fused, unfused_kernels}; with --once of {op,
    /// direction, rows, cols, dtype, plans}; with --ladder of {op, rows, cols, dtype, device, rung, about, kernels, launches,
    /// other_nodes, verified, worst_ratio, us, gbps, copy_gbps, fraction_of_copy, tflops, speedup, registers}, with --once too of {op, rung, verified,
    /// worst_ratio}; with --crossover of {op, batch, sequence, hidden, head, dtype, device, apart_kernels,
    /// apart_launches, apart_us, apart_predicted_us, one_kernels, one_launches, one_us, one_predicted_us, takes_one, over_best}; of a model {model, device, weights, phases,
    /// attention_layer}; of matmul {rows, inner, columns, transposed, epilogue, dtype, device, variant, chosen, verified, worst_ratio,
    /// us, tflops}, with --once of {variant, verified, worst_ratio}, with --fastest of {rows, inner, columns, epilogue, dtype, variant, chosen,
    /// launches}; of matmul --ladder {rows, inner, columns, dtype, device, rung, about,
    /// variant, chosen, verified, worst_ratio, us, tflops, speedup, over_library, registers}, with --once of {rung, verified, worst_ratio}
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    if arguments.overhead {
        return run_overhead(&arguments.device, arguments.json);
    }
    let mut engine = arguments.device.engine()?;
    if arguments.ops == ["matmul"] {
        return run_matmul(arguments, &engine);
    }
    if !arguments.matmul.is_empty() {
        bail!("--weights, --epilogue and --fastest are only for `bench matmul`, got {}", arguments.ops.join(" "));
    }
    if let [name] = arguments.ops.as_slice()
        && let Ok(config) = Config::find(name)
    {
        let report = arguments.model.run(&engine, &config, arguments.dtype.as_deref().unwrap_or("f32").parse()?)?;
        show::report(&report, arguments.json, bench_model::print)?;
        return Ok(Outcome::Good);
    }
    if arguments.crossover {
        return bench_crossover::run(&engine, &crossover_cases(arguments, &engine)?, arguments.json);
    }
    let cases = cases(arguments)?;
    if arguments.once && arguments.ladder {
        return run_ladder_once(&engine, &cases, arguments.json);
    }
    if arguments.once {
        return run_once(&engine, &cases, &arguments.plan, arguments.json);
    }
    if arguments.ladder {
        return run_ladder(&engine, &cases, arguments.json);
    }
    if arguments.tune {
        engine = tuned(arguments, &engine, &cases)?;
    }
    let rows = show::each(&cases, |case| case.op.name(), |case| Ok(bench(&engine, case)?))?;
    show::report(&rows, arguments.json, |rows| print(rows))?;
    Ok(Outcome::Good)
}

fn run_matmul(arguments: &Arguments, engine: &Engine) -> Result<Outcome> {
    let other = arguments.crossover || arguments.tune || arguments.backward;
    if other || !arguments.elements.is_empty() || arguments.cols != [768] {
        bail!(
            "expected `bench matmul` with --rows, --weights, --epilogue, --dtype, --once, --fastest, --ladder, --device and --json alone"
        );
    }
    // A CPU multiplies f32 in its vectors, and takes a thousand times as long for the first rung.
    let (dtype, rows) = match engine.device().backend() {
        Backend::Cpu => ("f32", &[256][..]),
        Backend::Cuda(_) => ("bf16", &[1024, 8192][..]),
    };
    let dtype = float(arguments.dtype.as_deref().unwrap_or(dtype))?;
    let rows = if arguments.rows.is_empty() { rows } else { &arguments.rows };
    let (matmul, json) = (&arguments.matmul, arguments.json);
    match (arguments.ladder, arguments.once) {
        (false, false) => matmul.run(engine, rows, dtype, json),
        (false, true) if matmul.fastest => matmul.run_fastest(engine, rows, dtype, json),
        (false, true) => matmul.check(engine, rows, dtype, json),
        (true, false) => matmul.run_ladder(engine, rows, dtype, json),
        (true, true) => matmul.check_ladder(engine, rows, dtype, json),
    }
}

fn run_overhead(device: &DeviceArguments, json: bool) -> Result<Outcome> {
    let options = device.gpu_options()?;
    let scratch = std::env::temp_dir().join(format!("deuteron-overhead-{}", std::process::id()));
    let measured = overhead(&options, &scratch);
    // Temporary kernels: failing to remove them does no harm.
    let _ = std::fs::remove_dir_all(&scratch);
    show::report(&[measured?], json, |[row]| {
        outln!("{}", row.device);
        let (bare, ours) = (row.bare_launch_us, row.launch_us);
        outln!("a launch    {ours:.2} us of host time, of which {bare:.2} us are the driver's call");
        let (cold, disk) = (row.first_cold_ms, row.first_disk_ms);
        outln!("first call  {cold:.0} ms with empty caches, {disk:.1} ms with kernels in the cache on disk");
    })?;
    Ok(Outcome::Good)
}

/// The engine, with the fastest launch shape measured for every kernel that will run.
fn tuned(arguments: &Arguments, engine: &Engine, cases: &[BenchCase]) -> Result<Engine> {
    let graphs: Vec<Graph> = cases.iter().map(graph).collect::<Result<_, _>>()?;
    let plans: Vec<(&Graph, Strategy)> =
        graphs.iter().flat_map(|graph| [(graph, Strategy::Unfused), (graph, catalog::strategy(graph))]).collect();
    let report = show::counted("launch shapes", |progress| tune_all(engine, &plans, progress))?;
    // Standard output is the table's, or the JSON's.
    report.kernels.iter().for_each(|kernel| errln!("{}", tuned_line(kernel)));
    match arguments.device.keep(engine, report.tuning()) {
        Ok(Some(path)) => errln!("Launch shapes of {} kernels stored in {}.", report.kernels.len(), path.display()),
        Ok(None) => errln!("Launch shapes of {} kernels not stored, as --tuning is given.", report.kernels.len()),
        // What was measured stands, whether or not it can be stored.
        Err(error) => errln!("note: what was measured is not stored: {error:#}"),
    }
    arguments.device.engine_tuned(engine, report.tuning())
}

fn tuned_line(kernel: &TunedKernel) -> String {
    let time = |us: f64| show::milliseconds(us / 1e3);
    let (name, tried) = (show::shorten(&kernel.name, 48), kernel.tried);
    let (before, after) = (kernel.suggested.us, kernel.chosen.us);
    let mut line = match kernel.is_changed() {
        true => {
            let saved = 100.0 * (1.0 - after / before.max(1e-9));
            format!("{name}: {} -> {}, {saved:.1} % less; {}", time(before), time(after), kernel.chosen.config)
        }
        false => format!("{name}: {} stays; {}", time(before), kernel.suggested.config),
    };
    line += &format!(" [{tried} tried");
    for dropped in &kernel.dropped {
        let config = dropped.config.to_string();
        line += &format!("; {} {}", config.split(':').next().unwrap_or_default(), dropped.reason);
    }
    line + "]"
}

fn op_plan(word: &str) -> Result<OpPlan, String> {
    OpPlan::find(word).ok_or_else(|| "expected eager, unfused or fused".to_string())
}

fn run_once(engine: &Engine, cases: &[BenchCase], plans: &[OpPlan], json: bool) -> Result<Outcome> {
    let rows: Vec<OnceRow> = cases.iter().map(|case| once(engine, case, plans)).collect::<Result<_, _>>()?;
    show::report(&rows, json, |rows| rows.iter().for_each(print_once))?;
    Ok(Outcome::Good)
}

fn print_once(row: &OnceRow) {
    outln!("{} {} {}x{} {}", row.op, row.direction, row.rows, row.cols, row.dtype);
    for plan in &row.plans {
        for kernel in &plan.kernels {
            let moved = Bytes(kernel.bytes_read + kernel.bytes_written);
            outln!("  {:<8} {}  [{moved}] {}", plan.plan, kernel.name, kernel.launches.join(" "));
        }
    }
}

fn run_ladder_once(engine: &Engine, cases: &[BenchCase], json: bool) -> Result<Outcome> {
    let mut rows: Vec<LadderCheck> = Vec::new();
    for case in cases {
        rows.extend(check_ladder(engine, case)?);
    }
    show::report(&rows, json, |rows| {
        for row in rows {
            let wrong = if row.verified { "" } else { " WRONG" };
            outln!("{} {}: error {:.2} of its bound{wrong}", row.op, row.rung, row.worst_ratio);
        }
    })?;
    Ok(Outcome::of(rows.iter().all(|row| row.verified)))
}

fn run_ladder(engine: &Engine, cases: &[BenchCase], json: bool) -> Result<Outcome> {
    let rows = show::each(cases, |case| case.op.name(), |case| Ok(ladder(engine, case)?))?.concat();
    show::report(&rows, json, |rows| print_ladder(rows))?;
    Ok(Outcome::of(rows.iter().all(|row| row.verified)))
}

fn print_ladder(rows: &[LadderRow]) {
    let lines = rows.iter().map(|row| {
        vec![
            format!("{} {}x{} {}", row.op, row.rows, row.cols, row.dtype),
            row.rung.clone(),
            row.about.clone(),
            row.kernels.to_string(),
            launches(row),
            show::milliseconds(row.us / 1e3),
            format!("{:.2}x", row.speedup),
            format!("{:.1}", row.gbps),
            format!("{:.0} %", 100.0 * row.fraction_of_copy),
            row.tflops.map_or("-".into(), |tflops| format!("{tflops:.1}")),
            row.registers.map_or("-".into(), |registers| registers.to_string()),
            format!("{:.2}{}", row.worst_ratio, if row.verified { "" } else { " WRONG" }),
        ]
    });
    let header = [
        "op",
        "rung",
        "what is new",
        "kernels",
        "launches",
        "time",
        "vs first",
        "GB/s",
        "vs copy",
        "TFLOP/s",
        "registers",
        "error / bound",
    ];
    outln!("{}", show::table(&header, lines.collect(), 3));
    if let Some(row) = rows.first() {
        outln!("{}, medians, rungs in turn.", row.device);
    }
}

/// Kernel launches and other graph nodes, as the driver counts them.
fn launches(row: &LadderRow) -> String {
    match (row.launches, row.other_nodes) {
        (Some(launches), Some(0)) => launches.to_string(),
        (Some(launches), Some(others)) => format!("{launches} + {others} other"),
        _ => "-".to_string(),
    }
}

/// Without a named op, both ops that continue after attention; without rows, sizes from small to large.
fn crossover_cases(arguments: &Arguments, engine: &Engine) -> Result<Vec<BenchCase>> {
    let named = !arguments.ops.is_empty();
    let ops =
        if named { arguments.ops.clone() } else { ["attention_add_norm", "attention_block"].map(String::from).into() };
    let mut cases = Vec::new();
    for name in &ops {
        let own = op_cases(arguments, FusedOp::find(name)?)?;
        match own.first() {
            Some(case) if arguments.rows.is_empty() && arguments.elements.is_empty() => {
                cases.extend(bench_crossover::cases(engine, case.op, case.dtype, case.heads.width));
            }
            _ => cases.extend(own),
        }
    }
    Ok(cases)
}

/// The storage type of attention ops where launches or rungs are compared.
const ATTENTION_DTYPE: &str = "bf16";

fn cases(arguments: &Arguments) -> Result<Vec<BenchCase>> {
    let ops = match arguments.ops.is_empty() {
        true if arguments.ladder => {
            ["add_act", "norm_act", "softmax"].into_iter().map(FusedOp::find).collect::<Result<_, _>>()?
        }
        true => FusedOp::catalog(),
        false => arguments.ops.iter().map(|words| words.parse()).collect::<Result<_, _>>()?,
    };
    let mut cases = Vec::new();
    for op in ops.into_iter().filter(|op| !arguments.backward || op.has_backward()) {
        cases.extend(op_cases(arguments, op)?);
    }
    Ok(cases)
}

/// An op at the requested sizes.
fn op_cases(arguments: &Arguments, op: FusedOp) -> Result<Vec<BenchCase>> {
    let op = match &arguments.act {
        Some(word) => match Activation::find(word) {
            Some(act) => op.with_activation(act),
            None => bail!("unknown activation `{word}`; expected gelu, gelu_erf, silu or relu"),
        },
        None => op,
    };
    let heads = Heads { positions: arguments.model.positions(), width: arguments.head };
    if heads.positions == 0 || heads.width == 0 {
        bail!("expected --seq and --head from 1; got {} and {}", heads.positions, heads.width);
    }
    // Rungs of attention are written for bf16, and the first of them have all scores in memory.
    let (rows, dtype) = match op.attends() && (arguments.ladder || arguments.crossover) {
        true => ([1024, 8192], ATTENTION_DTYPE),
        false => ([1024, 65536], "f32"),
    };
    let dtype = float(arguments.dtype.as_deref().unwrap_or(dtype))?;
    let (backward, experts) = (arguments.backward, arguments.experts.sizes()?);
    let case = |(rows, cols)| BenchCase { op, rows, cols, dtype, backward, heads, experts };
    Ok(sizes(arguments, &rows)?.into_iter().map(case).collect())
}

/// Rows and columns; these rows if none are given.
fn sizes(arguments: &Arguments, rows: &[usize]) -> Result<Vec<(usize, usize)>> {
    let rows = if arguments.rows.is_empty() { rows } else { &arguments.rows };
    let elements = arguments.elements.iter().map(|&elements| (elements.div_ceil(1024), 1024.min(elements)));
    let mut sizes: Vec<(usize, usize)> = elements.collect();
    if sizes.is_empty() {
        sizes.extend(rows.iter().flat_map(|&rows| arguments.cols.iter().map(move |&cols| (rows, cols))));
    }
    if sizes.iter().any(|&(rows, cols)| rows == 0 || cols == 0) {
        bail!("rows, columns and elements must be at least 1");
    }
    Ok(sizes)
}

fn print(rows: &[BenchRow]) {
    let from_graphs = rows.iter().any(|row| row.fused_graph_us.is_some());
    let lines = rows.iter().map(|row| {
        let time = |us: f64| show::milliseconds(us / 1e3);
        let mut line = vec![row.op.clone(), format!("{}x{}", row.rows, row.cols), row.dtype.clone()];
        line.extend([time(row.unfused_us), time(row.fused_us)]);
        if from_graphs {
            let graph = |us: Option<f64>| us.map_or("-".to_string(), time);
            line.extend([graph(row.unfused_graph_us), graph(row.fused_graph_us)]);
        }
        line.extend([
            time(row.predicted_us),
            format!("{:.2}x", row.speedup),
            format!("{:.2}x", row.bytes_unfused as f64 / row.bytes_fused.max(1) as f64),
            format!("{:.1}", row.gbps),
            format!("{:.1}", row.copy_gbps),
            format!("{:.0} %", 100.0 * row.fraction_of_copy),
        ]);
        line
    });
    let mut header = vec!["op", "size", "dtype", "unfused", "fused"];
    if from_graphs {
        header.extend(["unfused graph", "fused graph"]);
    }
    header.extend(["predicted", "speed-up", "bytes ratio", "GB/s", "copy GB/s", "vs copy"]);
    outln!("{}", show::table(&header, lines.collect(), 3));
    if let Some(row) = rows.first() {
        outln!("{} on {}, medians, variants in turn.", row.direction, row.device);
    }
}
