//! Attention, its projection, a residual and a norm as one launch: `hopper_block.cu`, whose text is its contract. Other GPUs and
//! other epilogues have separate kernels.

use deuteron_codegen::cuda::grid::CudaSource;
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_plan::{Work, primitive_work};

use super::forward::ForwardVariant;
use super::hopper_norm::{ExchangeRequest, RowExchange, by_rows};
use super::rows::refusal;
use crate::block::{self, AttentionBlock, AttentionBlockLaunch, LoweredAttentionBlock};
use crate::chain::{self, Fit};

/// Attention with its projection on a GPU.
pub struct AttentionBlockFamily;

impl Family<CudaTarget> for AttentionBlockFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let Some(Fit::Block(fit)) = chain::fit(&group) else { return None };
        if !target.arch.has_wgmma() || refusal(&fit.attention.kernel, &fit.attention.shape).is_some() {
            return None;
        }
        let lowered = block::lower(&group, *fit);
        let exchange = exchange(&lowered, target)?;
        let microseconds = Some(exchange.microseconds(exchange_request(&lowered), target));
        let (waits, drawback) = (exchange.waits(), exchange.drawback());
        let work = move || Work { waits, microseconds, drawback, ..primitive_work(&group) };
        offered(work, move || kernel(&lowered, &exchange, target))
    }
}

/// How blocks exchange statistics of rows, if the kernel takes it.
pub(crate) fn exchange(block: &LoweredAttentionBlock, target: &CudaTarget) -> Option<RowExchange> {
    let AttentionBlock { attention, product, .. } = &block.kernel;
    let narrow = [product.left, product.right, product.result].iter().all(|&dtype| dtype == attention.dtype);
    let plain = narrow && product.rights == 1 && product.prologue.is_none();
    RowExchange::new(exchange_request(block), target).filter(|_| plain)
}

fn exchange_request(block: &LoweredAttentionBlock) -> ExchangeRequest<'_> {
    let AttentionBlock { attention: kernel, norm, .. } = &block.kernel;
    let AttentionBlockLaunch { args, attention: shape, product, .. } = &block.launch;
    let shape = by_rows(kernel, shape, product.k);
    ExchangeRequest { kernel, shape, norm: norm.as_ref(), product: Some(product), args }
}

fn kernel(block: &LoweredAttentionBlock, exchange: &RowExchange, target: &CudaTarget) -> Kernel {
    let (variant, part) = (ForwardVariant::Hopper(exchange.groups), exchange.groups.queries());
    let name =
        format!("{variant}; {part} columns of their projection at a time; rows by warps beside them, as columns meet");
    let text = exchange.text(&block.kernel.attention);
    let grids = exchange.grids(exchange_request(block), target);
    let launch = Launch::of_grids(block.kernel.arguments(&block.launch), grids);
    let source = CudaSource::new(exchange.name(), text);
    Kernel::new(Source::Cuda(source), launch.with_variant(name, String::new()))
}
