//! What can be generated for a CPU.

use deuteron_attention::cpu::family::AttentionFamily;
use deuteron_codegen::cpu::family::CpuTarget;
use deuteron_codegen::kernel::{Family, Offer, Request};
use deuteron_matmul::cpu::family::{self as matmul, MatmulFamily};
use deuteron_plan::{Catalog, Chain, Draft, Link, Structure, Work, primitive_work};

use super::is_described;
use crate::append::cpu::AppendFamily;
use crate::copy::cpu::CopyFamily;
use crate::row::cpu::RowFamily;
use crate::scatter::cpu::ScatterFamily;

/// The family of a structure.
fn family(structure: &Structure) -> Option<&'static dyn Family<CpuTarget>> {
    match structure {
        Structure::Row => Some(&RowFamily),
        Structure::Chain(chain) => match chain.links.first()? {
            Link::Matmul { .. } | Link::Routed { .. } => Some(&MatmulFamily),
            Link::Attention(_) | Link::AttentionGradient(_) => Some(&AttentionFamily),
            // Probabilities are a matmul and row work: the row is still in cache when it is softened.
            Link::AttentionScores(_) => None,
            // So are losses: their logits are made for some rows at a time.
            Link::CrossEntropy(_) | Link::CrossEntropyGradient(_) => None,
        },
        Structure::Copy => Some(&CopyFamily),
        Structure::ScatterAdd => Some(&ScatterFamily),
        Structure::Append => Some(&AppendFamily),
        Structure::Opaque => None,
    }
}

/// What can be generated for a CPU: row kernels, one or two matmuls with elementwise work after them and, for few rows, row work
/// before them, matmuls of rows with weights picked for them, attention with its projection and row work after it and its gradient,
/// copies, scatters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuCatalog;

/// The kernel that the CPU's families offer for a group.
pub(super) fn offer<'a>(request: Request<'a>) -> Option<Box<dyn Offer + 'a>> {
    if is_described(&request.group) {
        return None;
    }
    family(request.group.structure)?.offer(request, &CpuTarget)
}

impl Catalog for CpuCatalog {
    fn offers_structure(&self, structure: &Structure) -> bool {
        let is_matmul = |chain: &Chain| matches!(chain.links.as_slice(), [Link::Matmul { .. } | Link::Routed { .. }]);
        let taken = structure.chain().is_none_or(|chain| !is_matmul(chain) || matmul::takes(chain));
        family(structure).is_some() && taken
    }

    fn offers(&self, draft: &Draft) -> bool {
        // Described operations are analysed with their neighbours; no kernel is made of them.
        if is_described(draft) { self.offers_structure(draft.structure) } else { offer(draft.into()).is_some() }
    }

    fn offers_everything(&self) -> bool {
        false
    }

    fn work(&self, draft: &Draft) -> Work {
        offer(draft.into()).map_or_else(|| primitive_work(draft), |offer| offer.work())
    }
}
