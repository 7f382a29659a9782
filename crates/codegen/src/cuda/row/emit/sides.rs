//! Row work as functions that another kernel calls: the prologue of a matmul, its epilogue, and work
//! on rows that a block has finished.

use super::names::{lane_type, scalar_type};
use super::{Emission, Span, Writer, partials};
use crate::body::{Access, ArgSpec, Expr, ExprId};
use crate::cuda::row_config::Policy;

/// `head::run(p, put, first)`: all threads of a block make ROWS rows of the operand, from the first on, and call `put(row, column, value)` for
/// each element.
pub(crate) fn emit_prologue(emission: &Emission) -> String {
    let mut writer = Writer::new(emission);
    writer.open("namespace head {");
    writer.constants_of_rows();
    writer.parameters();
    writer.open("template <class Put> static __device__ __forceinline__ void run(const Parameters& p, Put put, const int first = 0) {");
    writer.line("const int lane = threadIdx.x % T, group = threadIdx.x / T;");
    writer.line("const int part = 0, turn = 0;");
    writer.shared_memory();
    writer.place("first");
    writer.addresses(|spec, _| !spec.written);
    writer.early_loads();
    writer.sweeps();
    writer.close();
    writer.close();
    writer.text()
}

/// `make(p, start)`: the threads of a warp do the work of a row, and store it; `prefetch(p, start)` brings what they read of it into the L2.
pub(crate) fn emit_rows_of_warps(emission: &Emission) -> String {
    let mut writer = Writer::new(emission);
    writer.span = Span { begin: "start", step: "1", end: "start + 1", memory: None };
    writer.open("namespace head {");
    writer.constants_of_rows();
    writer.parameters();
    writer.open("static __device__ __forceinline__ void make(const Parameters& p, const i64 start) {");
    writer.line("const int lane = threadIdx.x % T, group = 0;");
    writer.line("const int part = 0, turn = 0;");
    writer.place("start");
    writer.addresses(|_, _| true);
    if emission.config.policy == Policy::Registers {
        writer.load_loop(&writer.own_loads());
        writer.kept_arrays();
    }
    writer.sweeps();
    writer.close();
    writer.open("static __device__ __forceinline__ void prefetch(const Parameters& p, const i64 start) {");
    writer.line("const int lane = threadIdx.x % T, group = 0;");
    writer.place("start");
    let own: Vec<usize> = writer.row_loads().into_iter().filter(|&arg| !writer.is_shared_row(arg)).collect();
    let own = |spec: &ArgSpec, arg: usize| !spec.written && spec.access == Access::Row && own.contains(&arg);
    writer.addresses(own);
    for (arg, spec) in emission.body.args.iter().enumerate().filter(|&(arg, spec)| own(spec, arg)) {
        let bytes = emission.body.cols * spec.dtype.bytes();
        writer.line(format!("for (int at = lane * 128; at < {bytes}; at += T * 128) prefetch_line((u64)g{arg} + at);"));
    }
    writer.close();
    writer.close();
    writer.text()
}

/// `read_shared(p, col, row)` gives what one thread reads from memory for V columns of all rows, or of all that have the index of `row` where
/// an index picks what is read; `read(p, row, col)` gives what it reads for those of one row; `run(p, row, col, sums, shared, operands)` does with both what follows V sums of that row, of each matmul. So several loads can be
/// in flight before the first work, and what rows share is loaded once. Where columns are summed over rows, the last argument of `run` is a sum
/// so far of each, and the kernel `finish` adds up what blocks have stored.
pub(crate) fn emit_epilogue(emission: &Emission) -> String {
    debug_assert_eq!(emission.config.policy, Policy::Streamed, "every value is read where it is needed");
    let mut writer = Writer::new(emission);
    writer.open("namespace tail {");
    writer.line(format!("constexpr int COLS = {};", emission.body.cols));
    writer.parameters();
    writer.prefetch_shared();
    writer.operands("Shared", "read_shared(const Parameters& p, const int col, const i64 row = 0)", true);
    writer.operands("Operands", "read(const Parameters& p, const i64 row, const int col)", false);
    let sums = partials(emission.body).len();
    let columns = if sums > 0 { ", F* columns" } else { "" };
    writer.open(format!(
        "static __device__ __forceinline__ void run(const Parameters& p, const i64 row, const int col, const F* sums, const Shared& shared, const Operands& operands{columns}) {{"
    ));
    writer.line("const bool live = true, in = true;");
    for index in 0..sums {
        writer.line(format!("F* const sum{index} = columns + {index};"));
    }
    if sums > 0 {
        writer.line("constexpr int c = 0;");
    }
    writer.addresses(|spec, _| spec.written);
    for id in writer.reachable() {
        match (emission.passes.uniform[id.index()], writer.operand(id)) {
            (uniform, Some(Operand { arg, shared, .. })) => {
                let from = if shared { "shared" } else { "operands" };
                let (ty, value) = match uniform {
                    true => (scalar_type(writer.kind(id)), format!("{from}.w{arg}")),
                    false => (lane_type(writer.kind(id)), format!("value({from}.w{arg})")),
                };
                writer.line(format!("const {ty} e{} = {value};", id.index()));
                writer.names.insert(id, format!("e{}", id.index()));
            }
            (true, None) => writer.number(id),
            (false, None) => writer.lanes(id, 0),
        }
    }
    if let Some(pass) = emission.passes.list.first() {
        writer.lane_stages(0, pass, &[]);
    }
    writer.close();
    writer.close();
    writer.finish_kernel();
    writer.text()
}

/// What an epilogue reads from memory.
struct Operand {
    arg: usize,
    /// whether all rows read the same
    shared: bool,
    /// of the loaded value, in the text
    ty: String,
    load: String,
}

/// `run(p, first, end, s_memory)`: all threads of a block do the work of the rows from `first` to before `end`, of which there is one at
/// least. Where several warps share a row, they meet in `s_memory`.
pub(crate) fn emit_following(emission: &Emission) -> String {
    let mut writer = Writer::new(emission);
    writer.span = Span::GIVEN;
    writer.constants_of_rows();
    writer.line("");
    writer.parameters();
    writer.open(
        "static __device__ __forceinline__ void run(const Parameters& p, const i64 first, const i64 end, char* s_memory) {",
    );
    writer.line("const int lane = threadIdx.x % T, group = threadIdx.x / T;");
    writer.line("const int part = 0;");
    writer.shared_memory();
    writer.walked();
    writer.close();
    writer.text()
}

impl Writer<'_> {
    /// A structure of what an epilogue loads, of what rows share or of all else, and the function that does.
    fn operands(&mut self, name: &str, function: &str, shared: bool) {
        let all = self.reachable().into_iter().filter_map(|id| self.operand(id));
        let loads: Vec<Operand> = all.filter(|operand| operand.shared == shared).collect();
        self.open(format!("struct {name} {{"));
        for Operand { arg, ty, .. } in &loads {
            self.line(format!("{ty} w{arg};"));
        }
        self.depth -= 1;
        self.line("};");
        self.open(format!("static __device__ __forceinline__ {name} {function} {{"));
        self.line("const bool in = true;");
        let indices: Vec<usize> = loads.iter().filter_map(|operand| self.index_of(operand.arg)).collect();
        self.indices_are_known(&indices);
        self.addresses(|_, arg| loads.iter().any(|operand| operand.arg == arg) || indices.contains(&arg));
        self.line(format!("{name} operands;"));
        for Operand { arg, load, .. } in &loads {
            self.line(format!("operands.w{arg} = {load};"));
        }
        self.line("return operands;");
        self.close();
    }

    /// Which argument has the indices that pick rows of this one, if any do.
    pub(super) fn index_of(&self, arg: usize) -> Option<usize> {
        match self.it.body.args[arg].access {
            Access::GatheredRow { index } => Some(usize::from(index)),
            Access::Row | Access::PerRow | Access::Columns => None,
        }
    }

    /// Names that addresses of picked rows want: whoever hands sums over has looked at the indices, and told of those that pick nothing.
    pub(super) fn indices_are_known(&mut self, indices: &[usize]) {
        if !indices.is_empty() {
            self.line("constexpr bool live = false;");
            self.line("constexpr int lane = 0, part = 0;");
        }
    }

    /// What an expression reads from memory, if it does.
    fn operand(&self, id: ExprId) -> Option<Operand> {
        let Expr::Load(arg) = self.it.body.expr(id) else { return None };
        let arg = usize::from(arg);
        if self.it.handed.contains(&arg) {
            return None;
        }
        let (ty, load) = match self.it.passes.uniform[id.index()] {
            true => (scalar_type(self.kind(id)).to_string(), format!("load_one({}{{}}, g{arg})", self.type_of(arg))),
            false => (format!("Raw<{}>", self.type_of(arg)), self.load(arg)),
        };
        let picked = matches!(self.it.body.args[arg].access, Access::GatheredRow { .. });
        Some(Operand { arg, shared: self.it.layouts[arg].axes.is_empty() || picked, ty, load })
    }

    /// `prefetch_shared(p, first, columns)`: all threads of a block bring this many columns, from the first on, of what all rows read into the
    /// L2. Nothing if there is no such argument.
    pub(super) fn prefetch_shared(&mut self) {
        let body = self.it.body;
        let is_read =
            |arg: &usize| !body.args[*arg].written && !self.it.handed.contains(arg) && self.is_shared_row(*arg);
        let args: Vec<usize> = (0..body.args.len()).filter(is_read).collect();
        if args.is_empty() {
            return;
        }
        self.open("static __device__ __forceinline__ void prefetch_shared(const Parameters& p, const int first, const int columns) {");
        self.line("const u64 count = max(0, min(columns, COLS - first));");
        for arg in args {
            let size = self.size_of(arg);
            self.line(format!("prefetch_range((u64)p.a{arg} + (i64)first * {size}, count * {size});"));
        }
        self.close();
    }

    fn constants_of_rows(&mut self) {
        let config = self.it.config;
        self.line(format!("constexpr int T = {};", config.threads_per_row));
        self.line(format!("constexpr int ROWS = {};", config.rows_per_block));
        self.line(format!("constexpr int CHUNKS = {};", config.chunks));
        self.line(format!("constexpr int COLS = {};", self.it.body.cols));
    }

    pub(super) fn text(self) -> String {
        self.lines.iter().flat_map(|line| [line.text.as_str(), "\n"]).collect()
    }
}
