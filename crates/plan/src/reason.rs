//! Why two groups are not fused: a closed list of codes, each with its numbers, its page and its hint.

use deuteron_graph::NodeId;
use serde::Serialize;

use crate::kind::GroupKind;
use crate::space::Space;
use crate::units::Seconds;

/// Why a fusion is refused. Codes are stable.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Reason {
    /// A third group needs the first and is needed by the second.
    #[error("another kernel is between them, through %{}", through.index())]
    WouldFormCycle {
        /// a node on the way
        through: NodeId,
    },
    /// Rows or columns differ.
    #[error("rows and columns differ: {producer} and {consumer}")]
    DifferentSpace {
        /// of the producer
        producer: Space,
        /// of the consumer
        consumer: Space,
    },
    /// The consumer needs a value that is complete only after the last row.
    #[error("%{} is complete only after the last row", value.index())]
    NeedsAllRows {
        /// the value
        value: NodeId,
    },
    /// A matmul beside work that needs whole rows.
    #[error(
        "the matmul is {} here ({intensity:.0} flop/byte {} {ridge:.0}) and its neighbour needs whole rows: a block that computed \
         all {cols} columns of its rows could not use the tiles that {units} need ({rows} rows; up to {few} are allowed)",
        if intensity > ridge { "compute-bound" } else { "memory-bound" },
        if intensity > ridge { ">" } else { "<=" }
    )]
    WholeRows {
        /// flops per byte of the matmul
        intensity: f64,
        /// flops per byte above which the matrix units are the bottleneck on this machine
        ridge: f64,
        /// rows of the matmul
        rows: usize,
        /// the largest number of rows at which the fusion is allowed
        few: usize,
        /// columns that one block would have to own
        cols: usize,
        /// the units that run the matmul: tensor cores, or the vector units of a CPU
        units: &'static str,
    },
    /// A view between them moves elements across rows or columns.
    #[error("%{} moves elements to other rows or columns", view.index())]
    ViewMovesData {
        /// the view
        view: NodeId,
    },
    /// Together they would read and write too many tensors.
    #[error("together they access {needed} tensors; at most {available} are allowed")]
    TooManyArguments {
        /// how many
        needed: usize,
        /// the limit
        available: usize,
    },
    /// A row of temporaries would not stay in the cache.
    #[error("the temporaries of a row take {needed} bytes; only {available} fit the cache")]
    RowTooLong {
        /// bytes of one row
        needed: usize,
        /// the limit
        available: usize,
    },
    /// The strategy does not fuse separate calls.
    #[error("this strategy does not fuse across calls")]
    Strategy,
    /// The fused kernel would have too many primitives.
    #[error("together they have {needed} primitives; at most {available} are allowed")]
    TooManyNodes {
        /// how many
        needed: usize,
        /// the limit
        available: usize,
    },
    /// No skeleton contains both kinds of work.
    #[error("no kernel skeleton contains both {producer} and {consumer} work")]
    OtherKernel {
        /// of the producer
        producer: GroupKind,
        /// of the consumer
        consumer: GroupKind,
    },
    /// Several matmuls without a common operand.
    #[error("{products} matmuls without a common operand would have to run one after another inside one kernel")]
    SeveralProducts {
        /// how many
        products: usize,
    },
    /// Another kernel reads a value that the fused kernel would not store.
    #[error("%{} would be computed in the prologue of a matmul, but another kernel reads it too", value.index())]
    ReadElsewhere {
        /// the value
        value: NodeId,
    },
    /// The planner knows the skeleton, but this device has no generator for it yet.
    #[error("this version cannot generate a kernel of the form `{form}` for this device")]
    NotOffered {
        /// the skeleton
        form: &'static str,
    },
    /// Legal, but slower than separate kernels.
    #[error("{}", slower(*extra))]
    Slower {
        /// the difference
        extra: Seconds,
    },
    /// Legal and generated, but slower than separate kernels for a reason that the cost model does not include.
    #[error("separate kernels are faster: {why}")]
    Drawback {
        /// the reason
        why: &'static str,
    },
    /// Excluded by --force or --forbid.
    #[error("excluded by --forbid or --force")]
    Forbidden,
    /// The backward pass recomputes it, so that the forward pass need not store it.
    #[error("the backward pass recomputes %{}, so that the forward pass need not store it", value.index())]
    Recomputed {
        /// the recomputed value
        value: NodeId,
    },
}

/// A difference below the resolution of measurements is reported as a tie.
fn slower(extra: Seconds) -> String {
    match extra.us() {
        us if us < 0.05 => "legal, but the best plan with it is no faster".to_string(),
        _ => format!("legal, but the best plan with it takes {extra} longer"),
    }
}

impl Reason {
    /// The stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Reason::WouldFormCycle { .. } => "E-PLAN-001",
            Reason::DifferentSpace { .. } => "E-PLAN-002",
            Reason::NeedsAllRows { .. } => "E-PLAN-003",
            Reason::WholeRows { .. } => "E-PLAN-004",
            Reason::ViewMovesData { .. } => "E-PLAN-005",
            Reason::TooManyArguments { .. } => "E-PLAN-006",
            Reason::RowTooLong { .. } => "E-PLAN-007",
            Reason::Strategy => "E-PLAN-008",
            Reason::TooManyNodes { .. } => "E-PLAN-009",
            Reason::OtherKernel { .. } => "E-PLAN-010",
            Reason::SeveralProducts { .. } => "E-PLAN-011",
            Reason::ReadElsewhere { .. } => "E-PLAN-012",
            Reason::NotOffered { .. } => "E-PLAN-013",
            Reason::Slower { .. } => "E-PLAN-014",
            Reason::Forbidden => "E-PLAN-015",
            Reason::Recomputed { .. } => "E-PLAN-016",
            Reason::Drawback { .. } => "E-PLAN-017",
        }
    }

    /// What the user can do about it.
    pub fn hint(&self) -> &'static str {
        page(self.code()).map_or("", |page| page.hint)
    }
}

/// The page of a code: what `deuteron explain` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Page {
    /// `E-PLAN-004`
    pub code: &'static str,
    /// a few words
    pub title: &'static str,
    /// what it means, and why the rule exists
    pub meaning: &'static str,
    /// a graph in text form that shows it; empty where one line does not
    pub example: &'static str,
    /// what to do
    pub hint: &'static str,
}

/// The page of a code.
pub fn page(code: &str) -> Option<&'static Page> {
    PAGES.iter().find(|page| page.code.eq_ignore_ascii_case(code))
}

/// All codes.
pub const PAGES: &[Page] = &[
    Page {
        code: "E-PLAN-001",
        title: "another kernel in between",
        meaning: "A third kernel reads a result of the first group, and the second group reads a result of that third \
                  kernel. If the two groups were one kernel, it would have to run both before and after the third.",
        example: "a = relu x[64,8] ; m = matmul a w[8,8] ; t = matmul m v[8,8] ; c = add a t ; out c",
        hint: "fuse the kernel in between too, or reorder the computation so that there is none",
    },
    Page {
        code: "E-PLAN-002",
        title: "rows or columns differ",
        meaning: "A row kernel has one number of rows and one number of columns. A value with another number of rows, or with another \
                  number of columns than 1, has no element at the same position.",
        example: "a = relu x[4,8] ; b = relu y[2,8] ; out a b",
        hint: "reshape so that both run over the same rows and columns, if the computation allows it",
    },
    Page {
        code: "E-PLAN-003",
        title: "complete only after the last row",
        meaning: "A column sum, or a table that rows are scattered into, is complete only when every row has been processed. A \
                  kernel that works row by row cannot use it before that.",
        example: "s = column_sum x[64,8] ; y = add x s ; out y",
        hint: "none: two kernels are needed. The sum itself is computed in the kernel that computes its rows",
    },
    Page {
        code: "E-PLAN-004",
        title: "a matmul beside work that needs whole rows",
        meaning: "A norm or a softmax needs a whole row before it can compute its first element. A tiled matmul distributes a \
                  row over many blocks. The two have different bottlenecks, memory and the matrix units. A block that computed whole rows would hold only a few of them, would load all weights \
                  again for every few rows, and would leave the tensor cores idle. With few rows (decoding) the matmul is limited \
                  by reading its weights anyway, so the fusion is allowed and priced. It is also allowed after a matmul whose \
                  rows fit a cluster of blocks and, on GPUs with such clusters, before one.",
        example: "y = linear x[8192,768] w[768,4096] ; z = layer_norm y g[4096] b[4096] ; out z",
        hint: "after a matmul, rows that fit a cluster are fused (up to 2048 columns on Hopper); otherwise let the matmul \
               write its rows and fuse the norm with the residual add, or use an op whose kernel computes whole rows \
               (attention_block)",
    },
    Page {
        code: "E-PLAN-005",
        title: "a view moves elements",
        meaning: "A transpose, a slice or a reshape between the two moves elements to other rows or columns, so a thread would need \
                  values that another thread computes.",
        example: "a = relu x[2,3,8] ; t = transpose a [1,0,2] ; b = relu t ; out b",
        hint: "apply the view to the inputs of the first kernel instead of its result, if the computation allows it",
    },
    Page {
        code: "E-PLAN-006",
        title: "too many tensors",
        meaning: "Each tensor is a stream of addresses. Beyond the limit of the machine, hardware prefetchers stop working (CPU) or \
                  pointers take the registers that values need (GPU).",
        example: "",
        hint: "split the computation where few values are live",
    },
    Page {
        code: "E-PLAN-007",
        title: "the row is too long",
        meaning: "A row that is reduced is kept in registers, in shared memory or in the second-level cache until the reduction is \
                  done. This row does not fit.",
        example: "",
        hint: "use shorter rows or a 16-bit dtype; separate kernels read the row again instead",
    },
    Page {
        code: "E-PLAN-008",
        title: "the strategy does not fuse across calls",
        meaning: "The plans `naive`, `eager` and `unfused` are baselines: they do not fuse separate calls.",
        example: "",
        hint: "use the plan `fused`",
    },
    Page {
        code: "E-PLAN-009",
        title: "too many primitives",
        meaning: "Kernels are limited in size, so that they compile quickly and can be read.",
        example: "",
        hint: "none needed: the planner splits the chain where it costs least",
    },
    Page {
        code: "E-PLAN-010",
        title: "no common skeleton",
        meaning: "Every kernel has one of a few skeletons: row, matmul, attention, copy, scatter. No skeleton contains both kinds \
                  of work.",
        example: "s = scatter_add i:i32[4] x[4,8] rows=16 ; y = relu s ; out y",
        hint: "none",
    },
    Page {
        code: "E-PLAN-011",
        title: "several matmuls",
        meaning: "Two matmuls share a kernel if they have the same left operand (as one wider matmul), or as parts of attention. \
                  Otherwise they would run one after another inside the kernel, which saves nothing.",
        example: "a = matmul x[64,64] w[64,64] ; b = matmul a v[64,64] ; out b",
        hint: "none",
    },
    Page {
        code: "E-PLAN-012",
        title: "read elsewhere too",
        meaning: "A prologue computes an operand of a matmul while it is loaded, once for every tile that needs it, and does not \
                  store it. Another kernel reads this value, so it must be stored.",
        example: "a = relu x[64,64] ; b = matmul a w[64,64] ; out a b",
        hint: "keep the producer as a kernel of its own",
    },
    Page {
        code: "E-PLAN-013",
        title: "not generated here",
        meaning: "The fusion is legal and has a price, but this version has no generator for such a kernel on this device. \
                  `analyze --conceivable` plans with it; `fuse` uses only kernels that can be generated.",
        example: "",
        hint: "the plan `conceivable` in the report shows what it would gain",
    },
    Page {
        code: "E-PLAN-014",
        title: "legal but slower",
        meaning: "The best plan with this fusion is slower than the best plan without it: it costs more in arithmetic, parallelism or \
                  other fusions than it saves in bytes and launches.",
        example: "",
        hint: "use --force to see the price",
    },
    Page {
        code: "E-PLAN-015",
        title: "excluded by the user",
        meaning: "A --forbid names this fusion, or a --force puts one of its operations into another kernel.",
        example: "",
        hint: "remove the --forbid or --force",
    },
    Page {
        code: "E-PLAN-016",
        title: "recomputed in the backward pass",
        meaning: "The backward pass recomputes this value from values that are stored anyway, so that it does not occupy memory \
                  through the forward pass. Fusing the recomputation into a kernel of the forward pass would make it occupy memory \
                  again.",
        example: "",
        hint: "analyse with --keep-all to store every value instead",
    },
    Page {
        code: "E-PLAN-017",
        title: "slower in one kernel",
        meaning: "One kernel could compute this, but measurements show that separate kernels are faster at these sizes, for a reason \
                  that the cost model does not include. A search never chooses it; ops of the catalogue that are defined as one \
                  launch use it.",
        example: "",
        hint: "none: separate kernels are faster. The price of one kernel leaves the named reason out",
    },
];
