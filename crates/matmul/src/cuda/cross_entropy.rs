//! Losses of rows of logits that are never stored, and their gradients, for 16-bit operands on Hopper: what `cross_entropy/*.cu` take, how they
//! are cut, and their launches. The matmuls are those of `hopper.rs`; what follows a tile is new.
//!
//! - Losses: one matmul whose tiles leave two or three numbers per row, and a grid that combines these.
//! - Gradients: slopes of the logits of some classes at a time, all rows, go to the workspace; then the gradient of these classes' weights
//!   and a share of that of the rows. Four matmuls in all, where storing the logits would take three and memory for them.

mod backward;
mod forward;

use deuteron_codegen::argument::{ArgBinding, Argument};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Offer, Request, offered};
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_codegen::tile::tensor_map::{Mapped, TensorMap};
use deuteron_codegen::tile::{self, Part};
use deuteron_graph::{Dtype, NodeId};
use deuteron_plan::{Draft, Link, Work, primitive_work};

use super::hopper::{self, HopperKernel, HopperTile, MAX_SIZE, ROWS};
use crate::kernel::{Matmul, MatmulLaunch};
pub use backward::BackwardKernel;
pub use forward::ForwardKernel;

/// Losses and their gradients on the matrix units of Hopper.
pub struct CrossEntropyFamily;

impl Family<CudaTarget> for CrossEntropyFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        match group.structure.chain()?.links.as_slice() {
            [Link::CrossEntropy(link)] => {
                let kernel = ForwardKernel::fit(&group, link, target)?;
                let microseconds = Some(kernel.microseconds(target));
                offered(move || Work { microseconds, ..primitive_work(&group) }, move || kernel.kernel(target))
            }
            [Link::CrossEntropyGradient(link)] => {
                let kernel = BackwardKernel::fit(&group, link, target)?;
                let microseconds = Some(kernel.microseconds(target));
                offered(move || Work { microseconds, ..primitive_work(&group) }, move || kernel.kernel(target))
            }
            _ => None,
        }
    }
}

/// What losses and gradients read: rows, weight, targets.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    /// storage type of rows and weight
    pub dtype: Dtype,
    /// rows of logits
    pub rows: usize,
    /// columns of logits
    pub classes: usize,
    /// the inner size
    pub inner: usize,
    /// elements from one row of the rows, and of the weight, to the next
    pub strides: [usize; 2],
    /// share of the target's weight that all classes have evenly
    pub smoothing: f64,
    /// rows, weight and targets
    pub args: [ArgBinding; 3],
}

/// Positions of the operands among the arguments of a launch.
const X: usize = 0;
const WEIGHT: usize = 1;
const TARGETS: usize = 2;

impl Logits {
    /// Those of a call, if its operands lie so that tensor maps take them.
    fn fit(draft: &Draft, [x, weight, targets]: [NodeId; 3], smoothing: f64, target: &CudaTarget) -> Option<Logits> {
        let (rows, inner) = (draft.graph.node(x).shape.rows(), draft.graph.node(x).shape.cols());
        let (classes, dtype) = (draft.graph.node(weight).shape.rows(), draft.graph.node(x).dtype);
        let ((x_arg, x_stride), (w_arg, w_stride)) = (matrix(draft, x)?, matrix(draft, weight)?);
        let (targets_arg, targets_stride) = per_row(draft, targets)?;
        let narrow = matches!(dtype, Dtype::F16 | Dtype::Bf16) && x_arg.dtype == dtype && w_arg.dtype == dtype;
        let mapped =
            hopper::is_fit_for_map((x_stride, 1), &x_arg, None) && hopper::is_fit_for_map((w_stride, 1), &w_arg, None);
        let sized = [rows, classes, inner].iter().all(|size| (1..MAX_SIZE).contains(size)) && classes >= 16;
        let fits = target.arch.has_wgmma() && narrow && mapped && sized && inner.is_multiple_of(8);
        (fits && (targets_stride == 1 || rows == 1)).then_some(Logits {
            dtype,
            rows,
            classes,
            inner,
            strides: [x_stride, w_stride],
            smoothing,
            args: [x_arg, w_arg, targets_arg],
        })
    }

    /// What a device has to know of them.
    fn arguments(&self) -> Vec<Argument> {
        let reach = |rows: usize, stride: usize| (rows - 1) * stride + self.inner;
        let [x, weight, targets] = &self.args;
        vec![
            Argument::new(x, reach(self.rows, self.strides[0])),
            Argument::new(weight, reach(self.classes, self.strides[1])),
            Argument::new(targets, self.rows).of_elements(),
        ]
    }

    /// What all texts begin with.
    fn constants(&self) -> String {
        let (kept, spread) = (1.0 - self.smoothing, self.smoothing / self.classes as f64);
        let parts = [
            Part::DependentLaunch,
            Part::Conversions,
            Part::Warp,
            Part::GlobalMemory,
            Part::NamedBarrier,
            Part::Cluster,
            Part::Tma,
            Part::Registers,
            Part::Wgmma,
            Part::Matrix,
        ];
        let own =
            format!("constexpr float KEPT = {:?}f;\nconstexpr float SPREAD = {:e}f;\n", kept as f32, spread as f32);
        own + &tile::text(&parts)
    }

    /// The matmul of rows and `width` classes.
    fn product(&self, width: usize, processors: usize) -> HopperKernel {
        let shape = [self.rows, width, self.inner];
        product(self.dtype, shape, (self.strides[0], 1), (1, self.strides[1]), processors)
    }

    /// Maps of its operands, the classes from `first` on.
    fn maps(&self, first: usize, width: usize, tile: &HopperTile) -> [TensorMap; 2] {
        let start = |position: usize| self.args[position].start();
        let classes = start(WEIGHT) + 2 * first * self.strides[1];
        [
            map(Mapped::Argument(X), start(X), [self.inner, self.rows], self.strides[0], ROWS),
            map(Mapped::Argument(WEIGHT), classes, [self.inner, width], self.strides[1], tile.columns),
        ]
    }
}

/// A matrix whose rows are contiguous, and the stride of these.
fn matrix(draft: &Draft, value: NodeId) -> Option<(ArgBinding, usize)> {
    let placed = draft.placement.get(value)?;
    let &[row, column] = placed.layout.strides.as_slice() else { return None };
    let arg = ArgBinding::whole(draft.graph, placed.base, placed.layout.offset, false);
    (column == 1 || placed.layout.shape.cols() == 1).then_some((arg, row))
}

/// A number per row, and the stride of these.
fn per_row(draft: &Draft, value: NodeId) -> Option<(ArgBinding, usize)> {
    let placed = draft.placement.get(value)?;
    let arg = ArgBinding::whole(draft.graph, placed.base, placed.layout.offset, false);
    let stride = placed.layout.strides.first().copied()?;
    (arg.dtype == draft.graph.node(value).dtype).then_some((arg, stride))
}

/// A matmul `[m, n, k]` whose blocks walk over tiles, and whose operands have these strides of rows and columns.
fn product(
    dtype: Dtype,
    [m, n, k]: [usize; 3],
    a: (usize, usize),
    b: (usize, usize),
    processors: usize,
) -> HopperKernel {
    let shape = MatmulShape { m, n, k, batch: Vec::new(), a, b, c: (n, 1) };
    let tile = hopper::fastest_walk(&shape, processors);
    let matmul =
        Matmul { left: dtype, right: dtype, result: dtype, rights: 1, routed: false, prologue: None, epilogue: None };
    let launch = MatmulLaunch { args: Vec::new(), shape, prologue_axes: Vec::new(), axes: Vec::new() };
    HopperKernel { matmul, launch, tile, updates: Vec::new() }
}

/// The same matmul of other sizes.
fn resized(product: &HopperKernel, [m, n, k]: [usize; 3]) -> HopperKernel {
    let mut product = product.clone();
    product.launch.shape = MatmulShape { m, n, k, ..product.launch.shape };
    product
}

/// A map of a matrix, innermost axis first, and of tiles of 64 elements by so many lines.
fn map(of: Mapped, offset: usize, [inner, outer]: [usize; 2], stride: usize, lines: usize) -> TensorMap {
    TensorMap {
        of,
        offset,
        rank: 3,
        sizes: [inner as u64, outer as u64, 1, 1, 1],
        strides: [2 * stride as u64, 16, 16, 16],
        tile: [64, lines as u32, 1, 1, 1],
    }
}

/// The text of a matmul, what its sums begin with and what follows its tiles, in a namespace of its own.
fn namespace(name: &str, product: &HopperKernel, around: &[&str]) -> String {
    let text = hopper::text(around, product.is_persistent());
    format!("namespace {name} {{\n{}\n{text}}}  // namespace {name}\n", product.constants())
}
