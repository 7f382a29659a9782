//! Why two groups stay apart: a closed list of codes, each with its numbers, its page and its hint.

use deuteron_graph::NodeId;
use serde::Serialize;

use crate::kind::GroupKind;
use crate::space::Space;
use crate::units::Seconds;

/// Why a fusion is refused. Codes are stable.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Reason {
    /// A third group needs the first and is needed by the second.
    #[error("another kernel stands between them, through %{}", through.index())]
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
    /// A product beside something that needs whole rows.
    #[error(
        "the product is {} here ({intensity:.0} flop/byte {} {ridge:.0}) and its neighbour needs whole rows: a block that owned \
         all {cols} columns of its rows would lose the tiles that {units} live on ({rows} rows; up to {few} it is allowed)",
        if intensity > ridge { "compute-bound" } else { "memory-bound" },
        if intensity > ridge { ">" } else { "<=" }
    )]
    WholeRows {
        /// flops a byte of the product
        intensity: f64,
        /// flops a byte above which the matrix units limit on this machine
        ridge: f64,
        /// rows of the product
        rows: usize,
        /// rows up to which it would be allowed
        few: usize,
        /// columns that one block would have to own
        cols: usize,
        /// what a product runs on: tensor cores, or the vector units of a CPU
        units: &'static str,
    },
    /// A view between them moves elements across rows or columns.
    #[error("%{} moves elements to other rows or columns", view.index())]
    ViewMovesData {
        /// the view
        view: NodeId,
    },
    /// Together they would read and write too many tensors.
    #[error("together they touch {needed} tensors, {available} are allowed")]
    TooManyArguments {
        /// how many
        needed: usize,
        /// the limit
        available: usize,
    },
    /// A row of temporaries would not stay in the cache.
    #[error("a row of temporaries takes {needed} bytes, {available} stay in the cache")]
    RowTooLong {
        /// bytes of one row
        needed: usize,
        /// the limit
        available: usize,
    },
    /// The strategy keeps calls apart.
    #[error("this strategy keeps calls apart")]
    Strategy,
    /// Together they would be a kernel of too many primitives.
    #[error("together they hold {needed} primitives, {available} are allowed")]
    TooManyNodes {
        /// how many
        needed: usize,
        /// the limit
        available: usize,
    },
    /// No skeleton holds both kinds of kernel.
    #[error("{producer} kernels and {consumer} kernels do not share a skeleton")]
    OtherKernel {
        /// of the producer
        producer: GroupKind,
        /// of the consumer
        consumer: GroupKind,
    },
    /// Several products that share no operand.
    #[error("{products} products that share no operand would wait for each other inside one kernel")]
    SeveralProducts {
        /// how many
        products: usize,
    },
    /// A value that only the fused kernel would know is read elsewhere.
    #[error("%{} would be computed while an operand is loaded, and is read elsewhere too", value.index())]
    ReadElsewhere {
        /// the value
        value: NodeId,
    },
    /// The skeleton exists in the planner, and no generator for this device makes it yet.
    #[error("no generator for this device makes a kernel of the form `{form}` yet")]
    NotOffered {
        /// the skeleton
        form: &'static str,
    },
    /// Legal, and slower than keeping them apart.
    #[error("{}", slower(*extra))]
    Slower {
        /// by so much
        extra: Seconds,
    },
    /// Legal and generated, and known to be slower than separate kernels for a reason that the cost model does not see.
    #[error("separate kernels are faster: {why}")]
    Drawback {
        /// the reason
        why: &'static str,
    },
    /// Excluded by the user's pins.
    #[error("excluded by --forbid or --force")]
    Forbidden,
    /// Computed again in the backward part, so that the forward part need not keep it.
    #[error("%{} is computed again in backward so that forward need not keep it", value.index())]
    Recomputed {
        /// the copy
        value: NodeId,
    },
}

/// Ties are no decision against a fusion; what is shorter than the clock shows is called one.
fn slower(extra: Seconds) -> String {
    match extra.us() {
        us if us < 0.05 => "legal, and the best plan with it is no faster".to_string(),
        _ => format!("legal, and the best plan with it takes {extra} longer"),
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

    /// What a person can do about it.
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
        title: "a third kernel stands between",
        meaning: "The first group makes a value that a third kernel reads, and the second group reads what that third \
                  kernel makes. In one kernel the two would have to run both before and after it.",
        example: "a = relu x[64,8] ; m = matmul a w[8,8] ; t = matmul m v[8,8] ; c = add a t ; out c",
        hint: "fuse the kernel in between too, or reorder the computation so that nothing stands between",
    },
    Page {
        code: "E-PLAN-002",
        title: "rows or columns differ",
        meaning: "A row kernel runs over one space of rows and columns. A value of another number of rows, or of other \
                  columns than 1, is not met at the same place.",
        example: "a = relu x[4,8] ; b = relu y[2,8] ; out a b",
        hint: "reshape so that both run over the same rows and columns, if the computation allows it",
    },
    Page {
        code: "E-PLAN-003",
        title: "complete only after the last row",
        meaning: "A column sum, or a table that is looked up, is known when every row has been seen. A kernel that works \
                  row by row cannot use it on the way.",
        example: "s = column_sum x[64,8] ; y = add x s ; out y",
        hint: "none: two kernels are needed. The sum itself shares the first kernel with whatever makes its rows",
    },
    Page {
        code: "E-PLAN-004",
        title: "a product beside something that needs whole rows",
        meaning: "A norm or a softmax needs a whole row before it can give its first element. A tiled product spreads a \
                  row over many blocks, and is limited by matrix units where the norm is limited by memory: different \
                  bottlenecks. One block that owned whole rows would hold few of them, load every weight again for each \
                  few, and leave the tensor cores idle. At a few rows (decoding) the product is limited by reading its \
                  weights anyway, and the fusion is allowed and priced; so is what follows a product whose rows a cluster \
                  of blocks holds together, and, on GPUs with such clusters, what comes before one.",
        example: "y = linear x[8192,768] w[768,4096] ; z = layer_norm y g[4096] b[4096] ; out z",
        hint: "after a product, rows that a cluster holds are fused (up to 2048 columns on Hopper); otherwise let the product \
               write its rows and fuse the norm with the residual add around it, or use a template that owns whole rows \
               (attention_block)",
    },
    Page {
        code: "E-PLAN-005",
        title: "a view moves elements",
        meaning: "Between the two a transpose, a slice or a reshape puts elements into other rows or columns, so that a \
                  thread would need what another one computes.",
        example: "a = relu x[2,3,8] ; t = transpose a [1,0,2] ; b = relu t ; out b",
        hint: "apply the view to the inputs instead of to what the first kernel makes, if the computation allows it",
    },
    Page {
        code: "E-PLAN-006",
        title: "too many tensors",
        meaning: "Each tensor is a stream of addresses. Beyond the limit of the machine, prefetchers lose track (CPU) or \
                  pointers crowd out values in registers (GPU).",
        example: "",
        hint: "split the computation where few values are alive",
    },
    Page {
        code: "E-PLAN-007",
        title: "the row is too long",
        meaning: "Rows that wait for a reduction are kept close to the cores: in registers, shared memory or the \
                  second-level cache. This row does not fit.",
        example: "",
        hint: "shorter rows, or a 16-bit storage type; a kernel of several passes reads the row again instead",
    },
    Page {
        code: "E-PLAN-008",
        title: "the strategy keeps calls apart",
        meaning: "The plans `naive`, `eager` and `unfused` are baselines: they keep apart what the user wrote apart.",
        example: "",
        hint: "use the plan `fused`",
    },
    Page {
        code: "E-PLAN-009",
        title: "too many primitives",
        meaning: "Kernels are kept small enough to compile quickly and to read.",
        example: "",
        hint: "none needed: the planner cuts the chain where it costs least",
    },
    Page {
        code: "E-PLAN-010",
        title: "no skeleton holds both",
        meaning: "Kernels are made from skeletons: row, matmul, attention, copy, scatter. These two kinds have none in \
                  common.",
        example: "s = scatter_add i:i32[4] x[4,8] rows=16 ; y = relu s ; out y",
        hint: "none",
    },
    Page {
        code: "E-PLAN-011",
        title: "several products",
        meaning: "Two products share a kernel if they read the same first operand (one wider product), or as parts of \
                  attention. Otherwise one would wait for the other inside the kernel.",
        example: "a = matmul x[64,64] w[64,64] ; b = matmul a v[64,64] ; out b",
        hint: "none",
    },
    Page {
        code: "E-PLAN-012",
        title: "read elsewhere too",
        meaning: "A prologue computes an operand while it is loaded, once for every tile that needs it; nobody stores \
                  it. Another kernel reads this value, so it must be stored.",
        example: "a = relu x[64,64] ; b = matmul a w[64,64] ; out a b",
        hint: "keep the producer as a kernel of its own",
    },
    Page {
        code: "E-PLAN-013",
        title: "not generated here",
        meaning: "The fusion is sound and priced, and no generator for this device makes such a kernel yet. `analyze` \
                  shows the plan as it would be; `fuse` uses what can be generated.",
        example: "",
        hint: "see `conceivable` beside the chosen plan for what it would be worth",
    },
    Page {
        code: "E-PLAN-014",
        title: "legal and slower",
        meaning: "The best plan that contains this fusion is slower than the best plan without it: what it saves in \
                  bytes and launches it loses in arithmetic, parallelism or another fusion.",
        example: "",
        hint: "force it with --force to see the price",
    },
    Page {
        code: "E-PLAN-015",
        title: "excluded by the user",
        meaning: "A --forbid names this fusion, or a --force puts one of its operations into another kernel.",
        example: "",
        hint: "drop the --forbid or --force",
    },
    Page {
        code: "E-PLAN-016",
        title: "computed again in backward",
        meaning: "The value is computed a second time in the backward part, from values that are kept anyway, so that it \
                  need not wait in memory through the whole forward part. A kernel of the forward part that computed it \
                  would bring the waiting back.",
        example: "",
        hint: "analyse with --keep-all to store every value instead",
    },
    Page {
        code: "E-PLAN-017",
        title: "slower in one kernel",
        meaning: "One kernel could compute this, and measurements show that separate kernels are faster for these sizes, for \
                  a reason that the cost model does not see. A search never takes it; ready-made ops that are named for one \
                  launch do.",
        example: "",
        hint: "change the size named in the reason, or keep the kernels separate",
    },
];
