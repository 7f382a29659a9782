//! The graphs to measure: text graphs at some sizes, and the catalogue. No size of the calibration is used for the
//! validation.

use deuteron_graph::{Dtype, Graph};

use crate::catalog::{self, FusedOp};
use crate::error::Error;

/// A graph in text form and the sizes it is measured at; `R` stands for the rows and `C` for the columns.
type Family = (&'static str, &'static [[usize; 2]]);

/// In L1 on one thread, in L2, in the last-level cache, in main memory.
const FLAT: &[[usize; 2]] = &[[48, 256], [300, 512], [1800, 640], [10000, 1024]];
/// Sizes at which arithmetic shows, not memory.
const DENSE: &[[usize; 2]] = &[[96, 512], [400, 800]];
/// Long rows.
const ROWS: &[[usize; 2]] = &[[24, 512], [360, 896], [2200, 640], [9000, 1024], [40, 5000]];
/// Rows of a few vectors.
const SHORT: &[[usize; 2]] = &[[3000, 40], [2500, 96], [1500, 160]];
/// Rows of a part of a vector.
const NARROW: &[[usize; 2]] = &[[6000, 2], [30000, 5], [12000, 9], [5000, 14]];

const FAMILIES: &[Family] = &[
    ("x = input f32[R,C] ; y = add x 1 ; out y", FLAT),
    ("x = input f32[R,C] ; z = input f32[R,C] ; y = mul x z ; out y", FLAT),
    ("x = input f32[R,C] ; a = input f32[R,C] ; b = input f32[R,C] ; p = mul x a ; y = add p b ; out y", FLAT),
    (
        "x = input f32[R,C] ; a = sub x 1 ; b = max a x ; c = mul b b ; d = min c x ; e = abs d ; y = add e x ; out y",
        FLAT,
    ),
    ("x = input f32[R,C] ; y = exp x ; out y", DENSE),
    ("x = input f32[R,C] ; a = neg x ; b = exp a ; c = exp b ; y = exp c ; out y", DENSE),
    ("x = input f32[R,C] ; y = tanh x ; out y", DENSE),
    ("x = input f32[R,C] ; y = gelu x ; out y", FLAT),
    ("x = input f32[R,C] ; y = silu x ; out y", DENSE),
    ("x = input f32[R,C] ; y = gelu x kind=erf ; out y", DENSE),
    ("x = input f32[R,C] ; a = abs x ; b = log a ; y = erf b ; out y", DENSE),
    ("x = input f32[R,C] ; z = input f32[R,C] ; y = div x z ; out y", DENSE),
    ("x = input f32[R,C] ; a = abs x ; b = sqrt a ; y = reciprocal b ; out y", DENSE),
    ("x = input f32[R,C] ; s = input i32[] ; y = dropout x s p=0.1 ; out y", FLAT),
    ("x = input f32[R,C] ; b = input f32[C] ; y = add x b ; out y", ROWS),
    ("x = input f32[R,C] ; b = input f32[C] ; y = add x b ; out y", SHORT),
    ("x = input f32[R,C] ; b = input f32[C] ; y = add x b ; out y", NARROW),
    ("x = input f32[R,C] ; y = row_sum x ; out y", ROWS),
    ("x = input f32[R,C] ; y = row_sum x ; out y", SHORT),
    ("x = input f32[R,C] ; y = row_max x ; out y", NARROW),
    ("x = input f32[R,C] ; y = rms_norm x w[C] ; out y", ROWS),
    ("x = input f32[R,C] ; y = layer_norm x w[C] b[C] ; out y", SHORT),
    ("x = input f32[R,C] ; y = layer_norm x w[C] b[C] ; out y", NARROW),
    ("x = input f32[R,C] ; y = softmax x ; out y", ROWS),
    ("x = input f32[R,C] ; y = softmax x ; out y", SHORT),
    ("x = input f32[R,C] ; y = softmax x ; out y", NARROW),
    ("x = input f32[R,C] ; g = gelu x kind=erf ; y = row_sum g ; out y", NARROW),
    ("x = input f32[R,C] ; g = gelu x ; y = row_mean g ; out y", SHORT),
    ("x = input f32[R,C] ; a = exp x ; b = tanh a ; c = sub b x ; y = row_max c ; out y", NARROW),
    ("x = input f32[R,C] ; s = input i32[] ; d = dropout x s p=0.1 ; y = row_sum d ; out y", NARROW),
    ("x = input f32[R,C] ; v = input f32[R,1] ; a = exp v ; b = tanh a ; c = sqrt b ; y = mul x c ; out y", NARROW),
    ("x = input f32[R,C] ; v = input f32[R,1] ; a = mul v v ; b = sub a 1 ; y = mul x b ; out y", SHORT),
    ("x = input f32[R,C] ; y = column_sum x ; out y", ROWS),
    ("x = input f32[R,C] ; g = silu x ; y = column_sum g ; out y", SHORT),
    ("x = input f32[R,C] ; y = column_sum x ; out y", NARROW),
    ("x = input bf16[R,C] ; z = input bf16[R,C] ; y = add x z ; out y", FLAT),
    ("x = input f16[R,C] ; y = gelu x ; out y", DENSE),
    ("x = input bf16[R,C] ; y = layer_norm x w:bf16[C] b:bf16[C] ; out y", SHORT),
    ("x = input f16[R,C] ; y = rms_norm x w:f16[C] ; out y", ROWS),
    ("x = input f32[R,C] ; y = transpose x [1,0] ; out y", &[[64, 96], [500, 320], [1500, 1000]]),
    ("x = input f32[R,8,C] ; y = transpose x [1,0,2] ; out y", &[[100, 64], [1000, 80]]),
    ("a = input f32[R,C] ; b = input f32[R,C] ; y = concat a b axis=1 ; out y", DENSE),
    ("i = input i32[R] ; u = input f32[R,C] ; y = scatter_add i u rows=3000 ; out y", &[[200, 256], [2000, 640]]),
    ("i = input i32[R] ; u = input f32[R,C] ; y = scatter_add i u rows=30000 ; out y", &[[500, 512]]),
    ("i = input i32[1,R] ; t = input f32[40000,C] ; y = gather t i ; out y", &[[300, 512], [4000, 640]]),
    ("a = input f32[R,C] ; b = input f32[C,512] ; y = matmul a b ; out y", &[[16, 512], [384, 384], [1000, 640]]),
    ("a = input f32[R,C] ; b = input f32[C,R] ; y = matmul a b ; out y", &[[32, 32], [96, 64], [200, 128], [700, 700]]),
    ("a = input f32[R,C] ; b = input f32[2000,C] ; y = matmul a b transpose_b ; out y", &[[40, 320], [640, 512]]),
    ("a = input f32[R,C] ; b = input f32[R,300] ; y = matmul a b transpose_a ; out y", &[[900, 200]]),
    (
        "a = input f32[8,R,C] ; b = input f32[8,R,C] ; y = matmul a b transpose_b ; out y",
        &[[32, 64], [200, 64], [384, 64]],
    ),
    ("a = input f32[16,R,R] ; b = input f32[16,R,C] ; y = matmul a b ; out y", &[[48, 64], [256, 64]]),
    ("a = input bf16[R,C] ; b = input bf16[C,600] ; y = matmul a b ; out y", &[[64, 320], [600, 600]]),
    ("a = input f16[8,R,C] ; b = input f16[8,R,C] ; y = matmul a b transpose_b ; out y", &[[160, 64]]),
];

/// Rows and columns at which the catalogue is measured to calibrate.
const CATALOG: [[usize; 2]; 3] = [[40, 512], [640, 512], [4200, 896]];

/// Rows and columns at which the catalogue is measured to validate.
const CATALOG_VALIDATION: [[usize; 2]; 3] = [[72, 384], [900, 704], [7000, 1088]];

/// Rows that fill no vector.
const NARROW_VALIDATION: &[[usize; 2]] = &[[10000, 3], [9000, 4], [7000, 6], [6000, 11], [4000, 15]];
/// Rows of some vectors.
const SHORT_VALIDATION: &[[usize; 2]] = &[[4000, 24], [2000, 72], [1200, 200]];
/// Rows of many vectors.
const LONG_VALIDATION: &[[usize; 2]] = &[[700, 600], [3000, 1000]];

/// Graphs in which fusing everything that is legal may be slower. On the CPU it is where a flat kernel, which runs full
/// vectors for any shape, becomes a kernel of narrow rows; and where a value of one number per row, cheap on its own, is
/// computed one row at a time.
const DECISIONS: &[Family] = &[
    ("x = input f32[R,C] ; g = gelu x kind=erf ; y = row_sum g ; out y", NARROW_VALIDATION),
    ("x = input f32[R,C] ; g = tanh x ; y = row_max g ; out y", NARROW_VALIDATION),
    ("x = input f32[R,C] ; s = input i32[] ; d = dropout x s p=0.2 ; y = row_sum d ; out y", NARROW_VALIDATION),
    ("x = input f32[R,C] ; s = input i32[] ; d = dropout x s p=0.2 ; y = softmax d ; out y", NARROW_VALIDATION),
    ("x = input f32[R,C] ; g = gelu x kind=erf ; y = layer_norm g w[C] b[C] ; out y", NARROW_VALIDATION),
    ("x = input f32[R,C] ; g = silu x ; y = mul g b[C] ; out y", NARROW_VALIDATION),
    ("x = input f32[R,C] ; a = exp x ; l = log a ; e = erf l ; y = add e b[C] ; out y", NARROW_VALIDATION),
    ("x = input f32[R,C] ; g = gelu x kind=erf ; y = column_sum g ; out y", NARROW_VALIDATION),
    ("x = input f32[R,C] ; e = exp x ; y = row_mean e ; out y", NARROW_VALIDATION),
    ("x = input f32[R,C] ; v = input f32[R,1] ; s = sigmoid x ; y = mul s v ; out y", NARROW_VALIDATION),
    ("x = input f32[R,C] ; v = input f32[R,1] ; a = tanh v ; b = exp a ; y = mul x b ; out y", NARROW_VALIDATION),
    ("x = input f32[R,C] ; g = gelu x ; y = row_mean g ; out y", SHORT_VALIDATION),
    ("x = input f32[R,C] ; v = input f32[R,1] ; a = sqrt v ; b = mul a a ; y = sub x b ; out y", SHORT_VALIDATION),
    ("x = input f32[R,C] ; s = input i32[] ; d = dropout x s p=0.2 ; y = rms_norm d w[C] ; out y", SHORT_VALIDATION),
    ("x = input f32[R,C] ; g = gelu x kind=erf ; y = softmax g ; out y", SHORT_VALIDATION),
    ("x = input f32[R,C] ; g = silu x ; y = column_sum g ; out y", SHORT_VALIDATION),
    ("x = input f32[R,C] ; g = gelu x ; y = row_mean g ; out y", LONG_VALIDATION),
    ("x = input f32[R,C] ; g = gelu x kind=erf ; y = row_sum g ; out y", LONG_VALIDATION),
    ("x = input f32[R,C] ; r = input f32[R,C] ; h = add x r ; y = rms_norm h w[C] ; out y h", LONG_VALIDATION),
    ("x = input f32[R,C] ; a = mul x x ; b = silu a ; c = sub b x ; y = relu c ; out y", LONG_VALIDATION),
    ("x = input f32[R,C] ; h = mul x w[C] ; g = gelu h ; y = softmax g ; out y", LONG_VALIDATION),
    ("x = input f32[R,C] ; g = silu x ; y = column_sum g ; out y", LONG_VALIDATION),
];

/// Every graph of the calibration.
pub(crate) fn calibration() -> Result<Vec<Graph>, Error> {
    let mut graphs = Vec::new();
    for (text, sizes) in FAMILIES {
        for &[rows, cols] in *sizes {
            graphs.push(text_graph(text, rows, cols)?);
        }
    }
    for op in FusedOp::catalog().into_iter().filter(FusedOp::is_rows) {
        // The embedding's table alone takes longer than all others.
        let sizes = if op.is(catalog::EMBED_NORM) { &CATALOG[1..2] } else { &CATALOG[..] };
        for &[rows, cols] in sizes {
            graphs.push(catalog_graph(&op, rows, cols, Dtype::F32, false)?);
            if op.has_backward() {
                graphs.push(catalog_graph(&op, rows, cols, Dtype::F32, true)?);
            }
        }
    }
    Ok(graphs)
}

/// Every graph of the validation, and whether it is one of the catalogue.
pub(crate) fn validation() -> Result<Vec<(Graph, bool)>, Error> {
    let mut graphs = Vec::new();
    for op in FusedOp::catalog().into_iter().filter(FusedOp::is_rows) {
        for [rows, cols] in CATALOG_VALIDATION {
            graphs.push((catalog_graph(&op, rows, cols, Dtype::F32, false)?, true));
            if op.has_backward() {
                graphs.push((catalog_graph(&op, rows, cols, Dtype::F32, true)?, true));
            }
        }
    }
    for (text, sizes) in DECISIONS {
        for &[rows, cols] in *sizes {
            graphs.push((text_graph(text, rows, cols)?, false));
        }
    }
    Ok(graphs)
}

/// Sizes at which a GPU has something to do: narrow rows, short ones, long ones.
const GPU_DECISIONS: [[usize; 2]; 3] = [[300_000, 6], [40_000, 200], [3000, 10_000]];

/// The graphs of the decisions at sizes for a GPU.
pub(crate) fn gpu_decisions() -> Result<Vec<Graph>, Error> {
    // A text stands there once for each kind of size.
    let mut texts: Vec<&str> = DECISIONS.iter().map(|(text, _)| *text).collect();
    texts.sort_unstable();
    texts.dedup();
    let sized = texts.iter().flat_map(|text| GPU_DECISIONS.map(|[rows, cols]| text_graph(text, rows, cols)));
    sized.collect()
}

/// An op of the catalogue at a size.
pub(crate) fn catalog_graph(
    op: &FusedOp,
    rows: usize,
    cols: usize,
    dtype: Dtype,
    backward: bool,
) -> Result<Graph, Error> {
    let types = op.operand_types(rows, cols, dtype);
    let mut graph = if backward { op.backward_graph(&types)? } else { op.graph(&types)? };
    let name = format!("{} {rows}x{cols}", graph.name());
    graph.set_name(&name);
    Ok(graph)
}

/// A text with the sizes put in.
pub(crate) fn text_graph(text: &str, rows: usize, cols: usize) -> Result<Graph, Error> {
    let sized = text.replace('R', &rows.to_string()).replace('C', &cols.to_string());
    let mut graph: Graph = sized.parse()?;
    graph.set_name(&format!("{} {rows}x{cols}", operations(text).join(" ")));
    Ok(graph)
}

/// The operations of a text, in order.
fn operations(text: &str) -> Vec<&str> {
    let definitions = text.split(';').filter_map(|statement| statement.split_once('='));
    let words = definitions.filter_map(|(_, rest)| rest.split_whitespace().next());
    words.filter(|&word| word != "input").collect()
}
