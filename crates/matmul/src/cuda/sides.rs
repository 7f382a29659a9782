//! Prologue and epilogue of a matmul as CUDA text: what its kernels share.

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::body::{Access, ArgSpec, Body, Expr, Exprs, Stage};
use deuteron_codegen::cuda::grid::Word;
use deuteron_codegen::cuda::row::sides::Side;
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::linear::earlier_sums;
use deuteron_graph::Dtype;
use deuteron_plan::Draft;

use crate::fit::{MatmulFit, lower_matmul};
use crate::kernel::{Epilogue, LoweredMatmul, Matmul, MatmulLaunch, Role};

/// Lowers a matmul, or several of one left operand; where nothing follows, sums are stored by an epilogue.
pub(super) fn lower(draft: &Draft, fit: MatmulFit) -> LoweredMatmul {
    let LoweredMatmul { mut product, mut launch } = lower_matmul(draft, fit);
    if product.epilogue.is_none() {
        let (rows, n, rights) = (launch.shape.m * launch.shape.batches(), launch.shape.n, product.rights);
        let mut exprs = Exprs::default();
        let spec = |dtype, written| ArgSpec { dtype, access: Access::Row, written };
        let stored =
            (0..rights as u16).map(|sum| Stage::Store { value: exprs.make(Expr::Load(sum)), arg: rights as u16 + sum });
        let stages = stored.collect();
        let args = [vec![spec(Dtype::F32, false); rights], vec![spec(product.result, true); rights]].concat();
        let body = Body { cols: n, args, exprs: exprs.finish(), stages, ..Body::default() };
        product.epilogue = Some(Epilogue { body, sums: (0..rights).collect() });
        for result in launch.args.iter_mut().rev().take(rights) {
            result.leading = vec![(rows, n)];
        }
    }
    LoweredMatmul { product, launch }
}

/// The same of few rows, whose blocks all make the left operand: sums that its row work needs again are taken from earlier ones.
pub(super) fn lower_few(draft: &Draft, fit: MatmulFit) -> LoweredMatmul {
    let mut lowered = lower(draft, fit);
    if let Some(prologue) = &mut lowered.product.prologue {
        prologue.body = earlier_sums(&prologue.body).body;
    }
    lowered
}

/// Bytes of weights that arrive in a microsecond beside a grid that starts and ends.
const FEW_ROWS_RATE: f64 = 3.3e6;

/// Elements of the left operand that a block makes in a microsecond.
const MADE_RATE: f64 = 8e3;

/// Time of a matmul of few rows on Hopper, where such matmuls were measured, from what it takes besides its bytes with one row, and more with
/// each doubling of the rows.
pub(super) fn few_rows_us(fit: &MatmulFit, [one, doubled]: [f64; 2], target: &CudaTarget) -> Option<f64> {
    let (shape, [_, weights]) = (&fit.shape, &fit.operands);
    let bytes = shape.k * shape.n * weights.dtype.bytes();
    // Every block makes the rows of the left operand for itself, before it multiplies anything.
    let made = if fit.prologue.is_empty() { 0 } else { shape.m * shape.k };
    let made = made as f64 / MADE_RATE;
    let us = one + doubled * (shape.m.max(1) as f64).log2() + made + bytes as f64 / FEW_ROWS_RATE;
    target.arch.has_wgmma().then_some(us)
}

/// What makes the left operand, by vectors of so many columns.
fn prologue<'a>(matmul: &'a Matmul<Body>, launch: &'a MatmulLaunch, vector: usize) -> Option<Side<'a>> {
    let prologue = matmul.prologue.as_ref()?;
    let made = std::slice::from_ref(&prologue.made);
    Some(side(matmul, launch, &prologue.body, made, Role::Prologue, &launch.prologue_axes, vector))
}

/// What follows, by vectors of so many columns.
pub(super) fn epilogue<'a>(matmul: &'a Matmul<Body>, launch: &'a MatmulLaunch, vector: usize) -> Option<Side<'a>> {
    let epilogue = matmul.epilogue.as_ref()?;
    Some(side(matmul, launch, &epilogue.body, &epilogue.sums, Role::Epilogue, &launch.axes, vector))
}

/// Prologue and epilogue of a matmul of few rows, whose blocks make the rows of A for themselves.
pub(super) struct Sides<'a> {
    prologue: Option<Side<'a>>,
    epilogue: Option<Side<'a>>,
}

impl<'a> Sides<'a> {
    /// Those of a matmul, by vectors of so many columns.
    pub(super) fn of(matmul: &'a Matmul<Body>, launch: &'a MatmulLaunch, vector: usize) -> Sides<'a> {
        Sides { prologue: prologue(matmul, launch, vector), epilogue: epilogue(matmul, launch, vector) }
    }

    /// Their functions, the prologue's for a block of so many rows and threads.
    pub(super) fn text(&self, rows: usize, threads: usize) -> String {
        let prologue = match &self.prologue {
            Some(prologue) => prologue.prologue(rows, threads),
            None => include_str!("no_head.cuh").to_string(),
        };
        prologue + "\n" + &self.epilogue.as_ref().map_or(String::new(), |epilogue| epilogue.epilogue())
    }

    /// Their parameters.
    pub(super) fn words(&self, rows: usize) -> Vec<Word> {
        let none = || vec![Word::Number(0)];
        let mut words = self.prologue.as_ref().map_or_else(none, |prologue| prologue.words(rows));
        words.extend(self.epilogue.iter().flat_map(|epilogue| epilogue.words(rows)));
        words
    }

    /// What all rows share beside the weights, three words each: the address if it is given, the bytes, and those of a strip of
    /// columns, 0 for what every block reads as a whole. One that is nothing where there is none. As `few_rows.cuh` reads them.
    pub(super) fn shared_words(&self, strip: usize) -> Vec<Word> {
        let all = |side: &Side, strip: usize| -> Vec<Word> {
            let words = |(position, binding, dtype): (usize, &ArgBinding, Dtype)| {
                let size = dtype.bytes();
                let numbers = [side.body.cols * size, strip * size].map(|bytes| Word::Number(bytes as u64));
                [Word::Unwritten { position, offset: binding.offset * size }, numbers[0], numbers[1]]
            };
            side.shared_rows().flat_map(words).collect()
        };
        let mut words = self.prologue.as_ref().map_or(Vec::new(), |prologue| all(prologue, 0));
        words.extend(self.epilogue.as_ref().map_or(Vec::new(), |epilogue| all(epilogue, strip)));
        if words.is_empty() { vec![Word::Number(0); 3] } else { words }
    }
}

/// Where an operand of a matmul is, or 0 if it has none of that role.
pub(super) fn address(matmul: &Matmul<Body>, launch: &MatmulLaunch, role: Role) -> Word {
    place(matmul, launch, role).map_or(Word::Number(0), |(position, offset)| Word::Argument { position, offset })
}

/// The same if it is given, or 0 if a kernel of the job makes it.
pub(super) fn given(matmul: &Matmul<Body>, launch: &MatmulLaunch, role: Role) -> Word {
    place(matmul, launch, role).map_or(Word::Number(0), |(position, offset)| Word::Unwritten { position, offset })
}

fn place(matmul: &Matmul<Body>, launch: &MatmulLaunch, role: Role) -> Option<(usize, usize)> {
    let position = matmul.roles().iter().position(|&known| known == role)?;
    Some((position, launch.args[position].start()))
}

fn side<'a>(
    matmul: &Matmul<Body>,
    launch: &'a MatmulLaunch,
    body: &'a Body,
    handed: &'a [usize],
    role: fn(usize) -> Role,
    axes: &'a [(usize, usize)],
    vector: usize,
) -> Side<'a> {
    let roles = matmul.roles();
    let arg = |arg: usize| -> Option<(usize, &'a ArgBinding)> {
        let position = roles.iter().position(|&known| known == role(arg))?;
        Some((position, &launch.args[position]))
    };
    Side { body, args: (0..body.args.len()).map(arg).collect(), handed, axes, vector, rounded: None }
}
