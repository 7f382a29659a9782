//! Body and config to CUDA text.
//!
//! The text consists of constants, the prelude, the parameter, the kernel and, for column sums, a second kernel
//! that adds the blocks' sums in a fixed order. The kernel's row work is one block of statements per pass: numbers of the
//! row, a loop over the thread's chunks of columns, then the reductions of the pass, all with one barrier.

mod names;
mod passes;
mod rows;
mod sides;
mod sums;
mod tiles;
mod values;

use std::collections::HashMap;
use std::sync::LazyLock;

use deuteron_graph::{Dtype, ReduceOp};

pub use self::names::type_name;
use self::names::{Kind, reduce_name, scalar_type, shared_name};
pub(crate) use self::sides::{emit_epilogue, emit_following, emit_prologue, emit_rows_of_warps};
pub use self::tiles::TileArguments;
pub(crate) use self::tiles::emit_tile_rows;
use crate::body::{Access, ArgSpec, Body, Expr, ExprId, Origin, Stage};
use crate::cuda::grid::{Grid, Word};
use crate::cuda::row::layout::ArgLayout;
use crate::cuda::row::passes::{Pass, Passes, stored};
use crate::cuda::row_config::{Policy, RowConfig};
use crate::tile::{self, Part};

/// Parts of the device-side library that the prelude has.
pub const PRELUDE_PARTS: [Part; 7] = [
    Part::Philox,
    Part::DependentLaunch,
    Part::Conversions,
    Part::Warp,
    Part::GlobalMemory,
    Part::AsyncCopy,
    Part::Cluster,
];

/// The code that every row kernel includes: parts of the device-side library, then functions of lanes.
pub static PRELUDE: LazyLock<String> = LazyLock::new(|| {
    let parts = tile::text(&PRELUDE_PARTS);
    format!("{parts}\n{}", PRELUDE_FILES.map(|(_, text)| text).join("\n"))
});

/// Functions of lanes, by the names of their files.
pub const PRELUDE_FILES: [(&str, &str); 6] = [
    ("math", include_str!("../../prelude/math.cuh")),
    ("lanes", include_str!("../../prelude/lanes.cuh")),
    ("storage", include_str!("../../prelude/storage.cuh")),
    ("access", include_str!("../../prelude/access.cuh")),
    ("dropout", include_str!("../../prelude/dropout.cuh")),
    ("reduce", include_str!("../../prelude/reduce.cuh")),
];

/// A line of the text and what it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    pub text: String,
    pub origin: Option<Origin>,
}

/// The lines of a kernel that are its own; [`PRELUDE`] stands between the two parts.
pub(crate) struct Lines {
    pub constants: Vec<Line>,
    pub kernel: Vec<Line>,
}

/// Everything that the text depends on.
pub(crate) struct Emission<'a> {
    pub body: &'a Body,
    pub layouts: &'a [ArgLayout],
    pub passes: &'a Passes,
    pub config: &'a RowConfig,
    /// Arguments that are not in memory: values passed from or to a matmul.
    pub handed: &'a [usize],
    /// The dtype that passed values were rounded to, if any.
    pub rounded: Option<Dtype>,
}

/// The lines of a row kernel.
pub(crate) fn emit(emission: &Emission) -> Lines {
    written(Writer::new(emission))
}

/// The lines of a flat kernel over several sets of arguments: its parameter has [`fields`] for each, then the number of each one's first block.
pub(crate) fn emit_many(emission: &Emission, sets: usize) -> Lines {
    written(Writer { sets: Some(sets), ..Writer::new(emission) })
}

fn written(mut writer: Writer<'_>) -> Lines {
    writer.constants();
    let constants = std::mem::take(&mut writer.lines);
    writer.line("");
    writer.parameters();
    match writer.it.config.policy {
        Policy::Flat => writer.flat(),
        Policy::Registers | Policy::Shared | Policy::Streamed => writer.rows(),
    }
    writer.finish_kernel();
    Lines { constants, kernel: writer.lines }
}

/// Fields of the parameter after the arguments' own: the order in which the launch fills them.
pub(crate) fn fields(body: &Body, layouts: &[ArgLayout], handed: &[usize]) -> Vec<String> {
    let mut fields = Vec::new();
    for (arg, (spec, layout)) in body.args.iter().zip(layouts).enumerate() {
        if handed.contains(&arg) {
            continue;
        }
        fields.push(format!("a{arg}"));
        if matches!(spec.access, Access::GatheredRow { .. }) {
            fields.push(format!("s{arg}_0"));
            fields.push(format!("n{arg}"));
            continue;
        }
        for axis in 0..layout.axes.len() {
            fields.push(format!("s{arg}_{axis}"));
            if axis > 0 {
                fields.push(format!("n{arg}_{axis}"));
            }
        }
    }
    for axis in 0..body.axes {
        fields.push(format!("divide{axis}"));
        fields.push(format!("modulo{axis}"));
    }
    fields.extend(["rows", "fault", "workspace"].map(String::from));
    fields
}

/// Column sums: (argument, width), in the order of their stages.
pub(crate) fn partials(body: &Body) -> Vec<(usize, usize)> {
    let sums = body.stages.iter().filter_map(|stage| match *stage {
        Stage::ColumnSum { arg, width, .. } => Some((arg as usize, width)),
        Stage::RowReduce { .. } | Stage::Store { .. } => None,
    });
    sums.collect()
}

/// The grid of the kernel that adds up column sums of all blocks.
pub(crate) fn finish_grid(partials: &[(usize, usize)], words: Vec<Word>) -> Grid {
    let widest = partials.iter().map(|&(_, width)| width).max().unwrap_or(0);
    let blocks = [widest.div_ceil(32).max(1) as u32, partials.len() as u32, 1];
    Grid { entry: "finish", blocks, threads: 1024, cluster: 1, shared: 0, waits: false, walks: false, words }
}

struct Writer<'a> {
    it: &'a Emission<'a>,
    lines: Vec<Line>,
    depth: usize,
    origin: Option<Origin>,
    /// names of values that are known where the text stands
    names: HashMap<ExprId, String>,
    span: Span,
    /// the result whose pairs leave with a tile, while a sweep of a tile is written
    staged: Option<usize>,
    /// how many sets of arguments a flat kernel has, if blocks find theirs among several
    sets: Option<usize>,
}

/// Which rows a block works on, each an expression of the text.
struct Span {
    begin: &'static str,
    /// from one turn to the next, where it walks over rows
    step: &'static str,
    /// behind the last
    end: &'static str,
    /// shared memory that it is given, if it has none of its own
    memory: Option<&'static str>,
}

impl Span {
    /// Those of the whole launch, shared by all blocks.
    const LAUNCH: Span = Span {
        begin: "(i64)(blockIdx.x / PARTS) * ROWS",
        step: "(i64)(gridDim.x / PARTS) * ROWS",
        end: "(i64)p.rows",
        memory: None,
    };

    /// Those that the function is called for.
    const GIVEN: Span = Span { begin: "first", step: "ROWS", end: "end", memory: Some("s_memory") };
}

impl<'a> Writer<'a> {
    fn new(emission: &'a Emission<'a>) -> Writer<'a> {
        Writer {
            it: emission,
            lines: Vec::new(),
            depth: 0,
            origin: None,
            names: HashMap::new(),
            span: Span::LAUNCH,
            staged: None,
            sets: None,
        }
    }
}

impl Writer<'_> {
    fn line(&mut self, text: impl AsRef<str>) {
        let text = text.as_ref();
        let indent = if text.is_empty() || text.starts_with('#') { 0 } else { self.depth };
        self.lines.push(Line { text: format!("{}{text}", "    ".repeat(indent)), origin: self.origin });
    }

    fn open(&mut self, text: impl AsRef<str>) {
        self.line(text);
        self.depth += 1;
    }

    fn close(&mut self) {
        self.depth -= 1;
        self.line("}");
    }

    fn constants(&mut self) {
        let (config, cols) = (self.it.config, self.it.body.cols);
        self.line(format!("// {config}"));
        if config.waits() {
            self.line("#define WAITS");
        }
        self.line(format!("constexpr int V = {};", config.vector));
        self.line(format!("constexpr int T = {};", config.threads_per_row));
        self.line(format!("constexpr int ROWS = {};", config.rows_per_block));
        self.line(format!("constexpr int CHUNKS = {};", config.chunks));
        self.line(format!("constexpr int PARTS = {};", config.parts));
        if config.stages > 0 {
            self.line(format!("constexpr int STAGES = {};", config.stages));
        }
        self.line(format!("constexpr int COLS = {cols};"));
        self.line("");
    }

    fn parameters(&mut self) {
        self.open("struct Parameters {");
        for field in fields(self.it.body, self.it.layouts, self.it.handed) {
            self.line(format!("unsigned long long {field};"));
        }
        self.depth -= 1;
        self.line("};");
        self.line("");
        if let Some(sets) = self.sets {
            self.open("struct Many {");
            self.line(format!("Parameters sets[{sets}];"));
            self.line(format!("unsigned long long first[{sets}];"));
            self.depth -= 1;
            self.line("};");
            self.line("");
        }
    }

    // Flat kernels.

    fn flat(&mut self) {
        let threads = self.it.config.threads();
        let parameter = if self.sets.is_some() { "Many many" } else { "Parameters p" };
        self.open(format!(
            "extern \"C\" __global__ void __launch_bounds__({threads}) row(const __grid_constant__ {parameter}) {{"
        ));
        self.wait();
        let block = match self.sets {
            Some(sets) => self.own_set(sets),
            None => "blockIdx.x",
        };
        self.flat_numbers();
        self.line(format!("const i64 first = ((i64){block} * CHUNKS * T + threadIdx.x) * V;"));
        self.line("const bool whole = first + (i64)(CHUNKS - 1) * T * V + V <= (i64)p.rows;");
        self.open("if (whole) {");
        self.flat_body(true);
        self.depth -= 1;
        self.open("} else {");
        self.flat_body(false);
        self.close();
        self.close();
    }

    /// The arguments of a block, found by bisection, and the number of the block among those of its set.
    fn own_set(&mut self, sets: usize) -> &'static str {
        self.line("int set = 0;");
        self.line("#pragma unroll");
        self.open(format!("for (int step = {}; step > 0; step /= 2) {{", sets.next_power_of_two() / 2));
        self.line(format!("if (set + step < {sets} && many.first[set + step] <= blockIdx.x) set += step;"));
        self.close();
        self.line("const Parameters& p = many.sets[set];");
        self.line("const i64 block = (i64)blockIdx.x - (i64)many.first[set];");
        "block"
    }

    /// Numbers that all elements share.
    fn flat_numbers(&mut self) {
        for id in self.reachable() {
            if self.it.passes.uniform[id.index()] {
                self.number(id);
            }
        }
    }

    fn flat_body(&mut self, whole: bool) {
        let outer = self.names.clone();
        let loads = self.row_loads();
        for &arg in &loads {
            self.line(format!("Raw<{}> w{arg}[CHUNKS];", self.type_of(arg)));
        }
        self.line("#pragma unroll");
        self.open("for (int c = 0; c < CHUNKS; ++c) {");
        self.line("const i64 element = first + (i64)c * T * V;");
        for &arg in &loads {
            let (ty, size) = (self.type_of(arg), self.size_of(arg));
            let address = format!("(const char*)p.a{arg} + element * {size}");
            let load = match whole {
                true => format!("load<{ty}, {}, STREAM>({address}, true)", self.access_of(arg)),
                false => format!("load_tail<{ty}>({address}, (int)min((i64)V, (i64)p.rows - element))"),
            };
            self.line(format!("w{arg}[c] = {load};"));
        }
        self.close();
        self.line("#pragma unroll");
        self.open("for (int c = 0; c < CHUNKS; ++c) {");
        self.line("const i64 element = first + (i64)c * T * V;");
        let pass = self.it.passes.list.first().cloned().unwrap_or_default();
        for id in pass.lanes {
            self.lanes(id, 0);
        }
        for position in pass.stages {
            self.origin = Some(Origin::Stage(position));
            if let Stage::Store { arg, .. } = self.it.body.stages[position] {
                let value = self.name_for(stored(self.it.body, &self.it.body.stages[position]), self.kind_stored(arg));
                let (ty, size) = (self.type_of(arg as usize), self.size_of(arg as usize));
                let address = format!("(char*)p.a{arg} + element * {size}");
                self.line(match whole {
                    true => format!("store<{ty}, {}>({address}, {value}, true);", self.access_of(arg as usize)),
                    false => format!("store_tail<{ty}>({address}, {value}, (int)min((i64)V, (i64)p.rows - element));"),
                });
            }
            self.origin = None;
        }
        self.close();
        self.names = outer;
    }

    // Row kernels.

    fn sweeps(&mut self) {
        let (outer, passes) = (self.names.clone(), self.it.passes.list.clone());
        for (level, pass) in passes.iter().enumerate() {
            self.pass(level, pass);
        }
        self.names = outer;
    }

    fn shared_memory(&mut self) {
        let config = self.it.config;
        let warps = config.threads_per_row.div_ceil(32);
        let counts: Vec<usize> = self.it.passes.list.iter().map(|pass| self.reductions(pass).len()).collect();
        let most = counts.iter().sum::<usize>();
        if warps * config.parts > 1 && most > 0 && self.communicates() {
            let parts = if config.cluster { config.parts } else { 1 };
            let sizes = format!("[2][{most}][{}]", warps * parts);
            self.shared_array("float", "s_reduce", &sizes, "");
            if self.has_argmax() {
                self.shared_array("Best", "s_best", &sizes, " + sizeof(s_reduce)");
            }
        }
        if config.cluster {
            // Every block of the cluster must run before another one writes into its shared memory.
            self.line("cluster_barrier();");
        }
        if config.policy == Policy::Shared {
            self.line("extern __shared__ char s_rows[];");
            let mut offset = String::from("s_rows");
            for (name, ty) in self.waiting() {
                self.line(format!("Raw<{ty}>* const {name} = (Raw<{ty}>*)({offset}) + threadIdx.x;"));
                offset = format!("{offset} + sizeof(Raw<{ty}>) * CHUNKS * T");
            }
        }
    }

    /// An array of shared memory: its own, or a part of what is given.
    fn shared_array(&mut self, ty: &str, name: &str, sizes: &str, offset: &str) {
        self.line(match self.span.memory {
            None => format!("__shared__ {ty} {name}{sizes};"),
            Some(memory) => format!("{ty} (&{name}){sizes} = *({ty} (*){sizes})({memory}{offset});"),
        });
    }

    /// Arrays for values kept for a later pass, in their order in shared memory: name and type.
    fn waiting(&self) -> Vec<(String, &'static str)> {
        let mut all = Vec::new();
        for arg in self.row_loads() {
            if self.sweeps_of(arg).len() > 1 {
                all.push((format!("w{arg}"), self.type_of(arg)));
            }
        }
        for &(id, dtype) in &self.it.passes.kept {
            all.push((format!("k{}", id.index()), type_name(dtype)));
        }
        all
    }

    /// Sweeps that read an argument.
    fn sweeps_of(&self, arg: usize) -> Vec<usize> {
        self.it.passes.sweeps_of(self.it.body, arg)
    }

    fn communicates(&self) -> bool {
        self.it.config.cluster || self.it.config.parts == 1
    }

    fn has_argmax(&self) -> bool {
        self.it.body.stages.iter().any(|stage| matches!(stage, Stage::RowReduce { op: ReduceOp::ArgMax, .. }))
    }

    /// Arguments that all rows share are loaded once where a block walks over many rows.
    fn hoisted(&mut self) {
        for arg in self.row_loads() {
            if self.is_hoisted(arg) {
                self.line(format!("const char* const g{arg} = (const char*)p.a{arg};"));
                self.load_loop(&[arg]);
            }
        }
    }

    fn is_hoisted(&self, arg: usize) -> bool {
        let config = self.it.config;
        config.resident > 0 && config.policy == Policy::Registers && self.is_shared_row(arg) && !self.is_late(arg)
    }

    /// Loaded by the one sweep that reads it, from the nearest cache: the next row takes the registers.
    fn is_late(&self, arg: usize) -> bool {
        self.it.config.resident > 0 && self.is_shared_row(arg) && self.sweeps_of(arg).len() < 2
    }

    fn is_shared_row(&self, arg: usize) -> bool {
        self.it.body.args[arg].access == Access::Row && self.it.layouts[arg].axes.is_empty()
    }

    /// Declares an array of raw chunks for each argument and fills it.
    fn load_loop(&mut self, args: &[usize]) {
        self.declare_row("w", "", args, &[]);
        self.fill("w", args);
    }

    fn fill(&mut self, raw: &str, args: &[usize]) {
        if args.is_empty() {
            return;
        }
        self.line("#pragma unroll");
        self.open("for (int c = 0; c < CHUNKS; ++c) {");
        self.column();
        for &arg in args {
            let load = self.load(arg);
            self.line(format!("{raw}{arg}[c] = {load};"));
        }
        self.close();
    }

    fn column(&mut self) {
        self.line("const int col = ((part * CHUNKS + c) * T + lane) * V;");
        let config = self.it.config;
        let covered = config.parts * config.chunks * config.threads_per_row * config.vector;
        self.line(match covered == self.it.body.cols {
            true => "const bool in = true;",
            false => "const bool in = col < COLS;",
        });
    }

    fn load(&self, arg: usize) -> String {
        // What all rows share, or every sweep reads, is worth the nearest cache.
        let how = match self.is_shared_row(arg) || self.it.config.policy == Policy::Streamed {
            true => "AGAIN",
            false => "STREAM",
        };
        let (ty, size, access) = (self.type_of(arg), self.size_of(arg), self.access_of(arg));
        format!("load<{ty}, {access}, {how}>(g{arg} + (i64)col * {size}, in)")
    }

    /// Addresses of this row's arguments.
    fn addresses(&mut self, wanted: impl Fn(&ArgSpec, usize) -> bool) {
        let body = self.it.body;
        let wide = if self.it.config.wide { "u64" } else { "u32" };
        // Indices first: a gathered row waits for its index.
        let order = |arg: &usize| matches!(body.args[*arg].access, Access::GatheredRow { .. });
        let is_memory = |arg: usize| !self.is_hoisted(arg) && !self.it.handed.contains(&arg);
        let mut args: Vec<usize> =
            (0..body.args.len()).filter(|&arg| is_memory(arg) && wanted(&body.args[arg], arg)).collect();
        args.sort_by_key(order);
        for arg in args {
            let constant = if body.args[arg].written { "" } else { "const " };
            let layout = &self.it.layouts[arg];
            let base = format!("({constant}char*)p.a{arg}");
            let offset = match body.args[arg].access {
                Access::Columns => continue,
                Access::GatheredRow { index } => {
                    self.line(format!("int x{arg} = load_one(I32{{}}, g{index});"));
                    self.open(format!("if (x{arg} < 0 || (u64)x{arg} >= p.n{arg}) {{"));
                    self.line(format!(
                        "if (live && lane == 0 && part == 0) atomicMin((u64*)p.fault, (u64)row * 256 + {arg});"
                    ));
                    self.line(format!("x{arg} = 0;"));
                    self.close();
                    format!(" + (i64)x{arg} * (i64)p.s{arg}_0")
                }
                Access::Row | Access::PerRow => match layout.axes.len() {
                    0 => String::new(),
                    1 => format!(" + row * (i64)p.s{arg}_0"),
                    axes => {
                        self.line(format!("{wide} q{arg} = ({wide})row;"));
                        self.line(format!("i64 o{arg} = 0;"));
                        for axis in (1..axes).rev() {
                            self.line(format!(
                                "o{arg} += (i64)(q{arg} % ({wide})p.n{arg}_{axis}) * (i64)p.s{arg}_{axis}; q{arg} /= ({wide})p.n{arg}_{axis};"
                            ));
                        }
                        format!(" + o{arg} + (i64)q{arg} * (i64)p.s{arg}_0")
                    }
                },
            };
            self.line(format!("{constant}char* const g{arg} = {base}{offset};"));
        }
    }

    /// A row that stays in registers is loaded as a whole before anything is computed.
    fn early_loads(&mut self) {
        if self.it.config.policy != Policy::Registers {
            return;
        }
        let own: Vec<usize> = self.row_loads().into_iter().filter(|&arg| !self.is_hoisted(arg)).collect();
        self.load_loop(&own);
        self.kept_arrays();
    }

    /// Arguments that are loaded along the row.
    fn row_loads(&self) -> Vec<usize> {
        let along = |arg: &usize| {
            let spec = &self.it.body.args[*arg];
            !spec.written
                && !self.it.handed.contains(arg)
                && matches!(spec.access, Access::Row | Access::GatheredRow { .. })
                && !self.sweeps_of(*arg).is_empty()
        };
        (0..self.it.body.args.len()).filter(along).collect()
    }

    fn type_of(&self, arg: usize) -> &'static str {
        type_name(self.it.body.args[arg].dtype)
    }

    fn size_of(&self, arg: usize) -> usize {
        self.it.body.args[arg].dtype.bytes()
    }

    /// Bytes of one access: what the vector has, as far as the alignment allows.
    fn access_of(&self, arg: usize) -> usize {
        let vector = self.it.config.vector * self.size_of(arg);
        // The lowest set bit of a size that is no power of two.
        self.it.layouts[arg].alignment.min(vector & vector.wrapping_neg()).min(16)
    }
}
