//! Attention on the CPU: alone, with row work on its result, and its gradient.

mod backward;
mod block;
mod forward;
mod rows;

use std::sync::Arc;

use deuteron::{Cpu, Dtype, Engine, Graph, GroupKind, Isa, Session, Strategy, Tensor};

fn parsed(text: &str, dtype: Dtype) -> Graph {
    text.replace("float", &dtype.to_string()).parse().unwrap()
}

fn engine(threads: usize, isa: Isa) -> Engine {
    Engine::on(Arc::new(Cpu::with(threads, isa)))
}

fn ran(engine: &Engine, graph: &Graph, strategy: Strategy, inputs: &[Tensor]) -> Session {
    let mut session = Session::new(engine, graph, strategy).unwrap();
    session.poison().unwrap();
    session.run(&inputs.iter().collect::<Vec<_>>()).unwrap();
    session
}

fn outputs(session: &Session) -> Vec<Tensor> {
    (0..session.graph().outputs().len()).map(|index| session.output(index).unwrap()).collect()
}

fn bits(session: &Session) -> Vec<u32> {
    outputs(session).iter().flat_map(|output| output.to_f32().unwrap()).map(f32::to_bits).collect()
}

/// Kernels of a kind.
fn count(session: &Session, kind: GroupKind) -> usize {
    session.plan().groups.iter().filter(|group| group.kind == kind).count()
}

/// Queries, keys and values of these sizes, and what is made of them.
fn sized([batch, heads, queries, keys, width]: [usize; 5], rest: &str) -> String {
    format!(
        "q = input float[{batch},{heads},{queries},{width}]
k = input float[{batch},{heads},{keys},{width}] ; v = input float[{batch},{heads},{keys},{width}]
{rest}"
    )
}
