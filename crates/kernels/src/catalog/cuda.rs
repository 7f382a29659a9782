//! What can be generated for CUDA, and the work of it.

use deuteron_attention::cuda::backward::BackwardFamily;
use deuteron_attention::cuda::block::AttentionBlockFamily;
use deuteron_attention::cuda::forward::AttentionFamily;
use deuteron_attention::cuda::rows::AttentionRowsFamily;
use deuteron_codegen::cuda::arch::Arch;
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Offer, Request};
use deuteron_matmul::cuda::cross_entropy::CrossEntropyFamily;
use deuteron_matmul::cuda::hopper::HopperFamily;
use deuteron_matmul::cuda::mma::MmaFamily;
use deuteron_matmul::cuda::mma_routed::MmaRoutedFamily;
use deuteron_matmul::cuda::realigned::RealignedFamily;
use deuteron_matmul::cuda::routed::RoutedFamily;
use deuteron_matmul::cuda::skinny::SkinnyFamily;
use deuteron_matmul::cuda::strips::StripsFamily;
use deuteron_matmul::library::LibraryFamily;
use deuteron_plan::{Catalog, Chain, Draft, Link, Reach, Structure, Work, primitive_work};

use super::is_described;
use crate::append::cuda::AppendFamily;
use crate::copy::cuda::CopyFamily;
use crate::row::cuda::RowFamily;
use crate::scatter::cuda::ScatterFamily;

/// The families of a structure, in the order in which they are tried.
fn families(structure: &Structure) -> &'static [&'static dyn Family<CudaTarget>] {
    let chain = match structure {
        Structure::Row => return &[&RowFamily],
        Structure::ScatterAdd => return &[&ScatterFamily],
        Structure::Append => return &[&AppendFamily],
        Structure::Copy => return &[&CopyFamily],
        Structure::Opaque => return &[],
        Structure::Chain(chain) => chain,
    };
    match chain.links.as_slice() {
        // Each but the library takes what it is predicted to do faster than those behind it.
        [Link::Matmul { .. }] => {
            &[&StripsFamily, &SkinnyFamily, &HopperFamily, &RealignedFamily, &MmaFamily, &LibraryFamily]
        }
        [Link::Routed { .. }] => &[&RoutedFamily, &MmaRoutedFamily],
        [Link::Attention(_)] if chain.epilogue.reach == Reach::None => &[&AttentionFamily],
        [Link::Attention(_)] => &[&AttentionRowsFamily],
        [Link::Attention(_), Link::Matmul { .. }] => &[&AttentionBlockFamily],
        [Link::AttentionScores(_)] => &[&AttentionFamily],
        [Link::AttentionGradient(_)] => &[&BackwardFamily],
        [Link::CrossEntropy(_) | Link::CrossEntropyGradient(_)] => &[&CrossEntropyFamily],
        _ => &[],
    }
}

/// The kernel of the first family that accepts a group.
pub(super) fn offer<'a>(request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
    if is_described(&request.group) {
        return None;
    }
    families(request.group.structure).iter().find_map(|family| family.offer(request, target))
}

/// Whether some family takes groups of a structure.
pub(super) fn offers_structure(structure: &Structure, arch: Arch) -> bool {
    let takes = |chain: &Chain| match chain.links.as_slice() {
        [Link::Matmul { nodes }] => arch.has_wgmma() || (nodes.len() == 1 && chain.epilogue.reach != Reach::Rows),
        [Link::Routed { .. }] => arch.has_wgmma() || chain.epilogue.reach != Reach::Rows,
        [Link::Attention(_), Link::Matmul { .. }] => arch.has_wgmma() && chain.epilogue.reach == Reach::Rows,
        _ => true,
    };
    !families(structure).is_empty() && structure.chain().is_none_or(takes)
}

/// Whether some family accepts a group.
pub(super) fn offers(draft: &Draft, target: &CudaTarget) -> bool {
    // Described operations are analysed with their neighbours; no kernel is made of them.
    offers_structure(draft.structure, target.arch) && (is_described(draft) || offer(draft.into(), target).is_some())
}

/// The work of the kernel of a group.
pub(super) fn work(draft: &Draft, target: &CudaTarget) -> Work {
    offer(draft.into(), target).map_or_else(|| primitive_work(draft), |offer| offer.work())
}

/// What can be generated for a GPU with as many multiprocessors as an H200: row kernels; matmuls with any elementwise work after them, on
/// Hopper with any row work; with row work before them too, of few rows or on Hopper; rows routed to experts; attention alone and with row
/// work after it, its probabilities and its gradient; losses without logits and their gradients; copies, scatters. A
/// [`Backend`](super::Backend) is the catalogue of its own GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaCatalog {
    arch: Arch,
}

impl CudaCatalog {
    /// That of an instruction set.
    pub fn of(arch: Arch) -> &'static CudaCatalog {
        static ALL: [CudaCatalog; Arch::ALL.len()] = {
            let mut all = [CudaCatalog { arch: Arch::Sm75 }; Arch::ALL.len()];
            let mut at = 0;
            while at < all.len() {
                all[at].arch = Arch::ALL[at];
                at += 1;
            }
            all
        };
        // Every one is there.
        ALL.iter().find(|catalog| catalog.arch == arch).unwrap_or(&ALL[0])
    }

    fn target(&self) -> CudaTarget {
        CudaTarget::new(self.arch, 132)
    }
}

impl Catalog for CudaCatalog {
    fn offers_structure(&self, structure: &Structure) -> bool {
        offers_structure(structure, self.arch)
    }

    fn offers(&self, draft: &Draft) -> bool {
        offers(draft, &self.target())
    }

    fn offers_everything(&self) -> bool {
        false
    }

    fn work(&self, draft: &Draft) -> Work {
        work(draft, &self.target())
    }

    fn widens_operands(&self) -> bool {
        self.arch.is_ampere()
    }
}
