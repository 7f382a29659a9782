//! Row kernels on CUDA: the same body as on the CPU, mapped to threads by a config.

use deuteron_codegen::cuda::row::many::Member;
use deuteron_codegen::cuda::row::variant::RowVariant;
use deuteron_codegen::cuda::row_config::RowConfig;
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Offer, Request, offered};
use deuteron_codegen::lower::lower_with_origins;
use deuteron_graph::NodeId;
use deuteron_plan::{Draft, Structure, node_space, primitive_work};

/// Columns of a row, at most: they are counted by 32 bits, as are those that the last sweep of all threads would have beyond the end.
const MAX_COLUMNS: usize = (1 << 31) - (1 << 24);

/// Row work on a GPU.
pub(crate) struct RowFamily;

impl Family<CudaTarget> for RowFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let kernel = move || {
            let lowered = lower_with_origins(&group).0;
            let updates = lowered.updates(request.in_place);
            RowVariant { updates, ..RowVariant::new(lowered, target) }.kernel(target)
        };
        let is_taken = *group.structure == Structure::Row && columns_fit(&group);
        if is_taken { offered(move || primitive_work(&group), kernel) } else { None }
    }
}

/// Whether columns can be counted in 32 bits. An elementwise kernel counts elements in 64 bits where necessary.
fn columns_fit(group: &Draft) -> bool {
    let is_short = |&id: &NodeId| node_space(group.graph, id).cols <= MAX_COLUMNS;
    group.nodes.iter().all(is_short) || lower_with_origins(group).0.body.flat
}

/// A group as one of several in one grid; none unless it is elementwise work on whole tensors.
pub(crate) fn member(request: Request) -> Option<Member> {
    if *request.group.structure != Structure::Row {
        return None;
    }
    let lowered = lower_with_origins(&request.group).0;
    let updates = lowered.updates(request.in_place);
    lowered.body.flat.then_some(Member { lowered, updates })
}

/// The config of a row kernel: the measured one if it fits, otherwise the suggested one.
pub fn chosen(group: &Draft, target: &CudaTarget) -> RowConfig {
    RowVariant::new(lower_with_origins(group).0, target).config
}
