//! CUDA sources without a GPU: every kernel of the catalogue and of random graphs goes through the real compiler, and the
//! catalogue's kernels are kept as reviewed snapshots. `DEUTERON_BLESS=1` writes the snapshots anew.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use deuteron::listing::{OfflineGpu, kernels_for};
use deuteron::reference::random_case;
use deuteron::{Dtype, FusedOp, Graph, GroupKind, Heads, Machine, Mask, NodeId, Norm, Sizes, Strategy, Target, plan};
use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget, Grid};
use deuteron_codegen::{Kernel, Source};
use deuteron_device::cuda::cache::DiskCache;
use deuteron_device::cuda::library::{self, Search};
use deuteron_device::cuda::nvrtc::{Compiler, Request};
use deuteron_kernels::{Backend, CudaCatalog, TaggedLine, render, tagged_source};

/// One kernel to compile.
struct Case {
    label: String,
    source: CudaSource,
    arch: Arch,
    /// part of the catalogue: must not spill
    ready_made: bool,
}

/// The CUDA sources of a graph's kernels.
fn sources(graph: &Graph, arch: Arch, strategy: Strategy) -> Vec<CudaSource> {
    let machine = Machine::profile("h200").unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(arch) };
    let plan = plan(graph, target, strategy, &[]).unwrap();
    let backend = Backend::Cuda(CudaTarget::new(arch, 132));
    let rendered =
        plan.groups.iter().map(|group| render(group.draft(graph, &plan.placement), &backend).unwrap().source);
    rendered.filter_map(|source| if let Source::Cuda(source) = source { Some(source) } else { None }).collect()
}

fn find(name: &str) -> FusedOp {
    FusedOp::find(name).unwrap()
}

/// Ops of the catalogue whose kernels are generated.
fn row_ops() -> Vec<FusedOp> {
    FusedOp::catalog().into_iter().filter(FusedOp::is_rows).collect()
}

/// Every op of a list, forward and backward.
fn catalogue(ops: &[FusedOp], dtype: Dtype, [rows, cols]: [usize; 2]) -> Vec<(String, Graph)> {
    let mut graphs = Vec::new();
    for op in ops {
        let types = op.operand_types(rows, cols, dtype);
        graphs.push((format!("{op:?} {dtype} {rows}x{cols}"), op.graph(&types).unwrap()));
        if op.has_backward() {
            graphs.push((format!("{op:?} backward {dtype} {rows}x{cols}"), op.backward_graph(&types).unwrap()));
        }
    }
    graphs
}

fn compiler() -> Option<Compiler> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/nvrtc");
    let environments = std::env::var_os("DEUTERON_NVRTC_ENV").map(PathBuf::from).into_iter().chain([root]).collect();
    match library::nvrtc(&Search { environments, ..Search::default() }) {
        Ok(found) => Some(Compiler::new(found)),
        Err(error) => {
            println!("SKIPPED: CUDA sources are not compiled: {error}");
            None
        }
    }
}

/// Where warps give registers to others, those that are given are those that are taken: with fewer to begin with some would wait for ever.
fn uneven(text: &str, registers: usize) -> Option<String> {
    let meets = text.contains("attention_rows_hopper") || text.contains("attention_block_hopper");
    let expected = if text.contains("constexpr int BLOCKS = 2;") { 80 } else { 168 };
    (meets && registers != expected).then(|| format!("expected {expected} registers to be shared out, got {registers}"))
}

/// Compiles all cases on all cores, each text once, and reports what fails and what spills. What an earlier run compiled is kept.
fn compile(compiler: &Compiler, cases: Vec<Case>) -> Vec<String> {
    let mut distinct: BTreeMap<(Arch, String), (String, bool)> = BTreeMap::new();
    for case in cases {
        let entry = distinct.entry((case.arch, case.source.text)).or_insert((case.label, false));
        entry.1 |= case.ready_made;
    }
    let list: Vec<_> = distinct.into_iter().collect();
    let requests: Vec<Request<'_>> = list
        .iter()
        .map(|((arch, text), (label, _))| Request { name: label, text, arch: arch.name(), options: &[] })
        .collect();
    let kept = DiskCache::open(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels"));
    let compiled = compiler.compile_all(&requests, Some(&kept));
    let (mut failures, mut most) = (Vec::new(), 0);
    for (((arch, text), (label, ready_made)), made) in list.iter().zip(compiled) {
        let cubin = match made {
            Ok(cubin) => cubin,
            Err(error) => {
                failures.push(format!("{label} for {arch}: {error}"));
                continue;
            }
        };
        let registers = cubin.entries.iter().map(|entry| entry.registers as usize).max().unwrap_or(0);
        most = most.max(registers);
        let spills = cubin.entries.iter().filter(|entry| *ready_made && entry.spill_stores + entry.spill_loads > 0);
        failures.extend(spills.take(1).map(|entry| {
            let (name, bytes) = (&entry.name, entry.spill_stores);
            format!("{label} for {arch}: `{name}` spills {bytes} bytes at {} registers", entry.registers)
        }));
        failures.extend(uneven(text, registers).map(|problem| format!("{label} for {arch}: {problem}")));
    }
    println!("{} kernels compiled, {most} registers at most", list.len());
    failures
}

#[test]
fn every_kernel_of_the_catalogue_compiles_without_spills() {
    let Some(compiler) = compiler() else { return };
    let mut cases = Vec::new();
    let mut add = |op: &FusedOp, dtype: Dtype, size: [usize; 2], arch: Arch| {
        for (label, graph) in catalogue(std::slice::from_ref(op), dtype, size) {
            for source in sources(&graph, arch, Strategy::Greedy) {
                cases.push(Case { label: label.clone(), source, arch, ready_made: true });
            }
        }
    };
    // Every variant for both architectures, which take turns at two sizes.
    let both = [Arch::Sm80, Arch::Sm90a];
    for (turn, op) in FusedOp::variants().iter().filter(|op| op.is_rows()).enumerate() {
        add(op, Dtype::Bf16, [8192, 768], both[turn % 2]);
        add(op, Dtype::F32, [8192, 1500], both[(turn + 1) % 2]);
    }
    // Of more sizes and architectures the usual ones, in turn.
    for (turn, op) in row_ops().iter().enumerate() {
        // The oldest has no instructions for bf16.
        match turn % 4 {
            0 => add(op, Dtype::Bf16, [512, 127], Arch::Sm89),
            1 | 3 => add(op, Dtype::Bf16, [512, 127], Arch::Sm75),
            _ => add(op, Dtype::F16, [4096, 4096], Arch::Sm90a),
        }
        // Scores grow with the square of the columns. Of so few rows clusters take one together where there are any.
        if !op.is_square() {
            add(op, Dtype::Bf16, [64, 32768], both[(turn / 2) % 2]);
        }
    }
    let failures = compile(&compiler, cases);
    assert!(failures.is_empty(), "{} kernels:\n{}", failures.len(), failures.join("\n"));
}

/// Sums of 16-bit operands that stay f32 and are added to what is there: one kernel, where there are instructions for it.
#[test]
fn matmuls_whose_sums_stay_f32_are_one_kernel() {
    let compiler = compiler();
    let gradient = |rows: usize, cols: usize, dtype: &str| {
        format!(
            "x = input {dtype}[{rows},{cols}] ; g = input {dtype}[{rows},72] ; s = input f32[{cols},72]
             a = cast x f32 ; b = cast g f32 ; d = matmul a b transpose_a ; y = add s d ; out y"
        )
    };
    let mut cases = Vec::new();
    for (dtype, size) in [("bf16", [4096, 768]), ("f16", [300, 264]), ("bf16", [301, 51])] {
        let graph: Graph = gradient(size[0], size[1], dtype).parse().unwrap();
        for arch in [Arch::Sm80, Arch::Sm89, Arch::Sm90a, Arch::Sm100, Arch::Sm120] {
            let made = sources(&graph, arch, Strategy::Fused);
            assert_eq!(made.len(), 1, "{size:?} of {dtype} for {arch}");
            cases.extend(made.into_iter().map(|source| Case {
                label: "f32 sums".into(),
                source,
                arch,
                ready_made: true,
            }));
        }
        assert_eq!(
            sources(&graph, Arch::Sm75, Strategy::Fused).len(),
            2,
            "both casts are copies, and the library multiplies"
        );
    }
    let Some(compiler) = compiler else { return };
    let failures = compile(&compiler, cases);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// A table of bytes, a norm and its bytes, a product of bytes with scales, bias and GELU; experts of bytes.
#[test]
fn kernels_around_bytes_compile() {
    let Some(compiler) = compiler() else { return };
    let text = "tokens = input i32[64] ; table = weight i8[1000,770] ; scales = weight f32[1000,1]
q = gather table tokens ; s = gather scales tokens ; x = dequantize q s f32
y, mean, rstd = layer_norm x w[770] b[770] eps=1e-5
a, sa = quantize_int8 y
z = quantized_linear a sa m:i8[3072,770] sm[3072] bm[3072] f32
g = gelu z kind=tanh
out g";
    let op = find("moe_int8");
    let experts =
        [[64, 96], [3, 770]].map(|[rows, cols]| op.graph(&op.operand_types(rows, cols, Dtype::Bf16)).unwrap());
    let mut cases = Vec::new();
    for graph in [text.parse().unwrap()].iter().chain(&experts) {
        for arch in [Arch::Sm75, Arch::Sm80, Arch::Sm90a] {
            let made = sources(graph, arch, Strategy::Fused).into_iter();
            cases.extend(made.map(|source| Case { label: "bytes".into(), source, arch, ready_made: true }));
        }
    }
    assert!(cases.len() >= 18, "{}", cases.len());
    let failures = compile(&compiler, cases);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn attention_is_one_kernel_of_its_own() {
    let compiler = compiler();
    for (mask, dtype, expected) in [
        (Mask::Causal, Dtype::Bf16, "attention_hopper"),
        (Mask::Full, Dtype::F16, "attention_hopper"),
        (Mask::Causal, Dtype::F32, "attention"),
    ] {
        let op = find("attention").with(|a| a.mask = mask);
        let graph = op.graph(&op.operand_types(8192, 768, dtype)).unwrap();
        for strategy in [Strategy::Unfused, Strategy::Greedy, Strategy::Fused] {
            let names: Vec<String> =
                sources(&graph, Arch::Sm90a, strategy).into_iter().map(|source| source.name).collect();
            assert_eq!(names, [expected], "{mask:?} {dtype} {strategy}");
        }
        let gradient = op.backward_graph(&op.operand_types(8192, 768, dtype)).unwrap();
        for strategy in [Strategy::Unfused, Strategy::Greedy, Strategy::Fused] {
            // Nine products in f32 on plain units cost more than the library's five with scores in memory: the search may say so.
            if dtype == Dtype::F32 && strategy == Strategy::Fused {
                continue;
            }
            let names: Vec<String> =
                sources(&gradient, Arch::Sm90a, strategy).into_iter().map(|source| source.name).collect();
            assert_eq!(names, ["attention_backward"], "{mask:?} {dtype} {strategy}");
        }
        let of = |graph: &Graph| sources(graph, Arch::Sm90a, Strategy::Greedy);
        let all = of(&graph).into_iter().chain(of(&gradient));
        let case =
            |source: CudaSource| Case { label: source.name.clone(), source, arch: Arch::Sm90a, ready_made: true };
        let failures = compiler.as_ref().map_or(Vec::new(), |compiler| compile(compiler, all.map(case).collect()));
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    }
}

/// For rows that a part of a warp, a warp or a block holds, and for those that nobody does; the usual ones on every architecture.
#[test]
fn attention_with_row_work_is_one_kernel() {
    let compiler = compiler();
    let mut cases = Vec::new();
    let mut add = |mask: Mask, norm: Norm, dtype: Dtype, [cols, width]: [usize; 2], archs: &[Arch]| {
        let op = find("attention_add_norm").with(|a| (a.mask, a.norm) = (mask, norm));
        let heads = Heads { positions: 300, width };
        let graph = op.graph(&op.operand_types_of(&Sizes { heads, ..Sizes::new(2400, cols, dtype) })).unwrap();
        for &arch in archs {
            let made = sources(&graph, arch, Strategy::Greedy);
            let names: Vec<&str> = made.iter().map(|source| source.name.as_str()).collect();
            let label = format!("{mask:?} {norm:?} {dtype} {cols} columns, heads of {width}");
            // By warpgroups where attention alone is, else by whoever ends the last head of some rows.
            let by_warpgroups = arch == Arch::Sm90a && dtype != Dtype::F32;
            let name = if by_warpgroups { "attention_rows_hopper" } else { "attention_rows" };
            assert_eq!(names, [name], "{label} {arch}");
            cases.extend(made.into_iter().map(|source| Case { label: label.clone(), source, arch, ready_made: true }));
        }
    };
    for dtype in Dtype::FLOATS {
        add(Mask::Causal, Norm::Layer, dtype, [768, 64], &[Arch::Sm75, Arch::Sm80, Arch::Sm90a]);
    }
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for sizes in [[64, 64], [1600, 64], [8192, 64], [96, 32], [768, 96], [1024, 128]] {
            add(Mask::Full, Norm::Rms, dtype, sizes, &[Arch::Sm80]);
        }
    }
    let failures = compiler.as_ref().map_or(Vec::new(), |compiler| compile(compiler, cases));
    assert!(failures.is_empty(), "{} kernels:\n{}", failures.len(), failures.join("\n"));
}

/// By warpgroups: with two blocks a multiprocessor or one, heads of 64 and 128, with a projection and without.
#[test]
fn attention_and_all_that_follows_is_one_kernel_of_warpgroups() {
    let compiler = compiler();
    let (mask, arch) = (Mask::Causal, Arch::Sm90a);
    let mut cases = Vec::new();
    for (rows, cols, width) in [(8192, 768, 64), (1024, 768, 64), (8192, 1024, 128), (8192, 1600, 64)] {
        for (dtype, norm) in [(Dtype::Bf16, Norm::Layer), (Dtype::F16, Norm::Rms)] {
            for (op, name) in
                [("attention_add_norm", "attention_rows_hopper"), ("attention_block", "attention_block_hopper")]
            {
                let op = find(op).with(|a| (a.mask, a.norm) = (mask, norm));
                let heads = Heads { positions: 1024, width };
                let graph = op.graph(&op.operand_types_of(&Sizes { heads, ..Sizes::new(rows, cols, dtype) })).unwrap();
                let made = sources(&graph, arch, Strategy::Greedy);
                let names: Vec<&str> = made.iter().map(|source| source.name.as_str()).collect();
                let label = format!("{name} {dtype} {rows} x {cols}, heads of {width}");
                assert_eq!(names, [name], "{label}");
                cases.extend(made.into_iter().map(|source| Case {
                    label: label.clone(),
                    source,
                    arch,
                    ready_made: true,
                }));
                // What comes before Hopper has a kernel for attention with row work, and none with a projection.
                let before = sources(&graph, Arch::Sm80, Strategy::Greedy);
                assert!(before.iter().all(|source| !source.name.ends_with("_hopper")), "{label}");
            }
        }
    }
    let Some(compiler) = compiler else { return };
    let failures = compile(&compiler, cases);
    assert!(failures.is_empty(), "{} kernels:\n{}", failures.len(), failures.join("\n"));
}

/// The last block of a tile does its rows alone: the search finds two kernels cheaper where attention is short.
#[test]
fn the_search_weighs_one_launch_by_what_its_blocks_wait_for() {
    let op = find("attention_add_norm");
    let graph = op.graph(&op.operand_types(1024, 768, Dtype::Bf16)).unwrap();
    let names: Vec<String> =
        sources(&graph, Arch::Sm80, Strategy::Fused).into_iter().map(|source| source.name).collect();
    assert_eq!(names, ["attention_tensor", "row"]);
}

/// As measured (`h200-crossover.csv`): rows pay at nearly every size, a projection hardly anywhere, and where columns do not fill its parts
/// it costs much.
#[test]
fn the_search_takes_one_launch_of_warpgroups_where_it_wins() {
    let [rows_op, block_op] = ["attention_add_norm", "attention_block"].map(find);
    for (op, rows, cols, positions, one) in [
        (rows_op, 1024, 768, 1024, true),
        (rows_op, 8192, 768, 1024, true),
        (rows_op, 32768, 1600, 1024, true),
        (rows_op, 16384, 768, 4096, true),
        (block_op, 1024, 768, 1024, false),
        (block_op, 8192, 768, 1024, false),
        (block_op, 32768, 768, 1024, false),
        (block_op, 32768, 768, 4096, false),
        (block_op, 4096, 768, 128, false),
        (block_op, 32768, 1600, 1024, false),
    ] {
        let heads = Heads { positions, width: 64 };
        let graph = op.graph(&op.operand_types_of(&Sizes { heads, ..Sizes::new(rows, cols, Dtype::Bf16) })).unwrap();
        let made = sources(&graph, Arch::Sm90a, Strategy::Fused);
        let names: Vec<&str> = made.iter().map(|source| source.name.as_str()).collect();
        assert_eq!(names.len() == 1, one, "{} {rows} x {cols}: {names:?}", op.name());
    }
}

#[test]
fn probabilities_of_attention_are_one_kernel() {
    let compiler = compiler();
    for mask in [Mask::Causal, Mask::Full, Mask::Additive] {
        let op = find("attention_scores").with(|a| a.mask = mask);
        for (dtype, arch) in [(Dtype::Bf16, Arch::Sm90a), (Dtype::F16, Arch::Sm80), (Dtype::F32, Arch::Sm75)] {
            let graph = op.graph(&op.operand_types(8192, 768, dtype)).unwrap();
            let of = |strategy| sources(&graph, arch, strategy);
            for strategy in [Strategy::Unfused, Strategy::Greedy] {
                let names: Vec<String> = of(strategy).into_iter().map(|source| source.name).collect();
                assert_eq!(names, ["attention_scores"], "{mask:?} {dtype} {strategy}");
            }
            // The search takes it where it is cheaper, which it is on the matrix units.
            if dtype != Dtype::F32 {
                let names: Vec<String> = of(Strategy::Fused).into_iter().map(|source| source.name).collect();
                assert_eq!(names, ["attention_scores"], "{mask:?} {dtype}");
            }
            let case = |source: CudaSource| Case { label: source.name.clone(), source, arch, ready_made: true };
            let all = of(Strategy::Greedy).into_iter().map(case).collect();
            let failures = compiler.as_ref().map_or(Vec::new(), |compiler| compile(compiler, all));
            assert!(failures.is_empty(), "{}", failures.join("\n"));
        }
    }
    let names = |text: &str| -> Vec<String> {
        let graph: Graph = text.parse().unwrap();
        sources(&graph, Arch::Sm90a, Strategy::Greedy).into_iter().map(|source| source.name).collect()
    };
    // In a cache, over keys that heads share, of slices of one tensor, of a single head.
    for text in [
        "q = input bf16[2,6,9,64] ; k1 = input bf16[2,1,300,64] ; k = broadcast k1 [2,6,300,64] ; at = input i32[2]
p = attention_scores q k at mask=cached ; out p",
        "x = input bf16[2,167,192]
q1 = slice x axis=2 start=0 length=96 ; q4 = reshape q1 [2,167,3,32] ; q = transpose q4 [0,2,1,3]
k1 = slice x axis=2 start=96 length=96 ; k4 = reshape k1 [2,167,3,32] ; k = transpose k4 [0,2,1,3]
m = input f32[2,1,1,167] ; p = attention_scores q k m mask=additive ; out p",
        "q = input f16[33,48] ; k = input f16[17,48] ; p = attention_scores q k scale=-0.3 ; out p",
    ] {
        assert_eq!(names(text), ["attention_scores"], "{text}");
    }
    // What follows stands beside it.
    let text = "q = input bf16[12,256,64] ; k = input bf16[12,256,64]
p = attention_scores q k mask=causal ; y = gelu p kind=tanh ; out p y";
    assert_eq!(names(text), ["attention_scores", "row"]);
}

#[test]
fn random_fused_groups_compile() {
    let Some(compiler) = compiler() else { return };
    let mut cases = Vec::new();
    // Both architectures take turns.
    let mut seed = 1;
    while cases.len() < 120 {
        let arch = [Arch::Sm80, Arch::Sm90a][seed as usize % 2];
        let made = sources(&random_case(seed).graph, arch, Strategy::Fused).into_iter();
        cases.extend(made.map(|source| Case { label: format!("seed {seed}"), source, arch, ready_made: false }));
        seed += 1;
    }
    let failures = compile(&compiler, cases);
    assert!(failures.is_empty(), "{} kernels:\n{}", failures.len(), failures.join("\n"));
}

/// The part of a source that is this kernel's own: constants first, then what follows the common prelude.
fn own_part(text: &str) -> String {
    let constants: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).collect();
    let kernel: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("struct Parameters")).collect();
    format!("{}\n\n{}\n", constants.join("\n"), kernel.join("\n"))
}

/// Row kernels that no op of the catalogue has at the size of its snapshot: sums of columns over rows that a block holds, of one number per
/// row, and of rows that are no whole number of vectors.
const OTHER_SOURCES: [(&str, &str); 3] = [
    ("sums_of_wide_rows", "x = input bf16[8192,6144] ; m = row_max x ; y = sub x m ; s = column_sum y ; out s"),
    ("sums_of_numbers", "x = input f32[8192,768] ; m = row_max x ; y = sub x m ; s = column_sum m ; out y s"),
    ("sums_of_odd_rows", "x = input bf16[8192,767] ; m = row_max x ; y = sub x m ; s = column_sum y ; out y s"),
];

/// The graphs whose sources are reviewed, each with the name of its file.
fn reviewed() -> Vec<(String, Graph)> {
    let mut graphs: Vec<(String, Graph)> =
        OTHER_SOURCES.map(|(name, text)| (name.to_string(), text.parse().unwrap())).to_vec();
    for op in row_ops() {
        let types = op.operand_types(8192, 768, Dtype::Bf16);
        graphs.push((op.name().to_string(), op.graph(&types).unwrap()));
        if op.has_backward() {
            graphs.push((format!("{}_backward", op.name()), op.backward_graph(&types).unwrap()));
        }
    }
    graphs
}

#[test]
fn the_catalogues_sources_are_the_reviewed_ones() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sources");
    let bless = std::env::var_os("DEUTERON_BLESS").is_some();
    let mut different = Vec::new();
    for (name, graph) in reviewed() {
        let all = sources(&graph, Arch::Sm90a, Strategy::Greedy);
        let rows = all.iter().filter(|source| source.name == "row");
        let text: String = rows.map(|source| own_part(&source.text)).collect();
        let path = folder.join(format!("{name}.cu"));
        // A kernel that is written by hand is its own source.
        if text.is_empty() {
            assert!(!path.exists(), "{name} has no row kernel");
            continue;
        }
        if bless {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, &text).unwrap();
        }
        if std::fs::read_to_string(&path).ok().as_deref() != Some(text.as_str()) {
            different.push(name);
        }
    }
    assert!(
        different.is_empty(),
        "sources changed: {}; look at them, then write them anew with DEUTERON_BLESS=1",
        different.join(", ")
    );
}

/// Whether a line does the work of some operation: arithmetic, reductions and stores, not loops and addresses.
fn computes(text: &str) -> bool {
    let starts = ["const F e", "const I e", "const B e", "const float e", "const int e", "const bool e"];
    let calls = ["store<", "store_tail<", "store_one(", "butterfly<", "::both(", "Packer<", "finish_columns<"];
    starts.iter().any(|start| text.trim_start().starts_with(start)) || calls.iter().any(|call| text.contains(call))
}

#[test]
fn every_line_that_computes_names_its_operation() {
    let machine = Machine::profile("h200").unwrap();
    let backend = Backend::Cuda(CudaTarget::new(Arch::Sm90a, 132));
    let mut graphs = catalogue(&row_ops(), Dtype::Bf16, [8192, 768]);
    // Rows that do not fit registers. Scores grow with the square of the columns.
    let is_long = |op: &FusedOp| !op.is_square();
    let long: Vec<FusedOp> = row_ops().into_iter().filter(is_long).collect();
    graphs.extend([[64, 32768], [3, 131072]].into_iter().flat_map(|size| catalogue(&long, Dtype::Bf16, size)));
    for (label, graph) in graphs {
        let plan =
            plan(&graph, Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) }, Strategy::Greedy, &[])
                .unwrap();
        for group in plan.groups.iter().filter(|group| group.kind == GroupKind::Row) {
            let draft = group.draft(&graph, &plan.placement);
            let source = render(draft, &backend).unwrap().source.to_string();
            let lines = tagged_source(&draft, &backend).unwrap();
            let text = |lines: &[TaggedLine]| lines.iter().map(|line| format!("{}\n", line.text)).collect::<String>();
            let shared = lines.iter().position(|line| line.text.starts_with("// prelude:")).unwrap();
            let (constants, kernel) = (&lines[..shared], &lines[shared + 1..]);
            assert!(source.starts_with(&text(constants)) && source.ends_with(&text(kernel)), "{label}: {}", group.name);
            let silent = kernel.iter().find(|line| line.node.is_none() && computes(&line.text));
            assert_eq!(silent, None, "{label}: {}", group.name);
            let calls = |nodes: Vec<NodeId>| nodes.into_iter().map(|id| graph.node(id).call).collect::<BTreeSet<_>>();
            let named = calls(lines.iter().filter_map(|line| line.node).collect());
            assert_eq!(named, calls(group.nodes.clone()), "{label}: {}", group.name);
        }
    }
}

/// How far the planner's registers may be from the compiler's, in the median, as a share. It is 0.20 with NVRTC 13.4 for
/// sm_90a: within 24 registers, except where sums over rows stay in registers, which the planner does not count.
const REGISTERS_OFF: f64 = 0.3;

#[test]
fn registers_are_about_what_the_planner_expects() {
    let Some(compiler) = compiler() else { return };
    let gpu = OfflineGpu::of_arch(Arch::Sm90a, compiler).unwrap();
    let mut off = Vec::new();
    // Every other one: another test compiles them all.
    for (label, graph) in catalogue(&row_ops(), Dtype::Bf16, [8192, 768]).into_iter().step_by(2) {
        for kernel in kernels_for(&gpu, &graph, Strategy::Greedy).unwrap() {
            let Some(compiled) = kernel.compiled.filter(|_| kernel.kind == "row") else { continue };
            let (registers, predicted) = (compiled.registers, compiled.predicted_registers);
            println!("{label}: {registers} registers, {predicted} predicted");
            off.push(predicted.abs_diff(registers) as f64 / registers as f64);
        }
    }
    off.sort_by(f64::total_cmp);
    let middle = off[off.len() / 2];
    println!("{} row kernels: off by {middle:.2} in the median", off.len());
    assert!(middle <= REGISTERS_OFF, "off by {middle:.2} in the median");
}

/// Every grid that a launch of a graph's kernels would start, with what it belongs to.
fn launches(graph: &Graph, arch: Arch) -> Vec<(String, Grid)> {
    let machine = Machine::profile("h200").unwrap();
    let plan =
        plan(graph, Target { machine: &machine, catalog: CudaCatalog::of(arch) }, Strategy::Greedy, &[]).unwrap();
    let target = CudaTarget::new(arch, 132);
    let mut all = Vec::new();
    for group in &plan.groups {
        let kernel = render(group.draft(graph, &plan.placement), &Backend::Cuda(target.clone())).unwrap();
        if let Kernel { source: Source::Cuda(source), launch } = kernel {
            let label = format!("{} {} {}", group.name, source.name, launch.variant().name);
            let grids = &launch.grids().expect("grids").list;
            all.extend(grids.iter().map(|grid| (label.clone(), grid.clone())));
        }
    }
    all
}

#[test]
fn every_launch_is_within_the_limits_of_the_architecture() {
    let sizes =
        [[0, 8], [1, 1], [1, 64], [1, 32768], [3, 131072], [2, 1048576], [7, 50257], [100, 50257], [262144, 64]];
    let more = [[1024, 32768], [4096, 1000], [65536, 768], [16384, 4096], [5, 129], [2048, 8192], [129, 16384]];
    for op in FusedOp::variants().into_iter().filter(FusedOp::is_rows) {
        if op.is_square() {
            continue; // its operands grow with the square of the columns
        }
        for [rows, cols] in sizes.into_iter().chain(more) {
            for arch in [Arch::Sm75, Arch::Sm80, Arch::Sm90a] {
                let types = op.operand_types(rows, cols, Dtype::Bf16);
                let mut graphs = vec![op.graph(&types).unwrap()];
                graphs.extend(op.has_backward().then(|| op.backward_graph(&types).unwrap()));
                for (name, grid) in graphs.iter().flat_map(|graph| launches(graph, arch)) {
                    let [x, y, z] = grid.blocks;
                    let label = format!("{op:?} {rows}x{cols} {arch} {name}: {grid:?}");
                    assert!(x <= i32::MAX as u32 && y <= 65535 && z <= 65535, "{label}");
                    assert!((1..=1024).contains(&grid.threads), "{label}");
                    assert!(grid.shared as usize <= arch.block_shared(), "{label}");
                    let clusters = if arch.has_clusters() { 16 } else { 1 };
                    assert!((1..=clusters).contains(&grid.cluster) && x.is_multiple_of(grid.cluster), "{label}");
                }
            }
        }
    }
}

#[test]
fn copies_and_scatters_are_within_the_limits_too() {
    let texts = [
        "x = input bf16[512,640] ; y = transpose x [1,0] ; out y",
        "x = input bf16[8000,4096] ; y = transpose x [1,0] ; out y",
        "x = input bf16[3,2000000] ; y = transpose x [1,0] ; out y",
        "x = input f32[4000,8,64] ; y = transpose x [1,0,2] ; out y",
        "x = input f32[70000,3,5] ; y = transpose x [2,1,0] ; out y",
        "x = input f32[9,70000,3,5] ; y = transpose x [1,0,3,2] ; out y",
        "a = input bf16[20000,800] ; b = input bf16[20000,800] ; y = concat a b axis=1 ; out y",
        "i = input i32[8192] ; u = input f32[8192,768] ; y = scatter_add i u rows=50257 ; out y",
        "i = input i32[100000] ; u = input bf16[100000,7] ; y = scatter_add i u rows=1000000 ; out y",
        "i = input i32[3] ; u = input f16[3,100000] ; y = scatter_add i u rows=2 ; out y",
        "c = input bf16[2,64,12,1024,64] ; r = input bf16[2,64,12,1024,64] ; p = input i32[64] ; y = append c r p batch=1 ; out y",
        "c = input f32[2,9,4] ; r = input f32[2,0,4] ; p = input i32[2] ; y = append c r p batch=0 ; out y",
    ];
    for text in texts {
        let graph: Graph = text.parse().unwrap();
        for arch in [Arch::Sm75, Arch::Sm80, Arch::Sm90a] {
            let all = launches(&graph, arch);
            assert!(!all.is_empty(), "{text}");
            for (name, grid) in all {
                let [x, y, z] = grid.blocks;
                let label = format!("{text} {arch} {name}: {grid:?}");
                assert!(x <= i32::MAX as u32 && (1..=65535).contains(&y) && (1..=65535).contains(&z), "{label}");
                assert!((1..=1024).contains(&grid.threads), "{label}");
                assert!(grid.shared as usize <= arch.block_shared() && grid.cluster == 1, "{label}");
            }
        }
    }
}
