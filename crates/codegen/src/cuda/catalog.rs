//! What can be generated for CUDA, and the work of it.

use deuteron_plan::{Catalog, Draft, Form, MatmulForm, Reach, Work, primitive_work};

use crate::kernels::attention::cuda;
use crate::kernels::matmul::cuda::skinny_parts;
use crate::{attention, epilogue};

/// What can be generated for a GPU: row kernels, products with the epilogues that a library has, products of few rows with row work
/// before them and any elementwise work after them, attention, its probabilities and its gradient, copies, scatters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CudaCatalog;

impl Catalog for CudaCatalog {
    fn offers_form(&self, form: Form) -> bool {
        match form {
            Form::Row | Form::Copy | Form::ScatterAdd | Form::Append => true,
            Form::AttentionScores | Form::AttentionBackward => true,
            Form::Matmul(MatmulForm { epilogue, products: 1, .. }) => epilogue != Reach::Rows,
            Form::Attention(_) => form == Form::ATTENTION,
            Form::Matmul(_) | Form::Routed { .. } | Form::Opaque => false,
        }
    }

    fn offers(&self, draft: &Draft) -> bool {
        match draft.form {
            Form::Matmul(_) => {
                self.offers_form(draft.form) && (skinny_parts(draft).is_some() || epilogue::recognise(draft).is_some())
            }
            Form::Attention(_) | Form::AttentionScores => self.offers_form(draft.form) && attends(draft),
            Form::AttentionBackward => differentiates(draft),
            form => self.offers_form(form),
        }
    }

    fn offers_everything(&self) -> bool {
        false
    }

    fn work(&self, draft: &Draft) -> Work {
        primitive_work(draft)
    }
}

fn attends(draft: &Draft) -> bool {
    attention::recognise(draft).is_some_and(|found| cuda::refusal(&found.kernel, &found.shape).is_none())
}

fn differentiates(draft: &Draft) -> bool {
    attention::backward::recognise(draft).is_some_and(|found| cuda::refusal(&found.kernel, &found.shape).is_none())
}
