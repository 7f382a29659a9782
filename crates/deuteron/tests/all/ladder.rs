//! Ladders without a GPU: every rung goes through the real compiler, and none spills.

use std::path::Path;
use std::sync::Mutex;
use std::thread;

use deuteron::bench::{BenchCase, MatmulCase, MatmulEpilogue, check_ladder, check_matmul_ladder, matmul_texts};
use deuteron::catalog::{Heads, Sizes};
use deuteron::cuda::{Arch, Compiler};
use deuteron::emulate::{Choice, emulate};
use deuteron::{Dtype, Engine, ExpertSizes, FusedOp, Graph, Machine, Plan, Strategy, Target, plan};
use deuteron_codegen::cuda::{CudaTarget, Grids, Word};
use deuteron_codegen::{Kernel, Source};
use deuteron_device::cuda::nvrtc::Request;
use deuteron_kernels::ladder::{Ladder, Rung};
use deuteron_kernels::{Backend, CudaCatalog, render};

use crate::support::{compiler, emulator};

/// The only kernel of an op, as it is generated.
struct Generated {
    graph: Graph,
    plan: Plan,
    kernel: Kernel,
}

impl Generated {
    /// A rung in its place.
    fn rung(&self, rung: &Rung, target: &CudaTarget) -> Option<Kernel> {
        rung.kernel(&self.plan.groups[0].draft(&self.graph, &self.plan.placement), target)
    }
}

fn generated(name: &str, rows: usize, cols: usize, dtype: Dtype, target: &CudaTarget) -> Generated {
    let machine = Machine::profile("h200").unwrap();
    let op = FusedOp::find(name).unwrap();
    let graph = op.graph(&op.operand_types(rows, cols, dtype)).unwrap();
    let plan = plan(&graph, Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) }, Strategy::Greedy, &[])
        .unwrap();
    assert_eq!(plan.groups.len(), 1, "{name}");
    let kernel = render(plan.groups[0].draft(&graph, &plan.placement), &Backend::Cuda(target.clone())).unwrap();
    assert!(matches!(kernel.source, Source::Cuda(_)), "{name} is no CUDA kernel");
    Generated { graph, plan, kernel }
}

/// Compiles a rung and gives the spills of each of its launches.
fn spills(compiler: &Compiler, kernel: &Kernel, target: &CudaTarget) -> Vec<u32> {
    let Source::Cuda(source) = &kernel.source else { panic!("{} is no CUDA kernel", kernel.source) };
    let request = Request { name: &source.name, text: &source.text, arch: target.arch.name(), options: &[] };
    let cubin = compiler.compile(&request).unwrap_or_else(|error| panic!("{error}"));
    let grids = &kernel.launch.grids().expect("grids").list;
    assert!(!grids.is_empty(), "{}", source.name);
    grids.iter().map(|grid| cubin.entry(grid.entry).unwrap().spill_stores).collect()
}

#[test]
fn every_rung_compiles_and_none_spills() {
    let Some(compiler) = compiler() else { return };
    // Types and architectures take turns.
    let turns = [[Arch::Sm80, Arch::Sm90a], [Arch::Sm90a, Arch::Sm75], [Arch::Sm75, Arch::Sm80]].into_iter().cycle();
    for ((name, cols), archs) in
        [("add_act", 1024), ("norm_act", 768), ("norm_act", 4096), ("softmax", 768)].into_iter().zip(turns)
    {
        let ladder = Ladder::of(name).unwrap();
        for (dtype, arch) in [Dtype::F32, Dtype::Bf16].into_iter().zip(archs) {
            let target = CudaTarget::new(arch, 132);
            let generated = generated(name, 1000, cols, dtype, &target);
            for rung in ladder.rungs() {
                let kernel = generated.rung(rung, &target).unwrap();
                let spills = spills(&compiler, &kernel, &target);
                // The whole row of 4096 columns does not fit a warp's registers: that is what the rung shows.
                let fits = cols < 4096 || rung.name != "l6_row_in_registers";
                assert!(!fits || spills.iter().all(|&spills| spills == 0), "{} {dtype} {arch}: {spills:?}", rung.name);
                for grid in &kernel.launch.grids().expect("grids").list {
                    assert!(grid.blocks[0] as usize * grid.threads as usize >= 1000, "{}: {grid:?}", rung.name);
                }
            }
        }
    }
}

#[test]
fn every_rung_of_attention_compiles_and_none_spills() {
    let Some(compiler) = compiler() else { return };
    for rows in [517, 1024, 8192] {
        // The tiles of the third rung are too much for the shared memory of sm_75.
        for (arch, count) in [(Arch::Sm75, 2), (Arch::Sm80, 5), (Arch::Sm90a, 6)] {
            let target = CudaTarget::new(arch, 132);
            let generated = generated("attention", rows, 768, Dtype::Bf16, &target);
            let rungs: Vec<_> = Ladder::Attention.rungs().iter().filter(|rung| rung.is_for(arch)).collect();
            assert_eq!(rungs.len(), count, "{arch}");
            let mut last = None;
            for rung in rungs {
                let kernel = generated.rung(rung, &target).unwrap();
                // Only the two shipped kernels have texts that follow from the shape.
                if rows == 8192 || matches!(rung.name, "l5_pipelined" | "l6_warpgroups") {
                    let spills = spills(&compiler, &kernel, &target);
                    assert!(spills.iter().all(|&spills| spills == 0), "{} {rows} {arch}: {spills:?}", rung.name);
                }
                last = Some(kernel);
            }
            // Where there are matrix units, the highest rung is what is generated.
            assert_eq!(last.as_ref() == Some(&generated.kernel), arch.is_ampere(), "{rows} {arch}");
        }
    }
}

#[test]
fn every_rung_of_attention_with_rows_compiles_and_none_spills() {
    let Some(compiler) = compiler() else { return };
    for (arch, count) in [(Arch::Sm75, 2), (Arch::Sm80, 5), (Arch::Sm90a, 5)] {
        let target = CudaTarget::new(arch, 132);
        let generated = generated("attention_add_norm", 1024, 768, Dtype::Bf16, &target);
        let rungs: Vec<_> = Ladder::AttentionAddNorm.rungs().iter().filter(|rung| rung.is_for(arch)).collect();
        assert_eq!(rungs.len(), count, "{arch}");
        for rung in rungs {
            let kernel = generated.rung(rung, &target).unwrap();
            let spills = spills(&compiler, &kernel, &target);
            assert!(spills.iter().all(|&spills| spills == 0), "{} {arch}: {spills:?}", rung.name);
            // The last is what is generated.
            assert_eq!(kernel == generated.kernel, rung.text().is_none(), "{} {arch}", rung.name);
        }
    }
}

#[test]
fn launches_of_attention_with_rows_cover_all_of_them() {
    let target = CudaTarget::new(Arch::Sm80, 132);
    let generated = generated("attention_add_norm", 517, 128, Dtype::Bf16, &target);
    let made = |index: usize| {
        let kernel = generated.rung(&Ladder::AttentionAddNorm.rungs()[index], &target).unwrap();
        let Grids { list, workspace, .. } = kernel.launch.grids().expect("grids").clone();
        let grids: Vec<_> = list.iter().map(|grid| (grid.entry, grid.blocks, grid.threads)).collect();
        (grids, workspace, list[0].words.clone())
    };
    // Two heads of 517 positions: 9 tiles, 517 rows of 128 columns, whose attention lies in the workspace before the scores.
    let (result, scores) = (517 * 128 * 2, 2 * 517 * 517 * 4);
    let rows = [("add", [259, 1, 1], 256), ("layer_norm", [3, 1, 1], 256)];
    assert_eq!((&made(0).0[3..], made(0).1), (&rows[..], result + scores));
    let rows = [("add", [33, 1, 1], 256), ("layer_norm", [65, 1, 1], 256)];
    assert_eq!((&made(1).0[3..], made(1).1), (&rows[..], result + scores));
    for index in [2, 3] {
        assert_eq!((&made(index).0[1..], made(index).1), (&[("add_norm", [130, 1, 1], 128)][..], result));
    }
    assert_eq!(&made(0).2[3..7], [Word::Workspace(0), Word::Workspace(result), Word::Number(2), Word::Number(517)]);
    assert_eq!(made(2).2[4], Word::Number(0));
}

/// The launches of the first rung of an op, of 1000 rows of 768 columns, and how many bytes of the workspace they have beside 4 per element.
fn first_launches(ladder: Ladder, dtype: Dtype) -> (Vec<(&'static str, u32)>, usize) {
    let target = CudaTarget::new(Arch::Sm90a, 132);
    let generated = generated(ladder.op(), 1000, 768, dtype, &target);
    let kernel = generated.rung(&ladder.rungs()[0], &target).unwrap();
    let grids = kernel.launch.grids().expect("grids");
    let launches = grids.list.iter().map(|grid| (grid.entry, grid.blocks[0])).collect();
    (launches, grids.workspace - 1000 * 768 * 4)
}

/// A thread per row, or per element.
#[test]
fn steps_of_row_work_are_launches_of_their_own() {
    let (rows, elements) = (4, 3000);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let add = vec![("add", elements), ("activate", elements)];
        assert_eq!(first_launches(Ladder::AddAct, dtype), (add, 0));
        let norm = vec![
            ("average", rows),
            ("deviate", rows),
            ("normalise", elements),
            ("scale_and_shift", elements),
            ("activate", elements),
        ];
        assert_eq!(first_launches(Ladder::NormAct, dtype), (norm, 2 * 1000 * 4));
        let softmax = vec![("find_largest", rows), ("exponentials", elements), ("add_up", rows), ("divide", elements)];
        assert_eq!(first_launches(Ladder::Softmax, dtype), (softmax, 2 * 1000 * 4));
    }
}

#[test]
fn a_rung_is_made_only_for_what_it_is_written_for() {
    let target = CudaTarget::new(Arch::Sm90a, 132);
    let all = |ladder: Ladder, generated: &Generated| {
        ladder.rungs().iter().filter_map(|rung| generated.rung(rung, &target)).count()
    };
    let of = |name: &str, cols: usize, dtype: Dtype| generated(name, 1000, cols, dtype, &target);
    let attention = of("attention", 768, Dtype::Bf16);
    assert_eq!(all(Ladder::Attention, &attention), 6);
    assert_eq!(all(Ladder::NormAct, &attention), 0);
    assert_eq!(all(Ladder::AttentionAddNorm, &attention), 0);
    let rows = of("attention_add_norm", 768, Dtype::Bf16);
    assert_eq!((all(Ladder::AttentionAddNorm, &rows), all(Ladder::Attention, &rows)), (5, 0));
    for (name, cols, dtype) in [
        ("attention", 768, Dtype::F16),
        ("attention", 768, Dtype::F32),
        ("attention", 80, Dtype::Bf16),
        ("norm_act", 768, Dtype::F16),
        ("add_act", 768, Dtype::F16),
        ("softmax", 768, Dtype::F16),
        ("attention_add_norm", 768, Dtype::F16),
        ("attention_add_norm", 80, Dtype::Bf16),
    ] {
        assert_eq!(all(Ladder::of(name).unwrap(), &of(name, cols, dtype)), 0, "{name} {cols} {dtype}");
    }
}

#[test]
fn launches_of_attention_cover_all_rows_and_share_scores() {
    let target = CudaTarget::new(Arch::Sm80, 132);
    let generated = generated("attention", 517, 128, Dtype::Bf16, &target);
    let made = |index: usize| {
        let kernel = generated.rung(&Ladder::Attention.rungs()[index], &target).unwrap();
        let Grids { list, workspace, .. } = kernel.launch.grids().expect("grids").clone();
        let grids: Vec<_> = list.iter().map(|grid| (grid.entry, grid.blocks, grid.threads, grid.shared)).collect();
        (grids, workspace, list[0].words.clone())
    };
    // Two heads of 517 positions: 9 tiles, 1034 rows.
    let scores = 2 * 517 * 517 * 4;
    let naive = [("scores", [3, 517, 2], 256, 0), ("softmax", [5, 1, 1], 256, 0), ("values", [259, 1, 1], 256, 0)];
    assert_eq!((&made(0).0[..], made(0).1), (&naive[..], scores));
    let tiled = [("scores", [9, 9, 2], 256, 0), ("softmax", [130, 1, 1], 256, 0), ("values", [9, 2, 1], 256, 0)];
    assert_eq!((&made(1).0[..], made(1).1), (&tiled[..], scores));
    assert_eq!((made(2).0, made(2).1), (vec![("attention", [9, 2, 1], 256, 69_632)], 0));
    assert_eq!((made(3).0, made(3).1), (vec![("attention", [9, 2, 1], 128, 0)], 0));
    // As `parameters.cuh` lists them.
    let arguments = (0..4).map(|position| Word::Argument { position, offset: 0 });
    let sizes = [Word::Number(2), Word::Number(517)];
    let expected: Vec<Word> = arguments.clone().chain([Word::Workspace(0)]).chain(sizes).collect();
    assert_eq!(made(0).2, expected);
    assert_eq!(made(2).2[4], Word::Number(0));
}

/// Sizes that fill no block, vector or tile; two sequences of two heads. Rungs whose text other rungs have too, or commands of the guide run,
/// are left out: each takes some seconds to compile.
#[test]
fn rungs_agree_with_the_reference() {
    let Some(toolchain) = emulator() else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("rungs");
    let add = (Ladder::AddAct, [5, 771], Dtype::Bf16, &[0][..]);
    let norm = (Ladder::NormAct, [37, 776], Dtype::Bf16, &[0][..]);
    let softmax = (Ladder::Softmax, [37, 776], Dtype::F32, &[0, 2, 4, 5][..]);
    let rows = (Ladder::AttentionAddNorm, [2 * 70, 128], Dtype::Bf16, &[0, 1, 3][..]);
    let cases = [add, norm, softmax, rows].into_iter().flat_map(|(ladder, sizes, dtype, rungs)| {
        rungs.iter().map(move |&index| (ladder.op(), &ladder.rungs()[index], sizes, dtype))
    });
    let next = Mutex::new(cases);
    let work = || {
        loop {
            let Some((name, rung, [rows, cols], dtype)) = next.lock().unwrap().next() else { return };
            let op = FusedOp::find(name).unwrap();
            let heads = Heads { positions: 70, ..Heads::default() };
            let graph = op.graph(&op.operand_types_of(&Sizes { heads, ..Sizes::new(rows, cols, dtype) })).unwrap();
            let choice = Choice { rung: Some(rung), text: None };
            let folder = folder.join(format!("{name}_{}", rung.name));
            let ran = emulate(toolchain, &folder, &graph, Strategy::Greedy, &choice, 1);
            let ran = ran.unwrap_or_else(|error| panic!("{name} {}: {error}", rung.name));
            assert!(ran.verification.holds(), "{name} {}: {:?}", rung.name, ran.verification.worst());
        }
    };
    thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(work))));
}

/// A plain matmul of bf16 as its only kernel, which the library may have.
fn matmul(m: usize, n: usize, k: usize) -> (Graph, Plan) {
    let machine = Machine::profile("h200").unwrap();
    let text = format!("x = input bf16[{m},{k}] ; w = input bf16[{k},{n}] ; y = matmul x w ; out y");
    let graph: Graph = text.parse().unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
    let plan = plan(&graph, target, Strategy::Greedy, &[]).unwrap();
    assert_eq!(plan.groups.len(), 1, "{plan}");
    (graph, plan)
}

#[test]
fn every_rung_of_a_matmul_compiles_and_none_spills() {
    let Some(compiler) = compiler() else { return };
    let names = |count: usize| Ladder::Matmul.rungs()[..count].iter().map(|rung| rung.name).collect::<Vec<_>>();
    for (m, n, k) in [(8192, 3072, 768), (1024, 3072, 768), (129, 131, 133)] {
        let (graph, plan) = matmul(m, n, k);
        let draft = plan.groups[0].draft(&graph, &plan.placement);
        for (arch, count) in [(Arch::Sm75, 3), (Arch::Sm80, 5), (Arch::Sm89, 5), (Arch::Sm90a, 7), (Arch::Sm120, 5)] {
            let target = CudaTarget::new(arch, 132);
            let rungs = Ladder::Matmul.rungs().iter().filter(|rung| rung.is_for(arch));
            let kernels: Vec<_> = rungs.map(|rung| (rung.name, rung.kernel(&draft, &target).unwrap())).collect();
            assert_eq!(kernels.iter().map(|(name, _)| *name).collect::<Vec<_>>(), names(count), "{arch}");
            for (name, kernel) in kernels {
                // Those that are written here have one text for all sizes that are aligned. Where they are not, two architectures stand for all.
                let stands_for_all = matches!(arch, Arch::Sm75 | Arch::Sm90a);
                if name > "l6" || m == 8192 || m == 129 && stands_for_all {
                    let spills = spills(&compiler, &kernel, &target);
                    assert!(spills.iter().all(|&spills| spills == 0), "{name} {m} {arch}: {spills:?}");
                }
            }
        }
    }
}

#[test]
fn launches_of_a_matmul_cover_its_result() {
    let target = CudaTarget::new(Arch::Sm90a, 132);
    let (graph, plan) = matmul(517, 300, 40);
    let draft = plan.groups[0].draft(&graph, &plan.placement);
    let blocks = [517 * 2, 9 * 5, 5 * 3, 5 * 3];
    for (rung, blocks) in Ladder::Matmul.rungs().iter().zip(blocks) {
        let kernel = rung.kernel(&draft, &target).unwrap();
        let [grid] = kernel.launch.grids().expect("grids").list.as_slice() else { panic!("{}", rung.name) };
        assert_eq!((grid.blocks, grid.threads), ([blocks, 1, 1], 256), "{}", rung.name);
        // As `parameters.cuh` lists them.
        let arguments = (0..3).map(|position| Word::Argument { position, offset: 0 });
        let sizes = [517, 300, 40].map(Word::Number);
        assert_eq!(grid.words, arguments.chain(sizes).collect::<Vec<_>>(), "{}", rung.name);
    }
    // Blocks of the last one are persistent: there are as many as multiprocessors, however many tiles there are.
    let (graph, plan) = matmul(32768, 3072, 768);
    let draft = plan.groups[0].draft(&graph, &plan.placement);
    let last = |index: usize| {
        let kernel = Ladder::Matmul.rungs()[index].kernel(&draft, &target).unwrap();
        kernel.launch.grids().expect("grids").list[0].blocks[0]
    };
    assert!(last(5) > 132 && last(6) == 132, "{} {}", last(5), last(6));
}

#[test]
fn rungs_of_a_matmul_take_plain_matmuls_alone() {
    let target = CudaTarget::new(Arch::Sm90a, 132);
    let machine = Machine::profile("h200").unwrap();
    for text in [
        "x = input f32[64,64] ; w = input f32[64,64] ; y = matmul x w ; out y",
        "x = input bf16[64,64] ; w = input bf16[64,64] ; y = matmul x w transpose_b ; out y",
        "x = input bf16[64,64] ; y = linear x w:bf16[64,64] b:bf16[64] ; out y",
        "x = input bf16[3,64,64] ; w = input bf16[3,64,64] ; y = matmul x w ; out y",
    ] {
        let graph: Graph = text.parse().unwrap();
        let target_of = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
        let plan = plan(&graph, target_of, Strategy::Greedy, &[]).unwrap();
        let draft = plan.groups[0].draft(&graph, &plan.placement);
        let made = Ladder::Matmul.rungs().iter().filter_map(|rung| rung.kernel(&draft, &target)).count();
        assert_eq!(made, 0, "{text}");
    }
}

/// A matmul on a CPU that fills no tile.
const ON_CPU: MatmulCase = MatmulCase {
    rows: 70,
    inner: 133,
    columns: 131,
    transposed: false,
    epilogue: MatmulEpilogue::None,
    dtype: Dtype::F32,
};

#[test]
fn rungs_of_a_matmul_on_a_cpu_are_within_their_bounds_and_what_they_are_named_after() {
    let engine = Engine::cpu();
    let checks = check_matmul_ladder(&engine, &ON_CPU).unwrap();
    assert!(checks.iter().all(|check| check.verified && check.worst_ratio > 0.0), "{checks:?}");
    let texts = matmul_texts(&engine, &ON_CPU).unwrap();
    assert!(texts.iter().map(|text| &text.rung).eq(checks.iter().map(|check| &check.rung)));
    let texts: Vec<&str> = texts.iter().map(|text| text.text.as_str()).collect();
    let words =
        ["Three loops", "4 x 4 sums", "multiply-add", "matrix product, f32 by f32", "matrix product, f32 by f32"];
    for (text, words) in texts.iter().zip(words) {
        assert!(text.contains(words) && text.contains("// kernel 1 of 2: gelu"), "{text}");
    }
    // One thread and all of them run the same kernels; the last rung has one.
    assert_eq!(texts[3], texts[4]);
    assert!(texts[5].contains("// kernel 0 of 1: ") && texts[5].contains("gelu_tanh"), "{}", texts[5]);
    assert!(texts[0].contains("without vectors") && !texts[1].contains("without vectors"), "{}", texts[0]);
}

#[test]
fn a_ladder_on_a_cpu_is_of_plain_matmuls_in_f32() {
    let engine = Engine::cpu();
    let said = |case: MatmulCase| matmul_texts(&engine, &case).unwrap_err().to_string();
    assert!(said(MatmulCase { transposed: true, ..ON_CPU }).ends_with("got weights that lie transposed"));
    assert!(said(MatmulCase { dtype: Dtype::Bf16, ..ON_CPU }).ends_with("got bf16"));
    assert!(said(MatmulCase { epilogue: MatmulEpilogue::Gelu, ..ON_CPU }).ends_with("got the epilogue gelu"));
}

/// Sizes below those of tiles and vectors, and just above them.
#[test]
fn rungs_of_a_matmul_on_a_cpu_take_any_sizes() {
    let engine = Engine::cpu();
    for [rows, inner, columns] in [[1, 1, 1], [3, 129, 67], [65, 64, 5], [4, 256, 64]] {
        let case = MatmulCase { rows, inner, columns, ..ON_CPU };
        let checks = check_matmul_ladder(&engine, &case).unwrap();
        assert!(checks.iter().all(|check| check.verified), "{rows} {inner} {columns}: {checks:?}");
    }
}

/// Every rung of every type, one element at a time first: also where rows are strided, masked and looked up by position.
#[test]
fn rungs_of_row_work_and_attention_on_a_cpu_are_within_their_bounds() {
    let engine = Engine::cpu();
    for name in ["add_act", "norm_act", "softmax", "attention"] {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let (op, heads) = (FusedOp::find(name).unwrap(), Heads { positions: 35, ..Heads::default() });
            let experts = ExpertSizes::default();
            let case = BenchCase { op, rows: 70, cols: 128, dtype, backward: false, heads, experts };
            let checks = check_ladder(&engine, &case).unwrap();
            assert_eq!(checks[0].rung, "scalar");
            assert!(
                checks.iter().all(|check| check.verified && check.worst_ratio >= 0.0),
                "{name} {dtype}: {checks:?}"
            );
        }
    }
}

#[test]
fn a_rung_of_rows_is_made_only_for_whole_vectors() {
    let target = CudaTarget::new(Arch::Sm90a, 132);
    for (name, cols, is_made) in
        [("softmax", 776, true), ("softmax", 771, false), ("norm_act", 4104, false), ("add_act", 771, true)]
    {
        let generated = generated(name, 10, cols, Dtype::F32, &target);
        let rungs = Ladder::of(name).unwrap().rungs();
        let made = rungs.iter().filter(|rung| generated.rung(rung, &target).is_some()).count();
        assert_eq!(made, if is_made { rungs.len() } else { 0 }, "{name} {cols}");
    }
}
