//! What can be generated for a CPU.

use deuteron_graph::Op;
use deuteron_plan::{Catalog, Draft, Form, Work, primitive_work};

use crate::cpu::family::CpuTarget;
use crate::kernel::{Family, Offer, Request};
use crate::kernels::append::cpu::AppendFamily;
use crate::kernels::attention::cpu::family::{
    AttentionBackwardFamily, AttentionBlockFamily, AttentionFamily, AttentionRowsFamily,
};
use crate::kernels::copy::cpu::CopyFamily;
use crate::kernels::matmul::cpu::family::{self as matmul, MatmulFamily};
use crate::kernels::row::cpu::RowFamily;
use crate::kernels::scatter::cpu::ScatterFamily;

/// Kernel families of the CPU. The first one that makes an offer is taken.
const FAMILIES: &[&dyn Family<CpuTarget>] = &[
    &RowFamily,
    &MatmulFamily,
    &AttentionFamily,
    &AttentionRowsFamily,
    &AttentionBlockFamily,
    &AttentionBackwardFamily,
    &CopyFamily,
    &ScatterFamily,
    &AppendFamily,
];

/// What can be generated for a CPU: row kernels, one or two matmuls with elementwise work after them and, for few rows, row work
/// before them, matmuls of rows with weights picked for them, attention with its projection and row work after it and its gradient,
/// copies, scatters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuCatalog;

/// What the CPU's families can make of a group.
pub(super) fn offer<'a>(request: Request<'a>) -> Option<Box<dyn Offer + 'a>> {
    if !CpuCatalog.offers_form(request.group.form) {
        return None;
    }
    FAMILIES.iter().find_map(|family| family.offer(request, &CpuTarget))
}

impl Catalog for CpuCatalog {
    fn offers_form(&self, form: Form) -> bool {
        match form {
            Form::Row | Form::Copy | Form::ScatterAdd | Form::Append => true,
            Form::Matmul(_) | Form::Routed { .. } => matmul::takes(form),
            Form::Attention(_) | Form::AttentionBackward => true,
            // Probabilities are a matmul and row work: the row is still in cache when it is softened.
            Form::AttentionScores | Form::Opaque => false,
        }
    }

    fn offers(&self, draft: &Draft) -> bool {
        offer(draft.into()).is_some()
    }

    fn offers_everything(&self) -> bool {
        false
    }

    fn work(&self, draft: &Draft) -> Work {
        let described = draft.nodes.iter().any(|&id| matches!(draft.graph.node(id).op, Op::Opaque(_)));
        let offer = if described { None } else { offer(draft.into()) };
        offer.map_or_else(|| primitive_work(draft), |offer| offer.work())
    }
}
