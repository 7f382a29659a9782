//! The op matrix: every op of the catalogue, direction and dtype, over odd shapes and three ways to lie in memory.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use deuteron_graph::{Dtype, Graph, Shape, View};
use deuteron_plan::{Layout, Strategy};
use serde::Serialize;

use super::Bed;
use super::mathematics::{self, Findings};
use crate::catalog::{self, ExpertSizes, FusedOp, OperandType, Sizes};
use crate::engine::Engine;
use crate::error::Error;
use crate::parallel;
use crate::seed;
use crate::session::{Session, SessionOptions};
use crate::tensor::Tensor;
use crate::verify::{Expected, Verification};

/// How much of the matrix to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Breadth {
    /// every shape and dtype, two layouts each
    All,
    /// a handful of cases an op: for tools that slow kernels down a hundredfold
    Small,
    /// two cases an op, each run this many times beside other work on the device: every run must give the same bits
    Repeated(usize),
}

/// A part of the matrix, so that several processes can share it, each with its own compiler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// the part, from 0
    pub index: usize,
    /// the number of parts
    pub count: usize,
}

impl Part {
    /// All of it.
    pub const WHOLE: Part = Part { index: 0, count: 1 };
}

/// The result of a run over the catalogue.
#[derive(Debug, Clone, Serialize)]
pub struct CatalogReport {
    /// where it ran
    pub device: String,
    /// results compared with the reference: op, direction, dtype, shape, layout
    pub cases: usize,
    /// different shapes among them
    pub shapes: usize,
    /// how often each was run again, beside other work; 0 if it was not
    pub repeats: usize,
    /// cases outside of their bound, or with an error; formulas and gradients that are wrong
    pub failures: usize,
    /// the largest error as a share of its bound
    pub worst_ratio: f64,
    /// the case it came from
    pub worst_case: String,
    /// calls of composites whose expansion was compared with its formula
    pub formulas: usize,
    /// gradients that were compared with central differences of the formulas
    pub gradients: usize,
    /// elements of these gradients
    pub gradient_elements: usize,
    /// by op
    pub ops: BTreeMap<String, OpRow>,
    /// seconds it took
    pub seconds: f64,
    /// the first failures
    pub failed: Vec<CatalogFailure>,
}

/// One op of the matrix.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct OpRow {
    /// how many cases
    pub cases: usize,
    /// how many of them failed, and formulas and gradients that are wrong
    pub failures: usize,
    /// the largest error as a share of its bound
    pub worst_ratio: f64,
}

/// A case that failed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CatalogFailure {
    /// op, direction, dtype, shape and layout
    pub case: String,
    /// the error, or the output that is wrong
    pub what: String,
}

/// Maximum number of failures listed individually.
const TOLD: usize = 20;

/// Rows and columns: none, one, around vectors, warps and blocks, a vocabulary, rows too long for one block. Columns are
/// compiled in, so there are fewer of them.
#[rustfmt::skip]
const SHAPES: [(usize, usize); 40] = [
    (0, 1), (1, 1), (2, 1), (7, 1), (4097, 1),
    (1, 2), (3, 2), (129, 2),
    (1, 7), (2, 7), (7, 7), (1025, 7),
    (1, 64), (64, 64), (513, 64),
    (0, 127), (1, 127), (2, 127), (254, 127),
    (1, 129), (33, 129), (129, 129),
    (0, 768), (1, 768), (2, 768), (7, 768), (127, 768),
    (1, 1500), (2, 1500), (17, 1500),
    (1, 4096), (3, 4096), (9, 4096),
    (1, 16384), (2, 16384),
    (1, 50257), (2, 50257), (3, 50257),
    (1, 131072), (2, 131072),
];

/// The sizes of a small run; the i-th has the i-th dtype and layout.
const FEW_SHAPES: [(usize, usize); 6] = [(5, 129), (2, 1500), (3, 768), (33, 7), (1, 16384), (1, 50257)];

/// The sizes to repeat: many rows, whose column sums are combined across blocks, and few long ones.
const REPEATED_SHAPES: [(usize, usize); 2] = [(1025, 129), (3, 16384)];

/// The longest row of an op with a square result.
const WIDEST_SQUARE: usize = 768;

/// The layout of operands in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lie {
    /// row after row
    Contiguous,
    /// rows padded to a stride that keeps vectors aligned
    Padded,
    /// rows that start one element into their buffer, with an odd stride
    Misaligned,
}

impl Lie {
    const ALL: [Lie; 3] = [Lie::Contiguous, Lie::Padded, Lie::Misaligned];

    fn name(self) -> &'static str {
        match self {
            Lie::Contiguous => "contiguous",
            Lie::Padded => "padded rows",
            Lie::Misaligned => "misaligned",
        }
    }

    /// Elements before and after each row.
    fn around(self) -> (usize, usize) {
        match self {
            Lie::Contiguous => (0, 0),
            Lie::Padded => (0, 16),
            Lie::Misaligned => (1, 2),
        }
    }
}

/// One graph of the matrix, and the layouts it is run with.
struct Piece {
    op: FusedOp,
    backward: bool,
    dtype: Dtype,
    rows: usize,
    cols: usize,
    lies: Vec<Lie>,
    repeats: usize,
}

/// The result of one layout.
struct Answer {
    lie: Lie,
    ratio: f64,
    problem: Option<String>,
}

/// Runs the catalogue on an engine, or those of its ops that are named. `progress` receives the number of finished graphs and of all graphs.
pub fn check_catalog(
    engine: &Engine,
    breadth: Breadth,
    names: &[&str],
    part: Part,
    mut progress: impl FnMut(usize, usize),
) -> Result<CatalogReport, Error> {
    let begin = Instant::now();
    let asked = |piece: &Piece| names.is_empty() || names.contains(&piece.op.name());
    let pieces = pieces(breadth).into_iter().filter(asked);
    let pieces: Vec<Piece> = pieces.skip(part.index).step_by(part.count.max(1)).collect();
    let bed = Bed::new(engine);
    let mut report = CatalogReport {
        device: engine.device().describe(),
        cases: 0,
        shapes: pieces.iter().map(|piece| (piece.rows, piece.cols)).collect::<std::collections::BTreeSet<_>>().len(),
        repeats: if let Breadth::Repeated(times) = breadth { times } else { 0 },
        failures: 0,
        worst_ratio: 0.0,
        worst_case: String::new(),
        formulas: 0,
        gradients: 0,
        gradient_elements: 0,
        ops: BTreeMap::new(),
        seconds: 0.0,
        failed: Vec::new(),
    };
    let mut done = 0;
    parallel::for_each(
        pieces.len(),
        |index| pieces[index].run(&bed),
        |index, answers| {
            answers.into_iter().for_each(|answer| report.add(&pieces[index], answer));
            done += 1;
            progress(done, pieces.len());
        },
    );
    let ops: Vec<FusedOp> = FusedOp::variants();
    let ops = ops.into_iter().filter(|op| names.is_empty() || names.contains(&op.name()));
    let ops: Vec<FusedOp> = ops.skip(part.index).step_by(part.count.max(1)).collect();
    let check = |index: usize| parallel::guarded(|| mathematics::check(&ops[index]));
    parallel::for_each(ops.len(), check, |index, findings| report.add_mathematics(&ops[index], findings));
    report.seconds = begin.elapsed().as_secs_f64();
    Ok(report)
}

/// Runs a function while another thread keeps the device busy with other work.
pub fn beside_other_work<T>(engine: &Engine, work: impl FnOnce() -> T) -> Result<T, Error> {
    let op = catalog::SOFTMAX.usual();
    let graph = op.graph(&op.operand_types(4096, 2000, Dtype::Bf16))?;
    let mut session = Session::new(engine, &graph, Strategy::Greedy)?;
    let input = seed::inputs(&graph, 3)?.swap_remove(0).to_device(engine)?;
    let enough = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| -> Result<(), Error> {
            while !enough.load(Ordering::Relaxed) {
                session.run(&[&input])?;
            }
            Ok(())
        });
        let end = End(&enough);
        let done = work();
        drop(end);
        // Work that could not go on meanwhile proves nothing.
        other.join().unwrap_or(Ok(()))?;
        Ok(done)
    })
}

/// Ends the other work, even on a panic.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn pieces(breadth: Breadth) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for op in FusedOp::variants() {
        for backward in [false, true].into_iter().filter(|backward| !backward || op.has_backward()) {
            let mut add = |dtype, (rows, cols), lies: &[Lie], repeats| {
                if is_bearable(&op, rows, cols) {
                    pieces.push(Piece { op, backward, dtype, rows, cols, lies: lies.to_vec(), repeats });
                }
            };
            match breadth {
                Breadth::All => {
                    for dtype in Dtype::FLOATS {
                        // Rows side by side, and padded and misaligned rows in turn: each width has both.
                        SHAPES.iter().enumerate().for_each(|(index, &shape)| {
                            add(dtype, shape, &[Lie::Contiguous, Lie::ALL[1 + index % 2]], 0);
                        });
                    }
                }
                Breadth::Small => FEW_SHAPES.iter().enumerate().for_each(|(index, &shape)| {
                    add(Dtype::FLOATS[index % 3], shape, &[Lie::ALL[index % 3]], 0);
                }),
                Breadth::Repeated(times) => REPEATED_SHAPES.iter().enumerate().for_each(|(index, &shape)| {
                    add(Dtype::FLOATS[2 * index % 3], shape, &[Lie::ALL[2 * index]], times);
                }),
            }
        }
    }
    pieces
}

/// Scores are as long as they are wide, and so are products: theirs are shapes that a reference can hold. A norm of two
/// columns is a sign where they are near each other, and behind a product their order is a matter of rounding. The mean of no losses is
/// refused.
fn is_bearable(op: &FusedOp, rows: usize, cols: usize) -> bool {
    let square = !op.is_rows() || op.is_square();
    let sign = !op.is_rows() && cols == 2;
    let nothing = op.is(catalog::LINEAR_CROSS_ENTROPY) && rows == 0;
    // Products are compiled for every inner size, which takes the time of all the rest: few of the wide ones.
    let rare = !op.is_rows() && cols == WIDEST_SQUARE && rows != 2;
    !square || (cols <= WIDEST_SQUARE && rows <= WIDEST_SQUARE && !sign && !nothing && !rare)
}

/// The types `bench` uses, with tables that a reference can hold.
fn types(op: &FusedOp, rows: usize, cols: usize, dtype: Dtype) -> Vec<OperandType> {
    let tokens = if cols <= 4099 { 301 } else { 5 };
    let usual = Sizes::new(rows, cols, dtype);
    op.operand_types_of(&Sizes {
        tokens,
        positions: rows + 2,
        classes: 301,
        experts: ExpertSizes { count: 3, columns: Some(37), choices: 2 },
        ..usual
    })
}

impl Piece {
    fn run(&self, bed: &Bed<'_>) -> Vec<Answer> {
        let failed = |lie: Lie, problem: String| Answer { lie, ratio: 0.0, problem: Some(problem) };
        let (graph, tensors, expected) = match parallel::guarded(|| self.prepare()) {
            Ok(Ok(prepared)) => prepared,
            Ok(Err(error)) => return vec![failed(self.lies[0], error.to_string())],
            Err(panic) => return vec![failed(self.lies[0], panic)],
        };
        let answer =
            |(lie, plan)| match parallel::guarded(|| self.run_with(bed, &graph, &tensors, &expected, (lie, plan))) {
                Ok(Ok(answer)) => answer,
                Ok(Err(error)) => failed(lie, error.to_string()),
                Err(panic) => failed(lie, panic),
            };
        // The plan that a ready-made op runs, and the greedy one once where that is another.
        let shipped = catalog::strategy(&graph);
        let greedy = (shipped != Strategy::Greedy).then_some((self.lies[0], Strategy::Greedy));
        self.lies.iter().map(|&lie| (lie, shipped)).chain(greedy).map(answer).collect()
    }

    fn prepare(&self) -> Result<(Graph, Vec<Tensor>, Expected), Error> {
        let types = types(&self.op, self.rows, self.cols, self.dtype);
        let graph = if self.backward { self.op.backward_graph(&types)? } else { self.op.graph(&types)? };
        let tensors = seed::inputs(&graph, 7)?;
        let arrays: Vec<_> = tensors.iter().map(Tensor::to_array).collect::<Result<_, _>>()?;
        let expected = Expected::new(&graph, &arrays)?;
        Ok((graph, tensors, expected))
    }

    fn run_with(
        &self,
        bed: &Bed<'_>,
        graph: &Graph,
        tensors: &[Tensor],
        expected: &Expected,
        (lie, plan): (Lie, Strategy),
    ) -> Result<Answer, Error> {
        let placed = tensors.iter().map(|tensor| lying(tensor, lie)?.to_device(bed.engine));
        let placed: Vec<Tensor> = placed.collect::<Result<_, _>>()?;
        let layouts: Vec<Layout> = placed.iter().map(|tensor| tensor.layout().clone()).collect();
        let options = SessionOptions::from(plan).layouts(layouts);
        let mut session = Session::new(bed.engine, graph, options)?;
        let inputs: Vec<&Tensor> = placed.iter().collect();
        let first = bed.run(&mut session, &inputs)?;
        let mut answer = answer(lie, &expected.verify(graph, &first)?);
        for repeat in 1..=self.repeats {
            let again = bed.run(&mut session, &inputs)?;
            let different = first.iter().zip(&again).position(|(first, again)| !first.is_bitwise(again));
            if let Some(output) = different {
                answer.problem = Some(format!("run {repeat} gives other bits than the first, in output {output}"));
                break;
            }
        }
        Ok(answer)
    }

    fn name(&self, lie: Lie) -> String {
        let direction = if self.backward { "backward" } else { "forward" };
        format!("{:?} {direction} {} {}x{} {}", self.op, self.dtype, self.rows, self.cols, lie.name())
    }
}

fn answer(lie: Lie, verification: &Verification) -> Answer {
    let worst = verification.worst();
    let ratio = worst.map_or(0.0, |worst| worst.comparison.ratio);
    let problem = worst.filter(|_| !verification.holds());
    let problem = problem.map(|worst| format!("output {}: {:?}", worst.name, worst.comparison));
    Answer { lie, ratio, problem }
}

/// A contiguous tensor's values in another layout, with NaN in the gaps. Indices are unchanged: tables are
/// picked from by a list.
fn lying(tensor: &Tensor, lie: Lie) -> Result<Tensor, Error> {
    let shape = tensor.shape().clone();
    let (rank, cols) = (shape.rank(), shape.cols());
    if rank == 0 || shape.elements() == 0 || lie == Lie::Contiguous || !tensor.dtype().is_float() {
        return Ok(tensor.clone());
    }
    let (before, after) = lie.around();
    let size = tensor.dtype().bytes();
    let stride = before + cols + after;
    // One more row at the end of each matrix of a batch.
    let rows = if rank > 1 { shape[rank - 2] } else { 1 };
    let (matrices, more) = (shape.elements() / (rows * cols), (rank > 1) as usize);
    let mut bytes = vec![0xFF; matrices * (rows + more) * stride * size];
    for (index, row) in tensor.to_bytes()?.chunks_exact(cols * size).enumerate() {
        let start = ((index / rows * (rows + more) + index % rows) * stride + before) * size;
        bytes[start..start + row.len()].copy_from_slice(row);
    }
    let mut dims = shape.to_vec();
    dims[rank - 1] = stride;
    if rank > 1 {
        dims[rank - 2] += more;
    }
    let around = Tensor::from_bytes(tensor.dtype(), Shape::new(dims), &bytes)?;
    let rows_view = View::Slice { axis: rank.saturating_sub(2), start: 0, length: rows };
    let within = if rank > 1 { around.view(&rows_view)? } else { around };
    within.view(&View::Slice { axis: rank - 1, start: before, length: cols })
}

impl CatalogReport {
    fn add(&mut self, piece: &Piece, answer: Answer) {
        let row = self.ops.entry(piece.op.name().to_string()).or_default();
        let failed = answer.problem.is_some() as usize;
        row.cases += 1;
        row.failures += failed;
        row.worst_ratio = row.worst_ratio.max(answer.ratio);
        self.cases += 1;
        self.failures += failed;
        if answer.ratio > self.worst_ratio {
            (self.worst_ratio, self.worst_case) = (answer.ratio, piece.name(answer.lie));
        }
        if let Some(what) = answer.problem {
            self.tell(piece.name(answer.lie), what);
        }
    }

    fn add_mathematics(&mut self, op: &FusedOp, findings: Result<Result<Findings, Error>, String>) {
        let failed = |problem: String| Findings { problems: vec![problem], ..Findings::default() };
        let findings = match findings {
            Ok(Ok(findings)) => findings,
            Ok(Err(error)) => failed(error.to_string()),
            Err(panic) => failed(panic),
        };
        self.formulas += findings.calls;
        self.gradients += findings.gradients;
        self.gradient_elements += findings.elements;
        self.failures += findings.problems.len();
        self.ops.entry(op.name().to_string()).or_default().failures += findings.problems.len();
        findings.problems.into_iter().for_each(|what| self.tell(format!("mathematics of {op:?}"), what));
    }

    fn tell(&mut self, case: String, what: String) {
        if self.failed.len() < TOLD {
            self.failed.push(CatalogFailure { case, what });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_the_same_however_they_lie() {
        for dims in [vec![5], vec![3, 7], vec![2, 3, 4]] {
            let shape = Shape::new(dims);
            let count = shape.elements();
            let tensor = Tensor::build(Dtype::Bf16, shape, count, |index| index as f64).unwrap();
            for lie in Lie::ALL {
                let lying = lying(&tensor, lie).unwrap();
                assert_eq!(lying.to_array().unwrap(), tensor.to_array().unwrap());
                assert_eq!(
                    lying.layout().is_contiguous(),
                    lie == Lie::Contiguous || lying.shape().rank() == 1 && lie == Lie::Padded
                );
                assert_eq!(lying.layout().offset, if lie == Lie::Misaligned { 1 } else { 0 });
            }
        }
    }

    #[test]
    fn the_matrix_is_as_wide_as_it_says() {
        let pieces = pieces(Breadth::All);
        let narrow = |op: &FusedOp| !op.is_rows() || op.is_square();
        for op in FusedOp::variants().into_iter().filter(|op| !narrow(op)) {
            for dtype in Dtype::FLOATS {
                let own = pieces.iter().filter(|piece| piece.op == op && piece.dtype == dtype && !piece.backward);
                assert!(own.count() >= 40);
            }
        }
    }
}
