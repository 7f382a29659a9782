//! All limits, with their reasons.

/// Nesting of messages, functions and branches. Real models nest less than ten deep; the stack holds this many easily.
pub(crate) const MAX_DEPTH: usize = 32;

/// Operations, tensors or stated values of a graph. The largest exports of language models have some tens of thousands.
pub(crate) const MAX_NODES: usize = 1 << 18;

/// Operations with their operands, functions inlined: calls of calls could multiply without end.
pub(crate) const MAX_WORK: usize = 1 << 20;

/// Operations of the canonical form, of which an operator of the file makes up to some twenty.
pub(crate) const MAX_IR_NODES: usize = 1 << 20;

/// Inputs and outputs of a model, initializers apart. A cache of 100 layers has 400.
pub(crate) const MAX_PORTS: usize = 1 << 14;

/// Bytes of a name that messages and reports show.
pub(crate) const MAX_NAME: usize = 256;

/// Entries of one repeated field (inputs of a node, axes of an attribute): far above any model, and small in memory.
pub(crate) const MAX_ITEMS: usize = 1 << 20;

/// Axes read from a file. More than the graph's own limit of 8, so that the message names the tensor and its rank.
pub(crate) const MAX_DIMS: usize = 64;

/// Elements of one folded constant: the causal mask of 4096 positions.
pub(crate) const FOLD_VALUE_ELEMENTS: usize = 1 << 24;

/// Bytes of all folded constants of an import. They live until it ends.
pub(crate) const FOLD_BYTES: usize = 1 << 28;

/// Elements read and written while folding: about a second of work.
pub(crate) const FOLD_WORK: usize = 1 << 28;

/// A float initializer of at most this many elements, on one axis, may be folded: rotary frequencies, scales. Larger
/// ones are weights, and weights stay where they are.
pub(crate) const FOLD_FLOAT_ELEMENTS: usize = 256;

/// A `Gather` of at most this many scattered constant indices becomes slices; beyond, it stays a gather.
pub(crate) const GATHER_SLICES: usize = 8;

/// Operators that one recognition follows in a row: the longest pattern (GELU by tanh) has fewer.
pub(crate) const PATTERN_DEPTH: usize = 16;

/// Operators that one recognition looks at where a pattern branches.
pub(crate) const PATTERN_STEPS: usize = 64;

/// What a mask adds to hide a key, at most. Models write -1e4 (16-bit), -1e9, the lowest float or -inf; the exponential
/// of any of them is 0 in f32.
pub(crate) const HIDDEN: f64 = -1e4;

/// Elements of the patches of one convolution or pool that are written out: VGG's first layers have a tenth.
pub(crate) const MAX_PATCH_ELEMENTS: usize = 1 << 28;

/// Updates of one place that a scatter combines, one after the other.
pub(crate) const SCATTER_ROUNDS: usize = 16;

/// Largest values that are found one after the other.
pub(crate) const TOP_ROUNDS: usize = 16;

/// Steps of a recurrent layer, a loop or a scan that are written out.
pub(crate) const MAX_STEPS: usize = 128;
