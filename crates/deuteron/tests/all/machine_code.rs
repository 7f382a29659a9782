//! Machine code of row kernels beside the interpreter: the same bits for every op of the catalogue and for random graphs, on every
//! instruction set, for any number of threads.

use deuteron::check::tensors;
use deuteron::reference::random_case_within;
use deuteron::{Dtype, Engine, FusedOp, Graph, Isa, Session, Strategy, Tensor, seed};
use deuteron_testkit::cases::SIZES;

use crate::support::{cpu, ran};

/// What each output holds, as bytes; all NaN are one.
fn results(session: &Session) -> Vec<Vec<u8>> {
    let of = |index: usize| -> Vec<u8> {
        let output = session.output(index).unwrap();
        match output.dtype() {
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {
                let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
                output.to_f32().unwrap().into_iter().flat_map(|x| bits(x).to_ne_bytes()).collect()
            }
            _ => output.to_bytes().unwrap(),
        }
    };
    (0..session.graph().outputs().len()).map(of).collect()
}

/// Pairs of engines that differ only in what runs row kernels, with different numbers of threads.
fn engines() -> Vec<[Engine; 2]> {
    let sets = Isa::available().into_iter().filter(|isa| ["avx512", "avx2"].contains(&isa.name()));
    sets.enumerate().map(|(at, isa)| [cpu(2 + at, isa), cpu(1, isa.interpreting())]).collect()
}

#[track_caller]
fn check([compiled, interpreted]: &[Engine; 2], graph: &Graph, strategy: Strategy, inputs: &[Tensor], label: &str) {
    let (got, expected) = (ran(compiled, graph, strategy, inputs), ran(interpreted, graph, strategy, inputs));
    for (index, (got, expected)) in results(&got).iter().zip(&results(&expected)).enumerate() {
        let name = &graph.outputs()[index].name;
        assert!(got == expected, "{label} {strategy}, {}: other bits of {name}\n{graph}", compiled.device().describe());
    }
}

#[test]
fn ops_of_the_catalogue_give_the_bits_of_the_interpreter() {
    let engines = engines();
    let ops = FusedOp::catalog().into_iter().filter(|op| op.is_rows() && !op.is_square());
    for (turn, op) in ops.enumerate() {
        // A fifth of the sizes for each op, in turn.
        for (at, &(rows, cols)) in SIZES.iter().enumerate().filter(|(at, _)| (turn + at) % 5 == 0) {
            let dtype = Dtype::FLOATS[at % Dtype::FLOATS.len()];
            let types = op.operand_types(rows, cols, dtype);
            let mut graphs = vec![op.graph(&types).unwrap()];
            if op.has_backward() {
                graphs.push(op.backward_graph(&types).unwrap());
            }
            for graph in graphs {
                let inputs = seed::inputs(&graph, 3).unwrap();
                let label = format!("{op:?} {rows}x{cols} {dtype}");
                for engines in engines.iter().skip(at % 2).step_by(2) {
                    check(engines, &graph, Strategy::Greedy, &inputs, &label);
                }
            }
        }
    }
}

#[test]
fn random_graphs_give_the_bits_of_the_interpreter() {
    let engines = engines();
    for seed in 0..300u64 {
        let case = random_case_within(seed, 4096);
        let tensors = tensors(&case.graph, &case.inputs).unwrap();
        let strategy = [Strategy::Greedy, Strategy::Eager][seed as usize / 2 % 2];
        for engines in engines.iter().skip(seed as usize % 2).step_by(2) {
            check(engines, &case.graph, strategy, &tensors, &format!("seed {seed}"));
        }
    }
}
