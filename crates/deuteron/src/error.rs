//! Errors of the public API.

use deuteron_device::DeviceError;
use deuteron_graph::memory::OutOfMemory;
use deuteron_graph::{Dtype, GraphError, Shape};
use deuteron_kernels::NoKernel;
use deuteron_plan::{MachineError, PlanError, Strategy};
use deuteron_reference::ReferenceError;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The graph could not be built.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// The graph could not be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A kernel of the plan cannot be generated.
    #[error(transparent)]
    NoKernel(#[from] NoKernel),
    /// The device refused or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The reference could not be computed.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// An operation that is only described.
    #[error("`{0}` is opaque: it can be analysed, not run; replace it by operations the graph knows")]
    Opaque(String),
    /// A machine file could not be read.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// A tensor's data does not fill its shape.
    #[error("a {dtype}{shape} tensor has {expected} elements, got {got}")]
    TensorSize {
        /// dtype of the tensor
        dtype: Dtype,
        /// shape of the tensor
        shape: Shape,
        /// elements of the shape
        expected: usize,
        /// elements given
        got: usize,
    },
    /// A shape whose bytes cannot be counted.
    #[error("a tensor of shape {0} is too large; at most 2^48 elements and rank 8 are allowed")]
    TensorTooLarge(Shape),
    /// A view that strides cannot express.
    #[error("cannot {what} a tensor of shape {shape}: {why}")]
    TensorView {
        /// the requested view
        what: &'static str,
        /// its shape
        shape: Shape,
        /// why not
        why: String,
    },
    /// The wrong number of inputs.
    #[error("{graph}: expected {expected} inputs ({names}), got {got}")]
    InputCount {
        /// the graph
        graph: String,
        /// how many it has
        expected: usize,
        /// their names
        names: String,
        /// how many were given
        got: usize,
    },
    /// An input of another type or layout than the session was made for.
    #[error("input `{name}`: expected {expected}, got {got}")]
    Input {
        /// its name
        name: String,
        /// what the session was made for
        expected: String,
        /// what was given
        got: String,
    },
    /// A target of a loss is not the number of a class.
    #[error("input `{name}`: expected a class from 0 to {last}{}, got {got} in row {row}", .ignored.map(|ignored| format!(" or {ignored}, which is ignored")).unwrap_or_default())]
    Target {
        /// its name
        name: String,
        /// the last class
        last: usize,
        /// the target of rows without a loss
        ignored: Option<i32>,
        /// the row
        row: usize,
        /// its target
        got: i32,
    },
    /// The wrong number of states.
    #[error("{graph}: expected {expected} states, got {got}; run a session with states by `run_with`")]
    StateCount {
        /// the graph
        graph: String,
        /// how many were declared
        expected: usize,
        /// how many were given
        got: usize,
    },
    /// A state that other tensors look into.
    #[error("state `{0}`: expected memory of its own, got a tensor that shares it; drop its clones and views")]
    SharedState(String),
    /// Pinned fusions in a plan that is not searched for.
    #[error("expected the strategy fused for a plan with pinned fusions, got {0}")]
    Pins(Strategy),
    /// A state with gaps, or in another order.
    #[error("state `{0}`: expected a contiguous layout")]
    StateLayout(String),
    /// A node that cannot be kept in place.
    #[error(
        "`{0}` cannot be a state: expected an input that only one append reads, with the result of the append as an output"
    )]
    NoState(String),
    /// An update that cannot be declared.
    #[error("state `{state}`, updated to `{result}`: {problem}")]
    Update {
        /// the state
        state: String,
        /// its new value
        result: String,
        /// why not
        problem: UpdateProblem,
    },
    /// An output that is memory of the caller.
    #[error("output `{0}` is a state; read the tensor that was handed to `run_with`")]
    OutputIsState(String),
    /// An output that does not exist.
    #[error("expected an output below {outputs}, got {index}")]
    OutputIndex {
        /// how many there are
        outputs: usize,
        /// the requested output
        index: usize,
    },
    /// Operands of a ready-made op that do not fit it.
    #[error("{op}: expected {expected}, got {got}")]
    Operands {
        /// the op
        op: &'static str,
        /// what it takes
        expected: String,
        /// what it was given
        got: String,
    },
    /// The catalogue has no op of this name.
    #[error("unknown op `{name}`; did you mean one of: {known}?")]
    UnknownOp {
        /// the requested name
        name: String,
        /// what there is
        known: String,
    },
    /// An op, a size or a storage type without hand-written rungs.
    #[error(
        "{op} has no ladder here; on a GPU there are ladders of add_act and norm_act with gelu and of softmax (f32 or bf16; rows of a \
         multiple of 8 columns, at most {widest}), of attention and attention_add_norm (causal, heads of 64, bf16), of \
         attention_block and of matmul, all of them forward"
    )]
    NoLadder {
        /// the op
        op: &'static str,
        /// the longest row
        widest: usize,
    },
    /// A text or a rung in place of a kernel, but the plan does not have exactly one kernel.
    #[error(
        "`{graph}` is planned as {kernels} kernels, but a rung or a source replaces exactly one: choose an op or a --plan with one kernel"
    )]
    NotOneKernel {
        /// the graph
        graph: String,
        /// how many it is
        kernels: usize,
    },
    /// A rung that does not support a graph.
    #[error(
        "the rung `{rung}` does not support `{graph}`: rungs of row work are in f32 and bf16, with a multiple of 8 columns, at most {widest}, where there \
         are rows; those of attention are causal, in bf16, with heads of 64; those of matmul are in f16 and bf16"
    )]
    NoRung {
        /// its name
        rung: &'static str,
        /// the graph
        graph: String,
        /// the longest row
        widest: usize,
    },
    /// The emulator refused a kernel or found a mistake.
    #[error(transparent)]
    Emulator(#[from] deuteron_emulator::EmulatorError),
    /// A matmul without hand-written rungs.
    #[error(
        "the ladder of matmul supports f16 and bf16 on a GPU and f32 on a CPU, weights stored as [inner size, columns], without --epilogue; got {got}"
    )]
    NoMatmulLadder {
        /// what differs
        got: String,
    },
    /// Variants of a kernel were requested for a plan that does not have exactly one kernel.
    #[error("expected a graph that is one kernel on this device, got a plan of {0} kernels")]
    SeveralKernels(usize),
    /// Launch shapes were requested for a device whose kernels have no variants.
    #[error("expected a GPU, whose kernels have variants to measure, got {device}")]
    NotTunable {
        /// what the engine runs on
        device: String,
    },
    /// A launch shape that broke the device.
    #[error("while tuning `{kernel}` with {config}: {problem}")]
    Trial {
        /// the kernel
        kernel: String,
        /// the launch shape
        config: String,
        /// what the device says
        problem: Box<DeviceError>,
    },
    /// A kernel whose suggested launch shape gives wrong results: a defect of ours.
    #[error("`{kernel}` with {config} is wrong ({problem}): nothing is tuned; please report this with the graph")]
    WrongKernel {
        /// the kernel
        kernel: String,
        /// the launch shape
        config: String,
        /// what is wrong
        problem: String,
    },
    /// The op has no gradient.
    #[error("{0} has no backward: its result is quantised")]
    NoBackward(&'static str),
}

impl From<OutOfMemory> for Error {
    fn from(missing: OutOfMemory) -> Error {
        Error::Device(missing.into())
    }
}

/// Why a state cannot be updated with a value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UpdateProblem {
    /// The state is another node.
    #[error("expected a state that is an input")]
    NoInput,
    /// One input, two states.
    #[error("expected one state for each input, got this one twice")]
    StateTwice,
    /// The new value is the state itself, or other memory of the caller.
    #[error("expected a value that the graph computes, got an input; a view of it is copied")]
    NotComputed,
    /// The new value is not an output.
    #[error("expected a value that is an output")]
    NoOutput,
    /// One value, two states.
    #[error("expected one value per state, got a value that already updates another state")]
    ResultTwice,
    /// The new value does not fit the state.
    #[error("expected {expected}, got {got}")]
    Type {
        /// dtype and shape of the state
        expected: String,
        /// those of the value
        got: String,
    },
}
