//! The analysis as plain data: the contents of the JSON form, the page and the diff.
//!
//! Repeated layers are listed once. A [`KernelSheet`] or a [`Candidate`] stands for all equal ones, with their number.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The result of `analyze`. The JSON form has these fields; `docs/analysis.schema.json` describes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Analysis {
    /// version of this form: 2
    pub schema: u32,
    /// name of the graph
    pub graph: String,
    /// name of the machine the numbers are for
    pub device: String,
    /// the plan in one sentence
    pub verdict: String,
    /// whether no cheaper plan exists among the groups considered
    pub optimal: bool,
    /// how the plan was searched for
    pub search: SearchSheet,
    /// milliseconds that planning took, all plans together
    pub planning_ms: f64,
    /// the plans side by side
    pub plans: Plans,
    /// every operation of the graph that some kernel computes, in order
    pub ops: Vec<OpSheet>,
    /// kernels of the plan that fusing starts from, equal ones listed once
    pub before: Vec<KernelSheet>,
    /// kernels of the chosen plan, equal ones listed once
    pub after: Vec<KernelSheet>,
    /// how candidates are scored
    pub scoring: ScoringSheet,
    /// every pair of neighbours and every template, equal ones listed once
    pub candidates: Vec<Candidate>,
    /// candidates for which score and plan disagree
    pub disagreements: Vec<Disagreement>,
    /// fusions that the user forced or forbade
    pub pins: Vec<PinSheet>,
    /// sizes at which verdicts change, if requested
    pub flips: Vec<Flip>,
    /// store or recompute between forward and backward, for graphs with gradients
    pub recompute: Option<RecomputeSheet>,
    /// numbers of the machine, each with its origin
    pub machine: MachineSheet,
    /// bytes of intermediates while each launch runs
    #[serde(default)]
    pub memory: Option<MemorySheet>,
    /// predicted beside measured, once `fuse` has measured
    pub measured: Option<MeasuredSheet>,
    /// how kernels were profiled, once `profile` has run
    #[serde(default)]
    pub profiled: Option<ProfiledSheet>,
    /// notes for the reader: near misses of an import, opaque operations
    pub notes: Vec<String>,
}

/// The plans side by side.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Plans {
    /// a kernel per primitive
    pub naive: PlanSheet,
    /// a kernel per composite, attention as scores, mask, softmax, product
    pub eager: PlanSheet,
    /// a kernel per builder call
    pub unfused: PlanSheet,
    /// the same with values recomputed in the backward pass instead of stored, if the chosen plan does that: fusing starts from here
    pub recomputed: Option<PlanSheet>,
    /// neighbours merged in order wherever it is legal; none if that does not lead to a plan that keeps the pins
    pub greedy: Option<PlanSheet>,
    /// the cheapest plan of kernels that can be generated for this machine or, if requested, of every skeleton
    pub chosen: PlanSheet,
    /// the cheapest plan with every skeleton, if it differs
    pub conceivable: Option<PlanSheet>,
}

impl Plans {
    /// What fusing starts from: `before` lists its kernels.
    pub fn before(&self) -> &PlanSheet {
        self.recomputed.as_ref().unwrap_or(&self.unfused)
    }
}

/// One plan in numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PlanSheet {
    /// launches
    pub kernels: usize,
    /// compulsory bytes of all kernels
    pub bytes: u64,
    /// predicted microseconds
    pub us: f64,
    /// most bytes of intermediates alive at once
    pub peak_bytes: u64,
}

/// How the plan was found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SearchSheet {
    /// groups considered
    pub groups: usize,
    /// states visited
    pub states: usize,
    /// independent parts of the graph
    pub parts: usize,
    /// parts that differ: the others were planned already
    pub distinct_parts: usize,
    /// upper bound of the plan's distance from the optimum, relative to it; 0 if the plan is optimal
    pub gap: f64,
    /// as text: `optimal among 42 groups, 97 states`
    pub text: String,
}

/// One operation: a builder call, or the part of it that one kernel computes when nothing is fused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OpSheet {
    /// position in `ops`
    pub id: usize,
    /// `layer_norm`, `matmul`, `grad(gelu)`
    pub name: String,
    /// the name the user gave its result, if any
    pub label: String,
    /// row, matmul, copy, scatter_add, opaque
    pub kind: String,
    /// type of its largest result: `bf16[8,1024,768]`
    pub result: String,
    /// operations whose results it reads
    pub reads: Vec<usize>,
    /// which kernel launch of the unfused plan computes it, counted from 0 in the order they run
    pub before: usize,
    /// which kernel launch of the chosen plan computes it
    pub after: usize,
    /// floating point operations over compulsory bytes
    pub intensity: f64,
}

/// A kernel, and all kernels equal to it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct KernelSheet {
    /// `add + layer_norm`
    pub name: String,
    /// row, matmul, attention, copy, scatter_add, opaque
    pub kind: String,
    /// which launches of the plan are this kernel, counted from 0 in the order they run
    pub launches: Vec<usize>,
    /// primitives it holds
    pub primitives: usize,
    /// rows and columns, or m x n x k
    pub size: String,
    /// the tensors that its first launch reads and then those that it writes
    #[serde(default)]
    pub tensors: Vec<TensorSheet>,
    /// what one launch costs
    pub cost: CostSheet,
    /// for a kernel of the chosen plan, microseconds that one launch saves over the kernels it replaces; the savings of all launches add up to
    /// the saving of the plan
    pub gain_us: Option<f64>,
    /// whether code for it can be generated here
    pub realizable: bool,
    /// the kernel variant, as text: `tiles of 128 x 192, two warpgroups in turn, 4 stages`, `cuBLASLt`; empty if
    /// there is only one, or no code
    #[serde(default)]
    pub variant: String,
    /// for a matmul by one of our kernels: its tiles, and how they fill the GPU
    pub tiles: Option<TileSheet>,
    /// generated source, each line with the operation it came from; empty if there is none
    pub source: Vec<SourceLine>,
    /// median of the measured times of its launches, if it was measured
    pub measured_us: Option<f64>,
    /// registers per thread, as the compiler reports them, if it was compiled
    pub measured_registers: Option<u32>,
    /// what one launch did, if it was profiled
    #[serde(default)]
    pub counters: Option<CounterSheet>,
}

/// A tensor that a kernel reads or writes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TensorSheet {
    /// its name in the graph, `%12` where it has none
    pub name: String,
    /// `bf16[1024,768]`
    pub tensor: String,
    /// whether it is written
    pub written: bool,
}

/// Hardware counters of one launch; none if the source does not provide the number. Means over the launches of equal kernels.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
pub struct CounterSheet {
    /// microseconds, as the profiler times it
    pub us: Option<f64>,
    /// bytes read from main memory
    pub read: Option<f64>,
    /// bytes written to main memory
    pub written: Option<f64>,
    /// bytes of the lines that missed the last-level cache, where reads and writes are not distinguished
    pub missed: Option<f64>,
    /// share of the accesses to the last-level cache, the L2 of a GPU, that hit
    pub cache_hits: Option<f64>,
    /// occupancy: the share of a multiprocessor's warps that were active (profiler) or that fit (driver)
    pub occupancy: Option<f64>,
    /// registers per thread
    pub registers: Option<f64>,
    /// bytes of shared memory per block
    pub shared: Option<f64>,
    /// share of the cycles in which the tensor cores were active
    pub tensor: Option<f64>,
    /// share of the cycles in which a scheduler issued an instruction
    pub issue: Option<f64>,
    /// instructions per cycle, of a CPU
    pub instructions_per_cycle: Option<f64>,
}

/// Every term of the predicted time of one launch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CostSheet {
    /// unique bytes read
    pub read: u64,
    /// bytes written
    pub written: u64,
    /// the part of the bytes read and written that is in the last-level cache
    pub cached: u64,
    /// bytes read again, from the last-level cache
    pub reread: u64,
    /// flops of matrix units
    pub matrix_flops: u64,
    /// flops of vector units
    pub vector_flops: u64,
    /// flops over unique bytes
    pub intensity: f64,
    /// registers per thread, estimated; 0 on a CPU
    pub registers: u32,
    /// bytes of shared memory per block; 0 on a CPU
    pub shared: u64,
    /// share of the threads a multiprocessor can hold; 1 on a CPU
    pub occupancy: f64,
    /// waves of blocks
    pub waves: f64,
    /// share of the last wave's places that are filled, over all waves
    pub wave_efficiency: f64,
    /// microseconds to start it
    pub launch_us: f64,
    /// microseconds of main memory traffic
    pub memory_us: f64,
    /// microseconds of cache traffic
    pub cache_us: f64,
    /// microseconds of matrix arithmetic
    pub matrix_us: f64,
    /// microseconds of vector arithmetic
    pub vector_us: f64,
    /// predicted microseconds
    pub us: f64,
    /// its bottleneck: launch, memory, cache, matrix, vector
    pub bound: String,
}

/// A line of generated source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SourceLine {
    /// the line
    pub text: String,
    /// the operation it came from; empty where it is scaffolding
    pub op: String,
}

/// The tiles of a matmul, and how they fill the GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TileSheet {
    /// the instructions that multiply: `wgmma`, `mma.sync`, `fma`, `dp4a`
    pub by: String,
    /// rows of a tile
    pub rows: usize,
    /// columns of a tile
    pub columns: usize,
    /// pipeline stages of operands in shared memory; none without such a pipeline
    pub stages: Option<usize>,
    /// blocks of a cluster; 1 where there are none
    pub cluster: u32,
    /// blocks of a launch
    pub blocks: u64,
    /// tiles that persistent blocks process; none if every block has one tile
    pub walked: Option<u64>,
    /// threads of a block
    pub threads: u32,
    /// bytes of shared memory of a block
    pub shared: u32,
    /// registers per thread, on average if warps reallocate them; see `registers_from`
    pub registers: u32,
    /// the origin of `registers`: `compiled`, or `bound`, the limit that the kernel sets for the compiler
    pub registers_from: String,
    /// occupancy: the share of a multiprocessor's threads that are resident
    pub occupancy: f64,
    /// number of waves of tiles
    pub waves: f64,
    /// share of the slots of all waves, including the whole last one, that hold a tile
    pub wave_efficiency: f64,
}

/// A fusion that was considered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Candidate {
    /// names of the operations, producer first
    pub ops: Vec<String>,
    /// positions in `ops` of the first of the equal candidates
    pub at: Vec<usize>,
    /// how many equal candidates the graph has
    pub count: usize,
    /// `pair`, `template`, or `view` (a split or transpose that is read in place)
    pub kind: String,
    /// rows and columns, or the sizes of a matmul
    #[serde(default)]
    pub size: String,
    /// the weighted sum of the criteria, 0 to 1
    pub score: f64,
    /// `FUSE` or `DO NOT FUSE`: what the score sheet says
    pub verdict: String,
    /// whether the chosen plan fuses it
    pub chosen: bool,
    /// whether some plan fuses everything of these names, so that `--force` works; a view is neither forced nor forbidden
    pub forceable: bool,
    /// operations of the kernel that contains it, if it is not a kernel by itself
    pub within: Option<Vec<String>>,
    /// whether a kernel for it can be generated here
    pub realizable: bool,
    /// why
    pub reason: ReasonSheet,
    /// each criterion, 0 to 1
    pub criteria: Criteria,
    /// whether each criterion meets its threshold
    pub passes: Passes,
    /// the values behind the criteria
    pub values: CriteriaValues,
    /// microseconds of the best plan without it minus those of the best plan with it, for one of the `count`: negative if the
    /// plan keeps it apart. These do not add up; `gain_us` does. None if no plan has it, or if another search would take too long.
    pub worth_us: Option<f64>,
    /// if it is a whole kernel of the chosen plan, the microseconds that one such kernel saves over the kernels it replaces
    pub gain_us: Option<f64>,
}

/// Why a verdict.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ReasonSheet {
    /// `E-PLAN-004`, or `OK` where the plan fuses it
    pub code: String,
    /// one sentence, with numbers
    pub text: String,
    /// what to do about it; empty if nothing can be done
    pub hint: String,
}

/// How candidates are scored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScoringSheet {
    /// the score from which the verdict is `FUSE`
    pub fuse_from: f64,
    /// the criteria, in order
    pub criteria: Vec<CriterionSheet>,
}

/// One criterion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CriterionSheet {
    /// its name in `criteria` and `passes`
    pub name: String,
    /// its share of the score
    pub weight: f64,
    /// its threshold
    pub threshold: f64,
    /// its requirement, as text
    pub asks: String,
}

/// Whether each criterion meets its threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Passes {
    /// bytes saved
    pub bandwidth: bool,
    /// launch time saved
    pub launch: bool,
    /// registers, or occupancy for matmul and attention
    pub registers: bool,
    /// size of the kernel
    pub complexity: bool,
    /// whether the kernel is generated or hand-written
    pub maintainability: bool,
}

impl Passes {
    /// In the order of the criteria.
    pub fn list(&self) -> [bool; 5] {
        [self.bandwidth, self.launch, self.registers, self.complexity, self.maintainability]
    }
}

/// The five criteria, each 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Criteria {
    /// bytes saved
    pub bandwidth: f64,
    /// launch time saved
    pub launch: f64,
    /// registers, or occupancy for matmul and attention
    pub registers: f64,
    /// size of the kernel
    pub complexity: f64,
    /// whether the kernel is generated or hand-written
    pub maintainability: f64,
}

impl Criteria {
    /// In order.
    pub fn list(&self) -> [f64; 5] {
        [self.bandwidth, self.launch, self.registers, self.complexity, self.maintainability]
    }
}

/// What the criteria are computed from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CriteriaValues {
    /// bytes of the separate kernels
    pub bytes_apart: u64,
    /// bytes of the fused kernel
    pub bytes_together: u64,
    /// share of the bytes that fusing saves
    pub bandwidth_saving: f64,
    /// share of main memory traffic saved; data that fits the last-level cache is not counted
    pub dram_saving: f64,
    /// launches of the separate kernels
    pub launches_apart: usize,
    /// launch time that fusing saves, relative to the time of all separate kernels except the longest
    pub launch_saving: f64,
    /// registers a thread of the fused kernel, estimated; 0 on a CPU
    pub registers: u32,
    /// occupancy of the fused kernel over that of its largest part
    pub occupancy_ratio: f64,
    /// primitives of the fused kernel
    pub primitives: usize,
    /// predicted microseconds of the separate kernels
    pub us_apart: f64,
    /// predicted microseconds of the fused kernel, if it can be priced
    pub us_together: Option<f64>,
}

/// A candidate for which score and plan disagree.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Disagreement {
    /// position in `candidates`
    pub candidate: usize,
    /// why the plan differs
    pub text: String,
}

/// A fusion the user forced or forbade.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PinSheet {
    /// `force` or `forbid`
    pub kind: String,
    /// the names as the user gave them
    pub ops: Vec<String>,
    /// how many places of the graph it applies to
    pub places: usize,
    /// microseconds over the plan without the pin, never negative
    pub price_us: f64,
    /// in words
    pub text: String,
}

/// The size at which the verdict on a fusion changes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Flip {
    /// position in `candidates`
    pub candidate: usize,
    /// `device`, `batch`, `sequence`, `hidden`, `rows`, `cols`
    pub what: String,
    /// where it is now
    pub from: String,
    /// the nearest value with the opposite verdict
    pub to: String,
    /// in words
    pub text: String,
}

/// Store or recompute between forward and backward.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RecomputeSheet {
    /// bytes stored in forward for backward when everything is stored
    pub kept_bytes_before: u64,
    /// bytes stored with the chosen recomputation
    pub kept_bytes: u64,
    /// peak of intermediates when everything is stored
    pub peak_bytes_before: u64,
    /// peak with the chosen recomputation
    pub peak_bytes: u64,
    /// predicted microseconds when everything is stored
    pub us_before: f64,
    /// predicted microseconds with the chosen recomputation
    pub us: f64,
    /// names of the recomputed values, with their number
    pub again: Vec<(String, usize)>,
    /// in words
    pub text: String,
}

/// The machine behind the numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MachineSheet {
    /// its name
    pub name: String,
    /// `cpu` or `gpu`
    pub kind: String,
    /// origin of its numbers: `calibrated` here, `learnt` from runs here, `guessed` from another machine, or `given` by a profile or a
    /// file
    pub basis: String,
    /// every number
    pub numbers: Vec<NumberSheet>,
    /// main memory, bytes per microsecond (a GB/s is 1000)
    pub bytes_per_us: f64,
    /// vector flops per microsecond
    pub vector_flops_per_us: f64,
    /// matrix flops per microsecond, in the graph's main dtype
    pub matrix_flops_per_us: f64,
    /// flops per byte above which the vector units are the bottleneck
    pub vector_ridge: f64,
    /// flops per byte above which the matrix units are the bottleneck
    pub matrix_ridge: f64,
}

/// One number of a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NumberSheet {
    /// what it is, with its unit: `dram_gbps`
    pub name: String,
    /// the number
    pub value: f64,
    /// where it comes from
    pub origin: String,
}

/// Predicted beside measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MeasuredSheet {
    /// median microseconds of the eager plan
    pub eager_us: f64,
    /// median microseconds of the unfused plan
    pub unfused_us: f64,
    /// median microseconds of the chosen plan
    pub chosen_us: f64,
    /// unfused over chosen
    pub speedup: f64,
    /// whether every output is within its bound of the f64 reference
    pub verified: bool,
    /// largest error as a share of its bound
    pub worst_ratio: f64,
    /// prediction error for each kind of kernel
    pub classes: Vec<ClassError>,
}

/// Bytes of intermediates that are alive while each launch runs, in the order they run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MemorySheet {
    /// of the plan that fusing starts from
    pub before: Vec<u64>,
    /// of the chosen plan
    pub after: Vec<u64>,
}

/// How kernels were profiled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProfiledSheet {
    /// `ncu`, `driver`, `perf` or `clock`
    pub by: String,
    /// its description, in one sentence
    pub text: String,
    /// microseconds of a run of the plan that fusing starts from, without the profiler
    pub before_us: f64,
    /// the same of the chosen plan
    pub after_us: f64,
    /// what could not be counted, and why
    pub notes: Vec<String>,
}

/// The prediction error of the cost model for one kind of kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ClassError {
    /// row, matmul, copy, ..
    pub class: String,
    /// how many kernels
    pub kernels: usize,
    /// predicted microseconds, all together
    pub predicted_us: f64,
    /// measured microseconds, all together
    pub measured_us: f64,
    /// median of |predicted - measured| / measured
    pub median_error: f64,
}
