//! Mistakes that kernels are known for are caught: each is made at one place of the graph of an op, in the reference.
//!
//! Every op of the catalogue, every dtype, both directions. The reference runs the graph as a kernel would, every value stored in its dtype. At one
//! node it makes a mistake, and goes on from there. A mistake that makes the error of a result eight times as large as it is without must be
//! caught by the bounds; one that does not is within what a right kernel does.
//!
//! `DEUTERON_BLESS=1` writes the counts to `bench/results/mistakes.csv`.

use std::collections::BTreeMap;
use std::path::Path;

use deuteron::reference::{Array, Bounded, Rounding, bounded, interpret, interpret_all, round_to};
use deuteron::{
    BinaryOp, Dtype, ExpertSizes, FusedOp, Graph, Node, NodeId, Op, Output, ReduceOp, Sizes, UnaryOp, extract, seed,
};

/// How much worse a kernel is that must be caught.
const WORSE: f64 = 8.0;

/// Inputs are made from these, one after the other, until a mistake is caught.
const SEEDS: [u64; 3] = [7, 8, 9];

const ROWS: usize = 17;
const COLS: usize = 65;

/// What a kernel does wrong at one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mistake {
    /// An exponential, or what is made of one, by a series that ends too early for the dtype: the longest such that matters.
    ShortSeries,
    /// A sum or difference of two without the second: an epsilon, a bias, a correction.
    DroppedTerm,
    /// A sum without its last term: the tail of a loop.
    ShortSum,
    /// A value of `f32` in 16 bits on the way; in a graph of `f32`, in the 19 of TF32.
    ExtraRounding,
}

impl Mistake {
    const ALL: [Mistake; 4] = [Mistake::ShortSeries, Mistake::DroppedTerm, Mistake::ShortSum, Mistake::ExtraRounding];

    /// The wrong value of a node, if the mistake can be made there and is so grave.
    fn at(self, run: &Run, id: NodeId, grave: i32) -> Option<Array> {
        let node = run.graph.node(id);
        match (self, &node.op) {
            (Mistake::ShortSeries, Op::Unary(op)) => run.short_series(node, *op, degree(run.dtype) - grave),
            // There is one way to make the others.
            _ if grave > 0 => None,
            (Mistake::DroppedTerm, Op::Binary(BinaryOp::Add | BinaryOp::Sub)) => {
                run.again(id, |operands| operands[1].values.fill(0.0))
            }
            (Mistake::ShortSum, Op::RowReduce(ReduceOp::Sum | ReduceOp::Mean)) => run.again(id, |operands| {
                let cols = operands[0].cols();
                operands[0].values.chunks_mut(cols).for_each(|row| row[cols - 1] = 0.0);
            }),
            (Mistake::ShortSum, Op::ColumnSum) => run.again(id, |operands| {
                let cols = operands[0].cols();
                operands[0].values.iter_mut().rev().take(cols).for_each(|x| *x = 0.0);
            }),
            (Mistake::ShortSum, Op::Matmul { transpose_a, .. }) => run.again(id, |operands| {
                let (cols, a) = (operands[0].cols(), &mut operands[0]);
                let rows = a.shape[a.shape.rank() - 2];
                let is_last = |index: usize| match transpose_a {
                    true => index / cols % rows == rows - 1,
                    false => index % cols == cols - 1,
                };
                a.values.iter_mut().enumerate().filter(|(index, _)| is_last(*index)).for_each(|(_, x)| *x = 0.0);
            }),
            (Mistake::ExtraRounding, Op::Unary(_) | Op::Binary(_) | Op::RowReduce(_) | Op::Matmul { .. }) => {
                let narrow = |x: &f64| match run.dtype {
                    Dtype::F32 => tf32(*x),
                    dtype => round_to(dtype, *x),
                };
                let value = &run.values[id.index()];
                let rounded = Array::new(value.shape.clone(), value.values.iter().map(narrow).collect());
                (node.dtype == Dtype::F32).then_some(rounded)
            }
            _ => None,
        }
    }
}

/// The 10 bits of a significand that TF32 has.
fn tf32(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let spacing = 2f64.powi(x.abs().log2().floor() as i32 - 10);
    (x / spacing).round_ties_even() * spacing
}

/// The longest series for `e^r`, `|r| <= ln 2 / 2`, that is off by eight roundings of a dtype at worst or more.
fn degree(dtype: Dtype) -> i32 {
    let half = std::f64::consts::LN_2 / 2.0;
    let left_out = |degree: i32| half.powi(degree + 1) / (1..=degree + 1).map(f64::from).product::<f64>();
    (1..).take_while(|&degree| left_out(degree) >= WORSE * dtype.epsilon() / 2.0).last().unwrap()
}

/// `e^x` as kernels compute it, a power of two and a series, by a series of some degree.
fn short_exp(x: f64, degree: i32) -> f64 {
    let power = (x / std::f64::consts::LN_2).round();
    let rest = x - power * std::f64::consts::LN_2;
    let series = (1..=degree).rev().fold(1.0, |sum, term| 1.0 + sum * rest / f64::from(term));
    if x.is_finite() { series * power.exp2() } else { x.exp() }
}

/// A graph, what it should give, and what every node has where it is run as a kernel would.
struct Run {
    graph: Graph,
    dtype: Dtype,
    inputs: Vec<Array>,
    values: Vec<Array>,
    expected: Vec<Bounded>,
    /// Of a right kernel.
    errors: Vec<f64>,
}

impl Run {
    fn new(graph: &Graph, dtype: Dtype, seed: u64) -> Run {
        let inputs: Vec<Array> = seed::inputs(graph, seed).unwrap().iter().map(|x| x.to_array().unwrap()).collect();
        let values = interpret_all(graph, &inputs, Rounding::Storage).unwrap();
        let expected = bounded(graph, &inputs).unwrap();
        let stored = graph.outputs().iter().map(|output| &values[output.node.index()]);
        let errors = expected.iter().zip(stored).map(|(expected, got)| error(expected, got)).collect();
        Run { graph: graph.clone(), dtype, inputs, values, expected, errors }
    }

    /// A node computed again from other operands, which a mistake changes.
    fn again(&self, id: NodeId, change: impl Fn(&mut [Array])) -> Option<Array> {
        let node = self.graph.node(id);
        let mut operands: Vec<Array> = node.inputs.iter().map(|input| self.values[input.index()].clone()).collect();
        // The same value on both sides is one operand.
        if node.inputs.len() == 2 && node.inputs[0] == node.inputs[1] || operands.iter().any(|x| x.values.is_empty()) {
            return None;
        }
        change(&mut operands);
        let output = Output { name: "result".to_string(), node: id };
        let alone = extract(&self.graph, &[output], &node.inputs).unwrap();
        Some(interpret(&alone, &operands, Rounding::Storage).unwrap().outputs.remove(0))
    }

    fn short_series(&self, node: &Node, op: UnaryOp, degree: i32) -> Option<Array> {
        if degree < 1 {
            return None;
        }
        let exp = |x: f64| short_exp(x, degree);
        let function = |x: f64| match op {
            UnaryOp::Exp => Some(exp(x)),
            UnaryOp::Sigmoid => Some(1.0 / (1.0 + exp(-x))),
            // By the exponential of a negative number, as kernels do, lest it overflows.
            UnaryOp::Tanh => {
                let power = exp(-2.0 * x.abs());
                Some(((1.0 - power) / (1.0 + power)).copysign(x))
            }
            _ => None,
        };
        let x = &self.values[node.inputs[0].index()];
        let values: Option<Vec<f64>> = x.values.iter().map(|&x| function(x)).collect();
        Some(Array::new(x.shape.clone(), values?).rounded(node.dtype))
    }

    /// The results where a node has another value.
    fn with(&self, id: NodeId, wrong: Array) -> Vec<Array> {
        let boundary: Vec<NodeId> = self.graph.inputs().iter().copied().chain([id]).collect();
        let rest = extract(&self.graph, self.graph.outputs(), &boundary).unwrap();
        let of = |name: &str| {
            let at = self.graph.find(name).or_else(|| self.graph.id(name.strip_prefix("node")?.parse().ok()?)).unwrap();
            let given = self.graph.inputs().iter().position(|&input| input == at);
            if at == id { wrong.clone() } else { self.inputs[given.unwrap()].clone() }
        };
        let inputs: Vec<Array> = rest.inputs().iter().map(|&input| of(&rest.label(input))).collect();
        interpret(&rest, &inputs, Rounding::Storage).unwrap().outputs
    }

    /// Whether a wrong value of a node makes some result eight times worse, and whether some bound is broken.
    fn judge(&self, id: NodeId, wrong: Array) -> Verdict {
        let results = self.with(id, wrong);
        let all = || self.expected.iter().zip(&results);
        if all().any(|(expected, got)| !expected.compare(got).holds()) {
            return Verdict::Caught;
        }
        let is_worse = |((expected, got), right): ((&Bounded, &Array), &f64)| error(expected, got) > WORSE * right;
        if all().zip(&self.errors).any(is_worse) { Verdict::Missed } else { Verdict::Small }
    }
}

/// What the bounds say of a mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Caught,
    /// It makes a result eight times worse, and is within every bound.
    Missed,
    /// It does not make any result eight times worse.
    Small,
}

/// The root mean square of the errors of the elements that have a bound.
fn error(expected: &Bounded, got: &Array) -> f64 {
    let elements = expected.exact.values.iter().zip(&got.values).zip(&expected.bounds);
    let bounded = elements.filter(|((exact, _), bound)| exact.is_finite() && bound.is_finite());
    let squares: Vec<f64> = bounded.map(|((exact, got), _)| (got - exact).powi(2)).collect();
    (squares.iter().sum::<f64>() / squares.len().max(1) as f64).sqrt()
}

/// Counts of places at which a mistake was made.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    caught: usize,
    small: usize,
    missed: usize,
}

fn graph(op: &FusedOp, backward: bool, dtype: Dtype) -> Graph {
    let experts = ExpertSizes { count: 3, columns: Some(COLS), choices: 2 };
    let sizes = Sizes { tokens: 101, classes: 101, positions: ROWS, experts, ..Sizes::new(ROWS, COLS, dtype) };
    let types = op.operand_types_of(&sizes);
    if backward { op.backward_graph(&types).unwrap() } else { op.graph(&types).unwrap() }
}

/// The runs of a graph, each made when it is asked for.
struct Runs {
    graph: Graph,
    dtype: Dtype,
    made: Vec<Run>,
}

impl Runs {
    /// What the bounds say of a mistake that is so grave. In a tensor of few elements all errors may be small by chance, so what is
    /// missed is tried with other inputs.
    fn verdict(&mut self, mistake: Mistake, id: NodeId, grave: i32) -> Option<Verdict> {
        let mut verdict = None;
        for (number, &seed) in SEEDS.iter().enumerate() {
            if self.made.len() == number {
                self.made.push(Run::new(&self.graph, self.dtype, seed));
            }
            let run = &self.made[number];
            verdict = Some(run.judge(id, mistake.at(run, id, grave)?));
            if verdict != Some(Verdict::Missed) {
                break;
            }
        }
        verdict
    }

    /// Of the least grave form of the mistake that matters.
    fn least(&mut self, mistake: Mistake, id: NodeId) -> Option<Verdict> {
        let mut last = None;
        for grave in 0.. {
            let Some(verdict) = self.verdict(mistake, id, grave) else { break };
            last = Some(verdict);
            if verdict != Verdict::Small {
                break;
            }
        }
        last
    }
}

type Table = BTreeMap<(String, Dtype, Mistake), Counts>;

#[test]
fn mistakes_of_kernels_are_caught() {
    let (mut table, mut missed) = (Table::new(), Vec::new());
    for op in FusedOp::variants() {
        for backward in [false, true].into_iter().filter(|backward| !backward || op.has_backward()) {
            let name = format!("{}{}", op.name(), if backward { " backward" } else { "" });
            for dtype in Dtype::FLOATS {
                let graph = graph(&op, backward, dtype);
                let mut runs = Runs { graph: graph.clone(), dtype, made: Vec::new() };
                for (mistake, id) in Mistake::ALL.iter().flat_map(|&mistake| graph.ids().map(move |id| (mistake, id))) {
                    let Some(verdict) = runs.least(mistake, id) else { continue };
                    let counts = table.entry((name.clone(), dtype, mistake)).or_default();
                    match verdict {
                        Verdict::Caught => counts.caught += 1,
                        Verdict::Small => counts.small += 1,
                        Verdict::Missed => {
                            counts.missed += 1;
                            missed.push(format!("{name} {dtype} {mistake:?} at {} of\n{graph}", graph.label(id)));
                        }
                    }
                }
            }
        }
    }
    record(&table);
    assert!(missed.is_empty(), "{} missed:\n{}", missed.len(), missed.join("\n"));
    // Most places matter: few exponentials are saturated, and few sums go into a result that is all rounding.
    for mistake in [Mistake::ShortSeries, Mistake::ShortSum] {
        let all = || table.iter().filter(|((_, _, of), _)| *of == mistake).map(|(_, counts)| counts);
        let (caught, small) = (all().map(|x| x.caught).sum::<usize>(), all().map(|x| x.small).sum::<usize>());
        assert!(caught > 200 && small < caught / 20, "{mistake:?}: {caught} caught, {small} small");
    }
}

/// Writes the table if asked to.
fn record(table: &Table) {
    if std::env::var_os("DEUTERON_BLESS").is_none() {
        return;
    }
    let mut text = "op,dtype,mistake,caught,small,missed\n".to_string();
    for ((op, dtype, mistake), Counts { caught, small, missed }) in table {
        text += &format!("{op},{dtype},{mistake:?},{caught},{small},{missed}\n");
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/results/mistakes.csv");
    std::fs::write(path, text).unwrap();
}

#[test]
fn a_short_series_is_off_by_what_it_leaves_out() {
    assert_eq!(Dtype::FLOATS.map(degree), [5, 2, 1]);
    for x in [-20.0f64, -0.3, 0.0, 0.1, 0.34, 5.0] {
        assert!((short_exp(x, 20) / x.exp() - 1.0).abs() < 1e-14);
        assert!((short_exp(x, 5) / x.exp() - 1.0).abs() < 4e-6);
    }
    assert_eq!((short_exp(f64::NEG_INFINITY, 5), short_exp(f64::INFINITY, 5)), (0.0, f64::INFINITY));
    assert_eq!(tf32(1.0 + 1.0 / 4096.0), 1.0);
    assert_eq!(tf32(1.0 + 1.0 / 1024.0), 1.0 + 1.0 / 1024.0);
}
