//! Prologue and epilogue of a matmul as CUDA text: what its kernels share.

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::body::{Access, ArgSpec, Body, Expr, Exprs, Stage};
use deuteron_codegen::cuda::grid::Word;
use deuteron_codegen::cuda::row::sides::Side;
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

/// What makes the left operand, by vectors of so many columns.
pub(super) fn prologue<'a>(matmul: &'a Matmul<Body>, launch: &'a MatmulLaunch, vector: usize) -> Option<Side<'a>> {
    let prologue = matmul.prologue.as_ref()?;
    let made = std::slice::from_ref(&prologue.made);
    Some(side(matmul, launch, &prologue.body, made, Role::Prologue, &launch.prologue_axes, vector))
}

/// What follows, by vectors of so many columns.
pub(super) fn epilogue<'a>(matmul: &'a Matmul<Body>, launch: &'a MatmulLaunch, vector: usize) -> Option<Side<'a>> {
    let epilogue = matmul.epilogue.as_ref()?;
    Some(side(matmul, launch, &epilogue.body, &epilogue.sums, Role::Epilogue, &launch.axes, vector))
}

/// What all rows share beside the weights, three words each: the address if it is given, the bytes, and those of a strip of
/// columns, 0 for what every block reads as a whole. One that is nothing where there is none. As `prefetch_shared.cuh` reads them.
pub(super) fn shared_words(prologue: Option<&Side>, epilogue: Option<&Side>, strip: usize) -> Vec<Word> {
    let all = |side: &Side, strip: usize| -> Vec<Word> {
        let words = |(position, binding, dtype): (usize, &ArgBinding, Dtype)| {
            let size = dtype.bytes();
            let numbers = [side.body.cols * size, strip * size].map(|bytes| Word::Number(bytes as u64));
            [Word::Unwritten { position, offset: binding.offset * size }, numbers[0], numbers[1]]
        };
        side.shared_rows().flat_map(words).collect()
    };
    let mut words = prologue.map_or(Vec::new(), |prologue| all(prologue, 0));
    words.extend(epilogue.map_or(Vec::new(), |epilogue| all(epilogue, strip)));
    if words.is_empty() { vec![Word::Number(0); 3] } else { words }
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
