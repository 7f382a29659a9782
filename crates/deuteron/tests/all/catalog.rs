//! Every op of the catalogue, every variant, every dtype, both directions, odd sizes: all plans against f64.

use deuteron::{Dtype, Engine, ExpertSizes, FusedOp, Graph, Session, Shape, Sizes, Strategy, Tensor, seed};
use deuteron_testkit::cases::SIZES;

use crate::support::{expected, outputs};

/// Runs a graph under every plan on poisoned memory and holds it against the reference.
fn check(engine: &Engine, graph: &Graph, label: &str) {
    let tensors = seed::inputs(graph, 7).unwrap();
    let inputs: Vec<&Tensor> = tensors.iter().collect();
    let expected = expected(graph, &tensors);
    for strategy in Strategy::ALL {
        let mut session = Session::new(engine, graph, strategy).unwrap_or_else(|e| panic!("{label} {strategy}: {e}"));
        session.poison().unwrap();
        session.run(&inputs).unwrap_or_else(|e| panic!("{label} {strategy}: {e}"));
        let verification = expected.verify(graph, &outputs(&session)).unwrap();
        assert!(
            verification.holds(),
            "{label} {strategy}: {:?}\n{}\n{graph}",
            verification.worst(),
            session.plan().explain()
        );
    }
}

/// The types `bench` uses, with a vocabulary that a reference can hold.
fn types(op: &FusedOp, rows: usize, cols: usize, dtype: Dtype) -> Vec<(Dtype, Shape)> {
    // What experts are picked is written down by the reference, in f64; it widens whole tables.
    let usual = Sizes::new(rows, cols, dtype);
    op.operand_types_of(&Sizes {
        tokens: 101,
        positions: rows.max(64),
        classes: 301,
        experts: ExpertSizes { count: 3, columns: Some(37), choices: 2 },
        ..usual
    })
}

/// Every variant with its cases. The first variant of an op has all sizes, others a third of them in turn: the rest is the same code.
/// `deuteron check --catalog` has all sizes of all.
fn cases(takes: impl Fn(&FusedOp) -> bool) -> Vec<(FusedOp, Dtype, usize, usize)> {
    let variants: Vec<FusedOp> = FusedOp::variants().into_iter().filter(takes).collect();
    let of_variant = |(turn, op): (usize, &FusedOp)| {
        let is_first = variants[..turn].iter().all(|other| other.name() != op.name());
        let sizes = sizes(op).into_iter().enumerate().filter(move |(index, _)| is_first || (index + turn) % 3 == 0);
        let of_size =
            |(index, (m, n))| [Dtype::F32, [Dtype::F16, Dtype::Bf16][index % 2]].map(|dtype| (*op, dtype, m, n));
        sizes.flat_map(of_size).collect::<Vec<_>>()
    };
    variants.iter().enumerate().flat_map(of_variant).collect()
}

/// All sizes, of products those that a reference multiplies in little time, and of scores, which are as many as the square of the
/// columns, one that is long. All of them in `f32`; the narrow floats take turns.
fn sizes(op: &FusedOp) -> Vec<(usize, usize)> {
    let is_quick = |&(m, n): &(usize, usize)| match (op.is_rows(), op.is_square()) {
        (true, true) => n <= 129 || n == 768,
        (true, false) => true,
        (false, _) => m.max(n) <= 129,
    };
    SIZES.into_iter().filter(is_quick).collect()
}

#[test]
fn forward_matches_the_reference() {
    let engine = Engine::cpu();
    for (op, dtype, rows, cols) in cases(|_| true) {
        let graph = op.graph(&types(&op, rows, cols, dtype)).unwrap();
        check(&engine, &graph, &format!("{op:?} {rows}x{cols} {dtype}"));
    }
}

#[test]
fn backward_matches_the_reference() {
    let engine = Engine::cpu();
    for (op, dtype, rows, cols) in cases(FusedOp::has_backward) {
        let graph = op.backward_graph(&types(&op, rows, cols, dtype)).unwrap();
        check(&engine, &graph, &format!("backward {op:?} {rows}x{cols} {dtype}"));
    }
}

#[test]
fn row_ops_become_one_kernel() {
    for op in FusedOp::variants().into_iter().filter(FusedOp::is_rows) {
        let graph = op.graph(&op.operand_types(64, 96, Dtype::F32)).unwrap();
        let session = Session::new(&Engine::cpu(), &graph, Strategy::Greedy).unwrap();
        let expected = if op.is_square() { 2 } else { 1 };
        assert_eq!(session.plan().groups.len(), expected, "{op:?}\n{}", session.plan().explain());
    }
}

#[test]
fn attention_with_what_follows_it_is_one_kernel() {
    let follows = |op: &FusedOp| op.attends() && op.name() != "attention";
    for op in FusedOp::variants().into_iter().filter(follows) {
        for (rows, dtype) in [(1, Dtype::F32), (64, Dtype::Bf16), (300, Dtype::F16)] {
            let graph = op.graph(&op.operand_types(rows, 96, dtype)).unwrap();
            let session = Session::new(&Engine::cpu(), &graph, Strategy::Greedy).unwrap();
            assert_eq!(session.plan().groups.len(), 1, "{op:?}\n{}", session.plan().explain());
        }
    }
}
