//! Gradients of the losses of rows.

use deuteron_codegen::argument::{ArgBinding, Argument};
use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Kernel, Launch, Source};
use deuteron_codegen::tile::tensor_map::Mapped;
use deuteron_graph::{Dtype, NodeId};
use deuteron_plan::{CrossEntropyGradientLink, Draft, Link};

use super::{Logits, TARGETS, WEIGHT, X, map, namespace, per_row, product, resized};
use crate::cuda::hopper::{HopperKernel, ROWS, ZEROS, walk_us};

/// Numbers of classes at a time that are tried, at most: each takes a tenth of a millisecond.
const TRIED: usize = 512;

/// Bytes of slopes that exist at once, at most; of one tile's classes there are always some.
const SLOPES: usize = 256 << 20;
/// The first of the grids that multiply, in the text.
const SLOPES_ENTRY: &str = "cross_entropy_slopes";
/// Positions among the arguments of a launch: logsumexp and its gradient, those of the losses; results.
const PER_ROW: usize = 3;
const RESULTS: usize = 6;

/// Gradients of the losses of rows, compiled for their sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct BackwardKernel {
    /// rows, weight and targets
    pub logits: Logits,
    /// logsumexp, its gradient and that of the losses, with strides
    pub per_row: [(ArgBinding, usize); 3],
    /// gradients of rows and weight; none of what is frozen
    pub results: [Option<ArgBinding>; 2],
}

/// The matmuls of some classes.
struct Products {
    /// columns of logits whose slopes exist at once
    width: usize,
    slopes: HopperKernel,
    d_weight: HopperKernel,
    d_x: HopperKernel,
}

impl BackwardKernel {
    /// The kernel of a link, if it takes it.
    pub fn fit(draft: &Draft, link: &CrossEntropyGradientLink, target: &CudaTarget) -> Option<BackwardKernel> {
        let logits = Logits::fit(draft, link.operands, link.smoothing, target)?;
        let narrow = |id| per_row(draft, id).filter(|(arg, _)| arg.dtype == Dtype::F32);
        let per_row = [narrow(link.logsumexp)?, narrow(link.d_logsumexp)?, narrow(link.d_loss)?];
        let asked = |id: &NodeId| draft.outputs.contains(id);
        let results = link.gradients.map(|id| asked(&id).then(|| ArgBinding::whole(draft.graph, id, 0, true)));
        let all = !draft.outputs.is_empty() && draft.outputs.iter().all(|id| link.gradients.contains(id));
        all.then_some(BackwardKernel { logits, per_row, results })
    }

    /// That of a group, if it is gradients that this kernel takes.
    pub fn of(draft: &Draft, target: &CudaTarget) -> Option<BackwardKernel> {
        let [Link::CrossEntropyGradient(link)] = draft.structure.chain()?.links.as_slice() else { return None };
        BackwardKernel::fit(draft, link, target)
    }

    /// What is compiled and launched, cut as it is predicted to be done first.
    pub fn kernel(&self, target: &CudaTarget) -> Kernel {
        self.kernel_of(self.fastest_width(target.processors), target)
    }

    /// The same for so many classes at a time, a multiple of 8 or all of them.
    pub fn kernel_of(&self, width: usize, target: &CudaTarget) -> Kernel {
        let products = self.products(width, target.processors);
        let (pairs, store, shares) = (include_str!("pairs.cu"), include_str!("store.cu"), include_str!("shares.cu"));
        let text = [
            &self.logits.constants(),
            include_str!("backward.cuh"),
            &namespace("slopes", &products.slopes, &[ZEROS, pairs, store, include_str!("slopes.cu")]),
            &namespace("d_b", &products.d_weight, &[ZEROS, pairs, store, include_str!("final.cu")]),
            &namespace("d_a", &products.d_x, &[pairs, store, shares, include_str!("resume.cu")]),
            include_str!("entries.cu"),
        ];
        let variant = format!("{} classes at a time, {}", products.width, products.slopes.describe());
        let launch = Launch::of_grids(self.arguments(), self.grids(&products, target))
            .with_variant(variant, String::new())
            .with_tiling(products.slopes.tiling(SLOPES_ENTRY));
        Kernel::new(Source::Cuda(CudaSource::new("cross_entropy_backward", text.join("\n"))), launch)
    }

    fn arguments(&self) -> Vec<Argument> {
        let Logits { rows, classes, inner, .. } = self.logits;
        let per_row =
            self.per_row.iter().map(|(arg, stride)| Argument::new(arg, (rows - 1) * stride + 1).of_elements());
        let results = self.results.iter().zip([rows, classes]);
        let results = results.filter_map(|(arg, lines)| Some(Argument::new(arg.as_ref()?, lines * inner)));
        self.logits.arguments().into_iter().chain(per_row).chain(results).collect()
    }

    /// The matmuls of so many classes.
    fn products(&self, width: usize, processors: usize) -> Products {
        let &Logits { dtype, rows, inner, strides: [x_stride, w_stride], .. } = &self.logits;
        let pitch = pitch(width);
        Products {
            width,
            slopes: self.logits.product(width, processors),
            d_weight: product(dtype, [width, inner, rows], (1, pitch), (x_stride, 1), processors),
            d_x: product(dtype, [rows, inner, width], (pitch, 1), (w_stride, 1), processors),
        }
    }

    /// Its time with as many classes at a time as slopes may exist of. The width that is chosen takes hardly less.
    pub(super) fn microseconds(&self, target: &CudaTarget) -> f64 {
        let classes = self.logits.classes;
        let width = widths(self.logits.rows, classes).last().unwrap_or(classes);
        let asked = self.results.each_ref().map(Option::is_some);
        let each = self.products(width, target.processors).microseconds(asked, target.processors);
        each * classes as f64 / width as f64
    }

    /// As many classes at a time as are predicted to be done first.
    fn fastest_width(&self, processors: usize) -> usize {
        let classes = self.logits.classes;
        let asked = self.results.each_ref().map(Option::is_some);
        let time = |width: usize| self.products(width, processors).microseconds(asked, processors);
        let total = |&width: &usize| {
            let rest = classes % width;
            (classes / width) as f64 * time(width) + if rest == 0 { 0.0 } else { time(rest) }
        };
        widths(self.logits.rows, classes).min_by(|a, b| total(a).total_cmp(&total(b))).unwrap_or(classes)
    }

    fn grids(&self, products: &Products, target: &CudaTarget) -> Grids {
        let Logits { rows, classes, .. } = self.logits;
        // Where things lie in the workspace.
        let sums = (2 * rows * pitch(products.width)).next_multiple_of(256);
        let whole = 4 * rows.next_multiple_of(ROWS) * products.sums_pitch();
        let added = if products.width < classes && self.results[0].is_some() { whole } else { 0 };
        let starts = (0..classes).step_by(products.width);
        let list = starts.flat_map(|first| self.grids_from(first, products, sums, target)).collect();
        Grids { list, workspace: sums + added, ..Grids::default() }
    }

    /// Those of the classes from `first` on: slopes, then the gradients that are asked for.
    fn grids_from(&self, first: usize, products: &Products, sums: usize, target: &CudaTarget) -> Vec<Grid> {
        let &Logits { rows, classes, inner, strides: [x_stride, w_stride], ref args, .. } = &self.logits;
        let width = products.width.min(classes - first);
        let pitch = pitch(products.width);
        let tail = |stored: Word, pitch: usize| {
            let number = |number: usize| Word::Number(number as u64);
            let per_row = self.per_row.iter().enumerate();
            let addresses =
                per_row.map(|(at, (arg, _))| Word::Argument { position: PER_ROW + at, offset: arg.start() });
            let mut words = vec![Word::Argument { position: TARGETS, offset: args[TARGETS].start() }];
            words.extend(addresses);
            words.extend(self.per_row.iter().map(|&(_, stride)| number(stride)));
            words.extend([number(first), number(width), stored, number(pitch), Word::Workspace(sums)]);
            words.extend([number(products.sums_pitch()), number(usize::from(first + width == classes))]);
            words
        };
        let slopes_by = |lines: usize| map(Mapped::Workspace, 0, [width, rows], pitch, lines);
        let (x, weight) = (args[X].start(), args[WEIGHT].start() + 2 * first * w_stride);
        let [d_x, d_weight] = self.results.each_ref().map(Option::is_some);
        let mut grids = vec![resized(&products.slopes, [rows, width, inner]).grid(
            SLOPES_ENTRY,
            self.logits.maps(first, width, &products.slopes.tile),
            tail(Word::Workspace(0), pitch),
            target,
        )];
        if d_weight {
            let position = RESULTS + usize::from(d_x);
            grids.push(resized(&products.d_weight, [width, inner, rows]).grid(
                "cross_entropy_d_b",
                [slopes_by(64), map(Mapped::Argument(X), x, [inner, rows], x_stride, 64)],
                tail(Word::Argument { position, offset: 2 * first * inner }, inner),
                target,
            ));
        }
        if d_x {
            grids.push(resized(&products.d_x, [rows, inner, width]).grid(
                "cross_entropy_d_a",
                [slopes_by(ROWS), map(Mapped::Argument(WEIGHT), weight, [inner, width], w_stride, 64)],
                tail(Word::Argument { position: RESULTS, offset: 0 }, inner),
                target,
            ));
        }
        grids
    }
}

impl Products {
    /// Numbers from one row of f32 sums to the next: there are whole tiles of them.
    fn sums_pitch(&self) -> usize {
        self.d_x.launch.shape.n.next_multiple_of(self.d_x.tile.columns)
    }

    /// With the gradients of rows and weight that are asked for.
    fn microseconds(&self, [d_x, d_weight]: [bool; 2], processors: usize) -> f64 {
        let time = |product: &HopperKernel, runs: bool| match runs {
            true => walk_us(&product.tile, &product.launch.shape, processors),
            false => 0.0,
        };
        time(&self.slopes, true) + time(&self.d_weight, d_weight) + time(&self.d_x, d_x)
    }
}

/// Elements from one row of slopes to the next: rows start at multiples of 128 bytes.
fn pitch(width: usize) -> usize {
    width.next_multiple_of(64)
}

/// Classes at a time whose slopes are not too many: whole tiles, or all classes.
fn widths(rows: usize, classes: usize) -> impl Iterator<Item = usize> {
    let most = (SLOPES / (2 * rows.max(1)) / ROWS).min(classes.div_ceil(ROWS)).max(1);
    (1..=most).step_by(most.div_ceil(TRIED)).map(move |tiles| (tiles * ROWS).min(classes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_widths_are_tried_and_none_twice() {
        let of = |rows: usize, classes: usize| widths(rows, classes).collect::<Vec<_>>();
        assert_eq!(of(2, 51), [51]);
        assert_eq!(of(1, 300), [ROWS, 2 * ROWS, 300]);
        // Half a gigabyte of slopes of a batch of GPT-2's is cut in parts.
        let largest = SLOPES / 2 / 8192;
        assert!(of(8192, 50257).iter().all(|&width| width <= largest.max(ROWS)));
        assert_eq!(of(8192, 50257).len(), largest / ROWS);
        for (rows, classes) in [(0, 7), (1, usize::MAX / 2), (1, 1 << 31)] {
            let tried = of(rows, classes);
            assert!(tried.len() <= TRIED && tried.windows(2).all(|pair| pair[0] < pair[1]), "{rows} {classes}");
        }
    }
}
