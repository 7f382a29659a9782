//! The inputs of the config's choice, gathered from a body and its launch.

use crate::body::{Access, ArgSpec, Body};
use crate::cuda::row::config::Facts;
use crate::cuda::row::layout::{ArgLayout, layouts};
use crate::cuda::row::passes::passes;
use crate::cuda::target::CudaTarget;
use crate::lower::RowLaunch;

/// Gathers the facts of a body and passes them to `f`.
pub(crate) fn with_facts<R>(body: &Body, launch: &RowLaunch, target: &CudaTarget, f: impl FnOnce(&Facts) -> R) -> R {
    let layouts = layouts(body, &launch.args);
    let is_shared = |(spec, layout): (&ArgSpec, &ArgLayout)| spec.access == Access::Row && layout.axes.is_empty();
    let shared_rows: Vec<bool> = body.args.iter().zip(&layouts).map(is_shared).collect();
    let kept = passes(body, &shared_rows, true);
    let &RowLaunch { rows, cols, .. } = launch;
    f(&Facts { body, layouts: &layouts, shared_rows: &shared_rows, passes: &kept, rows, cols, target })
}
