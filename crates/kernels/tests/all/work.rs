//! The work of kernels, counted on their tile programs, and what it is taken to cost.

use deuteron_codegen::cuda::Arch;
use deuteron_graph::{Graph, NodeId, Op, attention_interior, differentiate, recompute};
use deuteron_kernels::{CpuCatalog, CudaCatalog};
use deuteron_plan::{Catalog, Class, Machine, Plan, Quantity, Strategy, Target, Work, plan};

fn planned(text: &str, strategy: Strategy) -> (Graph, Plan) {
    let graph: Graph = text.parse().unwrap();
    let target = Target { machine: &Machine::cpu(), catalog: &CpuCatalog };
    let plan = plan(&graph, target, strategy, &[]).unwrap();
    (graph, plan)
}

/// The work of the only kernel.
fn work(text: &str) -> Work {
    let (graph, plan) = planned(text, Strategy::Greedy);
    assert_eq!(plan.groups.len(), 1, "{plan}");
    CpuCatalog.work(&plan.groups[0].draft(&graph, &plan.placement))
}

/// Predicted microseconds of a plan.
fn predicted(text: &str, strategy: Strategy) -> f64 {
    planned(text, strategy).1.time().us()
}

#[test]
fn a_layer_norm_takes_three_sweeps_and_two_reductions_a_row() {
    let work = work("x = input f32[64,768] ; y = layer_norm x w[768] b[768] ; out y");
    // Four rows of 768 columns are in flight at once; their scalars are worked on together, four instructions a flight.
    assert_eq!((work.rows, work.flights, work.reductions), (64.0, 16.0, 128.0));
    assert_eq!(work.dispatches, 64.0 * 3.0 + 16.0 * 4.0);
    assert_eq!(work.of(Class::Reduce), 2.0 * 64.0 * 48.0);
    assert_eq!(work.of(Class::Simple), 64.0 * 48.0 + 16.0 * 3.0, "the last sweep; mean, variance, plus epsilon");
    assert_eq!(work.of(Class::Divide), 16.0, "a reciprocal root for all rows in flight");
    assert_eq!((work.tails, work.copied, work.finished), (0.0, 0.0, 0.0));
    assert_eq!((work.chunks, work.streams), (2.0, false));
}

#[test]
fn a_flat_kernel_runs_full_vectors_and_a_narrow_row_one_for_each_instruction() {
    let flat = work("x = input f32[1000,3] ; y = exp x ; out y");
    assert_eq!((flat.of(Class::Exp), flat.tails, flat.rows), (188.0, 0.0, 0.0));
    let rows = work("x = input f32[1000,3] ; e = exp x ; y = add e b[3] ; out y");
    assert_eq!((rows.of(Class::Exp), rows.tails, rows.rows), (1000.0, 2000.0, 1000.0));
}

#[test]
fn a_dot_or_store_that_is_folded_in_is_no_sweep_of_its_own() {
    let sum = work("x = input f32[16,512] ; e = exp x ; y = add e x ; out y");
    assert_eq!(sum.dispatches, 2.0 * 8.0, "exponential; sum and store");
    let softmax = work("x = input f32[16,512] ; y = softmax x ; out y");
    assert_eq!(softmax.reductions, 32.0);
    assert_eq!(softmax.of(Class::Exp), 16.0 * 32.0);
}

#[test]
fn column_sums_are_finished_once() {
    let work = work("x = input f32[4096,512] ; y = column_sum x ; out y");
    assert_eq!((work.chunks, work.finished), (64.0, 64.0 * 512.0));
    assert_eq!(work.of(Class::Column), 4096.0 * 32.0);
}

#[test]
fn large_outputs_go_past_the_caches() {
    assert!(!work("x = input f32[1000,1000] ; y = relu x ; out y").streams);
    assert!(work("x = input f32[1100,1000] ; y = relu x ; out y").streams);
}

#[test]
fn products_are_cut_along_their_longer_side() {
    let product = work("a = input f32[700,64] ; b = input f32[64,100] ; y = matmul a b ; out y");
    assert_eq!((product.chunks, product.products), (3.0, 3.0));
    assert_eq!(product.matrix_flops, 2.0 * 700.0 * 64.0 * 100.0);
    assert_eq!(product.padded_flops, 2.0 * 700.0 * 64.0 * 112.0);
}

#[test]
fn copies_are_runs_or_single_elements() {
    let turned = work("x = input f32[30,40] ; y = transpose x [1,0] ; out y");
    assert_eq!((turned.copied, turned.rows), (1200.0, 0.0));
    let heads = work("x = input f32[10,4,16] ; y = transpose x [1,0,2] ; out y");
    assert_eq!((heads.copied, heads.rows), (0.0, 40.0));
}

#[test]
fn more_rows_never_cost_less() {
    let texts = [
        "x = input f32[R,768] ; y = layer_norm x w[768] b[768] ; out y",
        "x = input f32[R,40] ; g = gelu x ; y = column_sum g ; out y",
        "x = input f32[R,5] ; y = softmax x ; out y",
        "x = input f32[R,256] ; w = input f32[256,300] ; y = matmul x w ; out y",
    ];
    for text in texts {
        let mut before = 0.0;
        // Steps of a half: a chunk more for one thread of two is no more time, and stays within such a step.
        for rows in [8, 32, 128, 512, 2048, 8192, 32768] {
            let time = predicted(&text.replace('R', &rows.to_string()), Strategy::Greedy);
            assert!(time > before, "{text}: {rows} rows take {time} us, fewer took {before}");
            before = time;
        }
    }
}

/// The rows of matmuls on an H200: sizes, what follows, and the time of the faster one of our best kernel and the library.
fn measured_matmuls() -> Vec<([usize; 3], String, f64)> {
    let row = |line: &str| {
        let first: Vec<&str> = line.split(',').take(4).collect();
        let size = [0, 1, 2].map(|at| first[at].parse().unwrap());
        // Kernel names contain commas, so these columns are counted from the end: library_us is the eighth, kernel_us the ninth.
        let times = line.rsplit(',').skip(7).take(2).filter_map(|us| us.parse::<f64>().ok());
        (size, first[3].to_string(), times.fold(f64::INFINITY, f64::min))
    };
    include_str!("../../../../bench/results/h200-matmul.csv").lines().skip(1).map(row).collect()
}

fn planned_on_h200(text: &str, strategy: Strategy) -> Plan {
    let machine = Machine::profile("h200").unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
    plan(&text.parse().unwrap(), target, strategy, &[]).unwrap()
}

/// The predicted microseconds of a graph on an H200.
fn on_h200(text: &str, strategy: Strategy) -> f64 {
    planned_on_h200(text, strategy).time().us()
}

/// Holds predictions against measurements: each one within these bounds, half of them within so much.
#[derive(Default)]
struct Errors(Vec<f64>);

impl Errors {
    fn add(&mut self, text: &str, us: f64, measured: f64) {
        let ratio = us / measured;
        assert!((0.7..1.3).contains(&ratio), "{text}: {us:.1} us for {measured:.1}");
        self.0.push((ratio - 1.0).abs());
    }

    fn check(mut self, least: usize, median: f64) {
        self.0.sort_by(f64::total_cmp);
        assert!(self.0.len() >= least && self.0[self.0.len() / 2] < median, "{:?}", self.0);
    }
}

#[test]
fn matmuls_are_priced_as_they_were_measured() {
    let mut errors = Errors::default();
    for ([m, k, n], follows, measured) in measured_matmuls() {
        let bias = format!("c = weight bf16[{n}] ; z = add y c");
        let residual = format!("{bias} ; r = input bf16[{m},{n}] ; s = add z r");
        let follows = match follows.as_str() {
            "none" => "out y".to_string(),
            "bias" => format!("{bias} ; out z"),
            "gelu" => format!("{bias} ; a = gelu z ; out a"),
            "residual" => format!("{residual} ; out s"),
            "norm" => format!("{residual} ; t = layer_norm s g[{n}] b[{n}] ; out s t"),
            other => panic!("{other}"),
        };
        let text = format!("x = input bf16[{m},{k}] ; w = weight bf16[{k},{n}] ; y = matmul x w ; {follows}");
        errors.add(&text, on_h200(&text, Strategy::Fused), measured);
    }
    errors.check(40, 0.1);
}

/// Attention of heads beside each other.
struct Heads {
    sizes: [usize; 4],
    key_heads: usize,
    causal: bool,
}

impl Heads {
    fn text(&self) -> String {
        let &Heads { sizes: [batch, heads, positions, width], key_heads, causal } = self;
        let group = heads / key_heads;
        let q = format!("q = input bf16[{batch},{key_heads},{group},{positions},{width}]");
        let key = |name: &str| {
            format!(
                "{name}0 = input bf16[{batch},{key_heads},1,{positions},{width}]
{name} = broadcast {name}0 [{batch},{key_heads},{group},{positions},{width}]"
            )
        };
        let mask = if causal { "causal" } else { "full" };
        format!("{q}\n{}\n{}\na = attention q k v mask={mask}\n", key("k"), key("v"))
    }
}

/// Rows of a file: a function of the values by name.
fn rows<T>(file: &'static str, row: impl Fn(&dyn Fn(&str) -> &'static str) -> Option<T>) -> Vec<T> {
    let header: Vec<&str> = file.lines().next().unwrap().split(',').collect();
    let parse = |line: &'static str| {
        let values: Vec<&str> = line.split(',').collect();
        row(&|name: &str| values[header.iter().position(|&known| known == name).unwrap()])
    };
    file.lines().skip(1).filter_map(parse).collect()
}

#[test]
fn attention_is_priced_as_it_was_measured() {
    let number = |text: &str| -> usize { text.parse().unwrap() };
    let shared = rows(include_str!("../../../../bench/results/h200-heads.csv"), |value| {
        let sizes = ["batch", "heads", "positions", "width"].map(|name| number(value(name)));
        let heads = Heads { sizes, key_heads: number(value("key_heads")), causal: value("causal") == "True" };
        (value("direction") == "forward").then(|| (heads, value("us").parse().unwrap()))
    });
    // Wider heads have a newer kernel, which the rows above time.
    let narrow = rows(include_str!("../../../../bench/results/h200-attention-peers.csv"), |value| {
        let sizes = ["batch", "heads", "positions", "width"].map(|name| number(value(name)));
        let heads = Heads { sizes, key_heads: sizes[1], causal: true };
        (value("direction") == "forward" && sizes[3] == 64).then(|| (heads, value("us").parse().unwrap()))
    });
    let mut errors = Errors::default();
    for (heads, measured) in shared.into_iter().chain(narrow) {
        let text = heads.text() + "out a";
        errors.add(&text, on_h200(&text, Strategy::Fused), measured);
    }
    errors.check(19, 0.05);
}

/// What follows attention, in as many launches as the plan has; a projection is one of its own, which was faster at 14 of 16 sizes. Names of devices
/// have commas, so some columns are counted from the end.
#[test]
fn launches_of_attention_are_priced_as_they_were_measured() {
    let mut errors = Errors::default();
    for line in include_str!("../../../../bench/results/h200-crossover.csv").lines().skip(1) {
        let words: Vec<&str> = line.split(',').collect();
        let [batch, positions, cols, width] = [1, 2, 3, 4].map(|at| words[at].parse::<usize>().unwrap());
        let [one_us, apart_us] = [6, 10].map(|at| words[words.len() - at].parse::<f64>().unwrap());
        let (heads, rows) = (cols / width, batch * positions);
        let attention = Heads { sizes: [batch, heads, positions, width], key_heads: heads, causal: true }.text();
        let is_block = words[0] == "attention_block";
        let projected = match is_block {
            true => format!("w = weight bf16[{cols},{cols}] ; c = weight bf16[{cols}] ; p = linear m w c"),
            false => format!("p = reshape m [{rows},{cols}]"),
        };
        let text = format!(
            "{attention}h = reshape a [{batch},{heads},{positions},{width}]
t = transpose h [0,2,1,3] ; m = reshape t [{rows},{cols}] ; {projected} ; r = input bf16[{rows},{cols}] ; s = add r p
g = weight bf16[{cols}] ; b = weight bf16[{cols}] ; y = layer_norm s g b ; out s ; out y"
        );
        let plan = planned_on_h200(&text, Strategy::Fused);
        let is_one = plan.groups.len() == 1;
        assert!(!(is_block && is_one), "{plan}");
        errors.add(line, plan.time().us(), if is_one { one_us } else { apart_us });
    }
    errors.check(32, 0.1);
}

#[test]
fn routed_rows_are_priced_as_they_were_measured() {
    let mut errors = Errors::default();
    let measured = rows(include_str!("../../../../bench/results/h200-experts.csv"), |value| {
        let [rows, inner, columns, experts] = ["rows", "inner", "columns", "experts"].map(value);
        let text = format!(
            "x = input bf16[{rows},{inner}] ; e = input i32[{rows},1] ; w = weight bf16[{experts},{columns},{inner}]
b = weight bf16[{experts},{columns}] ; l = routed_linear x e w b ; y = gelu l ; out y"
        );
        Some((text, value("moe_us").parse().unwrap()))
    });
    for (text, measured) in measured {
        errors.add(&text, on_h200(&text, Strategy::Fused), measured);
    }
    errors.check(6, 0.1);
}

#[test]
fn fusing_into_narrow_rows_is_predicted_to_lose_and_into_long_ones_to_win() {
    let lost = "x = input f32[20000,3] ; g = gelu x kind=erf ; y = row_sum g ; out y";
    assert!(predicted(lost, Strategy::Greedy) > 1.2 * predicted(lost, Strategy::Unfused));
    let won = "x = input f32[8192,768] ; g = gelu x kind=erf ; y = layer_norm g w[768] b[768] ; out y";
    assert!(predicted(won, Strategy::Greedy) < 0.8 * predicted(won, Strategy::Unfused));
}

#[test]
fn attention_computes_what_is_seen_and_moves_its_operands_once() {
    let text = |mask: &str| {
        format!(
            "q = input f32[2,3,256,64] ; k = input f32[2,3,256,64] ; v = input f32[2,3,256,64]
a = attention q k v mask={mask} ; out a"
        )
    };
    let (full, causal) = (work(&text("full")), work(&text("causal")));
    assert_eq!(full.matrix_flops, 6.0 * 4.0 * (256 * 256 * 64) as f64);
    assert_eq!(causal.matrix_flops, 6.0 * 4.0 * (256 * 257 / 2 * 64) as f64);
    assert_eq!(causal.padded_flops, 6.0 * 4.0 * (64 * (64 + 128 + 192 + 256) * 64) as f64, "whole tiles of 64 queries");
    assert_eq!(full.of(Class::Exp), (6 * 256 * 256 / 16) as f64);
    assert_eq!((full.chunks, full.packed, full.of(Class::Convert)), (24.0, 0.0, 0.0));
    for mask in ["full", "causal"] {
        let (_, plan) = planned(&text(mask), Strategy::Fused);
        assert_eq!(plan.groups.len(), 1, "{plan}");
        assert_eq!(plan.groups[0].cost.traffic.total().0, 4 * 4 * 2 * 3 * 256 * 64);
        let (parts, one) = (predicted(&text(mask), Strategy::Eager), predicted(&text(mask), Strategy::Unfused));
        assert!(one < parts, "{mask}: {one} us and {parts} us");
    }
}

/// The matrix flops and the seconds on matrix units of a gradient of attention on a GPU, over those of one product of all scores.
fn products_of_gradient(attention: &str, width: usize) -> (f64, f64) {
    let shape = format!("bf16[2,16,2048,{width}]");
    let operands = ["q", "k", "v"].map(|name| format!("{name} = input {shape} ; ")).concat();
    let graph: Graph = format!("{operands} a = attention q k v {attention} ; out a").parse().unwrap();
    let joint = differentiate(&graph, graph.inputs()).unwrap();
    let scores = attention_interior(&joint.graph, joint.first_backward);
    let graph = recompute(&joint.graph, joint.first_backward, &scores).unwrap().graph;
    let machine = Machine::profile("h200").unwrap();
    let plan = plan(&graph, Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) }, Strategy::Greedy, &[])
        .unwrap();
    let group = plan.groups.iter().find(|group| group.structure.is_attention_gradient()).unwrap();
    let one = 2.0 * (2 * 16 * 2048 * 2048 * width) as f64;
    let rate = machine.tflops(Quantity::Matrix16Tflops).per_second * machine.get(Quantity::AttentionShare);
    (group.cost.matrix_flops / one, group.cost.matrix.0 * rate / one)
}

#[test]
fn kernels_of_a_gradient_of_attention_make_scores_two_or_three_times() {
    assert_eq!(products_of_gradient("", 64).0, 8.0, "scores and slopes twice, three gradients, one more sum for dq");
    assert_eq!(products_of_gradient("", 256).0, 9.0, "scores and slopes three times, three gradients");
    // Without warpgroups, which take no scale below 0.
    let other = "scale=-0.5";
    assert_eq!(products_of_gradient(other, 64).0, 9.0, "scores and slopes three times, three gradients");
    assert_eq!(products_of_gradient(other, 256).0, 11.0, "and once more for the second half of wide keys and values");
    // A causal mask hides half of each, and not what it takes to begin and end blocks.
    for width in [64, 256] {
        let [full, causal] = ["", "mask=causal"].map(|mask| products_of_gradient(mask, width).1);
        assert!((0.5..0.6).contains(&(causal / full)), "{full} and {causal}");
    }
}

/// Attention, projection, residual and norm of this many tokens in heads of 64, side by side.
fn block(tokens: usize, heads: usize) -> String {
    let cols = 64 * heads;
    format!(
        "q = input f32[{heads},{tokens},64] ; k = input f32[{heads},{tokens},64] ; v = input f32[{heads},{tokens},64]
r = input f32[{tokens},{cols}] ; a = attention q k v mask=causal ; t = transpose a [1,0,2] ; m = reshape t [{tokens},{cols}]
l = linear m w[{cols},{cols}] c[{cols}] ; s = add r l ; y = layer_norm s g[{cols}] b[{cols}] ; out y ; out s"
    )
}

#[test]
fn a_projection_is_shared_anew_after_attention() {
    let block_work = work(&block(512, 12));
    let attention = work(
        "q = input f32[12,512,64] ; k = input f32[12,512,64] ; v = input f32[12,512,64]
a = attention q k v mask=causal ; out a",
    );
    assert_eq!(Work { next: None, ..block_work.clone() }, attention);
    let next = block_work.next.as_ref().unwrap();
    assert_eq!(next.matrix_flops, 2.0 * (512 * 768 * 768) as f64);
    assert_eq!(block_work.all_matrix_flops(), attention.matrix_flops + next.matrix_flops);
    assert_eq!((next.chunks, next.reductions), (3.0, 0.0), "blocks of 256");
    let last = next.next.as_ref().unwrap();
    assert_eq!((last.chunks, last.reductions), (8.0, 2.0 * 512.0), "strips of 64; mean and variance of each row");
    for tokens in [1, 64, 512] {
        let text = block(tokens, 12);
        assert!(predicted(&text, Strategy::Greedy) < predicted(&text, Strategy::Unfused), "{tokens} tokens");
    }
    // The search keeps the projection with attention; whether the norm is there too is a matter of few percent.
    let (chosen, plan) = (predicted(&block(512, 12), Strategy::Fused), planned(&block(512, 12), Strategy::Fused).1);
    assert!(plan.groups.len() <= 2 && plan.groups[0].structure.name() == "attention block", "{plan}");
    assert!(predicted(&block(512, 12), Strategy::Greedy) < 1.02 * chosen);
}

#[test]
fn a_gpu_keeps_attention_and_its_projection_apart() {
    let graph: Graph = block(512, 12).parse().unwrap();
    for strategy in [Strategy::Greedy, Strategy::Fused] {
        let target = Target { machine: &Machine::profile("h200").unwrap(), catalog: CudaCatalog::of(Arch::Sm90a) };
        let plan = plan(&graph, target, strategy, &[]).unwrap();
        let apart = plan.groups.iter().all(|group| {
            let is_product = |id: &&NodeId| matches!(graph.node(**id).op, Op::Matmul { .. });
            let products = group.nodes.iter().filter(is_product).count();
            products <= if group.structure.is_plain_attention() { 2 } else { 1 }
        });
        assert!(apart && plan.groups.len() > 2, "{plan}");
    }
}
