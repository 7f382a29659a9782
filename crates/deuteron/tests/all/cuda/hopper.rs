//! Matmuls on Hopper's matrix units: every cut is right by f64, and gives the same bits in every run, whatever the sizes, the dtype, how
//! operands lie and what follows.

use deuteron::{Dtype, Engine, Graph, Session, SessionOptions, Strategy, Tensor, seed};
use deuteron_kernels::Backend;
use deuteron_matmul::cuda::hopper::{HopperKernel, HopperTile, Sharing};
use deuteron_plan::plan;

use crate::support::{assert_holds, guarded_gpu, parsed, seeded, twice};

/// With red zones around all memory, and where there are such matrix units.
pub(super) fn hopper() -> Option<Engine> {
    let engine = guarded_gpu()?;
    let is_hopper = matches!(engine.device().backend(), Backend::Cuda(target) if target.arch.has_wgmma());
    is_hopper.then_some(engine)
}

/// A session of a graph of one matmul, cut in some way.
fn session(engine: &Engine, graph: &Graph, tile: HopperTile) -> Session {
    let kernel = kernel(engine, graph);
    let Backend::Cuda(target) = engine.device().backend() else { panic!("a GPU") };
    assert!(kernel.tiles(target, f64::INFINITY).contains(&tile), "not possible: {tile}");
    let kernel = kernel.with_tile(tile).kernel(target);
    Session::new(engine, graph, SessionOptions::from(Strategy::Greedy).kernels([kernel])).unwrap()
}

/// The kernel of a graph of one matmul.
fn kernel(engine: &Engine, graph: &Graph) -> HopperKernel {
    let Backend::Cuda(target) = engine.device().backend() else { panic!("a GPU") };
    let plan = plan(graph, engine.device().target(), Strategy::Greedy, &[]).unwrap();
    let [group] = plan.groups.as_slice() else { panic!("{} kernels: {plan}", plan.groups.len()) };
    HopperKernel::of(&group.draft(graph, &plan.placement), target).expect("a matmul for Hopper")
}

fn check_tiles(engine: &Engine, text: &str, dtype: Dtype, tiles: &[HopperTile]) {
    let graph = parsed(text, dtype);
    let (inputs, expected) = seeded(&graph, 11);
    for &tile in tiles {
        let mut session = session(engine, &graph, tile);
        assert_holds(&expected, &graph, &twice(&mut session, &inputs), format_args!("{tile}, {dtype}\n{text}"));
    }
}

/// One of this many of the cuts that a graph can have: graphs, cuts and types take turns.
fn check_every(engine: &Engine, text: &str, count: usize, turn: usize) {
    let dtype = if turn.is_multiple_of(2) { Dtype::Bf16 } else { Dtype::F16 };
    check_every_of(engine, text, dtype, count, turn);
}

/// The same of one type.
fn check_every_of(engine: &Engine, text: &str, dtype: Dtype, count: usize, turn: usize) {
    let Backend::Cuda(target) = engine.device().backend() else { panic!("a GPU") };
    let tiles = kernel(engine, &parsed(text, dtype)).tiles(target, f64::INFINITY);
    assert!(!tiles.is_empty(), "{text}");
    let own: Vec<HopperTile> = tiles.into_iter().skip(turn % count).step_by(count).collect();
    check_tiles(engine, text, dtype, &own);
}

/// Those cuts that a graph can have: an epilogue in registers has a 16-bit result, and room for its operands.
fn possible(engine: &Engine, text: &str, tiles: &[HopperTile]) -> Vec<HopperTile> {
    let Backend::Cuda(target) = engine.device().backend() else { panic!("a GPU") };
    let all = kernel(engine, &parsed(text, Dtype::Bf16)).tiles(target, f64::INFINITY);
    tiles.iter().copied().filter(|tile| all.contains(tile)).collect()
}

const fn tile(columns: usize, sharing: Sharing, split: usize) -> HopperTile {
    HopperTile { rows: 128, columns, sharing, split, by_rows: false, sharers: 1 }
}

const fn by_rows(rows: usize, columns: usize, sharing: Sharing) -> HopperTile {
    HopperTile { rows, columns, sharing, split: 1, by_rows: true, sharers: 1 }
}

/// One of each kind.
const KINDS: [HopperTile; 4] = [
    tile(192, Sharing::Turns, 1),
    tile(96, Sharing::Turns, 1),
    tile(256, Sharing::Rows, 1),
    tile(128, Sharing::Rows, 2),
];

/// Of those whose operands are split.
const KINDS_OF_F32: [HopperTile; 2] = [tile(96, Sharing::Turns, 1), tile(128, Sharing::Rows, 1)];

/// Of those with the epilogue in registers.
const BY_ROWS: [HopperTile; 4] = [
    by_rows(128, 64, Sharing::Rows),
    by_rows(256, 128, Sharing::Rows),
    by_rows(64, 256, Sharing::Columns),
    by_rows(128, 384, Sharing::Columns),
];

/// How operands lie, and what follows.
fn graphs([m, k, n]: [usize; 3]) -> Vec<String> {
    let (x, w) = (format!("x = input float[{m},{k}]"), format!("w = weight float[{k},{n}]"));
    let tied = format!("w = weight float[{n},{k}]");
    let (bias, residual) = (format!("c:float[{n}]"), format!("r = input float[{m},{n}]"));
    vec![
        format!("{x} ; {w} ; y = matmul x w ; out y"),
        format!("{x} ; {tied} ; y = matmul x w transpose_b ; z = cast y f32 ; out z"),
        format!("{x} ; {w} ; l = linear x w {bias} ; y = gelu l ; out y"),
        format!("{x} ; {w} ; {residual} ; l = linear x w {bias} ; y = add l r ; out y"),
        format!("{x} ; {tied} ; {residual} ; l = linear x w {bias} transposed ; h = silu l ; y = mul h r ; out y"),
        format!(
            "{x} ; {w} ; {residual} ; seed = input i32[] ; l = linear x w {bias} ; h = dropout l seed p=0.3 offset=5 ; y = add h r ; out y"
        ),
        // A scale, and masks: by a value, and by the place of an element.
        format!("{x} ; {w} ; {residual} ; l = linear x w {bias} ; s = mul l 0.125 ; k = gt r 0 ; y = select k s -3e4 ; out y"),
        format!(
            "{x} ; {tied} ; l = matmul x w transpose_b ; s = mul l 0.125 ; i = iota [{m},{n}] axis=0 ; j = iota [{m},{n}] axis=1
             k = ge i j ; y = select k s -3e4 ; out y"
        ),
    ]
}

#[test]
fn every_cut() {
    let Some(engine) = hopper() else { return };
    // Graphs and types take turns: every kernel is compiled.
    let graphs = graphs([300, 648, 264]);
    let Backend::Cuda(target) = engine.device().backend() else { panic!("a GPU") };
    let tiles = kernel(&engine, &parsed(&graphs[0], Dtype::Bf16)).tiles(target, f64::INFINITY);
    for (at, tile) in tiles.into_iter().enumerate() {
        let dtype = if at % 2 == 0 { Dtype::Bf16 } else { Dtype::F16 };
        let graph = &graphs[at % graphs.len()];
        let taken = if possible(&engine, graph, &[tile]).is_empty() { &graphs[0] } else { graph };
        check_tiles(&engine, taken, dtype, &[tile]);
    }
}

#[test]
fn every_epilogue_and_odd_sizes() {
    let Some(engine) = hopper() else { return };
    for (at, size) in [[1, 8, 16], [127, 64, 136], [129, 1000, 1504], [1500, 136, 72]].into_iter().enumerate() {
        for (turn, text) in graphs(size).iter().enumerate() {
            // One that does not share K: there are sums of one step among these.
            let tiles = [KINDS[(at + turn) % 3], BY_ROWS[(at + turn) % 4]];
            check_tiles(&engine, text, Dtype::Bf16, &possible(&engine, text, &tiles));
        }
    }
}

#[test]
fn columns_that_no_vector_divides() {
    let Some(engine) = hopper() else { return };
    for n in [17, 51, 129, 1500] {
        let text = format!(
            "x = input float[130,72] ; w = weight float[{n},72] ; l = linear x w c:float[{n}] transposed ; y = gelu l ; out y"
        );
        check_tiles(&engine, &text, Dtype::Bf16, &KINDS[..3]);
    }
}

#[test]
fn all_transpositions_batches_and_parts_of_tensors() {
    let Some(engine) = hopper() else { return };
    for text in [
        "x = input float[136,200] ; w = weight float[136,72] ; y = matmul x w transpose_a ; out y",
        "x = input float[136,200] ; w = weight float[72,136] ; y = matmul x w transpose_a transpose_b ; out y",
        "x = input float[3,40,136] ; w = input float[3,136,72] ; y = matmul x w ; z = silu y ; out z",
        "x = input float[3,136,40] ; w = input float[3,72,136] ; y = matmul x w transpose_a transpose_b ; out y",
        "x = input float[3,40,136] ; w = weight float[136,72] ; y = matmul x w ; out y",
        "a = input float[130,400] ; x = slice a axis=1 start=8 length=136 ; w = weight float[136,72] ; y = matmul x w ; out y",
    ] {
        check_tiles(&engine, text, Dtype::Bf16, &[KINDS[0], KINDS[3]]);
    }
}

/// What is not a number in one row stays in it, and infinities are kept.
#[test]
fn numbers_that_are_none() {
    let Some(engine) = hopper() else { return };
    let largest_bf16 = f64::from(f32::from_bits(0x7f7f_0000));
    for (dtype, largest, tiles) in
        [(Dtype::Bf16, largest_bf16, &KINDS[..]), (Dtype::F32, f64::from(f32::MAX), &KINDS_OF_F32)]
    {
        let graph = parsed("x = input float[200,136] ; w = weight float[136,72] ; y = matmul x w ; out y", dtype);
        let mut inputs = seed::inputs(&graph, 5).unwrap();
        let (mut x, mut w) = (inputs[0].to_array().unwrap(), inputs[1].to_array().unwrap());
        (x.values[3 * 136 + 7], x.values[150 * 136]) = (f64::NAN, f64::INFINITY);
        // The largest number alone in its row, and one that has no rest.
        x.values[151 * 136..152 * 136].fill(0.0);
        (x.values[151 * 136], w.values[5]) = (largest, 1.0);
        let first_weights: Vec<f64> = w.values[..72].to_vec();
        for (input, array) in inputs.iter_mut().zip([&x, &w]) {
            *input = Tensor::from_array(dtype, array).unwrap();
        }
        for &tile in tiles {
            let mut session = session(&engine, &graph, tile);
            session.run(&inputs.iter().collect::<Vec<_>>()).unwrap();
            let found = session.output(0).unwrap().to_f32().unwrap();
            for (row, values) in found.chunks(72).enumerate() {
                for (&value, &weight) in values.iter().zip(&first_weights) {
                    match row {
                        3 => assert!(value.is_nan(), "{tile}, {dtype}"),
                        150 if weight != 0.0 => {
                            assert_eq!(value, f32::INFINITY.copysign(weight as f32), "{tile}, {dtype}")
                        }
                        150 => {}
                        151 if weight == 1.0 => assert_eq!(f64::from(value), largest, "{tile}, {dtype}"),
                        151 if weight.abs() > 1.0 => {}
                        _ => assert!(value.is_finite(), "{tile}, {dtype}, row {row}"),
                    }
                }
            }
        }
    }
}

/// Products of TF32: every cut, all ways that operands lie, and what follows.
#[test]
fn operands_that_are_split() {
    let Some(engine) = hopper() else { return };
    // Of few elements plans take the library, and what follows is a kernel of its own where the library has no such epilogue.
    let small = [[256, 256, 256], [300, 649, 264], [129, 127, 1500], [1500, 130, 129], [33, 64, 17], [700, 4100, 50]];
    let large = [[1024, 512, 1024], [1501, 321, 905], [2050, 129, 650], [1000, 777, 1333]];
    let plain = small.into_iter().map(|size| [0, 1, 3].map(|which| graphs(size).swap_remove(which)).to_vec());
    for (at, texts) in plain.chain(large.into_iter().map(graphs)).enumerate() {
        for (turn, text) in texts.iter().enumerate() {
            check_every_of(&engine, text, Dtype::F32, 6, at + turn);
        }
    }
    for (turn, text) in [
        "x = input float[136,200] ; w = weight float[136,72] ; y = matmul x w transpose_a ; out y",
        "x = input float[137,201] ; w = weight float[71,137] ; y = matmul x w transpose_a transpose_b ; out y",
        "x = input float[3,40,137] ; w = input float[3,137,72] ; y = matmul x w ; out y",
        "x = input float[3,136,40] ; w = input float[3,71,136] ; y = matmul x w transpose_a transpose_b ; out y",
        "x = input float[3,137,40] ; w = weight float[137,71] ; y = matmul x w transpose_a ; out y",
        "a = input float[130,401] ; x = slice a axis=1 start=7 length=136 ; w = weight float[136,72] ; y = matmul x w ; out y",
        // No axis of the left operand is contiguous.
        "a = input float[40,72,3] ; x = transpose a [2,0,1] ; w = input float[3,72,65] ; y = matmul x w ; out y",
    ]
    .into_iter()
    .enumerate()
    {
        check_every_of(&engine, text, Dtype::F32, 3, turn);
    }
}

/// More tiles than run at once: blocks, pairs that share columns of B, and clusters that have rows together walk over several of them.
#[test]
fn many_tiles() {
    let Some(engine) = hopper() else { return };
    let turns = |columns| tile(columns, Sharing::Turns, 1);
    let by_rows = |columns| HopperTile { by_rows: true, ..turns(columns) };
    let pair = |tile: HopperTile| HopperTile { sharers: 2, ..tile };
    let linear = |n: usize| {
        format!(
            "x = input float[17001,72] ; w = weight float[72,{n}] ; l = linear x w c:float[{n}] ; r = input float[17001,{n}] ; s = add l r"
        )
    };
    let plain = format!("{} ; out s", linear(392));
    check_tiles(&engine, &plain, Dtype::Bf16, &[turns(192), pair(turns(192)), by_rows(128), pair(by_rows(192))]);
    check_tiles(&engine, &plain, Dtype::F16, &[turns(64), pair(turns(96)), pair(tile(256, Sharing::Rows, 1))]);
    let normed = format!("{} ; y = layer_norm s g:float[768] h:float[768] eps=1e-5 ; out s ; out y", linear(768));
    check_tiles(&engine, &normed, Dtype::Bf16, &[by_rows(192), by_rows(128)]);
    let alone = format!("{} ; y = rms_norm s g:float[184] eps=1e-6 ; out s ; out y", linear(184));
    check_tiles(&engine, &alone, Dtype::F16, &[by_rows(192), pair(by_rows(192))]);
}

/// What needs whole rows: blocks and warpgroups exchange parts of them.
#[test]
fn norms_and_other_whole_rows() {
    let Some(engine) = hopper() else { return };
    for (at, [m, k, n]) in [[1, 8, 64], [127, 64, 136], [129, 1000, 1504], [1500, 136, 768]].into_iter().enumerate() {
        let linear = format!("x = input float[{m},{k}] ; w = weight float[{k},{n}] ; l = linear x w c:float[{n}]");
        let residual = format!("r = input float[{m},{n}] ; s = add l r");
        for (turn, text) in [
            format!("{linear} ; {residual} ; y = layer_norm s g:float[{n}] h:float[{n}] eps=1e-5 ; out s ; out y"),
            format!("{linear} ; {residual} ; y = rms_norm s g:float[{n}] eps=1e-6 ; out s ; out y"),
            format!("{linear} ; y = layer_norm l g:float[{n}] h:float[{n}] eps=1e-5 ; out y"),
            format!("{linear} ; y = softmax l ; out y"),
            // What a gradient reads again, one number per row, is stored beside the result.
            format!(
                "{linear} ; {residual} ; y, mean, rstd = layer_norm s g:float[{n}] h:float[{n}] eps=1e-5
                 out s ; out y ; out mean ; out rstd"
            ),
        ]
        .iter()
        .enumerate()
        {
            check_every(&engine, text, 4, at + turn);
        }
    }
}

/// Several matmuls of one left operand in a launch: gate and up, query, key and value, with and without what follows.
#[test]
fn several_right_operands() {
    let Some(engine) = hopper() else { return };
    for (at, [m, k, n]) in [[9, 8, 16], [127, 64, 136], [129, 1000, 1504], [1500, 136, 51]].into_iter().enumerate() {
        let x = format!("x = input float[{m},{k}]");
        let weights = |names: &[&str], high: usize, wide: usize| -> String {
            names.iter().map(|name| format!(" ; {name} = weight float[{high},{wide}]")).collect()
        };
        let gated =
            |flag: &str| format!("a = matmul x g{flag} ; b = matmul x u{flag} ; s = silu a ; y = mul s b ; out y");
        let three = format!(
            "a = linear x q c:float[{n}] transposed ; b = linear x k d:float[{n}] transposed ; \
             c2 = linear x v e:float[{n}] transposed ; out a ; out b ; out c2"
        );
        let mut texts = vec![
            format!("{x}{} ; {}", weights(&["g", "u"], n, k), gated(" transpose_b")),
            format!("{x}{} ; {three}", weights(&["q", "k", "v"], n, k)),
            format!(
                "{x}{} ; a = matmul x q transpose_b ; b = matmul x k transpose_b ; c = matmul x v transpose_b ; out a ; out b ; out c",
                weights(&["q", "k", "v"], n, k)
            ),
        ];
        if n % 8 == 0 {
            texts.push(format!("{x}{} ; {}", weights(&["g", "u"], k, n), gated("")));
            texts.push(format!(
                "{x}{} ; r = input float[{m},{n}] ; a = matmul x q ; b = matmul x k ; c = matmul x v ; d = mul a b ; e = add d r ; \
                 f = gelu c ; y = add e f ; out y ; out f",
                weights(&["q", "k", "v"], k, n)
            ));
        }
        for (turn, text) in texts.iter().enumerate() {
            check_every(&engine, text, 5, at + turn);
        }
    }
}

/// Gradients of weights: sums of 16-bit operands that stay f32, alone, added to what is there, and with what follows.
#[test]
fn sums_that_stay_f32() {
    let Some(engine) = hopper() else { return };
    for (at, [m, k, n]) in
        [[16, 16, 16], [136, 64, 128], [136, 1000, 1504], [1504, 136, 72], [200, 8192, 264]].into_iter().enumerate()
    {
        let wide = "a = cast x f32 ; b = cast w f32";
        for (turn, text) in [
            format!("x = input float[{k},{m}] ; w = input float[{k},{n}] ; s = input f32[{m},{n}] ; {wide} ; p = matmul a b transpose_a ; y = add s p ; out y"),
            format!("x = input float[{m},{k}] ; w = input float[{n},{k}] ; {wide} ; y = matmul a b transpose_b ; out y"),
            format!("x = input float[{m},{k}] ; w = input float[{k},{n}] ; {wide} ; p = matmul a b ; g = gelu p ; y = cast g float ; out y"),
        ]
        .iter()
        .enumerate()
        {
            check_every(&engine, text, 5, at + turn);
        }
    }
}

/// Gradients of biases: results are also summed over rows, in a fixed order.
#[test]
fn sums_over_rows() {
    let Some(engine) = hopper() else { return };
    for (at, [m, k, n]) in
        [[9, 16, 16], [127, 64, 136], [129, 1000, 1504], [1500, 136, 51], [3001, 72, 264]].into_iter().enumerate()
    {
        let linear = format!("x = input float[{m},{k}] ; l = matmul x w:float[{n},{k}] transpose_b");
        let saved = format!("{linear} ; q = input float[{m},{n}] ; t = sigmoid q ; y = mul l t");
        for (turn, text) in [
            format!("{saved} ; f = cast y f32 ; c = column_sum f ; d = cast c float ; out y ; out d"),
            format!("{linear} ; y = relu l ; f = cast y f32 ; c = column_sum f ; s = mul f f ; d = column_sum s ; out y ; out c ; out d"),
            format!("{saved} ; f = cast y f32 ; c = column_sum f ; out c"),
        ]
        .iter()
        .enumerate()
        {
            check_every(&engine, text, 4, at + turn);
        }
    }
    let batched = "x = input float[3,130,72] ; w = input float[3,72,40] ; l = matmul x w ; y = gelu l ; f = cast y f32
c = column_sum f ; out y ; out c";
    check_every(&engine, batched, 3, 0);
}

/// Row work before a matmul of any number of rows: the launch makes its left operand.
#[test]
fn norms_before() {
    let Some(engine) = hopper() else { return };
    for (at, [m, k, n]) in
        [[9, 16, 16], [127, 64, 136], [129, 1001, 1504], [1500, 136, 51], [3001, 72, 264]].into_iter().enumerate()
    {
        let norm = format!("x = input float[{m},{k}] ; a = layer_norm x g:float[{k}] h:float[{k}] eps=1e-5");
        let sum = format!(
            "x = input float[{m},{k}] ; r = input float[{m},{k}] ; s = add x r ; a = rms_norm s g:float[{k}] eps=1e-6"
        );
        // The way that rows of the weight have starts of 16 bytes.
        let linear = match k % 8 {
            0 => format!("linear a w:float[{n},{k}] c:float[{n}] transposed"),
            _ => format!("linear a w:float[{k},{n}] c:float[{n}]"),
        };
        for (turn, text) in [
            format!("{norm} ; y = {linear} ; out y"),
            format!("{sum} ; l = {linear} ; y = gelu l ; out y"),
            format!("{norm} ; q = input float[{m},{n}] ; l = {linear} ; t = silu l ; y = add t q ; out y"),
            format!("x = input float[{m},{k}] ; a = softmax x ; y = {linear} ; out y"),
        ]
        .iter()
        .enumerate()
        {
            check_every(&engine, text, 6, at + turn);
        }
    }
}
