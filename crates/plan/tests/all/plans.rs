//! Plans as text: what shares a kernel, and why the rest does not.

use deuteron_graph::{Graph, Shape};
use std::sync::LazyLock;

use deuteron_plan::{
    Catalog, Draft, Layout, Machine, Plan, Primitives, Quantity, Reason, Strategy, Structure, Target, Work, plan,
};
use deuteron_reference::random_case;

static CPU: LazyLock<Machine> = LazyLock::new(Machine::cpu);

/// What this version generates for CPUs, as the planner sees it.
struct RowKernels;

impl Catalog for RowKernels {
    fn offers_structure(&self, structure: &Structure) -> bool {
        matches!(structure, Structure::Row | Structure::Copy | Structure::ScatterAdd) || structure.is_plain_matmul()
    }

    fn offers(&self, draft: &Draft) -> bool {
        self.offers_structure(draft.structure)
    }

    fn offers_everything(&self) -> bool {
        false
    }

    fn work(&self, draft: &Draft) -> Work {
        Primitives.work(draft)
    }
}

fn cpu() -> Target<'static> {
    Target { machine: &CPU, catalog: &RowKernels }
}

fn planned(text: &str, strategy: Strategy) -> Plan {
    let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
    plan(&graph, cpu(), strategy, &[]).unwrap()
}

/// Compares the whole explanation of the fused plan.
fn check(text: &str, expected: &str) {
    let got = planned(text, Strategy::Fused).explain();
    let strip = |text: &str| text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n");
    assert_eq!(strip(&got), strip(expected), "\n{got}");
}

const NORM_GELU: &str = "x = input f32[1024,768] ; w = weight f32[768] ; b = weight f32[768]
y, mean, rstd = layer_norm x w b ; z = gelu y ; out z";

#[test]
fn a_norm_and_its_activation_share_a_kernel() {
    check(NORM_GELU, "group 0: layer_norm + gelu  [row, 6297.6 KB]");
}

#[test]
fn the_strategies_come_from_one_mechanism() {
    let kernels = |strategy| planned(NORM_GELU, strategy).groups.len();
    assert_eq!(kernels(Strategy::Naive), 16, "a kernel a primitive that computes");
    assert_eq!(kernels(Strategy::Eager), 2, "a kernel per composite");
    assert_eq!(kernels(Strategy::Unfused), 2, "a kernel per builder call");
    assert_eq!(kernels(Strategy::Fused), 1);
    let bytes = |strategy| planned(NORM_GELU, strategy).bytes().0;
    let tensor = 1024 * 768 * 4;
    assert_eq!(bytes(Strategy::Unfused), 4 * tensor + 2 * 768 * 4);
    assert_eq!(bytes(Strategy::Fused), 2 * tensor + 2 * 768 * 4);
}

#[test]
fn eager_splits_attention_into_scores_mask_softmax_product() {
    let text = "q = input f32[2,4,16,8] ; a = attention q q q mask=causal ; out a";
    let names: Vec<String> = planned(text, Strategy::Eager).groups.into_iter().map(|group| group.name).collect();
    assert_eq!(names, ["attention (matmul)", "attention", "attention", "attention (matmul)"]);
    assert_eq!(planned(text, Strategy::Fused).groups.len(), 3, "mask and softmax share a kernel");
}

#[test]
fn a_product_stays_apart_from_row_ops() {
    check(
        "x = input f32[64,32] ; y = linear x w[32,48] b[48] ; z = gelu y ; out z",
        "group 0: linear (matmul)  [matmul, 26.6 KB]
         group 1: linear + gelu  [row, 24.8 KB]
         apart from group 0: E-PLAN-013 this version cannot generate a kernel of the form `matmul with epilogue` for this device",
    );
}

/// Row kernels, and a product with what follows it as far as the result is of the product's type: half of a linear layer,
/// whose sum is f32 before it is rounded, is no kernel.
struct WholeEpilogues;

impl Catalog for WholeEpilogues {
    fn offers_structure(&self, structure: &Structure) -> bool {
        structure.is_matmul() || RowKernels.offers_structure(structure)
    }

    fn offers(&self, draft: &Draft) -> bool {
        let dtype = |id: deuteron_graph::NodeId| draft.graph.node(id).dtype;
        let whole = || {
            let &[stored] = draft.outputs else { return false };
            draft.nodes.last() == Some(&stored) && dtype(stored) == dtype(draft.nodes[0])
        };
        RowKernels.offers(draft) || (draft.structure.is_matmul() && whole())
    }

    fn offers_everything(&self) -> bool {
        false
    }

    fn work(&self, draft: &Draft) -> Work {
        Primitives.work(draft)
    }
}

#[test]
fn a_catalogue_sees_the_nodes_of_what_it_is_asked_about() {
    let target = Target { machine: &CPU, catalog: &WholeEpilogues };
    let names = |text: &str, strategy: Strategy| -> Vec<String> {
        let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
        plan(&graph, target, strategy, &[]).unwrap().groups.into_iter().map(|group| group.name).collect()
    };
    for dtype in ["f32", "bf16"] {
        let operands = format!(
            "x = input {dtype}[64,32] ; w = weight {dtype}[32,48] ; b = weight {dtype}[48] ; y = linear x w b ;"
        );
        let text = format!("{operands} z = gelu y ; out z");
        assert_eq!(names(&text, Strategy::Unfused), ["linear", "gelu"], "{dtype}: rounding belongs to the call");
        assert_eq!(names(&text, Strategy::Greedy), ["linear + gelu"], "{dtype}");
        assert_eq!(names(&text, Strategy::Fused), ["linear + gelu"], "{dtype}");
        let text = format!("{operands} z = gelu y ; out y z");
        assert_eq!(names(&text, Strategy::Fused).len(), 2, "{dtype}: both are stored");
    }
}

#[test]
fn what_needs_all_rows_waits_for_them() {
    check(
        "x = input f32[64,32] ; s = column_sum x ; y = mul x s ; out y",
        "group 0: column_sum  [row, 8320 B]
         group 1: mul  [row, 16.5 KB]
         apart from group 0: E-PLAN-003 %1 is complete only after the last row",
    );
}

#[test]
fn rows_are_picked_from_a_table_that_is_there() {
    // As many rows are picked as the table has: rows and columns are the same, and yet any row may be asked for.
    let plan =
        planned("x = input f32[64,32] ; i = input i32[64] ; t = exp x ; y = gather t i ; out y", Strategy::Fused);
    assert_eq!(plan.groups.len(), 2, "{plan}");
    assert!(matches!(plan.refusals[0].reason, Reason::NeedsAllRows { .. }), "{plan}");
}

#[test]
fn a_reshape_that_strides_cannot_express_is_a_copy() {
    let kernels = |to: &str| {
        let text = format!("x = input f32[64,32] ; h = slice x axis=1 start=0 length=16 ; r = reshape h {to}");
        planned(&format!("{text} ; y = exp r ; out y"), Strategy::Unfused).groups.len()
    };
    assert_eq!((kernels("[32,2,16]"), kernels("[32,32]")), (1, 2));
}

#[test]
fn what_is_repeated_is_read_once() {
    let bytes = |text: &str| planned(text, Strategy::Fused).bytes().0;
    let repeated = bytes("x = input f32[64,32] ; b = input f32[32] ; w = broadcast b [64,32] ; y = add x w ; out y");
    assert_eq!(repeated, 4 * (2 * 64 * 32 + 32));
}

#[test]
fn long_rows_take_more_threads_of_a_gpu() {
    let machine = Machine::profile("h200").unwrap();
    let waves = |cols: usize| {
        let graph: Graph = format!("x = input f32[64,{cols}] ; y = softmax x ; out y").parse().unwrap();
        plan(&graph, Target::conceivable(&machine), Strategy::Fused, &[]).unwrap().groups[0].cost.resources.waves
    };
    assert_eq!(waves(8192), 8.0 * waves(1024));
}

#[test]
fn a_converted_sum_is_read_by_another_kernel() {
    let groups = |rest: &str| {
        let text = format!("x = input bf16[8,256] ; s = column_sum x ; a = cast s f16 ; {rest}");
        planned(&text, Strategy::Fused).groups.len()
    };
    assert_eq!(groups("out a"), 1, "the conversion is the store of the sum");
    assert_eq!(groups("b = cast a bf16 ; out b"), 2);
    assert_eq!(groups("b = cast s bf16 ; out a b"), 2, "one conversion is the store of the sum");
}

#[test]
fn other_rows_and_columns_are_another_kernel() {
    check(
        "x = input f32[64,32] ; y = relu x ; z = reshape y [32,64] ; p = softmax z ; out p",
        "group 0: relu  [row, 16.4 KB]
         group 1: softmax  [row, 16.4 KB]
         apart from group 0: E-PLAN-002 rows and columns differ: 64x32 and 32x64",
    );
}

#[test]
fn a_view_that_moves_elements_ends_a_kernel() {
    check(
        "x = input f32[8,8,16] ; y = relu x ; z = transpose y [1,0,2] ; v = add z x ; out v",
        "group 0: relu  [row, 8192 B]
         group 1: add  [row, 12.3 KB]
         apart from group 0: E-PLAN-005 %3 moves elements to other rows or columns",
    );
}

#[test]
fn no_merge_closes_a_cycle() {
    check(
        "x = input f32[32,32] ; a = relu x ; m = matmul a w[32,32] ; y = add a m ; out y",
        "group 0: relu  [row, 8192 B]
         group 1: matmul  [matmul, 12.3 KB]
         apart from group 0: E-PLAN-012 %2 would be computed in the prologue of a matmul, but another kernel reads it too
         group 2: add  [row, 12.3 KB]
         apart from group 0: E-PLAN-001 another kernel is between them, through %4
         apart from group 1: E-PLAN-013 this version cannot generate a kernel of the form `matmul with epilogue` for this device",
    );
}

#[test]
fn two_readers_of_one_tensor_share_a_kernel() {
    let plan = planned("x = input f32[64,32] ; y = relu x ; s = softmax x ; out y s", Strategy::Fused);
    assert_eq!(plan.groups.len(), 1);
    assert_eq!(plan.bytes().0, 3 * 64 * 32 * 4, "x is read once");
}

#[test]
fn a_kernel_has_a_limit_of_tensors() {
    let mut text = String::from("x0 = input f32[8,8]\n");
    for index in 1..40 {
        text += &format!(
            "x{index} = input f32[8,8] ; s{index} = add {} x{index}\n",
            match index {
                1 => "x0".to_string(),
                _ => format!("s{}", index - 1),
            }
        );
    }
    text += "out s39";
    let plan = planned(&text, Strategy::Fused);
    assert_eq!(plan.groups.len(), 2);
    let limit = CPU.count(Quantity::KernelArguments);
    assert!(plan.groups.iter().all(|group| group.inputs.len() + group.outputs.len() <= limit));
    assert!(matches!(plan.refusals[0].reason, Reason::TooManyArguments { available, .. } if available == limit));
}

#[test]
fn views_cost_nothing_where_a_reader_can_follow_them() {
    // The halves of a packed tensor, and heads split from a fused projection.
    let text = "x = input f32[64,32] ; a = slice x axis=1 start=0 length=16 ; b = slice x axis=1 start=16 length=16
y = swiglu a b ; out y";
    assert_eq!(planned(text, Strategy::Unfused).groups.len(), 1);
    let text = "x = input f32[2,8,24] ; h = reshape x [2,8,3,8] ; t = transpose h [0,2,1,3] ; s = softmax t ; out s";
    assert_eq!(planned(text, Strategy::Unfused).groups.len(), 1);
}

/// Whatever the graph: every kernel after those it reads from, every value made once, no two live buffers overlap.
#[test]
fn random_plans_are_sound() {
    for seed in 0..300 {
        let graph = random_case(seed).graph;
        for strategy in Strategy::ALL {
            let plan = plan(&graph, cpu(), strategy, &[]).unwrap();
            let mut made: Vec<_> = graph.inputs().to_vec();
            for group in &plan.groups {
                assert!(group.inputs.iter().all(|input| made.contains(input)), "seed {seed} {strategy}");
                assert!(group.outputs.iter().all(|output| !made.contains(output)), "seed {seed} {strategy}");
                made.extend(&group.outputs);
            }
            assert!(graph.outputs().iter().all(|output| made.contains(&output.node)), "seed {seed} {strategy}");
            for (index, group) in plan.groups.iter().enumerate() {
                for slot in group.inputs.iter().chain(&group.outputs).filter_map(|&node| plan.arena.slot(node)) {
                    assert!((slot.first..=slot.last).contains(&index), "seed {seed} {strategy}: {slot:?} in {index}");
                }
            }
            for (index, a) in plan.arena.slots.iter().enumerate() {
                assert!(a.offset + a.bytes <= plan.arena.bytes);
                for b in &plan.arena.slots[index + 1..] {
                    let together = a.first <= b.last && b.first <= a.last;
                    let apart = a.offset + a.bytes <= b.offset || b.offset + b.bytes <= a.offset;
                    assert!(!together || apart || a.bytes == 0 || b.bytes == 0, "seed {seed} {strategy}: {a:?} {b:?}");
                }
            }
            assert_eq!(plan, deuteron_plan::plan(&graph, cpu(), strategy, &[]).unwrap(), "same in, same out");
        }
    }
}

#[test]
fn what_is_scattered_must_be_contiguous() {
    let graph: Graph = "i = input i32[4] ; u = input f32[4,8] ; y = scatter_add i u rows=9 ; out y".parse().unwrap();
    let contiguous = |dims: &[usize]| Layout::contiguous(&Shape::new(dims.to_vec()));
    let mut apart = contiguous(&[4, 8]);
    apart.strides[0] = 16;
    let target = Target { machine: &CPU, catalog: &Primitives };
    assert!(plan(&graph, target, Strategy::Fused, &[contiguous(&[4]), contiguous(&[4, 8])]).is_ok());
    let error = plan(&graph, target, Strategy::Fused, &[contiguous(&[4]), apart]).unwrap_err();
    assert!(error.to_string().contains("scattered"), "{error}");
}

/// Matmuls without elements, alone and with what reads or makes whole rows.
const EMPTY: [&str; 4] = [
    "x = input f32[128,64] ; y = linear x w[64,0] b[0] ; out y",
    "x = input f32[128,64] ; h, m, r = layer_norm x s[64] t[64] ; y = linear h w[64,0] b[0] ; out y",
    "x = input f32[128,0] ; y = linear x w[0,64] b[64] ; out y",
    "x = input f32[0,64] ; y = linear x w[64,64] b[64] ; h, m, r = layer_norm y s[64] t[64] ; out h",
];

#[test]
fn a_matmul_without_elements_has_a_cost() {
    for text in EMPTY {
        let graph: Graph = text.parse().unwrap();
        for name in Machine::PROFILES {
            let machine = Machine::profile(name).unwrap();
            for strategy in [Strategy::Naive, Strategy::Unfused, Strategy::Greedy, Strategy::Fused] {
                let plan = plan(&graph, Target::conceivable(&machine), strategy, &[]).unwrap();
                let costs: Vec<f64> = plan.groups.iter().map(|group| group.cost.total.0).collect();
                assert!(costs.iter().all(|cost| cost.is_finite()), "{name}, {strategy:?}: {costs:?} of {text}");
            }
        }
    }
}

#[test]
fn every_number_that_a_machine_file_may_hold_gives_a_cost() {
    let text = "x = input f32[64,64] ; h, m, r = layer_norm x s[64] t[64] ; u = linear h w[64,256] b[256] ; g = gelu u
y = linear g v[256,64] c[64] ; z = add x y ; out z";
    let graph: Graph = text.parse().unwrap();
    for name in ["cpu", "h200"] {
        let usual = Machine::profile(name).unwrap();
        let mut tried = 0;
        for (quantity, _) in usual.numbers() {
            for value in [0.0, 1e-9, 0.5, 1.0, 1e6, 9e8, 9e11, f64::MAX] {
                let Ok(machine) = usual.clone().with(quantity, value, "a test") else { continue };
                let plan = plan(&graph, Target::conceivable(&machine), Strategy::Fused, &[]).unwrap();
                let costs: Vec<f64> = plan.groups.iter().map(|group| group.cost.total.0).collect();
                assert!(costs.iter().all(|cost| cost.is_finite()), "{} = {value}: {costs:?}", quantity.name());
                tried += 1;
            }
        }
        assert!(tried > 100, "{name}: {tried} machines");
    }
}
