//! Row work on the accumulators of a tile, in registers: a function per pass, so that a kernel can reduce many
//! rows together between two passes.
//!
//! A thread has chunks of V columns of its rows. What it knows of a row is a `Row`. Of each sweep, `Level<L>`:
//! - `Facts<L>`: numbers that the sweep reduces a row to (`SLOTS`, the first is number `FIRST` of all), the map by which it stores a result (`PUT`, -1 for none).
//! - `pick(p, row)`: where what indices pick lies, which is the same for all rows of a tile, of which `row` is one.
//! - `shared(Level<L>, p, col, picked)`: what all rows of a tile read of V columns, loaded once for the rows of a thread.
//! - `take(Level<L>, p, own, c, col, sums, carried, shared)`: the work on chunk c of a row. `carried` has a word of each operand that
//!   comes with the tile. Returns the pair of 16-bit results that leaves with the tile.
//! - `gather` reduces this thread's chunks and those of its row's other threads, `both` combines the results of two parts of a row, `nothing`
//!   is the result of none, `meet` keeps the result of the whole row; `numbers` stores results that are one number per row.
//!
//! Sums of squares about a mean would need the mean of the whole row, and so a second exchange between those who have parts of it. They are
//! taken about each part's own mean (`Facts<L>::MOMENTS`, `squares`) and combined with the sums: a part of n columns with mean m adds
//! n (m - mean)^2 (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"). Nothing cancels.

use std::fmt::Write as _;

use deuteron_graph::{BinaryOp, ReduceOp};

use super::names::{lane_type, reduce_name, scalar_type, type_name};
use super::{Emission, Writer};
use crate::body::{Access, Expr, ExprId, Stage};
use crate::cuda::row::passes::Pass;

/// Arguments that do not pass between a thread and memory directly.
#[derive(Debug, Clone, Copy)]
pub struct TileArguments<'a> {
    /// operands whose pairs come with the tile, in order
    pub carried: &'a [usize],
    /// results whose pairs leave with it, at most one of a sweep
    pub put: &'a [usize],
}

/// The namespace `tail`.
pub(crate) fn emit_tile_rows(emission: &Emission, arguments: TileArguments) -> String {
    let mut writer = Writer::new(emission);
    writer.open("namespace tail {");
    let levels = emission.passes.list.len();
    let (columns, chunks) = (emission.body.cols, emission.config.chunks);
    let slots: Vec<usize> = (0..levels).map(|level| writer.slots(level).len()).collect();
    let (all, meetings) = (slots.iter().sum::<usize>(), slots.iter().filter(|&&slots| slots > 0).count());
    writer.line(format!("constexpr int COLS = {columns}, CHUNKS = {chunks}, LEVELS = {levels};"));
    writer.line(format!("constexpr int SLOTS = {all}, MEETINGS = {meetings};"));
    writer.line("template <int LEVEL> struct Level {};");
    writer.line("template <int LEVEL> struct Facts;");
    writer.parameters();
    writer.prefetch_shared();
    writer.row_state(arguments);
    writer.begin();
    writer.pick();
    for level in 0..levels {
        writer.tile_level(level, arguments);
    }
    writer.close();
    writer.text()
}

/// Mean and squares that one exchange is enough for.
struct Moments {
    /// the sweep of the sum
    level: usize,
    /// what is summed
    value: ExprId,
    /// the number of the row that is its squares about the mean
    squares: u16,
}

/// What a function of a sweep begins with.
const FUNCTION: &str = "static __device__ __forceinline__";

impl Writer<'_> {
    /// The state of a row in a thread between passes.
    fn row_state(&mut self, arguments: TileArguments) {
        self.open("struct Row {");
        self.line("i64 row;");
        self.line("bool live;");
        for arg in self.held_operands(arguments) {
            self.line(format!("Raw<{}> w{arg}[CHUNKS];", self.type_of(arg)));
        }
        self.kept_arrays();
        for arg in self.row_numbers() {
            self.line(format!("{} u{arg};", scalar_type(self.kind_stored(arg as u16))));
        }
        for (level, pass) in self.it.passes.list.clone().iter().enumerate() {
            for (slot, (_, _, into)) in self.reductions(pass).into_iter().enumerate() {
                self.line(format!("F f{level}_{slot};"));
                self.line(format!("float r{into};"));
            }
        }
        self.depth -= 1;
        self.line("};");
    }

    /// Operands that come with the tile and wait for a later sweep.
    fn held_operands(&self, arguments: TileArguments) -> Vec<usize> {
        let waits = |arg: &usize| self.sweeps_of(*arg).iter().any(|&sweep| sweep > 0);
        arguments.carried.iter().copied().filter(waits).collect()
    }

    /// `begin(p, own)`: loads what is one number per row.
    fn begin(&mut self) {
        self.open(format!("{FUNCTION} void begin(const Parameters& p, Row& own) {{"));
        self.line("const i64 row = own.row;");
        let numbers = self.row_numbers();
        self.addresses(|_, arg| numbers.contains(&arg));
        for arg in numbers {
            self.line(format!("own.u{arg} = load_one({}{{}}, g{arg});", self.type_of(arg)));
        }
        self.close();
    }

    fn tile_level(&mut self, level: usize, arguments: TileArguments) {
        let pass = self.it.passes.list[level].clone();
        let put = arguments.put.iter().position(|&arg| self.stores(&pass, arg));
        let map = put.map_or("-1".to_string(), |at| (arguments.carried.len() + at).to_string());
        let slots = self.slots(level);
        let before: usize = (0..level).map(|level| self.slots(level).len()).sum();
        let moments = self.moments().is_some_and(|moments| moments.level == level);
        // Where the only work was squares that an earlier sweep took, there is none.
        let empty = slots.is_empty()
            && pass.stages.iter().all(|&at| matches!(self.it.body.stages[at], Stage::RowReduce { .. }));
        self.line(format!(
            "template <> struct Facts<{level}> {{ static constexpr int SLOTS = {}, FIRST = {before}, PUT = {map}; static constexpr bool MOMENTS = {moments}, EMPTY = {empty}; }};",
            slots.len()
        ));
        let shared = self.shared_values(level, &pass);
        self.take(level, &pass, &shared, arguments, put.map(|at| arguments.put[at]));
        self.tile_reductions(level, &slots);
        self.row_results(level, &pass);
    }

    /// What a sweep reduces a row to: the operation and the number. Squares about a mean come right after its sum.
    fn slots(&self, level: usize) -> Vec<(ReduceOp, u16)> {
        let all: Vec<(ReduceOp, u16)> =
            self.reductions(&self.it.passes.list[level]).into_iter().map(|(op, _, into)| (op, into)).collect();
        match self.moments() {
            Some(moments) if moments.level == level => vec![all[0], (ReduceOp::Sum, moments.squares)],
            Some(moments) => all.into_iter().filter(|&(_, into)| into != moments.squares).collect(),
            None => all,
        }
    }

    /// A sum, and in the next sweep the sum of squares about its mean, of a value that waits in registers.
    fn moments(&self) -> Option<Moments> {
        let (body, passes) = (self.it.body, &self.it.passes.list);
        (0..passes.len().saturating_sub(1)).find_map(|level| {
            let &[(ReduceOp::Sum, value, sum)] = self.reductions(&passes[level]).as_slice() else { return None };
            let kept = self.it.passes.kept.iter().any(|&(id, _)| id == value);
            let is_mean = |id: ExprId| match body.expr(id) {
                Expr::Binary(BinaryOp::Mul, a, b) => {
                    let (a, b) = (body.expr(a), body.expr(b));
                    let of_columns = |expr: Expr| expr == Expr::Const((1.0 / body.cols as f32).to_bits());
                    (a == Expr::RowValue(sum) && of_columns(b)) || (b == Expr::RowValue(sum) && of_columns(a))
                }
                _ => false,
            };
            let is_centred = |id: ExprId| matches!(body.expr(id), Expr::Binary(BinaryOp::Sub, x, mean) if x == value && is_mean(mean));
            let squared = self.reductions(&passes[level + 1]).into_iter().find(|&(op, id, _)| {
                op == ReduceOp::Sum
                    && matches!(body.expr(id), Expr::Binary(BinaryOp::Mul, a, b) if a == b && is_centred(a))
            });
            let (_, _, squares) = squared.filter(|_| kept)?;
            Some(Moments { level, value, squares })
        })
    }

    /// Whether a sweep stores an argument.
    fn stores(&self, pass: &Pass, wanted: usize) -> bool {
        let stores =
            |&at: &usize| matches!(self.it.body.stages[at], Stage::Store { arg, .. } if usize::from(arg) == wanted);
        pass.stages.iter().any(stores)
    }

    /// Where rows of tables lie that indices pick.
    fn pick(&mut self) {
        let picked = |arg: &usize| self.index_of(*arg).is_some();
        let args: Vec<usize> = (0..self.it.body.args.len()).filter(picked).collect();
        let indices: Vec<usize> = args.iter().filter_map(|&arg| self.index_of(arg)).collect();
        self.open("struct Picked {");
        for arg in &args {
            self.line(format!("const char* g{arg};"));
        }
        self.depth -= 1;
        self.line("};");
        self.open(format!("{FUNCTION} Picked pick(const Parameters& p, const i64 row) {{"));
        self.indices_are_known(&indices);
        self.addresses(|_, arg| args.contains(&arg) || indices.contains(&arg));
        let names: Vec<String> = args.iter().map(|arg| format!("g{arg}")).collect();
        self.line(format!("return {{{}}};", names.join(", ")));
        self.close();
    }

    /// Arguments of which all rows of a tile read the same in this sweep, and the function that loads them.
    fn shared_values(&mut self, level: usize, pass: &Pass) -> Vec<usize> {
        let reads = |arg: &usize| pass.lanes.iter().any(|&id| self.it.body.expr(id) == Expr::Load(*arg as u16));
        let is_same = |arg: usize| self.is_shared_row(arg) || self.index_of(arg).is_some();
        let shared = |arg: &usize| is_same(*arg) && !self.it.handed.contains(arg) && reads(arg);
        let args: Vec<usize> = (0..self.it.body.args.len()).filter(shared).collect();
        self.open(format!("struct Shared{level} {{"));
        for &arg in &args {
            self.line(format!("Raw<{}> w{arg};", self.type_of(arg)));
        }
        self.depth -= 1;
        self.line("};");
        self.open(format!(
            "{FUNCTION} Shared{level} shared(Level<{level}>, const Parameters& p, const int col, const Picked& picked = {{}}) {{"
        ));
        self.inside();
        self.line("const i64 row = 0;");
        self.addresses(|spec, arg| args.contains(&arg) && spec.access == Access::Row);
        for &arg in &args {
            if self.index_of(arg).is_some() {
                self.line(format!("const char* const g{arg} = picked.g{arg};"));
            }
        }
        self.line(format!("Shared{level} values;"));
        for &arg in &args {
            let load = self.load(arg);
            self.line(format!("values.w{arg} = {load};"));
        }
        self.line("return values;");
        self.close();
        args
    }

    /// Whether a column is one of the row's.
    fn inside(&mut self) {
        let config = self.it.config;
        let covered = config.parts * config.chunks * config.threads_per_row * config.vector;
        let all = covered == self.it.body.cols;
        self.line(if all { "const bool in = true;" } else { "const bool in = col < COLS;" });
    }

    fn take(&mut self, level: usize, pass: &Pass, shared: &[usize], arguments: TileArguments, put: Option<usize>) {
        let outer = self.names.clone();
        self.open(format!(
            "{FUNCTION} u32 take(Level<{level}>, const Parameters& p, Row& own, const int c, const int col, const F* sums, const u32* carried, const Shared{level}& shared) {{"
        ));
        self.inside();
        self.line("u32 pair = 0;");
        self.state(level);
        let body = self.it.body;
        let direct = |arg: usize| {
            !shared.contains(&arg)
                && !arguments.carried.contains(&arg)
                && Some(arg) != put
                && body.args[arg].access == Access::Row
        };
        self.addresses(|_, arg| direct(arg));
        if level == 0 {
            self.hold_for_later(pass, arguments);
        }
        for &id in &pass.lanes {
            match body.expr(id) {
                Expr::Load(arg) if !self.it.handed.contains(&usize::from(arg)) => {
                    let value = self.tile_operand(level, usize::from(arg), shared, arguments);
                    self.line(format!("const {} e{} = {value};", lane_type(self.kind(id)), id.index()));
                    self.names.insert(id, format!("e{}", id.index()));
                }
                _ => self.lanes(id, level),
            }
        }
        self.staged = put;
        self.lane_stages(level, pass, &self.reductions(pass));
        self.staged = None;
        self.line("return pair;");
        self.close();
        self.names = outer;
    }

    /// Keeps operands that come with the tile and are read by later sweeps alone: their place is a result's by then.
    fn hold_for_later(&mut self, pass: &Pass, arguments: TileArguments) {
        let is_read = |arg: usize| pass.lanes.iter().any(|&id| self.it.body.expr(id) == Expr::Load(arg as u16));
        let later = self.held_operands(arguments).into_iter().filter(|&arg| !is_read(arg));
        for arg in later.collect::<Vec<_>>() {
            let raw = self.carried(arg, arguments).unwrap_or_default();
            self.line(format!("own.w{arg}[c] = {raw};"));
        }
    }

    /// The pair of an operand that comes with the tile, if it does.
    fn carried(&self, arg: usize, arguments: TileArguments) -> Option<String> {
        let at = arguments.carried.iter().position(|&carried| carried == arg)?;
        Some(format!("Raw<{}>{{{{carried[{at}]}}}}", self.type_of(arg)))
    }

    /// The text of what an operand is in a sweep.
    fn tile_operand(&mut self, level: usize, arg: usize, shared: &[usize], arguments: TileArguments) -> String {
        if shared.contains(&arg) {
            return format!("value(shared.w{arg})");
        }
        let Some(raw) = self.carried(arg, arguments) else {
            return format!("value({})", self.load(arg));
        };
        match (self.held_operands(arguments).contains(&arg), level) {
            (true, 0) => format!("value(own.w{arg}[c] = {raw})"),
            (true, _) => format!("value(own.w{arg}[c])"),
            (false, _) => format!("value({raw})"),
        }
    }

    /// Names for what is known of a row: its state, and numbers that follow from it.
    fn state(&mut self, level: usize) {
        self.line("const i64 row = own.row;");
        self.line("const bool live = own.live;");
        for (earlier, pass) in self.it.passes.list.clone().iter().enumerate().take(level + 1) {
            for (slot, (_, _, into)) in self.reductions(pass).into_iter().enumerate() {
                match earlier == level {
                    true => self.line(format!("F& f{level}_{slot} = own.f{level}_{slot};")),
                    false => self.line(format!("const float r{into} = own.r{into};")),
                }
            }
        }
        let kept: Vec<ExprId> = self.it.passes.kept.iter().map(|&(id, _)| id).collect();
        for id in kept {
            self.line(format!("auto& k{0} = own.k{0};", id.index()));
        }
        let body = self.it.body;
        for id in self.reachable() {
            match body.expr(id) {
                Expr::Load(arg) if body.args[usize::from(arg)].access == Access::PerRow => {
                    self.names.insert(id, format!("own.u{arg}"));
                }
                _ if self.it.passes.uniform[id.index()] && self.it.passes.levels[id.index()] <= level => {
                    self.number(id)
                }
                _ => {}
            }
        }
    }

    fn tile_reductions(&mut self, level: usize, slots: &[(ReduceOp, u16)]) {
        let (mut start, mut gather, mut both, mut meet) = (String::new(), String::new(), String::new(), String::new());
        let mut nothing = String::new();
        let (lanes, moments) = (self.it.config.threads_per_row, self.moments());
        for (slot, &(op, _, into)) in self.reductions(&self.it.passes.list[level].clone()).iter().enumerate() {
            let name = reduce_name(op);
            let _ = write!(start, " own.f{level}_{slot} = lanes<F>([](int) {{ return {name}::start(); }});");
            if let Some(slot_at) = slots.iter().position(|&(_, known)| known == into) {
                let part = format!("butterfly<{name}, {lanes}>(gather_lanes<{name}>(own.f{level}_{slot}))");
                let _ = write!(gather, " parts[{slot_at}] = {part};");
            }
        }
        for (slot, &(op, into)) in slots.iter().enumerate() {
            let _ = write!(both, " if (slot == {slot}) return {}::both(a, b);", reduce_name(op));
            let _ = write!(nothing, " if (slot == {slot}) return {}::start();", reduce_name(op));
            let _ = write!(meet, " own.r{into} = totals[{slot}];");
        }
        self.line(format!("{FUNCTION} void start(Level<{level}>, Row& own) {{{start} }}"));
        self.line(format!("{FUNCTION} void gather(Level<{level}>, const Row& own, float* parts) {{{gather} }}"));
        self.line(format!("{FUNCTION} float both(Level<{level}>, int slot, float a, float b) {{{both} return a; }}"));
        self.line(format!("{FUNCTION} float nothing(Level<{level}>, int slot) {{{nothing} return 0.0f; }}"));
        self.line(format!("{FUNCTION} void meet(Level<{level}>, Row& own, const float* totals) {{{meet} }}"));
        match moments.filter(|moments| moments.level == level) {
            Some(moments) => self.squares(level, moments.value),
            None => self
                .line(format!("{FUNCTION} float squares(Level<{level}>, const Row&, int, float) {{ return 0.0f; }}")),
        }
    }

    /// `squares(Level<L>, own, column, mean)`: squares about a mean, over this thread's columns of a part that begins at a column, and over the
    /// threads of the row.
    fn squares(&mut self, level: usize, value: ExprId) {
        let (lanes, k) = (self.it.config.threads_per_row, value.index());
        self.open(format!("{FUNCTION} float squares(Level<{level}>, const Row& own, int column, float mean) {{"));
        self.line("F all = lanes<F>([](int) { return 0.0f; });");
        self.line("#pragma unroll");
        self.open("for (int c = 0; c < CHUNKS; ++c) {");
        self.line(format!("const int col = column + c * {lanes} * V;"));
        self.inside();
        self.line(format!("const F x = value(own.k{k}[c]);"));
        self.line("if (in) all = lanes<F>([&](int i) { return fmaf(x.v[i] - mean, x.v[i] - mean, all.v[i]); });");
        self.close();
        self.line(format!("return butterfly<Sum, {lanes}>(gather_lanes<Sum>(all));"));
        self.close();
    }

    /// `numbers(Level<L>, p, own, lane, part)`: stores what is one number per row.
    fn row_results(&mut self, level: usize, pass: &Pass) {
        let outer = self.names.clone();
        self.open(format!(
            "{FUNCTION} void numbers(Level<{level}>, const Parameters& p, Row& own, const int lane, const int part) {{"
        ));
        if pass.stages.iter().any(|&at| self.is_per_row_store(&self.it.body.stages[at])) {
            self.state(level);
            self.addresses(|spec, _| spec.written && spec.access == Access::PerRow);
            self.row_stages(pass);
        }
        self.close();
        self.names = outer;
    }

    /// The pair of a result that leaves with the tile.
    pub(super) fn pair(&mut self, arg: usize, value: &str) {
        self.line(format!("pair = Packer<{}>::pack({value}).w[0];", type_name(self.it.body.args[arg].dtype)));
    }
}
