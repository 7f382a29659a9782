//! The text that all kernels of attention share.

use deuteron_codegen::tile::{self, Part};
use deuteron_graph::{Dtype, keep_threshold};

use crate::kernel::{AttentionKernel, AttentionMask, DropoutRule};

/// Parts of the device-side library: of the kernels in f32 arithmetic.
pub(super) const PLAIN: &[Part] = &[Part::Philox, Part::Conversions, Part::Warp];
/// Of the kernels on the matrix units of a warp.
pub(super) const TENSOR: &[Part] = &[Part::Philox, Part::Conversions, Part::Warp, Part::AsyncCopy, Part::Matrix];
/// Of the kernel for few queries.
pub(super) const DECODE: &[Part] = &[Part::Philox, Part::Conversions, Part::Warp, Part::DependentLaunch, Part::Cluster];
/// Of the kernels by warpgroups.
pub(super) const HOPPER: &[Part] = &[
    Part::Philox,
    Part::Conversions,
    Part::Warp,
    Part::Matrix,
    Part::Mbarrier,
    Part::NamedBarrier,
    Part::Tma,
    Part::Signals,
    Part::Registers,
    Part::Wgmma,
];
/// Attention of a tile by warpgroups.
pub(super) const HOPPER_ATTEND: &str = include_str!("hopper_attend.cuh");

/// What all kernels share, with the constants before it and the kernel's own text behind it.
pub(super) fn text(kernel: &AttentionKernel, constants: &str, parts: &[Part], own: &str) -> String {
    format!("{}{constants}\n{}\n{}\n{own}", prelude(kernel), tile::text(parts), include_str!("common.cuh"))
}

/// What follows attention where nothing does.
pub(super) const NOTHING: &str = include_str!("no_rows.cuh");

/// The kernel in f32 arithmetic, and what follows it.
pub(super) fn plain_text(follows: &str) -> String {
    [include_str!("plain.cuh"), follows, include_str!("plain.cu")].join("\n")
}

/// The kernel on the matrix units, and what follows it.
pub(super) fn tensor_text(follows: &str) -> String {
    [include_str!("tensor.cuh"), follows, include_str!("tensor.cu")].join("\n")
}

/// The constants of all kernels.
fn prelude(kernel: &AttentionKernel) -> String {
    let storage = |dtype: Dtype| match dtype {
        Dtype::F16 => 1,
        Dtype::Bf16 => 2,
        _ => 0,
    };
    let (mask, mask_storage) = match kernel.mask {
        AttentionMask::Full => (0, 0),
        AttentionMask::Causal => (1, 0),
        AttentionMask::Additive(dtype) => (2, storage(dtype)),
        AttentionMask::Cached => (3, 0),
    };
    let DropoutRule { probability, offset } = kernel.dropout.unwrap_or(DropoutRule { probability: 0.0, offset: 0 });
    let threshold = keep_threshold(probability);
    let kept = if probability < 1.0 { (1.0 / (1.0 - probability)) as f32 } else { 0.0 };
    format!(
        "constexpr int STORAGE = {};\nconstexpr int KV_STORAGE = {};\nconstexpr int MASK_STORAGE = {mask_storage};\nconstexpr int WIDTH = {};\n\
         constexpr float SCALE = {:e}f;\nconstexpr int MASK = {mask};\nconstexpr bool DROPOUT = {};\n\
         constexpr unsigned THRESHOLD = {threshold}u;\nconstexpr unsigned OFFSET = {offset}u;\n\
         constexpr float KEPT = {kept:e}f;\n",
        storage(kernel.dtype),
        storage(kernel.kv),
        kernel.width,
        kernel.scale,
        kernel.dropout.is_some(),
    )
}
