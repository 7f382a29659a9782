//! Attention and what follows it in one launch.

use std::fmt::Write;

use deuteron_attention::kernel::{AttentionKernel, AttentionMask, HeadStrides};
use deuteron_codegen::Source;
use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget, Grids, Word};
use deuteron_graph::{Dtype, Graph, NodeId};
use deuteron_kernels::{Backend, CudaCatalog, render};
use deuteron_plan::{Machine, Strategy, Target, plan};

use super::attention::{Case, kernel, runs};
use super::{Launched, Mistake, TileProgram, check_mistakes, compiler, greedy, only, written};

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
            let program = TileProgram::compile(compiler, name, "meeting.cpp", entry, &source.text);
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
    check_mistakes("mistakes_where_rows_meet", launched, case.resident, case.seeds, &mistakes);
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
    check_mistakes(name, launched, case.resident, case.seeds, mistakes);
}
