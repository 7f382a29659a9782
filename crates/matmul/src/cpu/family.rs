//! Matmuls of the CPU as kernels: what is supported, the listing, and the launch.

use std::fmt;
use std::sync::Arc;

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::body::{Access, ArgSpec, Body};
use deuteron_codegen::cpu::bind::has_space;
use deuteron_codegen::cpu::emit::emit;
use deuteron_codegen::cpu::family::{CpuTarget, assemble, touched};
use deuteron_codegen::cpu::program::TileProgram;
use deuteron_codegen::cpu::simd::MAX_LEADING;
use deuteron_codegen::cpu::task::CpuSource;
use deuteron_codegen::kernel::{Family, Kernel, Offer, Request, offered_lowered};
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_graph::Dtype;
use deuteron_plan::{Chain, Link, Reach};

use super::driver::{MatmulTasks, spec};
use super::routed::RoutedTasks;
use super::{PartKernel, STREAMED_ROWS, work};
use crate::fit::{self, lower_matmul};
use crate::kernel::{Epilogue, LoweredMatmul, Matmul, MatmulLaunch, PROLOGUE_ROWS, Prologue, Role};

/// Prologues are supported for matmuls whose right operand is streamed: those need whole rows.
const _: () = assert!(PROLOGUE_ROWS <= STREAMED_ROWS);

/// One or two matmuls of one operand, or one of rows with matrices that indices pick for them.
pub struct MatmulFamily;

impl Family<CpuTarget> for MatmulFamily {
    fn offer<'a>(&self, request: Request<'a>, _: &'a CpuTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let fit = fit::fit(&group).filter(|_| group.structure.chain().is_some_and(takes))?;
        let work = |lowered: LoweredMatmul| work::work(&lowered.product.map(|body| emit(&body)), &lowered.launch);
        offered_lowered(
            move || lower_matmul(&group, fit.clone()),
            work,
            |lowered| {
                debug_assert!(fits(&lowered), "{lowered:?}");
                make(lowered)
            },
        )
    }
}

/// Whether a chain may be one of this family: a cheap no.
pub fn takes(chain: &Chain) -> bool {
    let few = match chain.links.as_slice() {
        // Two, if the epilogue uses both.
        [Link::Matmul { nodes }] => nodes.len() == 1 || (nodes.len() == 2 && chain.epilogue.reach != Reach::None),
        [Link::Routed { .. }] => true,
        _ => false,
    };
    few && chain.epilogue.reach != Reach::Rows
}

/// The kernel of a matmul, or none if its sizes are inconsistent or not supported.
pub fn kernel(lowered: LoweredMatmul) -> Option<Kernel> {
    fits(&lowered).then(|| make(lowered))
}

fn make(lowered: LoweredMatmul) -> Kernel {
    let LoweredMatmul { product, launch } = lowered;
    let arguments = product.arguments(&launch);
    let product = Arc::new(product.map(|body| emit(&body)));
    let (source, touched) = (CpuSource::new(product.clone()), touched(&arguments));
    // SAFETY: of matmuls that fit, both drivers touch what `product.arguments` takes the reach of: each operand by its sizes and strides, what
    // stands around by rows and columns, and of a table only matrices that an index inside of it picks.
    unsafe {
        match experts(&product, &launch.args) {
            Some(experts) => assemble(source, arguments, RoutedTasks { product, launch, experts, touched }),
            None => assemble(source, arguments, MatmulTasks { product, launch, touched }),
        }
    }
}

/// Matrices of the table that rows are routed to, and elements from one to the next.
fn experts<T>(product: &Matmul<T>, args: &[ArgBinding]) -> Option<(usize, usize)> {
    let table = args.get(1).filter(|_| product.routed)?;
    table.leading.first().copied()
}

/// Whether kernels compute it, and its sizes and arguments do not contradict each other.
pub fn fits(lowered: &LoweredMatmul) -> bool {
    let LoweredMatmul { product, launch } = lowered;
    let MatmulLaunch { args, shape, prologue_axes, axes } = launch;
    let roles = product.roles();
    let bound = roles.len() == args.len() && roles.iter().zip(args).all(|(&role, arg)| is_bound(product, role, arg));
    let whole_rows = product.epilogue.as_ref().is_some_and(|epilogue| needs_whole_rows(&epilogue.body));
    let stored = product.rights == 1 || product.epilogue.is_some();
    let in_strips = !whole_rows || (shape.batch.is_empty() && product.rights == 1 && !product.routed);
    let filled = product.prologue.as_ref().is_none_or(|prologue| fills(product, prologue, shape, prologue_axes));
    let followed = product.epilogue.as_ref().is_none_or(|epilogue| follows(product, epilogue, shape, axes));
    let picked = !product.routed || is_routed(product, launch);
    PartKernel::computes(spec(product, shape)) && bound && stored && in_strips && filled && followed && picked
}

/// Whether an argument has the dtype and direction that the matmul has it in.
fn is_bound(product: &Matmul<Body>, role: Role, arg: &ArgBinding) -> bool {
    let of = |spec: Option<&ArgSpec>| spec.map(|spec| (spec.dtype, spec.written));
    let wanted = match role {
        Role::Left => Some((product.left, false)),
        Role::Right(_) => Some((product.right, false)),
        Role::Indices => Some((Dtype::I32, false)),
        Role::Result => Some((product.result, true)),
        Role::Prologue(at) => of(product.prologue.as_ref().and_then(|prologue| prologue.body.args.get(at))),
        Role::Epilogue(at) => of(product.epilogue.as_ref().and_then(|epilogue| epilogue.body.args.get(at))),
    };
    let is_wanted = wanted.is_some_and(|(dtype, written)| arg.dtype.bytes() == dtype.bytes() && arg.written == written);
    is_wanted && arg.leading.len() <= MAX_LEADING
}

/// Whether a prologue is row work whose only result is the first operand in `f32`, where that is asked for in whole rows.
fn fills(product: &Matmul<Body>, prologue: &Prologue<Body>, shape: &MatmulShape, axes: &[(usize, usize)]) -> bool {
    let hands = |(arg, spec): (usize, &ArgSpec)| match arg == prologue.made {
        true => *spec == ArgSpec { dtype: Dtype::F32, access: Access::Row, written: true },
        false => !spec.written,
    };
    let body = &prologue.body;
    let is_prologue = prologue.made < body.args.len() && body.args.iter().enumerate().all(hands);
    let over_rows = is_row_work(product, body, shape.k, axes) && shape.batch.is_empty();
    is_prologue && over_rows && PartKernel::streams(spec(product, shape)) && !product.routed
}

/// Whether an epilogue is row work that reads the sums in `f32`.
fn follows(product: &Matmul<Body>, epilogue: &Epilogue<Body>, shape: &MatmulShape, axes: &[(usize, usize)]) -> bool {
    let body = &epilogue.body;
    let known = |&sum: &usize| body.args.get(sum).is_some_and(|spec| spec.dtype == Dtype::F32 && !spec.written);
    let sums = epilogue.sums.len() == product.rights && epilogue.sums.iter().all(known);
    sums && is_row_work(product, body, shape.n, axes)
}

/// Whether a body reads and writes rows of this many columns. What follows a routed matmul takes rows of tables, too.
fn is_row_work(product: &Matmul<Body>, body: &Body, cols: usize, axes: &[(usize, usize)]) -> bool {
    let of_rows = |spec: &ArgSpec| match spec.access {
        Access::Row | Access::PerRow => true,
        Access::GatheredRow { index } => product.routed && usize::from(index) < body.args.len(),
        Access::Columns => false,
    };
    !body.flat && body.args.iter().all(of_rows) && has_space(body, cols, axes)
}

/// Whether the right operand is gathered from a table of matrices stored by columns, and the epilogue gathers from tables.
fn is_routed(product: &Matmul<Body>, launch: &MatmulLaunch) -> bool {
    let (roles, shape) = (product.roles(), &launch.shape);
    let one_type = product.left == product.right && shape.b.0 == 1;
    let alone = product.prologue.is_none() && product.rights == 1 && shape.batch.is_empty();
    let axes = launch.args.first().map_or(&[][..], |left| &left.leading);
    let rows = (shape.k <= 1 || shape.a.1 == 1)
        && matches!(axes.len(), 1 | 2)
        && axes.iter().map(|axis| axis.0).product::<usize>() == shape.m;
    let table = launch.args.get(1).is_some_and(|table| table.leading.len() == 1);
    let gathered = |arg: usize| {
        let spec = product.epilogue.as_ref().and_then(|epilogue| epilogue.body.args.get(arg));
        spec.is_some_and(|spec| matches!(spec.access, Access::GatheredRow { .. }))
    };
    let tables = roles.iter().zip(&launch.args).all(|(&role, arg)| match role {
        Role::Epilogue(at) if gathered(at) => arg.leading.len() == 1 && arg.leading[0].0 == arg.table_rows,
        _ => true,
    });
    one_type && alone && rows && table && tables
}

/// Whether a row is worked on as a whole.
fn needs_whole_rows(body: &Body) -> bool {
    let stored = body.args.iter().any(|spec| spec.written && spec.access == Access::PerRow);
    stored || body.row_values > 0
}

impl fmt::Display for Matmul<TileProgram> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Matmul { left, right, result, rights, routed, prologue, epilogue } = self;
        let sums = if (*left, *right) == (Dtype::I8, Dtype::I8) { "exact" } else { "f32" };
        let products = match (*routed, *rights) {
            (true, _) => "matrix products of rows and the experts that indices pick for them",
            (false, 1) => "matrix product",
            (false, _) => "two matrix products of one operand",
        };
        writeln!(f, "{products}, {left} by {right}, {sums} sums, blocks of the result")?;
        if let Some(prologue) = prologue {
            write!(f, "first its rows of the first operand (argument {}):\n{}", prologue.made, prologue.body)?;
        }
        match epilogue {
            Some(epilogue) => {
                let sums: Vec<String> = epilogue.sums.iter().map(usize::to_string).collect();
                let sums = sums.join(" and ");
                let unit = if epilogue.body.needs_whole_rows() { "each row" } else { "each block" };
                write!(f, "{unit}, while its sums (argument {sums}) are hot:\n{}", epilogue.body)
            }
            None => writeln!(f, "each block stored as {result}"),
        }
    }
}
