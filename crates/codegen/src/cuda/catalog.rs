//! What can be generated for CUDA, and the work of it.

use deuteron_plan::{Catalog, Class, Draft, GroupKind, LANES, Link, Reach, Structure, Work, primitive_work};

use crate::attention::backward::GradientFit;
use crate::attention::block::BlockFit;
use crate::attention::{self, AttentionFit, Fit};
use crate::cuda::{Arch, CudaTarget};
use crate::kernels::attention::cuda::{self, Meeting, block, rows};
use crate::kernels::matmul::cuda as matmul;
use crate::source::{Kernel, Lowered};

/// What can be generated for a GPU: row kernels, products with the epilogues that a library has, products of few rows with row work
/// before them and any elementwise work after them, attention alone and with row work after it, its probabilities and its gradient,
/// copies, scatters.
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

    /// What a draft would be launched for. How many multiprocessors there are decides how blocks are cut, and nothing here.
    fn target(&self) -> CudaTarget {
        CudaTarget::new(self.arch, 132)
    }

    /// How blocks of a launch with a projection meet, where they do.
    fn meeting(&self, draft: &Draft, fit: BlockFit) -> Option<Meeting> {
        let refused = rows::refusal(&fit.attention.kernel, &fit.attention.shape).is_some();
        if refused || !self.arch.has_wgmma() {
            return None;
        }
        let Lowered { kernel: Kernel::AttentionBlock(kernel), launch } = attention::block::lower(draft, fit) else {
            return None;
        };
        block::meeting(&kernel, &launch, &self.target())
    }

    /// What attention with what follows it waits for.
    fn waits(&self, draft: &Draft) -> f64 {
        match attention::fit(draft) {
            Some(Fit::Rows(fit)) => match attention::rows::lower(draft, fit) {
                Lowered { kernel: Kernel::AttentionRows(kernel), launch } => {
                    rows::waits(&kernel, &launch, &self.target())
                }
                _ => 0.0,
            },
            Some(Fit::Block(fit)) => self.meeting(draft, *fit).map_or(0.0, |meeting| meeting.waits()),
            Some(Fit::Alone(_) | Fit::Gradient(_)) | None => 0.0,
        }
    }

    /// Whether there is a kernel for a chain that begins with attention.
    fn attends(&self, draft: &Draft) -> bool {
        match attention::fit(draft) {
            Some(Fit::Alone(AttentionFit { kernel, shape, .. }) | Fit::Gradient(GradientFit { kernel, shape, .. })) => {
                cuda::refusal(&kernel, &shape).is_none()
            }
            Some(Fit::Rows(fit)) => rows::refusal(&fit.attention.kernel, &fit.attention.shape).is_none(),
            Some(Fit::Block(fit)) => self.meeting(draft, *fit).is_some(),
            None => false,
        }
    }
}

impl Catalog for CudaCatalog {
    fn offers_structure(&self, structure: &Structure) -> bool {
        let chain = match structure {
            Structure::Row | Structure::Copy | Structure::ScatterAdd | Structure::Append => return true,
            Structure::Opaque => return false,
            Structure::Chain(chain) => chain,
        };
        match chain.links.as_slice() {
            [Link::Matmul { nodes }] => nodes.len() == 1 && chain.epilogue.reach != Reach::Rows,
            [Link::Attention(_), Link::Matmul { .. }] => self.arch.has_wgmma() && chain.epilogue.reach == Reach::Rows,
            [Link::Attention(_) | Link::AttentionScores(_) | Link::AttentionGradient(_)] => true,
            _ => false,
        }
    }

    fn offers(&self, draft: &Draft) -> bool {
        self.offers_structure(draft.structure)
            && match draft.structure.kind() {
                GroupKind::Matmul => matmul::fit(draft, self.arch).is_some(),
                GroupKind::Attention => self.attends(draft),
                GroupKind::Row | GroupKind::Copy | GroupKind::ScatterAdd | GroupKind::Append | GroupKind::Opaque => {
                    true
                }
            }
    }

    fn offers_everything(&self) -> bool {
        false
    }

    fn work(&self, draft: &Draft) -> Work {
        let work = primitive_work(draft);
        let Some(chain) = draft.structure.chain() else { return work };
        match chain.links.first() {
            Some(Link::AttentionGradient(_)) => gradient_work(draft, work),
            Some(Link::Attention(_)) if chain.epilogue.reach != Reach::None => {
                Work { waits: self.waits(draft), ..work }
            }
            _ => work,
        }
    }
}

/// The work of a gradient of attention whose kernels make scores again, given that of its operations. Other numbers of a pair
/// of a query and a key are made again with them; only those that cost much are counted.
fn gradient_work(draft: &Draft, mut work: Work) -> Work {
    let Some(Fit::Gradient(GradientFit { kernel, shape, .. })) = attention::fit(draft) else { return work };
    let heads = shape.batch * shape.heads;
    let pairs = (heads * shape.queries * shape.keys) as f64;
    let products = cuda::backward::products(&kernel) as f64;
    work.matrix_flops = 2.0 * products * pairs * kernel.width as f64;
    work.padded_flops = work.matrix_flops;
    work.products = products * heads as f64;
    work.add(Class::Exp, 2.0 * pairs / LANES as f64);
    if kernel.dropout.is_some() {
        work.add(Class::Random, 2.0 * pairs / LANES as f64);
    }
    work
}
