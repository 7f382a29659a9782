//! Attention of the CPU as kernels: alone, with row work on its result, with a projection, and its gradient.

use std::fmt;
use std::sync::Arc;

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::body::{Access, ArgSpec};
use deuteron_codegen::cpu::bind::has_space;
use deuteron_codegen::cpu::emit::emit;
use deuteron_codegen::cpu::family::{CpuTarget, assemble, touched};
use deuteron_codegen::cpu::program::TileProgram;
use deuteron_codegen::cpu::simd::MAX_LEADING;
use deuteron_codegen::cpu::task::CpuSource;
use deuteron_codegen::kernel::{Family, Kernel, Offer, Request, offered, offered_lowered};
use deuteron_codegen::matmul_shape::Matrix;
use deuteron_matmul::cpu::driver::MatmulTasks;
use deuteron_matmul::cpu::family as matmul;
use deuteron_matmul::kernel::{LoweredMatmul, Matmul};

use super::driver::AttentionLaunch;
use super::driver::alone::AttentionTasks;
use super::driver::backward::AttentionBackwardTasks;
use super::driver::block::AttentionBlockTasks;
use super::driver::rows::AttentionRowsTasks;
use super::work::{attention_work, backward_work, block_work, rows_work};
use crate::backward::{self, LoweredBackward};
use crate::block::{self, LoweredAttentionBlock};
use crate::chain::{self, Fit};
use crate::kernel::{AttentionKernel, AttentionOperand, AttentionResult, LoweredAttention};
use crate::rows::{self, AttentionRows, AttentionRowsLaunch, LoweredAttentionRows};

/// Attention alone, with row work on its result, with a projection, and its gradient.
pub struct AttentionFamily;

impl Family<CpuTarget> for AttentionFamily {
    fn offer<'a>(&self, request: Request<'a>, _: &'a CpuTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        match chain::fit(&group)? {
            // Probabilities are a matmul and row work: the row is still in cache when it is softened.
            Fit::Alone(fit) if fit.kernel.result == AttentionResult::Probabilities => None,
            Fit::Alone(fit) => offered(
                move || attention_work(&fit.kernel, &fit.shape),
                move || checked(LoweredAttention::new(&group, &fit), fits, make),
            ),
            Fit::Rows(fit) => offered_lowered(
                move || rows::lower(&group, fit.clone()),
                rows_work,
                |lowered| checked(lowered, rows_fit, make_rows),
            ),
            Fit::Block(fit) => offered_lowered(
                move || block::lower(&group, (*fit).clone()),
                block_work,
                |lowered| checked(lowered, block_fits, make_block),
            ),
            // Sums over heads that share keys are kernels of their own.
            Fit::Gradient(fit) if fit.kernel.group > 1 => None,
            Fit::Gradient(fit) => {
                let fit = *fit;
                offered(
                    move || backward_work(&fit.kernel, &fit.shape),
                    move || checked(backward::lower(&group, &fit), backward_fits, make_backward),
                )
            }
        }
    }
}

/// The kernel of a lowered group, which is always supported.
fn checked<L: fmt::Debug>(lowered: L, fits: fn(&L) -> bool, make: fn(L) -> Kernel) -> Kernel {
    debug_assert!(fits(&lowered), "{lowered:?}");
    make(lowered)
}

/// The kernel of attention, or none if its sizes are inconsistent or not supported.
pub fn kernel(lowered: LoweredAttention) -> Option<Kernel> {
    fits(&lowered).then(|| make(lowered))
}

/// The kernel of attention with row work, or none.
pub fn rows_kernel(lowered: LoweredAttentionRows) -> Option<Kernel> {
    rows_fit(&lowered).then(|| make_rows(lowered))
}

/// The kernel of attention with a projection, or none.
pub fn block_kernel(lowered: LoweredAttentionBlock) -> Option<Kernel> {
    block_fits(&lowered).then(|| make_block(lowered))
}

/// The kernel of the gradient of attention, or none.
pub fn backward_kernel(lowered: LoweredBackward) -> Option<Kernel> {
    backward_fits(&lowered).then(|| make_backward(lowered))
}

fn make(lowered: LoweredAttention) -> Kernel {
    let LoweredAttention { kernel, shape, .. } = lowered;
    let source = CpuSource::described(kernel, kernel.describe() + "\n");
    let tasks = AttentionTasks(AttentionLaunch { kernel, shape, offsets: starts(&lowered.args) });
    // SAFETY: of attention that fits, tasks touch each operand at the positions of its shape, which its reach is taken of.
    unsafe { assemble(source, lowered.arguments(), tasks) }
}

fn make_rows(lowered: LoweredAttentionRows) -> Kernel {
    let LoweredAttentionRows { kernel, launch } = lowered;
    let arguments = kernel.arguments(&launch, kernel.epilogue.cols);
    // What attention reads is read over and over, and is no reason to write past the caches.
    let touched = touched(&arguments[kernel.operands()..]);
    let kernel = Arc::new(kernel.map(|body| emit(&body)));
    let source = CpuSource::new(kernel.clone());
    // SAFETY: of what fits, tasks touch operands of attention as above, and arguments of the row work by its rows and columns.
    unsafe { assemble(source, arguments, AttentionRowsTasks { kernel, launch, touched }) }
}

fn make_block(lowered: LoweredAttentionBlock) -> Kernel {
    let LoweredAttentionBlock { kernel, launch } = lowered;
    let arguments = kernel.arguments(&launch);
    let second = launch.matmul_launch(&kernel);
    let touched = touched(&kernel.product.arguments(&second));
    let product = Arc::new(kernel.product.map(|body| emit(&body)));
    let (kernel, shape) = (kernel.attention, launch.attention);
    let source = CpuSource::new(Arc::new(AttentionBlockProgram { attention: kernel, product: product.clone() }));
    let mut offsets = starts(&launch.args[..kernel.operands().len() - 1]);
    offsets.push(0);
    let tasks = AttentionBlockTasks {
        attention: AttentionTasks(AttentionLaunch { kernel, shape, offsets }),
        matmul: MatmulTasks { product, launch: second, touched },
        handed: kernel.reach(&shape, AttentionOperand::O) * kernel.dtype.bytes(),
    };
    // SAFETY: of what fits, tasks touch operands of attention as above, and the others as those of the matmul, whose left operand is the
    // kernel's own memory.
    unsafe { assemble(source, arguments, tasks) }
}

fn make_backward(lowered: LoweredBackward) -> Kernel {
    let LoweredBackward { kernel, shape, gradients, .. } = lowered;
    let text = format!("gradients of {}, scores computed again\n", kernel.describe());
    let source = CpuSource::described(kernel, text);
    let attention = AttentionLaunch { kernel, shape, offsets: starts(&lowered.args) };
    let tasks = AttentionBackwardTasks { attention, gradients };
    // SAFETY: of a gradient that fits, tasks touch operands of attention at the positions of the shape, and gradients at those of their places.
    unsafe { assemble(source, lowered.arguments(), tasks) }
}

/// Bytes from the start of each argument's buffer.
fn starts(args: &[ArgBinding]) -> Vec<usize> {
    args.iter().map(ArgBinding::start).collect()
}

/// Whether kernels support it, and its arguments match their use.
fn fits(lowered: &LoweredAttention) -> bool {
    let LoweredAttention { kernel, shape, args } = lowered;
    let operands = kernel.operands();
    let bound = operands.len() == args.len() && operands.iter().zip(args).all(|(&op, arg)| is_bound(kernel, op, arg));
    // Probabilities that are stored are a GPU's kernel.
    kernel.result == AttentionResult::Values && kernel.sized(shape, 0).refusal().is_none() && bound
}

/// Whether an argument has the dtype and direction that attention expects.
fn is_bound(kernel: &AttentionKernel, operand: AttentionOperand, arg: &ArgBinding) -> bool {
    arg.dtype.bytes() == kernel.operand_dtype(operand).bytes() && arg.written == (operand == AttentionOperand::O)
}

/// Whether the operands of attention are among those of a launch.
fn operands_fit(kernel: &AttentionKernel, args: &[ArgBinding]) -> bool {
    let operands = &kernel.operands()[..kernel.operands().len() - 1];
    args.len() >= operands.len() && operands.iter().zip(args).all(|(&operand, arg)| is_bound(kernel, operand, arg))
}

fn rows_fit(lowered: &LoweredAttentionRows) -> bool {
    let AttentionRows { attention, epilogue, result, .. } = &lowered.kernel;
    let AttentionRowsLaunch { args, shape, axes } = &lowered.launch;
    let computed = attention.sized(shape, 0).refusal().is_none() && attention.result == AttentionResult::Values;
    let simple = |spec: &ArgSpec| matches!(spec.access, Access::Row | Access::PerRow);
    let known = epilogue.args.get(*result).is_some_and(|spec| spec.dtype == attention.dtype && !spec.written);
    let row_work =
        known && !epilogue.flat && epilogue.args.iter().all(simple) && has_space(epilogue, epilogue.cols, axes);
    let operands = lowered.kernel.operands();
    if !computed || !row_work || args.len() + 1 != operands + epilogue.args.len() || !operands_fit(attention, args) {
        return false;
    }
    let bound = args.iter().enumerate().skip(operands).all(|(position, arg)| {
        let spec = &epilogue.args[lowered.kernel.epilogue_argument(position)];
        let is_spec = arg.dtype.bytes() == spec.dtype.bytes() && arg.written == spec.written;
        is_spec && arg.leading.len() <= MAX_LEADING
    });
    bound && attention.joined(shape, epilogue.cols).is_some()
}

/// Whether attention computes the whole left operand of one supported matmul without a prologue.
fn block_fits(lowered: &LoweredAttentionBlock) -> bool {
    let LoweredAttentionBlock { kernel, launch } = lowered;
    let (attention, product) = (&kernel.attention, &kernel.product);
    let computed =
        attention.sized(&launch.attention, 0).refusal().is_none() && attention.result == AttentionResult::Values;
    if !computed || !operands_fit(attention, &launch.args) {
        return false;
    }
    let alone = product.prologue.is_none() && !product.routed && product.rights == 1 && launch.product.batch.is_empty();
    let given = attention.reach(&launch.attention, AttentionOperand::O);
    let inside = product.left == attention.dtype && launch.product.reach(Matrix::A) <= given;
    let second = LoweredMatmul { product: product.clone(), launch: launch.matmul_launch(kernel) };
    alone && inside && matmul::fits(&second)
}

/// Whether kernels support it: every head has its own keys, in the dtype of its queries.
fn backward_fits(lowered: &LoweredBackward) -> bool {
    let LoweredBackward { kernel, shape, args, gradients } = lowered;
    let alone = kernel.group == 1 && kernel.kv == kernel.dtype && kernel.result == AttentionResult::Values;
    let inputs = kernel.backward_inputs().count();
    let Some((read, [result_gradient, stored @ ..])) = args.split_at_checked(inputs) else { return false };
    let bound = kernel.backward_inputs().zip(read).all(|(operand, arg)| is_bound(kernel, operand, arg));
    let sized = |arg: &ArgBinding| arg.dtype.bytes() == kernel.dtype.bytes();
    let placed = gradients.iter().all(|place| place.argument > inputs && place.argument < args.len());
    let written = stored.iter().all(|arg| sized(arg) && arg.written);
    let computed = alone && kernel.sized(shape, 0).refusal().is_none();
    computed && bound && sized(result_gradient) && !result_gradient.written && written && placed
}

impl fmt::Display for AttentionRows<TileProgram> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AttentionRows { attention, epilogue, result, .. } = self;
        let heads = epilogue.cols / attention.width.max(1);
        writeln!(f, "{}", attention.describe())?;
        writeln!(f, "rows of {heads} heads side by side, while they (argument {result}) are hot:")?;
        write!(f, "{epilogue}")
    }
}

/// Attention with a projection before its sizes.
#[derive(Debug, PartialEq)]
struct AttentionBlockProgram {
    attention: AttentionKernel,
    product: Arc<Matmul<TileProgram>>,
}

impl fmt::Display for AttentionBlockProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.attention.describe())?;
        write!(f, "then, of its rows and a weight: {}", self.product)
    }
}
