//! Kernels for Hopper on a CPU: the text that a GPU would be given runs on the machine of `emulator/emulator.h`, which stands
//! in for the instructions. It checks synchronisation and index arithmetic, not speed. It needs a C++ compiler: `$CXX`, else
//! `c++`.
//!
//! A kernel has a driver of its own in `emulator/`, which makes its operands and knows what it should compute.

use std::fmt::Write;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use deuteron_attention::AttentionOperand;
use deuteron_attention::cuda::forward::{ForwardVariant, with_variant};
use deuteron_attention::cuda::hopper::Groups;
use deuteron_attention::cuda::tiles::Tiles;
use deuteron_attention::kernel::{
    AttentionKernel, AttentionMask, AttentionResult, AttentionShape, HeadStrides, LoweredAttention,
};
use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget, Grid, Grids, Mapped, Word};
use deuteron_codegen::tile::Part;
use deuteron_codegen::{ArgBinding, Kernel, Launch, Source};
use deuteron_graph::{Dtype, Graph, NodeId};
use deuteron_kernels::{Backend, CudaCatalog, render};
use deuteron_plan::{Machine, Plan, Strategy, Target, plan};

/// What is replaced in a text, and by what.
// A kernel with less patience releases slots more often, and sooner where few blocks run.
const REPLACED: (&str, &str) = ("constexpr int PATIENCE = 100;", "constexpr int PATIENCE = 5;");

/// Parts of the device-side library that the emulator implements in `emulator/tile/`; others are plain C++.
fn is_emulated(part: Part) -> bool {
    !matches!(part, Part::Words | Part::Philox | Part::Warp)
}

/// A text for the emulator.
fn emulated(text: &str) -> String {
    let mut text = text.replace(REPLACED.0, REPLACED.1);
    for part in Part::ALL.into_iter().filter(|&part| is_emulated(part)) {
        text = text.replace(part.text(), "");
    }
    const EXTERN: &str = "extern __shared__ ";
    const SHARED: &str = "__shared__ ";
    while let Some(start) = text.find(EXTERN) {
        let end = start + text[start..].find("[];").expect("an array of unknown size");
        let (element, name) = text[start + EXTERN.len()..end].rsplit_once(' ').expect("a type and a name");
        let pointer = format!("{element}* const {name} = ({element}*)shared_memory();");
        text.replace_range(start..end + "[];".len(), &pointer);
    }
    let mut number = 0;
    while let Some(start) = text.find(SHARED) {
        let end = start + text[start..].find(';').expect("the end of a declaration");
        let (of, names) = text[start + SHARED.len()..end].split_once(' ').expect("a type and a name");
        let variable = |name: &str| {
            number += 1;
            let (name, sizes) = name.split_at(name.find('[').unwrap_or(name.len()));
            format!("{of} (&{name}){sizes} = shared_variable<{number}, {of}{sizes}>()")
        };
        let variables: Vec<String> = names.split(", ").map(variable).collect();
        text.replace_range(start..end, &variables.join("; "));
    }
    text
}

/// The C++ compiler, if there is one.
fn compiler() -> Option<String> {
    let name = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let found = Command::new(&name).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        // Not by a macro, whose lines are shown of tests that fail alone.
        let _ = std::io::Write::write_all(&mut std::io::stderr(), b"skipped: no C++ compiler\n");
    }
    found.then_some(name)
}

/// A kernel that is compiled, and where its files are.
struct TileProgram {
    folder: PathBuf,
}

impl TileProgram {
    /// `driver` is a file of `emulator/` that includes `kernel.h`, the text, and runs ENTRY.
    fn compile(compiler: &str, name: &str, driver: &str, entry: &str, text: &str) -> TileProgram {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated").join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("kernel.h"), emulated(text)).unwrap();
        let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulator");
        let output = Command::new(compiler)
            .args(["-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", "-I"])
            .arg(&own)
            .arg(format!("-DENTRY={entry}"))
            .arg("-I")
            .arg(&folder)
            .arg(own.join(driver))
            .arg("-o")
            .arg(folder.join("program"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        TileProgram { folder }
    }

    /// What it says of a launch, and whether all went well. A text may have mistakes, of which this one is made; none is 0.
    fn run(&self, launch: &str, resident: usize, lanes: Lanes, seeds: Range<u64>, mistake: usize) -> (bool, String) {
        let file = self.folder.join("launch");
        fs::write(&file, launch).unwrap();
        let lanes = if lanes == Lanes::Apart { "apart" } else { "together" };
        let mut command = Command::new(self.folder.join("program"));
        command.arg(file).arg(resident.to_string()).arg(lanes).args(seeds.map(|seed| seed.to_string()));
        let output = command.env("MISTAKE", mistake.to_string()).output().unwrap();
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.success(), said.concat())
    }
}

/// Whether the lanes of a warp run one after another before another warp does, as they mostly do on a GPU, or at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lanes {
    Together,
    Apart,
}

/// How a case of a list is run: lanes apart, which takes longer, in the first one.
fn runs(at: usize, case: &Case) -> Vec<(Lanes, Range<u64>)> {
    let together = (Lanes::Together, 1..case.seeds + 1);
    if at == 0 { vec![together, (Lanes::Apart, 101..102)] } else { vec![together] }
}

/// A grid as `emulator/launch.h` reads it.
fn written(grid: &Grid) -> String {
    assert_eq!(grid.blocks[1..], [1, 1]);
    let mut text = format!("grid {} {} {} {}\n", grid.blocks[0], grid.threads, grid.shared, grid.cluster);
    for word in &grid.words {
        match word {
            Word::Number(number) => writeln!(text, "n {number}"),
            Word::Argument { position, offset } | Word::Unwritten { position, offset } => {
                writeln!(text, "a {position} {offset}")
            }
            Word::Workspace(offset) => writeln!(text, "w {offset}"),
            Word::Persistent(offset) => writeln!(text, "k {offset}"),
            Word::Fault => panic!("no kernel here takes indices"),
            Word::Map(map) => {
                let position = match map.of {
                    Mapped::Argument(position) => position as i64,
                    Mapped::Workspace => -1,
                };
                let list = |numbers: &[u64]| numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
                let (sizes, strides, tile) = (list(&map.sizes), list(&map.strides), list(&map.tile.map(u64::from)));
                writeln!(text, "m {position} {} {} {sizes} {strides} {tile}", map.offset, map.rank)
            }
        }
        .unwrap();
    }
    text + "end\n"
}

// ---- attention

/// How rows of heads lie.
#[derive(Debug, Clone, Copy)]
enum Order {
    /// positions of a head together
    Heads,
    /// heads of a position together
    Positions,
}

/// Attention of some sizes on a machine.
#[derive(Debug, Clone, Copy)]
struct Case {
    batch: usize,
    heads: usize,
    queries: usize,
    keys: usize,
    order: Order,
    /// multiprocessors, for a grid of as many blocks as run at once
    processors: usize,
    /// blocks that run at once
    resident: usize,
    seeds: u64,
}

impl Case {
    const fn new([batch, heads, queries, keys]: [usize; 4]) -> Case {
        Case { batch, heads, queries, keys, order: Order::Heads, processors: 2, resident: 2, seeds: 2 }
    }

    fn strides(&self, heads: usize, positions: usize, width: usize) -> HeadStrides {
        let batch = heads * positions * width;
        match self.order {
            Order::Heads => HeadStrides { batch, head: positions * width, position: width },
            Order::Positions => HeadStrides { batch, head: width, position: heads * width },
        }
    }

    fn shape(&self, kernel: &AttentionKernel) -> AttentionShape {
        let &Case { batch, heads, queries, keys, .. } = self;
        let q = self.strides(heads, queries, kernel.width);
        let k = self.strides(heads / kernel.group, keys, kernel.width);
        AttentionShape { batch, heads, queries, keys, q, k, v: k, mask: HeadStrides::default(), o: q }
    }

    /// The kernel by a variant.
    fn made(&self, kernel: &AttentionKernel, variant: ForwardVariant) -> Kernel {
        let base = Graph::new("test").input("x", Dtype::F32, [1]).unwrap();
        let binding = |&operand: &AttentionOperand| ArgBinding {
            base,
            dtype: kernel.operand_dtype(operand),
            written: operand == AttentionOperand::O,
            offset: 0,
            leading: Vec::new(),
            table_rows: 0,
        };
        let args = kernel.operands().iter().map(binding).collect();
        let attention = LoweredAttention { kernel: *kernel, shape: self.shape(kernel), args };
        with_variant(&attention, &variant, &CudaTarget::new(Arch::Sm90a, self.processors))
    }

    /// As `emulator/attention.h` and `emulator/launch.h` read it.
    fn text(&self, variant: ForwardVariant, kernel: &AttentionKernel) -> String {
        let shape = self.shape(kernel);
        let made = self.made(kernel, variant);
        let grids = made.launch.grids().expect("grids");
        assert_eq!(grids.list.len(), 1);
        let &Case { batch, heads, queries, keys, .. } = self;
        let mut text = format!("shape {batch} {heads} {} {queries} {keys}", kernel.group);
        for HeadStrides { batch, head, position } in [shape.q, shape.k, shape.v, shape.o] {
            write!(text, " {batch} {head} {position}").unwrap();
        }
        text + "\n" + &written(&grids.list[0])
    }
}

fn kernel(dtype: Dtype, width: usize, mask: AttentionMask) -> AttentionKernel {
    let (scale, result) = (1.0 / (width as f32).sqrt(), AttentionResult::Values);
    AttentionKernel { dtype, kv: dtype, width, group: 1, scale, mask, dropout: None, result }
}

const DRIVER: &str = "attention.cpp";
const HOPPER: &str = "attention_hopper";

/// The text of attention by a variant, which no case has a part in.
fn source(kernel: &AttentionKernel, variant: ForwardVariant, case: &Case) -> CudaSource {
    match case.made(kernel, variant).source {
        Source::Cuda(source) => source,
        source => panic!("{source}"),
    }
}

/// Runs attention in every case; the variants differ in nothing that the text has.
fn check(name: &str, entry: &str, variants: &[ForwardVariant], kernel: AttentionKernel, cases: &[Case]) {
    let Some(compiler) = compiler() else { return };
    let text = source(&kernel, variants[0], &cases[0]).text;
    let program = TileProgram::compile(&compiler, name, DRIVER, entry, &text);
    for &variant in variants {
        for (at, case) in cases.iter().enumerate() {
            assert_eq!(source(&kernel, variant, case).text, text, "{name}, {case:?}");
            let launch = case.text(variant, &kernel);
            for (lanes, seeds) in runs(at, case) {
                let (ok, said) = program.run(&launch, case.resident, lanes, seeds, 0);
                assert!(ok, "{name}, {case:?}, {lanes:?}:\n{said}");
            }
        }
    }
}

#[test]
fn heads_of_64() {
    let causal = kernel(Dtype::Bf16, 64, AttentionMask::Causal);
    let positions = Case { order: Order::Positions, ..Case::new([2, 2, 200, 200]) };
    let cases = [
        Case { resident: 4, ..Case::new([1, 2, 129, 129]) },
        positions,
        Case { resident: 1, ..Case::new([1, 1, 320, 320]) },
        Case::new([1, 2, 65, 193]),
        // The first queries see no key.
        Case::new([1, 1, 193, 65]),
        Case { seeds: 1, ..Case::new([1, 1, 450, 450]) },
    ];
    check("heads_of_64_causal", HOPPER, &[ForwardVariant::Hopper(Groups::NARROW)], causal, &cases);
    let grouped = AttentionKernel { group: 2, ..kernel(Dtype::F16, 64, AttentionMask::Full) };
    let cases = [Case { order: Order::Positions, ..Case::new([1, 4, 129, 200]) }, Case::new([2, 2, 9, 64])];
    check("heads_of_64_full", HOPPER, &[ForwardVariant::Hopper(Groups::NARROW)], grouped, &cases);
}

#[test]
fn few_heads_of_64() {
    let cases = [
        Case { resident: 4, ..Case::new([1, 2, 129, 129]) },
        Case { order: Order::Positions, processors: 3, ..Case::new([2, 1, 200, 200]) },
        Case { resident: 1, processors: 1, ..Case::new([1, 1, 320, 320]) },
        Case::new([1, 2, 64, 64]),
        Case { seeds: 1, processors: 3, ..Case::new([1, 1, 500, 500]) },
    ];
    let causal = kernel(Dtype::Bf16, 64, AttentionMask::Causal);
    check("few_heads_of_64_causal", HOPPER, &[ForwardVariant::Hopper(Groups::NARROW_FEW)], causal, &cases);
    let cases = [Case::new([1, 2, 129, 200]), Case::new([1, 1, 200, 65])];
    let full = kernel(Dtype::Bf16, 64, AttentionMask::Full);
    check("few_heads_of_64_full", HOPPER, &[ForwardVariant::Hopper(Groups::NARROW_FEW)], full, &cases);
}

#[test]
fn heads_of_128() {
    let cases = [
        Case { resident: 4, ..Case::new([1, 2, 129, 129]) },
        Case { order: Order::Positions, processors: 3, ..Case::new([2, 1, 200, 200]) },
        Case { resident: 1, processors: 1, ..Case::new([1, 1, 320, 320]) },
        Case { seeds: 1, ..Case::new([1, 1, 72, 200]) },
    ];
    let wide = [Groups::WIDE, Groups::WIDE_FEW].map(ForwardVariant::Hopper);
    check("heads_of_128_causal", HOPPER, &wide, kernel(Dtype::Bf16, 128, AttentionMask::Causal), &cases);
    let cases = [Case::new([1, 1, 129, 300]), Case { seeds: 1, ..Case::new([1, 1, 64, 64]) }];
    check("heads_of_128_full", HOPPER, &wide, kernel(Dtype::F16, 128, AttentionMask::Full), &cases);
}

#[test]
fn matrix_units_of_a_warp() {
    let tiles = ForwardVariant::Tensor(Tiles { warps: 4, atoms: 1, keys: 32, blocks: 2 });
    let cases = [Case::new([1, 2, 129, 129]), Case { order: Order::Positions, ..Case::new([2, 1, 65, 200]) }];
    let causal = kernel(Dtype::F16, 80, AttentionMask::Causal);
    check("matrix_units_of_a_warp", "attention_tensor", &[tiles], causal, &cases);
}

#[test]
fn the_machine_itself() {
    let Some(compiler) = compiler() else { return };
    let program = TileProgram::compile(&compiler, "the_machine_itself", "machine.cpp", "", "");
    let run = |which: &str, resident: &str, seed: &str| {
        let output = Command::new(program.folder.join("program")).args([which, resident, seed]).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for seed in ["1", "2", "3"] {
        assert_eq!(run("products", "1", seed), (true, String::new()));
        assert_eq!(run("cluster", "1", seed), (true, String::new()));
        assert_eq!(run("cluster", "8", seed), (true, String::new()));
        let (ok, said) = run("missing", "4", seed);
        assert!(!ok && said.contains("deadlock") && said.contains("the barrier"), "{said}");
        assert_eq!(run("waiting", "8", seed), (true, String::new()));
        assert_eq!(
            run("waiting", "2", seed),
            (true, String::new()),
            "block 0 stays, the others come one after another"
        );
        let (ok, said) = run("waiting", "1", seed);
        assert!(!ok && said.contains("deadlock") && said.contains("polls"), "{said}");
    }
}

/// What stands in a text, what stands there by mistake, and what is said of it.
type Mistake = (&'static str, &'static str, &'static str);

/// A kernel, its launch as its driver reads it, and the driver.
struct Launched {
    source: CudaSource,
    entry: &'static str,
    launch: String,
    driver: &'static str,
}

impl Launched {
    fn attention(groups: Groups, kernel: &AttentionKernel, case: &Case) -> Launched {
        let variant = ForwardVariant::Hopper(groups);
        let (source, launch) = (source(kernel, variant, case), case.text(variant, kernel));
        Launched { source, entry: HOPPER, launch, driver: DRIVER }
    }
}

/// Every mistake of a list is noticed, alone, for some seed; a text without one is right.
fn check_mistakes(name: &str, launched: Launched, case: Case, mistakes: &[Mistake]) {
    let Some(compiler) = compiler() else { return };
    let Launched { source, entry, launch, driver } = launched;
    let mut text = String::from("static const int mistake = atoi(getenv(\"MISTAKE\"));\n");
    text += &source.text;
    for (i, (right, wrong, _)) in mistakes.iter().enumerate() {
        assert_eq!(text.matches(right).count(), 1, "{right}");
        let number = i + 1;
        let both = match right.strip_suffix(';') {
            Some(_) => format!("if (mistake == {number}) {{ {wrong} }} else {{ {right} }}"),
            None => format!("(mistake == {number} ? {wrong} : {right})"),
        };
        text = text.replace(right, &both);
    }
    let program = TileProgram::compile(&compiler, name, driver, entry, &text);
    let run = |mistake: usize| program.run(&launch, case.resident, Lanes::Together, 1..case.seeds + 1, mistake);
    let (ok, said) = run(0);
    assert!(ok, "{said}");
    for (i, (right, _, notice)) in mistakes.iter().enumerate() {
        let (ok, said) = run(i + 1);
        assert!(!ok && said.contains("FAILED") && said.contains(notice), "a mistake at {right}:\n{said}");
    }
}

#[test]
fn mistakes_in_order() {
    let mistakes: [Mistake; 7] = [
        ("mbarrier_wait(in.rings.k_full(now), Rings::parity(now));", "", "in flight"),
        ("mbarrier_wait(rings.v_empty(now), Rings::parity(now) ^ 1);", "", "a copy to"),
        ("if ((threadIdx.x & 31) == 0) mbarrier_arrive(barrier);", "mbarrier_arrive(barrier);", "FAILED"),
        (
            "mbarrier_arrive_expect_tx(rings.v_full(now), KV_BYTES);",
            "mbarrier_arrive_expect_tx(rings.v_full(now), KV_BYTES + 16);",
            "deadlock",
        ),
        ("in.end1 - key", "in.end1 - key + 1", "of what rounding allows"),
        (
            "if (soften(r, r_s, factor, in, i)) scale_result(r, factor);",
            "soften(r, r_s, factor, in, i);",
            "of what rounding allows",
        ),
        (
            "store_staged<BEYOND>(s_o, g_o, p.o.position, tile.end - first);",
            "store_staged<BEYOND>(s_o, g_o, p.o.position, 16);",
            "wrote beside the result",
        ),
    ];
    let causal = kernel(Dtype::Bf16, 64, AttentionMask::Causal);
    let case = Case { seeds: 3, ..Case::new([1, 1, 450, 450]) };
    check_mistakes("mistakes_in_order", Launched::attention(Groups::NARROW, &causal, &case), case, &mistakes);
}

#[test]
fn mistakes_ahead() {
    let mistakes: [Mistake; 4] = [
        ("wgmma_wait<1>();", "", "FAILED"),
        ("release(rings.q_empty());", "", "deadlock"),
        ("named_barrier_arrive(TURN_BARRIER + 1 - warpgroup, MULTIPLIERS);", "", "a named barrier"),
        (
            "named_barrier_sync(TURN_BARRIER + warpgroup, MULTIPLIERS);",
            "named_barrier_sync(TURN_BARRIER + warpgroup, 128);",
            "threads and of",
        ),
    ];
    let causal = kernel(Dtype::Bf16, 128, AttentionMask::Causal);
    let case = Case { processors: 1, ..Case::new([1, 1, 300, 300]) };
    check_mistakes("mistakes_ahead", Launched::attention(Groups::WIDE_FEW, &causal, &case), case, &mistakes);
}

// ---- attention and what follows it in one launch

/// What stands after attention.
#[derive(Debug, Clone, Copy)]
struct After {
    /// columns of a projection, and whether they lie together in the weight
    projection: Option<(usize, bool)>,
    rms: bool,
    /// whether the sum is a result too
    stored: bool,
    /// the norm's weights
    weights: Dtype,
}

const LAYER: After = After { projection: None, rms: false, stored: true, weights: Dtype::Bf16 };

/// A graph of one launch: heads as they lie in a fused projection of queries, keys and values.
fn meeting_graph(kernel: &AttentionKernel, case: &Case, after: After) -> Graph {
    let (dtype, width, weights) = (kernel.dtype, kernel.width, after.weights);
    let &Case { batch, heads, queries, keys, .. } = case;
    let inner = heads * width;
    let cols = after.projection.map_or(inner, |(cols, _)| cols);
    let mask = if kernel.mask == AttentionMask::Causal { "mask=causal" } else { "" };
    let projection = match after.projection {
        None => "".into(),
        Some((_, true)) => {
            format!("p = weight {dtype}[{inner},{cols}] ; c = weight {dtype}[{cols}] ; x = linear m p c")
        }
        Some((_, false)) => {
            format!("p = weight {dtype}[{cols},{inner}] ; c = weight {dtype}[{cols}] ; x = linear m p c transposed")
        }
    };
    let x = if after.projection.is_some() { "x" } else { "m" };
    let norm = if after.rms { "rms_norm s w" } else { "layer_norm s w b" };
    let bias = if after.rms { String::new() } else { format!("b = weight {weights}[{cols}]") };
    let sum = if after.stored { "out s" } else { "" };
    let text = format!(
        "q = input {dtype}[{batch},{heads},{queries},{width}] ; k = input {dtype}[{batch},{heads},{keys},{width}]
v = input {dtype}[{batch},{heads},{keys},{width}] ; r = input {dtype}[{batch},{queries},{cols}]
w = weight {weights}[{cols}]
{bias}
a = attention q k v {mask}
t = transpose a [0,2,1,3] ; m = reshape t [{batch},{queries},{inner}]
{projection}
s = add r {x}
y = {norm}
out y
{sum}"
    );
    text.parse().unwrap_or_else(|error| panic!("{error:?}\n{text}"))
}

/// The only kernel of a graph, its launch and its grids.
fn only(graph: &Graph, plan: &Plan, processors: usize) -> (CudaSource, Launch, Grids) {
    let [group] = plan.groups.as_slice() else { panic!("not one kernel: {plan}") };
    let cuda = CudaTarget::new(Arch::Sm90a, processors);
    let Kernel { source, launch } = render(group.draft(graph, &plan.placement), &Backend::Cuda(cuda)).unwrap();
    let Source::Cuda(source) = source else { panic!("{source}") };
    let grids = launch.grids().expect("grids").clone();
    (source, launch, grids)
}

fn greedy(graph: &Graph) -> Plan {
    let machine = Machine::profile("h200").unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
    plan(graph, target, Strategy::Greedy, &[]).unwrap()
}

fn meeting_grids(kernel: &AttentionKernel, case: &Case, after: After) -> (CudaSource, Grids) {
    let graph = meeting_graph(kernel, case, after);
    let (source, _, grids) = only(&graph, &greedy(&graph), case.processors);
    (source, grids)
}

/// The kernel of such a graph and, as `emulator/meeting.cpp` reads it, its launch.
fn meeting(kernel: &AttentionKernel, case: &Case, after: After) -> (CudaSource, String) {
    let graph = meeting_graph(kernel, case, after);
    let plan = greedy(&graph);
    let (source, launch, Grids { list, workspace, persistent, .. }) = only(&graph, &plan, case.processors);
    let [grid] = list.as_slice() else { panic!("{} grids", list.len()) };

    let named = |base: NodeId| {
        let output = graph.outputs().iter().position(|output| plan.placement.base(output.node) == Some(base));
        match output {
            Some(0) => "y".to_owned(),
            Some(_) => "s".to_owned(),
            None => graph.given_name(base).unwrap_or("?").to_owned(),
        }
    };
    let names: Vec<String> = launch.arguments().iter().map(|arg| named(arg.base)).collect();
    let shape = case.shape(kernel);
    let mut text = format!("shape {} {} 1 {} {}", case.batch, case.heads, case.queries, case.keys);
    for HeadStrides { batch, head, position } in [shape.q, shape.k, shape.v, shape.o] {
        write!(text, " {batch} {head} {position}").unwrap();
    }
    let cols = after.projection.map_or(case.heads * kernel.width, |(cols, _)| cols);
    let turned = after.projection.is_some_and(|(_, turned)| turned);
    writeln!(text, "\nmeeting {cols} {cols} {} 1e-5 {workspace} {persistent}", u8::from(turned)).unwrap();
    writeln!(text, "arguments {} {}", names.len(), names.join(" ")).unwrap();
    (source, text + &written(grid))
}

/// A kernel knows its columns: cases of as many heads that stand together are compiled once.
fn check_meeting(name: &str, kernel: AttentionKernel, after: After, cases: &[Case]) {
    let Some(compiler) = compiler() else { return };
    let mut made: Option<(String, TileProgram)> = None;
    for (at, case) in cases.iter().enumerate() {
        let (source, launch) = meeting(&kernel, case, after);
        let entry = source.name.as_str();
        assert!(entry.ends_with("_hopper"), "{entry}: {case:?}");
        let known = made.take().filter(|(text, _)| *text == source.text);
        let (text, program) = known.unwrap_or_else(|| {
            let program = TileProgram::compile(&compiler, name, "meeting.cpp", entry, &source.text);
            (source.text.clone(), program)
        });
        for (lanes, seeds) in runs(at, case) {
            let (ok, said) = program.run(&launch, case.resident, lanes, seeds, 0);
            assert!(ok, "{name}, {case:?}, {lanes:?}:\n{said}");
        }
        made = Some((text, program));
    }
}

/// Few multiprocessors make few tiles enough for blocks of 128 queries.
#[test]
fn heads_of_64_that_meet() {
    let causal = kernel(Dtype::Bf16, 64, AttentionMask::Causal);
    let one = Case { processors: 1, ..Case::new([1, 2, 129, 129]) };
    let cases = [
        one,
        // Fewer blocks run than have heads of the same rows.
        Case { resident: 1, seeds: 1, ..Case::new([1, 3, 300, 300]) },
        Case { resident: 4, ..Case::new([2, 3, 200, 200]) },
        Case { resident: 2, seeds: 1, ..Case::new([4, 3, 130, 194]) },
    ];
    check_meeting("heads_of_64_that_meet", causal, LAYER, &cases);
    let full = kernel(Dtype::F16, 64, AttentionMask::Full);
    let rms = After { rms: true, stored: false, weights: Dtype::F32, ..LAYER };
    check_meeting("heads_of_64_that_meet_full", full, rms, &[one, Case::new([2, 2, 150, 70])]);
}

#[test]
fn few_heads_that_meet() {
    let causal = kernel(Dtype::Bf16, 64, AttentionMask::Causal);
    let few = |sizes| Case { processors: 16, ..Case::new(sizes) };
    let cases = [
        few([1, 2, 129, 129]),
        // The first queries see no key.
        Case { seeds: 1, ..few([1, 2, 129, 65]) },
        // More numbers than a board has places, all of one block.
        Case { seeds: 1, resident: 1, ..few([70, 2, 9, 73]) },
        Case { resident: 1, seeds: 1, ..few([1, 3, 100, 100]) },
        Case { resident: 3, ..few([2, 3, 130, 130]) },
        Case { seeds: 1, ..few([1, 1, 77, 77]) },
    ];
    check_meeting("few_heads_that_meet", causal, LAYER, &cases);
    let wide = kernel(Dtype::Bf16, 128, AttentionMask::Causal);
    check_meeting(
        "wide_heads_that_meet",
        wide,
        LAYER,
        &[few([1, 2, 129, 129]), Case { resident: 1, ..few([1, 2, 200, 200]) }],
    );
}

#[test]
fn projections_that_meet() {
    let causal = kernel(Dtype::Bf16, 64, AttentionMask::Causal);
    let after = |cols, turned| After { projection: Some((cols, turned)), ..LAYER };
    let cases = [
        Case { processors: 1, ..Case::new([1, 2, 129, 129]) },
        Case { processors: 1, resident: 1, seeds: 1, ..Case::new([1, 3, 300, 300]) },
        Case { resident: 3, ..Case::new([2, 3, 200, 200]) },
    ];
    check_meeting("projections_that_meet", causal, after(256, true), &cases);
    check_meeting("turned_projections_that_meet", causal, after(128, false), &cases[..1]);
    let few = |sizes| Case { processors: 16, ..Case::new(sizes) };
    let cases = [
        few([1, 2, 129, 129]),
        Case { resident: 1, seeds: 1, ..few([1, 3, 70, 70]) },
        few([2, 1, 130, 130]),
        Case { resident: 1, seeds: 1, ..few([24, 1, 9, 73]) },
    ];
    check_meeting("few_projections_that_meet", causal, after(192, true), &cases);
    let wide = kernel(Dtype::Bf16, 128, AttentionMask::Causal);
    let cases = [few([1, 2, 129, 129]), Case { resident: 1, seeds: 1, ..few([1, 2, 200, 200]) }];
    check_meeting("wide_projections_that_meet", wide, after(256, true), &cases);
}

/// A word too many, or one too few, would shift all that follow.
#[test]
fn a_meeting_has_the_words_of_its_parameter_and_memory_of_its_own() {
    let causal = kernel(Dtype::Bf16, 64, AttentionMask::Causal);
    let case = Case { processors: 132, ..Case::new([8, 12, 1024, 1024]) };
    let cols = 768;
    for (projection, words, numbers) in [(None, 144, 64 * 12), (Some((cols, true)), 176, 64 * (12 + 6))] {
        let (source, grids) = meeting_grids(&causal, &case, After { projection, ..LAYER });
        let [grid] = grids.list.as_slice() else { panic!("{} grids", grids.list.len()) };
        assert_eq!(grid.words.iter().map(Word::count).sum::<usize>(), words, "{}", source.name);
        assert_eq!((grid.blocks, grid.threads), ([264, 1, 1], 384));
        // No more than two blocks have room for.
        assert!(2 * (grid.shared as usize + 1024) <= 228 << 10, "{} bytes", grid.shared);
        assert!(grid.words.contains(&Word::Number(numbers)));
        let ready = if projection.is_some() { 64 * 4 } else { 0 };
        assert_eq!(grids.persistent, 256 + ready + 8 * 1024 * cols / 64 * 8);
        assert_eq!(grids.workspace, if projection.is_some() { 8 * 1024 * cols * 2 } else { 0 });
    }
}

/// One element for a whole row, of a weight or of the residual, is no row of elements.
#[test]
fn what_is_broadcast_does_not_meet() {
    let rest = "k = input bf16[2,3,100,64] ; v = input bf16[2,3,100,64] ; q = input bf16[2,3,100,64]
a = attention q k v mask=causal ; t = transpose a [0,2,1,3] ; m = reshape t [2,100,192]";
    let full = "w = weight bf16[192] ; b = weight bf16[192] ; r = input bf16[2,100,192]";
    let scalar = "w1 = weight bf16[1] ; w = broadcast w1 [192] ; b = weight bf16[192] ; r = input bf16[2,100,192]";
    let shift = "b1 = weight bf16[1] ; b = broadcast b1 [192] ; w = weight bf16[192] ; r = input bf16[2,100,192]";
    let column = "r8 = input bf16[2,100,8] ; r1 = slice r8 axis=2 start=0 length=1 ; r = broadcast r1 [2,100,192]
w = weight bf16[192] ; b = weight bf16[192]";
    for (operands, sum, meets) in [
        (full, "add r m", true),
        (full, "add m r", true),
        (full, "add m m", false),
        (scalar, "add r m", false),
        (shift, "add r m", false),
        (column, "add r m", false),
    ] {
        let text = format!("{operands}\n{rest}\ns = {sum} ; y = layer_norm s w b ; out y ; out s");
        let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{error:?}\n{text}"));
        let plan = greedy(&graph);
        let hopper = plan.groups.iter().any(|group| {
            let backend = Backend::Cuda(CudaTarget::new(Arch::Sm90a, 132));
            let source = render(group.draft(&graph, &plan.placement), &backend).unwrap().source;
            matches!(source, Source::Cuda(source) if source.name == "attention_rows_hopper")
        });
        assert_eq!(hopper, meets, "{text}");
    }
}

/// Other GPUs and what the kernels do not do have other kernels.
#[test]
fn what_does_not_meet() {
    let causal = kernel(Dtype::Bf16, 64, AttentionMask::Causal);
    let names = |kernel: &AttentionKernel, case: Case, after: After, arch: Arch| -> Vec<String> {
        let graph = meeting_graph(kernel, &case, after);
        let machine = Machine::profile("h200").unwrap();
        let target = Target { machine: &machine, catalog: CudaCatalog::of(arch) };
        let plan = plan(&graph, target, Strategy::Greedy, &[]).unwrap();
        let backend = Backend::Cuda(CudaTarget::new(arch, 132));
        let name = |source: Source| if let Source::Cuda(source) = source { source.name } else { "library".into() };
        plan.groups
            .iter()
            .map(|group| name(render(group.draft(&graph, &plan.placement), &backend).unwrap().source))
            .collect()
    };
    let (hopper, usual) = (Arch::Sm90a, Case::new([2, 12, 300, 300]));
    let projected = |cols| After { projection: Some((cols, true)), ..LAYER };
    assert_eq!(names(&causal, usual, LAYER, hopper), ["attention_rows_hopper"]);
    assert_eq!(names(&causal, usual, projected(768), hopper), ["attention_block_hopper"]);
    assert_eq!(names(&causal, usual, LAYER, Arch::Sm80), ["attention_rows"]);
    assert!(names(&causal, usual, projected(768), Arch::Sm80).len() > 1);
    // Columns that are no multiple of 64, more than 63 parts, widths without warpgroups, f32, few keys.
    assert!(names(&causal, usual, projected(96), hopper).len() > 1);
    assert!(names(&causal, usual, projected(4096), hopper).len() > 1);
    assert!(names(&kernel(Dtype::Bf16, 96, AttentionMask::Causal), usual, projected(768), hopper).len() > 1);
    assert!(names(&kernel(Dtype::F32, 64, AttentionMask::Causal), usual, projected(768), hopper).len() > 1);
    assert_eq!(names(&kernel(Dtype::Bf16, 80, AttentionMask::Causal), usual, LAYER, hopper), ["attention_rows"]);
    assert_eq!(names(&causal, Case::new([1, 64, 100, 100]), LAYER, hopper), ["attention_rows"]);
    assert_eq!(names(&causal, Case::new([1, 2, 40, 40]), LAYER, hopper), ["attention_rows"]);
}

#[test]
fn mistakes_where_rows_meet() {
    let mistakes: [Mistake; 7] = [
        ("((u32)(word >> 32) & 1) == mark", "true", "FAILED"),
        ("mbarrier_wait(rings.barrier(READY + use % SLOTS), turn_of(use));", "", "FAILED"),
        ("mbarrier_wait(filled, turn_of(use));", "", "FAILED"),
        ("(u32)(word >> 32) & ~1u", "(u32)(word >> 32)", "other bits in another launch"),
        ("release(rings.barrier(EMPTY + (use + turn) % SLOTS));", "", "deadlock"),
        ("if (--looks <= 0) return false;", "", "deadlock"),
        ("(helper_anew() + round) % HELPERS * BATCH", "helper_anew() * BATCH + 1", "FAILED"),
    ];
    let causal = kernel(Dtype::Bf16, 64, AttentionMask::Causal);
    let case = Case { processors: 1, seeds: 2, ..Case::new([1, 7, 200, 200]) };
    let (source, launch) = meeting(&causal, &case, LAYER);
    let launched = Launched { source, entry: "attention_rows_hopper", launch, driver: "meeting.cpp" };
    check_mistakes("mistakes_where_rows_meet", launched, case, &mistakes);
}

#[test]
fn mistakes_where_parts_meet() {
    let mistakes: [Mistake; 3] = [
        ("wait_for_chunks(rings, chunks);", "", "a copy to"),
        ("if (i < CHUNKS) wait_for_tiles(rings, at, now % CHUNKS);", "", "FAILED"),
        ("mbarrier_wait(chunk_full(rings, now), chunk_parity(now));", "", "in flight"),
    ];
    check_parts(
        "mistakes_where_parts_meet",
        Case { processors: 1, seeds: 3, ..Case::new([1, 3, 300, 300]) },
        &mistakes,
    );
}

/// Blocks that have one head each draw parts while others are not done with theirs.
#[test]
fn a_part_that_does_not_wait_for_heads() {
    let mistakes: [Mistake; 1] =
        [("while ((int)(load_acquire(p.g_ready + number.tile) - target) < 0) back_off();", "", "FAILED")];
    let case = Case { processors: 2, resident: 4, seeds: 3, ..Case::new([1, 2, 129, 129]) };
    check_parts("a_part_that_does_not_wait_for_heads", case, &mistakes);
}

fn check_parts(name: &str, case: Case, mistakes: &[Mistake]) {
    let causal = kernel(Dtype::Bf16, 64, AttentionMask::Causal);
    let (source, launch) = meeting(&causal, &case, After { projection: Some((128, true)), ..LAYER });
    let launched = Launched { source, entry: "attention_block_hopper", launch, driver: "meeting.cpp" };
    check_mistakes(name, launched, case, mistakes);
}

// ---- matmuls of few rows

/// The kernel of `y = x w + b` in bf16 and, as `emulator/matmul.cpp` reads it, its launch.
fn matmul([m, n, k]: [usize; 3], transposed: bool, processors: usize) -> (CudaSource, Grid, String) {
    let (weight, flag) = if transposed { (format!("{n},{k}"), "transposed") } else { (format!("{k},{n}"), "") };
    let text = format!(
        "x = input bf16[{m},{k}] ; w = weight bf16[{weight}] ; b = weight bf16[{n}] ; y = linear x w b {flag} ; out y"
    );
    let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{error:?}\n{text}"));
    let (source, launch, grids) = only(&graph, &greedy(&graph), processors);
    let [grid] = grids.list.as_slice() else { panic!("{} grids", grids.list.len()) };
    let names: Vec<&str> = launch.arguments().iter().map(|arg| graph.given_name(arg.base).unwrap_or("y")).collect();
    let sizes =
        format!("matmul {m} {n} {k} {} 2\narguments {} {}\n", u8::from(transposed), names.len(), names.join(" "));
    let launch = sizes + &written(grid);
    (source, grid.clone(), launch)
}

/// Weights by rows, whose sums a cluster exchanges, and by columns.
#[test]
fn matmuls_of_few_rows() {
    let Some(compiler) = compiler() else { return };
    for (name, sizes, transposed, processors, cluster) in [
        ("matmul_by_rows", [1, 40, 300], false, 1, 1),
        ("matmul_of_clusters", [3, 100, 1030], false, 7, 4),
        ("matmul_by_columns", [2, 50, 520], true, 2, 1),
        ("matmul_of_slices", [5, 9, 520], true, 4, 1),
    ] {
        let (source, grid, launch) = matmul(sizes, transposed, processors);
        assert_eq!((source.name.as_str(), grid.cluster), ("skinny", cluster), "{name}");
        let program = TileProgram::compile(&compiler, name, "matmul.cpp", "skinny", &source.text);
        for (lanes, seeds) in [(Lanes::Together, 1..3), (Lanes::Apart, 101..102)] {
            let (ok, said) = program.run(&launch, 4, lanes, seeds, 0);
            assert!(ok, "{name}, {lanes:?}:\n{said}");
        }
    }
}

#[test]
fn mistakes_in_a_cluster() {
    let mistakes: [Mistake; 3] = [
        ("await_remote_stores(&s_sent);", "", "FAILED"),
        ("cluster_wait();", "", "FAILED"),
        (
            "if (threadIdx.x == 0) mbarrier_arrive_expect_tx(shared_address(&s_sent), (VECTORS + SPLIT - 1 - part) / SPLIT * V * SPLIT * (int)sizeof(float));",
            "",
            "deadlock",
        ),
    ];
    let (source, _, launch) = matmul([3, 100, 1030], false, 7);
    let launched = Launched { source, entry: "skinny", launch, driver: "matmul.cpp" };
    check_mistakes("mistakes_in_a_cluster", launched, Case::new([1, 1, 1, 1]), &mistakes);
}

/// A part with instructions of a GPU has a file of the emulator, and one without them has none.
#[test]
fn the_emulator_mirrors_the_device_side_library() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulator/tile");
    let mut files: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    files.sort();
    let mut emulated: Vec<&str> = Part::ALL.into_iter().filter(|&part| is_emulated(part)).map(Part::name).collect();
    emulated.sort_unstable();
    assert_eq!(files, emulated);
    for part in Part::ALL {
        assert!(is_emulated(part) || !part.text().contains("asm"), "{part:?}");
        for name in functions(part.text()).into_iter().filter(|_| is_emulated(part)) {
            let file = fs::read_to_string(folder.join(part.name()).with_extension("h")).unwrap();
            assert!(file.contains(&format!("{name}(")), "{part:?} has {name}");
        }
    }
}

/// Names of the functions that a text defines.
fn functions(text: &str) -> Vec<&str> {
    let name = |line: &'_ str| -> Option<usize> { line.contains("__forceinline__").then(|| line.find('('))? };
    let before = text.lines().filter_map(|line| name(line).map(|end| &line[..end]));
    before.filter_map(|before| before.rsplit([' ', '*', '&']).next()).collect()
}
