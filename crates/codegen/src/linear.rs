//! Sums that can be computed one pass earlier: the sum of `u a + v b`, with `u` and `v` numbers of the row, is
//! `u sum(a) + v sum(b)`. So the gradient of a norm, as it comes from its parts, needs one barrier instead of two.

use deuteron_graph::{BinaryOp, ReduceOp, UnaryOp};

use crate::body::{Body, Expr, ExprId, Exprs, Stage};

/// Terms that one sum may be split into.
const TERMS: usize = 4;

/// A body whose sums have moved, and what its parts were before.
pub struct Earlier {
    /// the body
    pub body: Body,
    /// the expression that each expression came from
    pub exprs: Vec<ExprId>,
    /// the stage that each stage came from
    pub stages: Vec<usize>,
}

/// The body with every row sum taken as early as its terms allow.
pub fn earlier_sums(body: &Body) -> Earlier {
    let mut earlier =
        Earlier { body: body.clone(), exprs: body.ids().collect(), stages: (0..body.stages.len()).collect() };
    // A sum that has moved may let another one move; each moves at most once.
    for _ in 0..body.row_values {
        match movable(&earlier.body) {
            Some(sum) => earlier = split(&earlier, &sum),
            None => break,
        }
    }
    earlier
}

/// A sum that can move.
struct Movable {
    /// its stage
    position: usize,
    /// the number of the row it makes
    into: u16,
    terms: Vec<Term>,
}

/// One term of a linear sum: `factors` are numbers of the row.
#[derive(Debug, Clone)]
struct Term {
    factors: Vec<Factor>,
    value: ExprId,
}

#[derive(Debug, Clone, Copy)]
enum Factor {
    Number(ExprId),
    Minus,
}

/// The first sum that could be taken in an earlier sweep.
fn movable(body: &Body) -> Option<Movable> {
    let (uniform, levels) = (body.uniform(), body.levels());
    body.stages.iter().enumerate().find_map(|(position, stage)| {
        let &Stage::RowReduce { op: ReduceOp::Sum, value, into } = stage else { return None };
        let level = levels[value.index()];
        if level == 0 || uniform[value.index()] {
            return None;
        }
        let mut terms = Vec::new();
        collect(body, &uniform, value, &[], &mut terms);
        let earlier = terms.iter().all(|term| levels[term.value.index()] < level && !uniform[term.value.index()]);
        (earlier && !terms.is_empty() && terms.len() <= TERMS).then_some(Movable { position, into, terms })
    })
}

fn collect(body: &Body, uniform: &[bool], id: ExprId, factors: &[Factor], terms: &mut Vec<Term>) {
    let with = |factor: Factor| [factors, &[factor]].concat();
    match body.expr(id) {
        _ if terms.len() > TERMS => {}
        Expr::Binary(BinaryOp::Add, a, b) => {
            collect(body, uniform, a, factors, terms);
            collect(body, uniform, b, factors, terms);
        }
        Expr::Binary(BinaryOp::Sub, a, b) => {
            collect(body, uniform, a, factors, terms);
            collect(body, uniform, b, &with(Factor::Minus), terms);
        }
        Expr::Unary(UnaryOp::Neg, a) => collect(body, uniform, a, &with(Factor::Minus), terms),
        Expr::Binary(BinaryOp::Mul, a, b) if uniform[a.index()] && !uniform[b.index()] => {
            collect(body, uniform, b, &with(Factor::Number(a)), terms);
        }
        Expr::Binary(BinaryOp::Mul, a, b) if uniform[b.index()] && !uniform[a.index()] => {
            collect(body, uniform, a, &with(Factor::Number(b)), terms);
        }
        _ => terms.push(Term { factors: factors.to_vec(), value: id }),
    }
}

/// Replaces a sum by sums of its terms. The expressions are built anew, since what reads the sum comes later than it.
fn split(given: &Earlier, sum: &Movable) -> Earlier {
    let body = &given.body;
    let &Movable { position, into, ref terms } = sum;
    let mut exprs = Exprs::default();
    let (mut exprs_from, mut stages_from) = (Vec::new(), Vec::new());
    let mut ids: Vec<ExprId> = Vec::with_capacity(body.exprs.len());
    let mut row_values = body.row_values;
    // Equal terms are summed once.
    let mut sums: Vec<(ExprId, u16)> = Vec::new();
    for term in terms {
        if !sums.iter().any(|&(value, _)| value == term.value) {
            sums.push((term.value, row_values));
            row_values += 1;
        }
    }
    for (index, &expr) in body.exprs.iter().enumerate() {
        let id = match expr {
            Expr::RowValue(value) if value == into => {
                let mut total = None;
                for term in terms {
                    let slot = sums.iter().find(|&&(value, _)| value == term.value).map_or(0, |&(_, slot)| slot);
                    let mut scaled = exprs.make(Expr::RowValue(slot));
                    for factor in &term.factors {
                        scaled = match *factor {
                            Factor::Minus => exprs.make(Expr::Unary(UnaryOp::Neg, scaled)),
                            Factor::Number(number) => {
                                exprs.make(Expr::Binary(BinaryOp::Mul, scaled, ids[number.index()]))
                            }
                        };
                    }
                    total = Some(match total {
                        None => scaled,
                        Some(sum) => exprs.make(Expr::Binary(BinaryOp::Add, sum, scaled)),
                    });
                }
                total.unwrap_or_else(|| exprs.constant(0.0))
            }
            _ => {
                let moved = expr.with_operands(|operand| ids[operand.index()]);
                exprs.make(moved)
            }
        };
        exprs_from.resize(exprs.len(), given.exprs[index]);
        ids.push(id);
    }
    let mut stages = Vec::new();
    for (index, stage) in body.stages.iter().enumerate() {
        let moved = |id: ExprId| ids[id.index()];
        match *stage {
            Stage::RowReduce { .. } if index == position => {
                stages.extend(sums.iter().map(|&(value, into)| Stage::RowReduce {
                    op: ReduceOp::Sum,
                    value: moved(value),
                    into,
                }));
            }
            Stage::RowReduce { op, value, into } => stages.push(Stage::RowReduce { op, value: moved(value), into }),
            Stage::ColumnSum { value, arg, width } => stages.push(Stage::ColumnSum { value: moved(value), arg, width }),
            Stage::Store { value, arg } => stages.push(Stage::Store { value: moved(value), arg }),
        }
        stages_from.resize(stages.len(), given.stages[index]);
    }
    let body = Body { exprs: exprs.finish(), row_values, stages, ..body.clone() };
    Earlier { body, exprs: exprs_from, stages: stages_from }
}
