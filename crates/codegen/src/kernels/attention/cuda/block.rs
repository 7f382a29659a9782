//! Attention, its projection, a residual and a norm as one launch: `hopper_block.cu`, whose text is its contract. Other GPUs and
//! other tails have separate kernels.

use std::fmt;

use super::Way;
use super::hopper_norm::{Asked, Meeting, by_rows};
use crate::attention::block::AttentionBlock;
use crate::body::Body;
use crate::cuda::{CudaSource, CudaTarget, Family, Grids};
use crate::source::{Geometry, Launch};

/// Attention, its projection, what follows, and how a block is cut.
#[derive(Debug, Clone, PartialEq)]
pub struct CudaBlock {
    /// what is computed
    pub kernel: AttentionBlock<Body>,
    /// by which kernel
    pub meeting: Meeting,
}

impl fmt::Display for CudaBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (way, part) = (Way::Hopper(self.meeting.groups), self.meeting.groups.queries());
        write!(f, "{way}; {part} columns of their projection at a time; rows by warps beside them, as columns meet")
    }
}

/// The kernel of a launch, if there is one.
pub(crate) fn meeting(kernel: &AttentionBlock<Body>, launch: &Launch, target: &CudaTarget) -> Option<Meeting> {
    let product = &kernel.product;
    let narrow = [product.left, product.right, product.result].iter().all(|&dtype| dtype == kernel.attention.dtype);
    Meeting::new(asked(kernel, launch)?, target).filter(|_| narrow && product.rights == 1 && product.head.is_none())
}

fn asked<'a>(kernel: &'a AttentionBlock<Body>, launch: &'a Launch) -> Option<Asked<'a>> {
    let Geometry::AttentionBlock { attention: shape, product, .. } = &launch.geometry else { return None };
    let AttentionBlock { attention: kernel, norm, .. } = kernel;
    let shape = by_rows(kernel, shape, product.k);
    Some(Asked { kernel, shape, norm: norm.as_ref(), product: Some(product), launch })
}

/// The kernel for a launch that [`meeting`] takes.
pub(crate) fn render(kernel: AttentionBlock<Body>, launch: &Launch, target: &CudaTarget) -> CudaSource {
    let meeting = meeting(&kernel, launch, target).expect("the catalogue offers blocks that the kernel does");
    let text = meeting.text(&kernel.attention);
    let block = CudaBlock { kernel, meeting };
    CudaSource { name: meeting.name().into(), text, family: Family::AttentionBlock(Box::new(block)) }
}

/// The grid of a launch; none where there is nothing to write.
pub(crate) fn grids(block: &CudaBlock, launch: &Launch, target: &CudaTarget) -> Grids {
    asked(&block.kernel, launch).map_or_else(Grids::default, |asked| block.meeting.grids(asked, target))
}
