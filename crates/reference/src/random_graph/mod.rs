//! Random graphs with inputs, for differential tests, determined by a seed.
//!
//! A graph grows by steps (`steps.rs`) from one input until it has enough calls. Magnitudes are estimated
//! on the way and squashed before they grow, so that 16-bit storage does not overflow; graphs that still overflow are drawn again.
//! Every value that nothing reads becomes an output.

mod maker;
mod steps;

use std::collections::BTreeMap;

use deuteron_graph::{CallId, Dtype, Graph, GraphError, NodeId, Op, Shape, differentiate};

use crate::array::Array;
use crate::bounds::{Bounded, bounded_by};
use crate::error::ReferenceError;
use crate::generator::Generator;
use crate::primitives::{Interpretation, Rounding, interpret};
use maker::Maker;

/// A graph and values for all its inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// The graph, gradients included where `backward`.
    pub graph: Graph,
    /// In the order of [`Graph::inputs`], rounded to their dtypes.
    pub inputs: Vec<Array>,
    /// The dtype of its activations.
    pub dtype: Dtype,
    /// Whether gradients are among its outputs.
    pub backward: bool,
    /// What it was made from.
    pub seed: u64,
}

/// Fewest and most calls of a graph before differentiation, inputs and constants not counted.
const CALLS: (usize, usize) = (3, 14);
/// Most outputs before differentiation.
const MOST_OUTPUTS: usize = 4;
/// Binary logarithm of the fewest elements that are aimed at.
const FEWEST_ELEMENTS: f64 = 8.5;
/// Most elements that are aimed at, unless a caller says otherwise.
pub const MOST_ELEMENTS: usize = 1 << 17;
/// Magnitude above which a 16-bit result is drawn again: a quarter of what `f16` holds.
const MOST_MAGNITUDE: f64 = 16384.0;
/// Magnitude below which a result is drawn again: the smallest normal `f16`. What is left of a sum that cancels is noise.
const LEAST_MAGNITUDE: f64 = 1.0 / 16384.0;
/// The same for tensors of few elements, which have no larger neighbours to be measured against.
const LEAST_MAGNITUDE_OF_FEW: f64 = 1.0 / 128.0;
/// Elements below which a tensor has few.
const FEW: usize = 32;
/// Sizes where kernels change shape: one, around powers of two, around a warp's share, and those of real models.
const SIZES: [usize; 31] = [
    1, 1, 2, 3, 7, 8, 16, 31, 33, 48, 63, 64, 65, 96, 127, 128, 129, 200, 255, 256, 257, 384, 511, 512, 768, 1000,
    1024, 1500, 2048, 3072, 4095,
];

/// The case of a seed.
pub fn random_case(seed: u64) -> Case {
    random_case_within(seed, MOST_ELEMENTS)
}

/// A case of a seed that aims at no more elements of its first input than this many. Sizes are spread evenly over their logarithms from the fewest
/// on, so that small graphs, whose kernels have all the same edges, are checked many times as fast.
pub fn random_case_within(seed: u64, most_elements: usize) -> Case {
    drawn(seed, most_elements, Rounding::Exact).case
}

/// The same case, and what [`bounded`](crate::bounded) gives for it. Whether a case is drawn again is seen in runs of the reference, and bounds
/// need the same ones.
pub fn random_bounded_case(seed: u64, most_elements: usize) -> Result<(Case, Vec<Bounded>), ReferenceError> {
    let Drawn { case, exact, rounded } = drawn(seed, most_elements, Rounding::Analysed);
    let expected = bounded_by(&case.graph, exact, rounded)?;
    Ok((case, expected))
}

/// A case that is not drawn again, with both runs that show it.
struct Drawn {
    case: Case,
    exact: Interpretation,
    rounded: Vec<Array>,
}

fn drawn(seed: u64, most_elements: usize, exact: Rounding) -> Drawn {
    let mut generator = Generator::new(seed);
    loop {
        // A graph that cannot be built is a mistake in the steps, not bad luck.
        let case = attempt(seed, generator.bits(), most_elements);
        let case = case.unwrap_or_else(|error| panic!("random case {seed}: {error}"));
        if let Some(drawn) = case.and_then(|case| Drawn::of(case, exact)).filter(Drawn::is_tame) {
            return drawn;
        }
    }
}

/// How often each call occurs, by the name reports use; inputs and constants are left out.
pub fn op_counts(graph: &Graph) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for id in calls(graph) {
        *counts.entry(graph.call_name(id).to_string()).or_default() += 1;
    }
    counts
}

/// The calls that compute something.
fn calls(graph: &Graph) -> impl Iterator<Item = CallId> {
    let mut previous = None;
    graph.nodes().iter().filter_map(move |node| {
        let is_new = previous != Some(node.call);
        previous = Some(node.call);
        let computes = !matches!(node.op, Op::Input { .. } | Op::Const { .. });
        // A composite may begin with a constant: it counts by the length of its call.
        let composite = graph.calls()[node.call.index()].end - graph.calls()[node.call.index()].start > 1;
        (is_new && (computes || composite)).then_some(node.call)
    })
}

/// A case, or `None` if it came out too long or with too many results.
fn attempt(seed: u64, bits: u64, most_elements: usize) -> Result<Option<Case>, GraphError> {
    let dtype = Dtype::FLOATS[(seed % 3) as usize];
    let mut generator = Generator::new(bits);
    let shape = random_shape(&mut generator, most_elements);
    let target = CALLS.0 + generator.below(CALLS.1 - CALLS.0 - 2);
    let mut maker = Maker::new(&format!("random{seed}"), generator, dtype);
    maker.begin(&shape)?;
    while calls(&maker.graph).count() < target {
        maker.step()?;
    }
    if !maker.declare_outputs(MOST_OUTPUTS)? || calls(&maker.graph).count() > CALLS.1 {
        return Ok(None);
    }
    let Maker { graph, inputs, mut generator, .. } = maker;
    // Each dtype is seen forward and backward in turn.
    let backward = seed / 3 % 2 == 1;
    if !backward {
        return Ok(Some(Case { graph, inputs, dtype, backward, seed }));
    }
    with_gradients(Case { graph, inputs, dtype, backward, seed }, &mut generator)
}

/// The case continued by its gradients with respect to some of its inputs. `None` if no output depends on them.
fn with_gradients(forward: Case, generator: &mut Generator) -> Result<Option<Case>, GraphError> {
    let floats = forward.graph.inputs().iter().copied().filter(|&id| forward.graph.node(id).dtype.is_float());
    let wrt: Vec<NodeId> =
        floats.enumerate().filter(|(i, _)| *i == 0 || generator.chance(0.8)).map(|(_, id)| id).collect();
    let differentiated = differentiate(&forward.graph, &wrt)?;
    if differentiated.seeds.is_empty() {
        return Ok(None);
    }
    let mut inputs = forward.inputs;
    for &seed in &differentiated.seeds {
        let node = differentiated.graph.node(seed);
        inputs.push(Array::normal(node.shape.clone(), generator.bits()).rounded(node.dtype));
    }
    Ok(Some(Case { graph: differentiated.graph, inputs, ..forward }))
}

/// `[rows, cols]` or `[a, b, cols]`; log-uniform in the number of elements.
fn random_shape(generator: &mut Generator, most_elements: usize) -> Shape {
    let most = (most_elements as f64).log2().max(FEWEST_ELEMENTS);
    let budget = generator.uniform(FEWEST_ELEMENTS, most).exp2() as usize;
    let mut size_within = |budget: usize| {
        let fitting: Vec<usize> = SIZES.into_iter().filter(|&size| size <= budget.max(1)).collect();
        generator.pick(&fitting)
    };
    let cols = size_within(budget);
    let rows = size_within(budget / cols);
    if !generator.chance(0.35) {
        return Shape::from([rows, cols]);
    }
    let batch = generator.pick(&[1, 2, 3, 4, 7]);
    if batch * rows * cols > budget { Shape::from([1, rows, cols]) } else { Shape::from([batch, rows, cols]) }
}

impl Drawn {
    fn of(case: Case, exact: Rounding) -> Option<Drawn> {
        let run = |rounding| interpret(&case.graph, &case.inputs, rounding).ok();
        let (rounded, exact) = (run(Rounding::Storage)?.outputs, run(exact)?);
        Some(Drawn { case, exact, rounded })
    }

    /// Whether storage holds every result: finite wherever the exact one is, far from overflow and from underflow.
    fn is_tame(&self) -> bool {
        self.exact.outputs.iter().zip(&self.rounded).all(|(exact, rounded)| {
            let magnitude = exact.max_abs();
            let least = if exact.values.len() < FEW { LEAST_MAGNITUDE_OF_FEW } else { LEAST_MAGNITUDE };
            (magnitude == 0.0 || (least..MOST_MAGNITUDE).contains(&magnitude))
                && exact.values.iter().zip(&rounded.values).all(|(exact, rounded)| {
                    exact.is_finite() == rounded.is_finite() && !exact.is_nan() && !rounded.is_nan()
                })
        })
    }
}
