//! What can be generated for CUDA, and the work of it.

use deuteron_plan::{AttentionForm, Catalog, Class, Draft, Form, LANES, MatmulForm, Reach, Work, primitive_work};

use crate::attention::backward::FoundBackward;
use crate::cuda::{Arch, CudaTarget};
use crate::kernels::attention::cuda::{self, Meeting, block, rows};
use crate::kernels::matmul::cuda::skinny_parts;
use crate::source::{Kernel, Lowered};
use crate::{attention, epilogue};

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
    fn meeting(&self, draft: &Draft) -> Option<Meeting> {
        let found = attention::block::recognise(draft).filter(|_| self.arch.has_wgmma())?;
        let refused = rows::refusal(&found.attention.kernel, &found.attention.shape).is_some();
        let Lowered { kernel: Kernel::AttentionBlock(kernel), launch } = attention::block::lower(draft, found) else {
            return None;
        };
        block::meeting(&kernel, &launch, &self.target()).filter(|_| !refused)
    }

    /// What attention with what follows it waits for.
    fn waits(&self, draft: &Draft) -> f64 {
        let found = attention::rows::recognise(draft).map(|found| attention::rows::lower(draft, found));
        match found {
            Some(Lowered { kernel: Kernel::AttentionRows(kernel), launch }) => {
                rows::waits(&kernel, &launch, &self.target())
            }
            _ => self.meeting(draft).map_or(0.0, |meeting| meeting.waits()),
        }
    }
}

impl Catalog for CudaCatalog {
    fn offers_form(&self, form: Form) -> bool {
        match form {
            Form::Row | Form::Copy | Form::ScatterAdd | Form::Append => true,
            Form::AttentionScores | Form::AttentionBackward => true,
            Form::Matmul(MatmulForm { epilogue, products: 1, .. }) => epilogue != Reach::Rows,
            Form::Attention(AttentionForm { projection: true, epilogue }) => {
                self.arch.has_wgmma() && epilogue == Reach::Rows
            }
            Form::Attention(AttentionForm { projection: false, .. }) => true,
            Form::Matmul(_) | Form::Routed { .. } | Form::Opaque => false,
        }
    }

    fn offers(&self, draft: &Draft) -> bool {
        match draft.form {
            Form::Matmul(_) => {
                self.offers_form(draft.form) && (skinny_parts(draft).is_some() || epilogue::recognise(draft).is_some())
            }
            Form::Attention(AttentionForm { projection: true, .. }) => self.meeting(draft).is_some(),
            Form::Attention(AttentionForm { epilogue: Reach::None, .. }) | Form::AttentionScores => attends(draft),
            Form::Attention(_) => attends_with_rows(draft),
            Form::AttentionBackward => differentiates(draft),
            form => self.offers_form(form),
        }
    }

    fn offers_everything(&self) -> bool {
        false
    }

    fn work(&self, draft: &Draft) -> Work {
        let work = primitive_work(draft);
        match draft.form {
            Form::AttentionBackward => backward_work(draft, work),
            Form::Attention(AttentionForm { epilogue: Reach::Pointwise | Reach::Rows, .. }) => {
                Work { waits: self.waits(draft), ..work }
            }
            _ => work,
        }
    }
}

/// The work of a gradient of attention whose kernels make scores again, given that of its operations. Other numbers of a pair
/// of a query and a key are made again with them; only those that cost much are counted.
fn backward_work(draft: &Draft, mut work: Work) -> Work {
    let Some(FoundBackward { kernel, shape, .. }) = attention::backward::recognise(draft) else { return work };
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

fn attends(draft: &Draft) -> bool {
    attention::recognise(draft).is_some_and(|found| cuda::refusal(&found.kernel, &found.shape).is_none())
}

fn attends_with_rows(draft: &Draft) -> bool {
    let found = attention::rows::recognise(draft);
    found.is_some_and(|found| rows::refusal(&found.attention.kernel, &found.attention.shape).is_none())
}

fn differentiates(draft: &Draft) -> bool {
    attention::backward::recognise(draft).is_some_and(|found| cuda::refusal(&found.kernel, &found.shape).is_none())
}
