//! A session in the steady state: no allocation, and little time besides the kernels.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use deuteron::{Dtype, Engine, FusedOp, Graph, Session, SessionOptions, Strategy, Tensor, seed};

/// The system's allocator, counting.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test, so that nothing else allocates meanwhile.
#[test]
fn the_second_run_allocates_nothing_and_costs_little() {
    let engine = Engine::cpu();
    for op in FusedOp::variants() {
        for backward in [false, true] {
            if backward && !op.has_backward() {
                continue;
            }
            // Products go through a library that allocates.
            if op.is_square() {
                continue;
            }
            let types = op.operand_types(96, 96, Dtype::Bf16);
            let graph = if backward { op.backward_graph(&types) } else { op.graph(&types) }.unwrap();
            let tensors = seed::inputs(&graph, 1).unwrap();
            let inputs: Vec<&Tensor> = tensors.iter().collect();
            let mut session = Session::new(&engine, &graph, Strategy::Fused).unwrap();
            session.run(&inputs).unwrap();
            // A thread that has its first task meanwhile allocates once; what a run allocates it does each time.
            let count = |session: &mut Session| {
                let before = ALLOCATIONS.load(Ordering::SeqCst);
                session.run(&inputs).unwrap();
                session.run_timed(&inputs).unwrap();
                ALLOCATIONS.load(Ordering::SeqCst) - before
            };
            let made = (0..3).map(|_| count(&mut session)).min();
            assert_eq!(made, Some(0), "{op:?} {}", if backward { "backward" } else { "forward" });
        }
    }
    attention(&engine);
    block(&engine);
    cache(&engine);
    updates(&engine);
    overhead(&engine);
}

fn allocates_nothing(what: &str, run: impl FnOnce()) {
    let before = ALLOCATIONS.load(Ordering::SeqCst);
    run();
    assert_eq!(ALLOCATIONS.load(Ordering::SeqCst), before, "{what}");
}

/// A graph that is one kernel.
fn one_kernel(engine: &Engine, text: &str, strategy: Strategy) {
    let graph: Graph = text.parse().unwrap();
    let tensors = seed::inputs(&graph, 1).unwrap();
    let inputs: Vec<&Tensor> = tensors.iter().collect();
    let mut session = Session::new(engine, &graph, strategy).unwrap();
    assert_eq!(session.plan().groups.len(), 1, "{text}");
    session.run(&inputs).unwrap();
    allocates_nothing(text, || session.run(&inputs).map(drop).unwrap());
}

/// Tiles of queries, and one query whose keys are split.
fn attention(engine: &Engine) {
    for queries in [1, 130] {
        let text = format!(
            "q = input bf16[2,{queries},64] ; k = input bf16[2,700,64] ; v = input bf16[2,700,64] ; seed = input i32[]
a = attention q k v seed mask=causal p=0.1 ; out a"
        );
        one_kernel(engine, &text, Strategy::Unfused);
    }
}

/// Attention with its projection: rows enough for strips of their own, and few, whose columns are shared.
fn block(engine: &Engine) {
    for queries in [1, 300] {
        let text = format!(
            "q = input f32[2,{queries},64] ; k = input f32[2,700,64] ; v = input f32[2,700,64] ; r = input f32[{queries},96]
a = attention q k v mask=causal ; t = transpose a [1,0,2] ; m = reshape t [{queries},128]
l = linear m w[128,96] c[96] ; s = add l r ; y = layer_norm s g[96] b[96] ; out y ; out s"
        );
        one_kernel(engine, &text, Strategy::Greedy);
    }
}

/// A cache kept in place, and attention over it.
fn cache(engine: &Engine) {
    let text = "c = input bf16[2,3,2,700,64] ; r = input bf16[2,3,2,1,64] ; p = input i32[3] ; q = input bf16[3,2,1,64]
y = append c r p batch=1 ; ks = slice y axis=0 start=0 length=1 ; k = reshape ks [3,2,700,64]
vs = slice y axis=0 start=1 length=1 ; v = reshape vs [3,2,700,64] ; a = attention q k v p mask=cached ; out a y";
    let graph: Graph = text.parse().unwrap();
    let mut tensors = seed::inputs(&graph, 1).unwrap();
    let mut states = [tensors.remove(0)];
    let inputs: Vec<&Tensor> = tensors.iter().collect();
    let mut session =
        Session::new(engine, &graph, SessionOptions::from(Strategy::Unfused).states(&graph.inputs()[..1])).unwrap();
    assert_eq!(session.plan().groups.len(), 2);
    session.run_with(&inputs, &mut states).unwrap();
    allocates_nothing(text, || {
        session.run_with(&inputs, &mut states).unwrap();
        session.run_timed_with(&inputs, &mut states).unwrap();
    });
}

/// States that are updated in place, and by a copy.
fn updates(engine: &Engine) {
    let text = "w = input f32[3,500] ; q = input f32[3,500] ; g = input f32[3,500]
s = mul g 0.1 ; y = sub w s ; z = softmax q ; out y z";
    let graph: Graph = text.parse().unwrap();
    let mut tensors = seed::inputs(&graph, 1).unwrap();
    let mut states: Vec<Tensor> = tensors.drain(..2).collect();
    let inputs: Vec<&Tensor> = tensors.iter().collect();
    let options = SessionOptions::from(Strategy::Unfused);
    let pairs = graph.inputs().iter().zip(graph.outputs());
    let options = pairs.fold(options, |options, (&state, output)| options.update(state, output.node));
    let mut session = Session::new(engine, &graph, options).unwrap();
    assert_eq!(session.kernels().len(), session.plan().groups.len() + 1);
    session.run_with(&inputs, &mut states).unwrap();
    allocates_nothing(text, || {
        session.run_with(&inputs, &mut states).unwrap();
        session.run_timed_with(&inputs, &mut states).unwrap();
    });
}

/// Undisturbed runs of a one-kernel graph, and of its kernel alone: the fastest tenth, since a machine does other things too.
fn overhead(engine: &Engine) {
    let op = FusedOp::find("add_norm").unwrap();
    let graph = op.graph(&op.operand_types(4, 64, Dtype::F32)).unwrap();
    let tensors = seed::inputs(&graph, 1).unwrap();
    let inputs: Vec<&Tensor> = tensors.iter().collect();
    let mut session = Session::new(engine, &graph, Strategy::Fused).unwrap();
    let (mut whole, mut kernel) = (Vec::new(), Vec::new());
    for _ in 0..2000 {
        let start = Instant::now();
        session.run(&inputs).unwrap();
        whole.push(start.elapsed());
        kernel.push(session.run_timed(&inputs).unwrap()[0]);
    }
    let undisturbed = |mut times: Vec<Duration>| {
        times.sort();
        times[times.len() / 10]
    };
    let extra = undisturbed(whole).saturating_sub(undisturbed(kernel));
    assert!(extra < Duration::from_micros(5), "a run costs {extra:?} besides its kernel");
}
