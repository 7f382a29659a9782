//! Attention and the row work that follows it as one launch on a GPU: against f64, and against the separate kernels, whatever the
//! sizes, the dtype, the mask and what follows.

use deuteron::{Dtype, Engine, Launching, Recorded, Session, Strategy, Tensor, seed};
use deuteron_codegen::Source;
use deuteron_codegen::cuda::CudaSource;
use deuteron_kernels::Backend;

use crate::support::{assert_holds, expected, gpu, guarded_gpu, outputs, parsed, ran, set};

/// What a session has made is within the bound of f64.
fn assert_right(session: &Session, inputs: &[Tensor], what: &str) {
    let graph = session.graph();
    assert_holds(&expected(graph, inputs), graph, &outputs(session), what);
}

/// The only kernel of a plan: attention with row work, or with its projection and row work.
fn joint(session: &Session) -> Option<CudaSource> {
    let [kernel] = session.kernels() else { return None };
    let Source::Cuda(source) = &kernel.source else { return None };
    let known = ["attention_rows", "attention_rows_hopper", "attention_block_hopper"].contains(&source.name.as_str());
    known.then(|| source.clone())
}

/// How blocks are cut, as far as bits follow from it: neither which block has which tile nor how many are in shared memory changes one.
fn cut(source: &CudaSource) -> Vec<&str> {
    let names = ["int WARPS", "int ATOMS", "int KEYS", "int BLOCKS", "bool SPLIT", "bool TURNS"];
    let is_cut = |line: &&str| names.iter().any(|name| line.starts_with(&format!("constexpr {name} = ")));
    source.text.lines().filter(is_cut).collect()
}

/// Whether the separate kernel of attention is the same variant, and so has the same bits.
fn is_variant_of(separate: &Session, joint: &CudaSource) -> bool {
    let alone = match joint.name.as_str() {
        "attention_rows_hopper" => "attention_hopper",
        "attention_rows" if joint.text.contains(" attention_tensor(") => "attention_tensor",
        "attention_rows" => "attention",
        _ => return false,
    };
    separate.kernels().iter().any(|kernel| match &kernel.source {
        Source::Cuda(source) => source.name == alone && cut(source) == cut(joint),
        _ => false,
    })
}

/// Whether one launch is recorded, of a session that has run once.
fn is_one_launch(session: &mut Session, inputs: &[Tensor]) -> bool {
    session.set_launching(Launching::Graph);
    session.run(&inputs.iter().collect::<Vec<_>>()).unwrap();
    session.recorded_launches().unwrap() == Some(Recorded { kernels: 1, others: 0 })
}

/// Everything is one launch, within the bound of f64, twice the same; the last `alone` outputs, which no sum along a row goes into,
/// have the bits of the separate kernels.
fn check(engine: &Engine, text: &str, dtype: Dtype, alone: usize) {
    let graph = parsed(text, dtype);
    let inputs = seed::inputs(&graph, 11).unwrap();
    let mut session = ran(engine, &graph, Strategy::Greedy, &inputs);
    let found = outputs(&session);
    let Some(joint) = joint(&session) else { panic!("{dtype}: not one kernel\n{text}\n{}", session.plan()) };
    let name = format!("{} {:?}", joint.name, cut(&joint));
    assert_right(&session, &inputs, &format!("{dtype} {name}\n{text}"));
    session.poison().unwrap();
    assert!(is_one_launch(&mut session, &inputs), "{dtype}: more than one launch\n{text}");
    let same = outputs(&session).iter().zip(&found).all(|(a, b)| a.is_bitwise(b));
    assert!(same, "{dtype} {name}: other bits in the second run\n{text}");
    let separate = ran(engine, &graph, Strategy::Unfused, &inputs);
    assert!(separate.kernels().len() > 1, "{text}");
    if is_variant_of(&separate, &joint) {
        let first = found.len() - alone;
        let same = outputs(&separate)[first..].iter().zip(&found[first..]).all(|(a, b)| a.is_bitwise(b));
        assert!(same, "{dtype} {name}: not the bits of separate kernels\n{text}");
    }
}

/// Attention over heads that are merged, and what follows.
fn merged([batch, heads, sequence, width]: [usize; 4], operands: &str, attention: &str, rest: &str) -> String {
    let cols = heads * width;
    format!(
        "q = input float[{batch},{heads},{sequence},{width}] ; k = input float[{batch},{heads},{sequence},{width}]
v = input float[{batch},{heads},{sequence},{width}] ; r = input float[{batch},{sequence},{cols}]
w = weight float[{cols}] ; b = weight float[{cols}]
{operands}
a = attention q k v {attention}
t = transpose a [0,2,1,3] ; m = reshape t [{batch},{sequence},{cols}]
{rest}"
    )
}

const ADD_NORM: &str = "s = add r m ; y = layer_norm s w b ; out y ; out s";

#[test]
fn add_and_norm_of_every_size() {
    let Some(engine) = guarded_gpu() else { return };
    // Hidden sizes from 64 to 1600 and 8192, whole and partial tiles of queries, one head and many.
    let sizes = [
        [1, 1, 17, 64],
        [3, 2, 64, 32],
        [1, 12, 127, 64],
        [3, 12, 129, 64],
        [1, 25, 200, 64],
        [3, 25, 65, 64],
        [1, 16, 129, 96],
        [3, 4, 200, 128],
        [1, 6, 1000, 64],
        [1, 3, 1000, 96],
        [2, 5, 9, 40],
        [1, 64, 20, 128],
    ];
    for (sizes, dtype) in sizes.into_iter().flat_map(|sizes| Dtype::FLOATS.map(|dtype| (sizes, dtype))) {
        for mask in ["mask=causal", ""] {
            check(&engine, &merged(sizes, "", mask, ADD_NORM), dtype, 1);
        }
    }
}

/// With a projection: its weight as it lies in GPT-2 and turned, with a bias and without, another width than that of the heads.
const PROJECTED: [&str; 4] = [
    "p = weight float[INNER,COLS] ; c = weight float[COLS] ; x = linear m p c",
    "p = weight float[COLS,INNER] ; c = weight float[COLS] ; x = linear m p c transposed",
    "p = weight float[INNER,COLS] ; x = linear m p",
    "p = weight float[COLS,INNER] ; x = linear m p transposed",
];

fn projected(
    [batch, heads, sequence, width]: [usize; 4],
    cols: usize,
    mask: &str,
    projection: &str,
    norm: &str,
) -> String {
    let inner = heads * width;
    let projection = projection.replace("INNER", &inner.to_string()).replace("COLS", &cols.to_string());
    format!(
        "q = input float[{batch},{heads},{sequence},{width}] ; k = input float[{batch},{heads},{sequence},{width}]
v = input float[{batch},{heads},{sequence},{width}] ; r = input float[{batch},{sequence},{cols}]
w = weight float[{cols}] ; b = weight float[{cols}]
a = attention q k v {mask}
t = transpose a [0,2,1,3] ; m = reshape t [{batch},{sequence},{inner}]
{projection}
s = add r x ; y = {norm} ; out y ; out s"
    )
}

#[test]
fn projection_add_and_norm_of_every_size() {
    let Some(engine) = guarded_gpu() else { return };
    if !has_warpgroups(&engine) {
        println!("SKIPPED: one launch with a projection is for Hopper");
        return;
    }
    let sizes = [
        ([1, 1, 64, 64], 64),
        ([1, 2, 127, 64], 192),
        ([3, 12, 129, 64], 768),
        ([1, 12, 1000, 64], 768),
        ([2, 25, 200, 64], 1600),
        ([1, 8, 200, 128], 1024),
        ([3, 2, 129, 128], 512),
        ([24, 12, 300, 64], 768),
        ([40, 4, 300, 128], 512),
    ];
    for (at, (sizes, cols)) in sizes.into_iter().enumerate() {
        for (turn, mask) in ["mask=causal", ""].into_iter().enumerate() {
            let (projection, dtype) = (PROJECTED[(at + turn) % 4], [Dtype::Bf16, Dtype::F16][at % 2]);
            check(&engine, &projected(sizes, cols, mask, projection, "layer_norm s w b"), dtype, 0);
        }
        check(&engine, &projected(sizes, cols, "mask=causal", PROJECTED[0], "rms_norm s w"), Dtype::Bf16, 0);
    }
}

fn has_warpgroups(engine: &Engine) -> bool {
    matches!(engine.device().backend(), Backend::Cuda(target) if target.arch.has_wgmma())
}

/// Who comes first differs from run to run, also beside a busy GPU; the bits do not.
#[test]
fn a_thousand_projected_runs_give_the_same_bits() {
    let Some(engine) = gpu() else { return };
    if !has_warpgroups(&engine) {
        println!("SKIPPED: one launch with a projection is for Hopper");
        return;
    }
    for (sizes, cols, dtype) in [
        ([8, 12, 256, 64], 768, Dtype::Bf16),
        ([1, 25, 129, 64], 1600, Dtype::F16),
        ([3, 4, 200, 128], 512, Dtype::Bf16),
    ] {
        repeat(&engine, &projected(sizes, cols, "mask=causal", PROJECTED[0], "layer_norm s w b"), dtype);
    }
}

/// Enough tiles that two sixteens of queries go to a warp.
#[test]
fn many_tiles() {
    let Some(engine) = gpu() else { return };
    for dtype in [Dtype::F16, Dtype::Bf16] {
        check(&engine, &merged([8, 8, 300, 64], "", "mask=causal", ADD_NORM), dtype, 1);
        check(&engine, &merged([16, 12, 200, 32], "", "", ADD_NORM), dtype, 1);
    }
}

#[test]
fn other_masks_and_other_work() {
    let Some(engine) = guarded_gpu() else { return };
    let sizes = [2, 3, 90, 64];
    for dtype in Dtype::FLOATS {
        let mask = "x = input float[90,90]";
        check(&engine, &merged(sizes, mask, "x mask=additive", ADD_NORM), dtype, 1);
        let seeded = merged(sizes, "seed = input i32[]", "seed mask=causal p=0.3 offset=2", ADD_NORM);
        check(&engine, &seeded, dtype, 1);
        let rms = "s = add m r ; y = rms_norm s w ; out y ; out s";
        check(&engine, &merged(sizes, "", "mask=causal", rms), dtype, 1);
        check(&engine, &merged(sizes, "", "", "y = add m r ; out y"), dtype, 1);
        check(&engine, &merged(sizes, "", "", "g = gelu m ; y = mul g r ; out y"), dtype, 0);
        let dropped = "d = dropout m seed p=0.2 ; s = add d r ; y = layer_norm s w b ; out y ; out s";
        // Without a rounding in between, what dropout multiplies by is part of the addition.
        let alone = usize::from(dtype != Dtype::F32);
        check(&engine, &merged(sizes, "seed = input i32[]", "mask=causal", dropped), dtype, alone);
        // Heads that share keys, and heads that are not merged.
        let shared = "q = input float[2,2,3,50,16] ; k1 = input float[2,2,1,70,16] ; v1 = input float[2,2,1,70,16]
k = broadcast k1 [2,2,3,70,16] ; v = broadcast v1 [2,2,3,70,16] ; r = input float[2,50,96] ; w = weight float[96]
a = attention q k v mask=causal ; t = transpose a [0,3,1,2,4] ; m = reshape t [2,50,96]
s = add m r ; y = rms_norm s w ; out y ; out s";
        check(&engine, shared, dtype, 1);
        let apart = "q = input float[2,3,50,16] ; k = input float[2,3,70,16] ; v = input float[2,3,70,16]
r = input float[2,3,50,16] ; w = weight float[16]
a = attention q k v mask=causal ; s = add a r ; y = rms_norm s w ; out y ; out s";
        check(&engine, apart, dtype, 1);
    }
}

/// Few queries are decoded by kernels of their own: more launches, and as right.
#[test]
fn few_queries_are_more_launches() {
    let Some(engine) = guarded_gpu() else { return };
    for (sequence, dtype) in [1, 8].into_iter().flat_map(|sequence| Dtype::FLOATS.map(|dtype| (sequence, dtype))) {
        let graph = parsed(&merged([2, 12, sequence, 64], "", "mask=causal", ADD_NORM), dtype);
        let inputs = seed::inputs(&graph, 11).unwrap();
        let session = ran(&engine, &graph, Strategy::Greedy, &inputs);
        assert!(session.kernels().len() > 1 && joint(&session).is_none());
        assert_right(&session, &inputs, &dtype.to_string());
    }
}

/// Scores of 10^4, 0 and -10^4: every weight is 1, 0, or one of equal ones.
#[test]
fn extreme_scores() {
    let Some(engine) = guarded_gpu() else { return };
    let [batch, heads, sequence, width] = [2, 3, 150, 64];
    for (mask, dtype) in ["", "mask=causal"].into_iter().flat_map(|mask| Dtype::FLOATS.map(|dtype| (mask, dtype))) {
        let graph = parsed(&merged([batch, heads, sequence, width], "", mask, ADD_NORM), dtype);
        let mut inputs = seed::inputs(&graph, 3).unwrap();
        let spread = |sign: fn(usize) -> f32| -> Tensor {
            let element = |index: usize| {
                let (position, column) = (index / width % sequence, index % width);
                if position % width == column { 283.0 * sign(position) } else { 0.0 }
            };
            let values: Vec<f32> = (0..batch * heads * sequence * width).map(element).collect();
            Tensor::from_f32(dtype, [batch, heads, sequence, width], &values).unwrap()
        };
        inputs[0] = spread(|_| 1.0);
        inputs[1] = spread(|position| if position % 3 == 0 { -1.0 } else { 1.0 });
        let session = ran(&engine, &graph, Strategy::Greedy, &inputs);
        assert!(joint(&session).is_some());
        assert_right(&session, &inputs, &format!("{dtype} {mask}"));
    }
}

/// A query that is NaN makes its own row NaN, a key that is NaN the rows that see it; all other rows keep their bits.
#[test]
fn nan_reaches_only_rows_that_see_it() {
    let Some(engine) = guarded_gpu() else { return };
    let [batch, heads, sequence, width] = [2, 3, 150, 64];
    let cols = heads * width;
    for dtype in Dtype::FLOATS {
        let graph = parsed(&merged([batch, heads, sequence, width], "", "mask=causal", ADD_NORM), dtype);
        let clean = seed::inputs(&graph, 5).unwrap();
        let of = |inputs: &[Tensor]| -> Vec<Vec<f32>> {
            let session = ran(&engine, &graph, Strategy::Greedy, inputs);
            assert!(joint(&session).is_some());
            outputs(&session).iter().map(|output| output.to_f32().unwrap()).collect()
        };
        let right = of(&clean);
        assert!(right.iter().flatten().all(|value| value.is_finite()));
        // (operand, sequence, head, position, rows of that sequence that see it)
        for (operand, of_batch, head, position, rows) in [(0, 1, 2, 70, 70..71), (1, 0, 1, 130, 130..150)] {
            let mut inputs = clean.clone();
            set(&mut inputs[operand], ((of_batch * heads + head) * sequence + position) * width + 5, f32::NAN);
            let found = of(&inputs);
            for (output, (found, right)) in found.iter().zip(&right).enumerate() {
                for (index, (found, right)) in found.iter().zip(right).enumerate() {
                    let (row, column) = (index / cols, index % cols);
                    let hit = row / sequence == of_batch && rows.contains(&(row % sequence));
                    // The norm spreads it over its row; the sum has it in the columns of its head.
                    let nan = hit && (output == 0 || column / width == head);
                    let good = if nan { found.is_nan() } else { found.to_bits() == right.to_bits() };
                    assert!(good, "{dtype} operand {operand}, output {output}, row {row}, column {column}: {found}");
                }
            }
        }
    }
}

/// Who comes last differs from run to run, the bits do not; nor do they by launching.
#[test]
fn a_thousand_runs_give_the_same_bits() {
    let Some(engine) = gpu() else { return };
    for (sizes, dtype) in [
        ([2, 12, 200, 64], Dtype::Bf16),
        ([24, 12, 300, 64], Dtype::Bf16),
        ([1, 25, 129, 64], Dtype::F16),
        ([3, 4, 77, 32], Dtype::F32),
    ] {
        repeat(&engine, &merged(sizes, "", "mask=causal", ADD_NORM), dtype);
    }
}

/// A thousand runs, half of them launched one by one and half recorded.
fn repeat(engine: &Engine, text: &str, dtype: Dtype) {
    let graph = parsed(text, dtype);
    let inputs: Vec<Tensor> =
        seed::inputs(&graph, 5).unwrap().iter().map(|tensor| tensor.to_device(engine).unwrap()).collect();
    let mut session = ran(engine, &graph, Strategy::Greedy, &inputs);
    assert!(joint(&session).is_some(), "{dtype}: not one kernel\n{text}");
    let first = outputs(&session);
    for run in 0..1000 {
        session.set_launching(if run < 500 { Launching::Eager } else { Launching::Graph });
        session.poison().unwrap();
        session.run(&inputs.iter().collect::<Vec<_>>()).unwrap();
        let same = outputs(&session).iter().zip(&first).all(|(a, b)| a.is_bitwise(b));
        assert!(same, "{dtype}: other bits in run {run}\n{text}");
    }
}

/// More numbers than all boards have places for: the same sums as separate kernels give, twice.
#[test]
fn more_numbers_than_places() {
    let Some(engine) = gpu() else { return };
    let graph = parsed(&merged([700, 25, 65, 64], "", "mask=causal", ADD_NORM), Dtype::Bf16);
    let inputs = seed::inputs(&graph, 5).unwrap();
    let mut session = ran(&engine, &graph, Strategy::Greedy, &inputs);
    let Some(joint) = joint(&session) else { panic!("not one kernel\n{}", session.plan()) };
    let (first, separate) = (outputs(&session), ran(&engine, &graph, Strategy::Unfused, &inputs));
    assert!(!is_variant_of(&separate, &joint) || outputs(&separate)[1].is_bitwise(&first[1]));
    session.poison().unwrap();
    session.run(&inputs.iter().collect::<Vec<_>>()).unwrap();
    assert!(outputs(&session).iter().zip(&first).all(|(a, b)| a.is_bitwise(b)));
}

/// Several launches of one session, each with counters of its own.
#[test]
fn layers_in_a_row() {
    let Some(engine) = guarded_gpu() else { return };
    let text = "x = input float[2,100,192] ; w = weight float[192] ; u = weight float[192]
h1 = reshape x [2,100,3,64] ; q1 = transpose h1 [0,2,1,3] ; a1 = attention q1 q1 q1 mask=causal
t1 = transpose a1 [0,2,1,3] ; m1 = reshape t1 [2,100,192] ; s1 = add x m1 ; y1 = rms_norm s1 w
h2 = reshape y1 [2,100,3,64] ; q2 = transpose h2 [0,2,1,3] ; a2 = attention q2 q2 q2 mask=causal
t2 = transpose a2 [0,2,1,3] ; m2 = reshape t2 [2,100,192] ; s2 = add s1 m2 ; y2 = rms_norm s2 u ; out y2 ; out s2";
    for dtype in Dtype::FLOATS {
        let graph = parsed(text, dtype);
        let inputs = seed::inputs(&graph, 11).unwrap();
        let mut session = ran(&engine, &graph, Strategy::Greedy, &inputs);
        assert_eq!(session.plan().groups.len(), 2, "{}", session.plan());
        let expected = expected(&graph, &inputs);
        for _ in 0..3 {
            assert_holds(&expected, &graph, &outputs(&session), dtype);
            session.poison().unwrap();
            session.run(&inputs.iter().collect::<Vec<_>>()).unwrap();
        }
    }
}
