//! Row kernels on CUDA: the same body as on the CPU, spread over threads by a config.

use deuteron_codegen::cuda::row::variant::RowVariant;
use deuteron_codegen::cuda::row_config::RowConfig;
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Offer, Request, offered};
use deuteron_codegen::lower::lower_with_origins;
use deuteron_plan::{Draft, Structure, primitive_work};

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
        if *group.structure == Structure::Row { offered(move || primitive_work(&group), kernel) } else { None }
    }
}

/// The config that the kernel of row work is given: the measured one where it fits, else the suggested one.
pub fn chosen(group: &Draft, target: &CudaTarget) -> RowConfig {
    RowVariant::new(lower_with_origins(group).0, target).config
}
