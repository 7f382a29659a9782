//! Five pairs worked by hand. Bytes, launches and registers are written out as a person would; the score must agree.

use deuteron_graph::Graph;
use deuteron_plan::{Assessment, Fusion, FusionKind, Machine, Question, Scoring, Seconds, Target, assess};

fn assessed(text: &str) -> Assessment {
    let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
    let machine = Machine::profile("h200").unwrap();
    let question = Question {
        graph: &graph,
        baseline: &graph,
        target: Target::conceivable(&machine),
        realizable: None,
        pins: &[],
        scoring: Scoring::default(),
    };
    assess(&question).unwrap()
}

fn pair(text: &str, ops: [&str; 2]) -> Fusion {
    let found = assessed(text).fusions.into_iter().find(|fusion| fusion.kind == FusionKind::Pair && fusion.ops == ops);
    found.unwrap_or_else(|| panic!("no pair {ops:?}"))
}

fn near(got: f64, expected: f64, what: &str) {
    assert!((got - expected).abs() < 5e-4, "{what}: got {got}, by hand {expected}");
}

/// The launch criterion by hand: launches saved over the time of all kernels but the longest.
fn launch_saving(fusion: &Fusion) -> f64 {
    let launches: Vec<f64> = fusion.apart.iter().map(|cost| cost.launch.0).collect();
    let times: Vec<f64> = fusion.apart.iter().map(|cost| cost.total.0).collect();
    let longest = times.iter().copied().fold(0.0, f64::max);
    (launches.iter().sum::<f64>() - launches[0]) / (times.iter().sum::<f64>() - longest)
}

const ROWS: f64 = 8192.0;
/// Bytes of an activation of 768 bf16 columns.
const T: f64 = ROWS * 768.0 * 2.0;

#[test]
fn layer_norm_and_gelu_are_fused_with_a_score_of_about_085() {
    let fusion = pair(
        "x = input bf16[8192,768] ; w = weight bf16[768] ; b = weight bf16[768]
         y, mean, rstd = layer_norm x w b ; z = gelu y ; out z",
        ["layer_norm", "gelu"],
    );
    // Apart: the norm reads x, w, b and writes y; GELU reads y and writes z. Together: x, w, b in, z out.
    let weights = 2.0 * 768.0 * 2.0;
    let saving = 1.0 - (2.0 * T + weights) / (4.0 * T + weights);
    near(fusion.score.bandwidth_saving, saving, "half of the traffic");
    near(fusion.score.bandwidth.score, saving / 0.6, "bandwidth");
    assert!(fusion.score.bandwidth.passes, "half is more than 30 %");
    near(fusion.score.launch_saving, launch_saving(&fusion), "the shorter kernel's launch over its time");
    near(fusion.score.launch.score, 1.0, "more than a tenth of the shorter kernel is its launch");
    // A warp per row: 768 / 32 = 24 elements per thread, one row waiting for the variance, 24 registers for the rest.
    assert_eq!(fusion.together.as_ref().unwrap().resources.registers, 48);
    near(fusion.score.registers.score, 1.0, "48 registers are fewer than 50");
    // mean, sub, square, mean, + eps, rsqrt, * rstd, * w, + b, narrow; square, cube, *, +, *, tanh, +1, half, *, narrow.
    near(fusion.score.complexity.score, 1.0 - fusion.primitives as f64 / 32.0, "complexity");
    assert!((17..=20).contains(&fusion.primitives), "{} primitives", fusion.primitives);
    near(fusion.score.maintainability.score, 0.7, "a generated row kernel");
    assert!((fusion.score.total - 0.85).abs() < 0.02, "about 0.85: {}", fusion.score.total);
    assert!(fusion.score.fuse && fusion.chosen && fusion.reason.is_none());
    assert!(fusion.worth.unwrap().0 > 0.0);
}

#[test]
fn a_large_product_and_a_layer_norm_are_not_fused() {
    let fusion = pair(
        "x = input bf16[8192,768] ; w = weight bf16[768,4096] ; g = weight bf16[4096]
         y = matmul x w ; z, mean, rstd = layer_norm y g g ; out z",
        ["matmul", "layer_norm"],
    );
    assert!(!fusion.score.fuse && !fusion.chosen);
    let reason = fusion.reason.as_ref().unwrap();
    assert_eq!(reason.code(), "E-PLAN-004");
    // 2 m n k flops over (m k + k n + m n) bf16 elements: 8192 x 768 x 4096.
    let intensity = 2.0 * ROWS * 768.0 * 4096.0 / (2.0 * (ROWS * 768.0 + 768.0 * 4096.0 + ROWS * 4096.0));
    let text = reason.to_string();
    assert!(text.contains(&format!("{intensity:.0} flop/byte > 198")), "{text}");
    assert!(text.contains("compute-bound") && text.contains("whole rows") && text.contains("tensor cores"), "{text}");
    let impossible = [fusion.score.registers, fusion.score.complexity, fusion.score.maintainability];
    assert!(impossible.iter().all(|criterion| criterion.score == 0.0 && !criterion.passes), "nobody can write it");
    assert!(!fusion.forceable && fusion.worth.is_none(), "{:?}", fusion.worth);
    let apart: Seconds = fusion.apart.iter().map(|cost| cost.total).sum();
    assert!(fusion.estimate.unwrap() > apart, "one block with whole rows would take longer: {:?}", fusion.estimate);
}

#[test]
fn at_a_few_rows_a_product_and_a_norm_are_allowed_and_priced() {
    let text = "x = input bf16[1,768] ; w = weight bf16[768,768] ; g = weight bf16[768]
         n, mean, rstd = layer_norm x g g ; y = matmul n w ; out y";
    let fusion = pair(text, ["layer_norm", "matmul"]);
    assert_eq!(fusion.structure.as_ref().unwrap().name(), "norm, then matmul of few rows");
    assert!(fusion.chosen, "decoding: a launch costs more than reading one row again: {:?}", fusion.worth);
    assert!(fusion.worth.unwrap().us() > 1.0);
}

#[test]
fn a_residual_add_and_a_norm_save_a_fifth_of_the_bytes() {
    let fusion = pair(
        "x = input bf16[8192,768] ; r = input bf16[8192,768] ; g = weight bf16[768]
         s = add x r ; y, mean, rstd = layer_norm s g g ; out s y",
        ["add", "layer_norm"],
    );
    // Apart: x, r in, s out; s in, y out. Together: x, r in, s, y out.
    let weights = 768.0 * 2.0;
    let saving = 1.0 - (4.0 * T + weights) / (5.0 * T + weights);
    near(fusion.score.bandwidth_saving, saving, "a fifth");
    near(fusion.score.bandwidth.score, saving / 0.6, "a third of the criterion");
    let launch = (launch_saving(&fusion) / 0.1).min(1.0);
    let total = 0.4 * saving / 0.6 + 0.2 * launch + 0.2 + 0.1 * (1.0 - fusion.primitives as f64 / 32.0) + 0.1 * 0.7;
    near(fusion.score.total, total, "score");
    assert!(fusion.score.fuse && fusion.chosen);
}

#[test]
fn a_product_takes_its_activation_in() {
    let fusion = pair(
        "x = input bf16[8192,768] ; w = weight bf16[768,3072] ; y = matmul x w ; z = gelu y ; out z",
        ["matmul", "gelu"],
    );
    let (w, y) = (768.0 * 3072.0 * 2.0, 4.0 * T);
    let saving = 1.0 - (T + w + y) / (T + w + 3.0 * y);
    near(fusion.score.bandwidth_saving, saving, "the product's result is never written");
    assert_eq!(fusion.structure.as_ref().unwrap().name(), "matmul with epilogue");
    near(fusion.score.registers.score, 1.0, "the occupancy of the product stays");
    near(fusion.score.maintainability.score, 0.6, "a generated epilogue");
    assert!(fusion.score.fuse && fusion.chosen);
}

#[test]
fn a_transpose_between_two_kernels_keeps_them_apart() {
    let text = "a = relu x[2,3,64] ; t = transpose a [1,0,2] ; b = relu t ; out b";
    let fusion = pair(text, ["relu", "relu"]);
    let reason = fusion.reason.as_ref().map(|reason| reason.code());
    assert_eq!(reason, Some("E-PLAN-005"));
    assert!(!fusion.score.fuse && !fusion.chosen);
}

#[test]
fn a_split_is_read_in_place_and_attention_takes_the_residual() {
    let assessment = assessed(
        "h = input bf16[8,1024,2304] ; r = input bf16[8,12,1024,64]
         q0 = slice h axis=2 start=0 length=768 ; k0 = slice h axis=2 start=768 length=768
         v0 = slice h axis=2 start=1536 length=768
         q1 = reshape q0 [8,1024,12,64] ; k1 = reshape k0 [8,1024,12,64] ; v1 = reshape v0 [8,1024,12,64]
         q = transpose q1 [0,2,1,3] ; k = transpose k1 [0,2,1,3] ; v = transpose v1 [0,2,1,3]
         a = attention q k v mask=causal ; y = add a r ; out y",
    );
    assert_eq!(assessment.chosen.groups.len(), 1, "{}", assessment.chosen);
    let view = assessment.fusions.iter().find(|fusion| fusion.ops[0] == "split").unwrap();
    // Three slices of 768 columns, read and written, would have been copied.
    let copied: u64 = view.apart[0].traffic.total().0;
    assert_eq!(copied, 2 * 3 * 8 * 1024 * 768 * 2);
    assert!(view.score.fuse && view.chosen);
    let residual = assessment.fusions.iter().find(|fusion| fusion.ops == ["attention", "add"]).unwrap();
    assert!(residual.chosen && residual.score.fuse, "{:?}", residual.score);
}

#[test]
fn a_cluster_of_blocks_holds_rows_of_2048_columns() {
    let graph = |columns: usize| {
        format!(
            "x = input bf16[8192,768] ; w = weight bf16[768,{columns}] ; g = weight bf16[{columns}]
             y = matmul x w ; z, mean, rstd = layer_norm y g g ; out z"
        )
    };
    assert!(pair(&graph(2048), ["matmul", "layer_norm"]).reason.is_none());
    assert!(pair(&graph(2056), ["matmul", "layer_norm"]).reason.is_some());
}

#[test]
fn every_example_of_a_code_shows_that_code() {
    for page in deuteron_plan::PAGES.iter().filter(|page| !page.example.is_empty()) {
        let graph: Graph = page.example.parse().unwrap_or_else(|error| panic!("{}: {error}", page.code));
        let machine = Machine::profile("h200").unwrap();
        let plan =
            deuteron_plan::plan(&graph, Target::conceivable(&machine), deuteron_plan::Strategy::Greedy, &[]).unwrap();
        let refused: Vec<&str> = plan.refusals.iter().map(|refusal| refusal.reason.code()).collect();
        // Kernels that share no value are no neighbours: what keeps them apart is not listed.
        assert!(refused.contains(&page.code) || page.code == "E-PLAN-002", "{}: {refused:?}\n{plan}", page.code);
    }
}

#[test]
fn two_products_of_one_operand_and_their_gate_are_one_kernel() {
    let assessment = assessed(
        "x = input bf16[8192,768] ; w = weight bf16[768,2048] ; v = weight bf16[768,2048]
         a = matmul x w ; b = matmul x v ; y = swiglu a b ; out y",
    );
    assert_eq!(assessment.chosen.groups.len(), 1, "{}", assessment.chosen);
    assert_eq!(assessment.chosen.groups[0].structure.name(), "products of one operand with epilogue");
    // Neither product is written: x, two weights in, y out.
    let bytes = 2 * (8192 * 768 + 2 * 768 * 2048 + 8192 * 2048);
    assert_eq!(assessment.chosen.bytes().0, bytes);
}

#[test]
fn the_launch_criterion_tells_short_kernels_from_long_ones() {
    let at = |rows: usize| {
        let text =
            format!("x = input bf16[{rows},768] ; r = input bf16[{rows},768] ; s = add x r ; y = gelu s ; out y");
        pair(&text, ["add", "gelu"]).score
    };
    let [short, medium, long] = [64, 8192, 262_144].map(at);
    assert!(short.launch.passes && short.launch.score == 1.0, "{short:?}");
    assert!(!long.launch.passes && long.launch.score < 0.1, "{long:?}");
    assert!(long.launch_saving < medium.launch_saving && medium.launch_saving < short.launch_saving, "{medium:?}");
}

#[test]
fn a_user_may_weigh_otherwise() {
    let text = "x = input bf16[64,768] ; r = input bf16[64,768] ; s = add x r ; y = gelu s ; out s y";
    let weights = "[weights]\nbandwidth = 0\nlaunch = 1\nregisters = 0\ncomplexity = 0\nmaintainability = 0";
    let graph: Graph = text.parse().unwrap();
    let machine = Machine::profile("h200").unwrap();
    let target = Target::conceivable(&machine);
    let scoring = Scoring::parse(weights).unwrap();
    let question = Question { graph: &graph, baseline: &graph, target, realizable: None, pins: &[], scoring };
    let fusion = &assess(&question).unwrap().fusions[0];
    assert_eq!(fusion.score.total, fusion.score.launch.score, "the one criterion that counts");
}
