//! States that a graph updates: written in place or copied at the end, always with the bits of a session without states.

use deuteron::{
    Dtype, Engine, Error, Graph, Isa, Launching, Layout, NodeId, Session, SessionOptions, Strategy, Tensor,
    UpdateProblem, View, seed,
};
use deuteron_kernels::Backend;

use crate::support::{assert_holds, cpu, expected, gpu};

fn input(graph: &Graph, name: &str) -> NodeId {
    graph.inputs().iter().copied().find(|&id| graph.label(id) == name).unwrap()
}

fn output(graph: &Graph, name: &str) -> NodeId {
    graph.outputs().iter().find(|output| output.name == name).unwrap().node
}

/// A graph, its states with their new values, and how it is planned.
struct Case<'a> {
    text: &'a str,
    updates: &'a [(&'a str, &'a str)],
    strategy: Strategy,
}

impl Case<'_> {
    /// Runs it several times. Each run has the bits of a session without states, and is within the bounds of the reference, on the
    /// states as the run before left them. Gives the number of copies.
    fn run(&self, engine: &Engine) -> usize {
        let graph: Graph = self.text.parse().unwrap();
        let mut options = SessionOptions::from(self.strategy);
        for (state, result) in self.updates {
            options = options.update(input(&graph, state), output(&graph, result));
        }
        let mut session = Session::new(engine, &graph, options).unwrap();
        let mut functional = Session::new(engine, &graph, self.strategy).unwrap();
        let mut inputs = start(&graph);
        let position = |name: &str| graph.inputs().iter().position(|&id| graph.label(id) == name).unwrap();
        let is_state = |at: usize| self.updates.iter().any(|(state, _)| position(state) == at);
        let at_first = |(state, _): &(&str, &str)| inputs[position(state)].to_device(engine).unwrap();
        let mut states: Vec<Tensor> = self.updates.iter().map(at_first).collect();
        for launching in [Launching::Eager, Launching::Eager, Launching::Graph, Launching::Graph] {
            functional.poison().unwrap();
            functional.run(&inputs.iter().collect::<Vec<_>>()).unwrap();
            session.set_launching(launching);
            session.poison().unwrap();
            let data: Vec<&Tensor> = (0..inputs.len()).filter(|&at| !is_state(at)).map(|at| &inputs[at]).collect();
            session.run_with(&data, &mut states).unwrap();
            let mut outputs = Vec::new();
            for (index, expected) in graph.outputs().iter().enumerate() {
                let state = self.updates.iter().position(|(_, result)| *result == expected.name);
                let refused = session.output(index);
                let got = match state {
                    Some(state) => {
                        assert!(matches!(refused, Err(Error::OutputIsState(name)) if name == expected.name));
                        Tensor::from_array(states[state].dtype(), &states[state].to_array().unwrap()).unwrap()
                    }
                    None => refused.unwrap(),
                };
                assert!(got.is_bitwise(&functional.output(index).unwrap()), "{} {}", self.strategy, self.text);
                outputs.push(got);
            }
            assert_holds(&expected(&graph, &inputs), &graph, &outputs, format_args!("{} {}", self.strategy, self.text));
            for (state, result) in self.updates {
                let index = graph.outputs().iter().position(|output| output.name == *result).unwrap();
                inputs[position(state)] = outputs[index].clone();
            }
        }
        session.kernels().len() - session.plan().groups.len()
    }
}

/// Inputs from a seed; second moments are squares, positions the first row.
fn start(graph: &Graph) -> Vec<Tensor> {
    let mut inputs = seed::inputs(graph, 5).unwrap();
    for (tensor, &id) in inputs.iter_mut().zip(graph.inputs()) {
        if graph.label(id) == "v" {
            let mut squares = tensor.to_array().unwrap();
            squares.values.iter_mut().for_each(|value| *value *= *value);
            *tensor = Tensor::from_array(tensor.dtype(), &squares).unwrap();
        }
        if tensor.dtype() == Dtype::I32 {
            *tensor = Tensor::filled(Dtype::I32, tensor.shape().clone(), 0.0).unwrap();
        }
    }
    inputs
}

const SHAPES: [&str; 6] = ["[1]", "[127]", "[1500]", "[3,127]", "[5,1]", "[0,7]"];

fn sgd(dtype: Dtype, shape: &str) -> String {
    format!(
        "w = input {dtype}{shape} ; g = input {dtype}{shape}
s = mul g 0.1 ; y = sub w s ; out y"
    )
}

fn gradient_descent(engine: &Engine) {
    for dtype in Dtype::FLOATS {
        for shape in SHAPES {
            for strategy in [Strategy::Naive, Strategy::Fused] {
                let text = sgd(dtype, shape);
                let copies = Case { text: &text, updates: &[("w", "y")], strategy }.run(engine);
                // One number is read by all threads, so it is not written while they run.
                assert_eq!(copies, usize::from(shape == "[1]"), "{strategy} {text}");
            }
        }
    }
}

fn adam(engine: &Engine) {
    for dtype in Dtype::FLOATS {
        for shape in SHAPES {
            let text = format!(
                "w = input {dtype}{shape} ; g = input {dtype}{shape} ; m = input {dtype}{shape} ; v = input {dtype}{shape}
a = mul m 0.9 ; b = mul g 0.1 ; m2 = add a b
c = mul v 0.95 ; gg = mul g g ; d = mul gg 0.05 ; v2 = add c d
r = sqrt v2 ; e = add r 0.001 ; u = div m2 e ; s = mul w 0.99 ; t = mul u 0.01 ; w2 = sub s t ; out m2 v2 w2"
            );
            let updates = [("m", "m2"), ("v", "v2"), ("w", "w2")];
            let copies = Case { text: &text, updates: &updates, strategy: Strategy::Fused }.run(engine);
            assert_eq!(copies, if shape == "[1]" { 3 } else { 0 }, "{text}");
            let graph: Graph = text.parse().unwrap();
            let groups = Session::new(engine, &graph, Strategy::Fused).unwrap().plan().groups.len();
            assert!(groups == 1 || graph.node(output(&graph, "w2")).shape.elements() == 0, "{groups} groups: {text}");
            Case { text: &text, updates: &updates, strategy: Strategy::Naive }.run(engine);
        }
    }
}

/// All readers of a state see it as it was before the run, and readers of its new value see that.
fn readers(engine: &Engine) {
    for dtype in Dtype::FLOATS {
        for shape in ["[127]", "[1500]", "[3,127]"] {
            let after = format!("{} ; z = mul w g ; out z", sgd(dtype, shape));
            let copies = Case { text: &after, updates: &[("w", "y")], strategy: Strategy::Naive }.run(engine);
            assert_eq!(copies, 1, "a later kernel reads the state: {after}");
            Case { text: &after, updates: &[("w", "y")], strategy: Strategy::Fused }.run(engine);
            let head = format!("w = input {dtype}{shape} ; g = input {dtype}{shape}");
            let before = format!("{head}\nz = mul w g ; s = mul g 0.1 ; y = sub w s ; out z y");
            for strategy in [Strategy::Naive, Strategy::Fused] {
                let copies = Case { text: &before, updates: &[("w", "y")], strategy }.run(engine);
                assert_eq!(copies, 0, "{strategy} {before}");
            }
            let new = format!("{} ; z = row_sum y ; q = mul y y ; out z q", sgd(dtype, shape));
            for strategy in [Strategy::Naive, Strategy::Fused] {
                Case { text: &new, updates: &[("w", "y")], strategy }.run(engine);
            }
        }
    }
}

/// Kernels that are not elementwise do not write what they read; those that read nothing of the state may write it.
fn other_kernels(engine: &Engine) {
    for dtype in Dtype::FLOATS {
        for cols in [1, 127, 1500] {
            let text = format!("w = input {dtype}[7,{cols}] ; y = softmax w ; out y");
            let copies = |strategy| Case { text: &text, updates: &[("w", "y")], strategy }.run(engine);
            assert_eq!(copies(Strategy::Unfused), 1, "{text}");
            copies(Strategy::Fused);
            copies(Strategy::Naive);
        }
        let text = format!(
            "w = input {dtype}[24,40] ; p = input {dtype}[24,33] ; q = input {dtype}[33,40]
z = relu w ; y = matmul p q ; out z y"
        );
        for strategy in [Strategy::Naive, Strategy::Fused] {
            Case { text: &text, updates: &[("w", "y")], strategy }.run(engine);
        }
        let square = format!("w = input {dtype}[40,40] ; p = input {dtype}[40,40] ; y = matmul w p ; out y");
        let copies = Case { text: &square, updates: &[("w", "y")], strategy: Strategy::Fused }.run(engine);
        assert_eq!(copies, 1, "{square}");
        // Gradients that add up in f32.
        let sum = format!(
            "w = input f32[24,40] ; p = input {dtype}[64,24] ; q = input {dtype}[64,40]
g = matmul p q transpose_a ; f = cast g f32 ; y = add w f ; out y"
        );
        let copies = Case { text: &sum, updates: &[("w", "y")], strategy: Strategy::Fused }.run(engine);
        let is_hopper = matches!(engine.device().backend(), Backend::Cuda(target) if target.arch.has_wgmma());
        assert!(copies == 0 || dtype == Dtype::F32 || !is_hopper, "{sum}");
        let turned = format!("w = input {dtype}[40,40] ; y = transpose w [1,0] ; out y");
        let copies = Case { text: &turned, updates: &[("w", "y")], strategy: Strategy::Fused }.run(engine);
        assert_eq!(copies, 1, "{turned}");
        let rows = format!(
            "c = input {dtype}[2,9,4] ; r = input {dtype}[2,1,4] ; p = input i32[2]
y = append c r p batch=0 ; z = relu c ; out y z"
        );
        let copies = Case { text: &rows, updates: &[("c", "y")], strategy: Strategy::Naive }.run(engine);
        assert_eq!(copies, 1, "an append of a state that is read later: {rows}");
        let own = format!("c = input {dtype}[2,1,4] ; p = input i32[2] ; y = append c c p batch=0 ; out y");
        let copies = Case { text: &own, updates: &[("c", "y")], strategy: Strategy::Naive }.run(engine);
        assert_eq!(copies, 1, "{own}");
    }
}

fn swapped(engine: &Engine) {
    for dtype in Dtype::FLOATS {
        for shape in ["[1]", "[127]", "[1500]"] {
            let head = format!("a = input {dtype}{shape} ; b = input {dtype}{shape}");
            let moved = format!("{head}\nx = reshape b {shape} ; y = reshape a {shape} ; out x y");
            let scaled = format!("{head}\nx = mul b 2.0 ; y = mul a 0.5 ; out x y");
            for text in [moved, scaled] {
                for strategy in [Strategy::Naive, Strategy::Fused] {
                    Case { text: &text, updates: &[("a", "x"), ("b", "y")], strategy }.run(engine);
                    Case { text: &text, updates: &[("b", "y"), ("a", "x")], strategy }.run(engine);
                    Case { text: &text, updates: &[("a", "x")], strategy }.run(engine);
                    Case { text: &text, updates: &[("a", "y"), ("b", "x")], strategy }.run(engine);
                }
            }
        }
    }
}

/// More than the caches hold, on threads that share it.
fn large(engine: &Engine) {
    let text = sgd(Dtype::F32, "[3000001]");
    assert_eq!(Case { text: &text, updates: &[("w", "y")], strategy: Strategy::Fused }.run(engine), 0);
}

/// A cache and weights, in the order in which they are declared.
fn caches_and_updates(engine: &Engine) {
    let text = "w = input f32[5] ; c = input f32[1,3,5] ; p = input i32[1]
r = reshape w [1,1,5] ; y = append c r p batch=0 ; x = add w 1.0 ; out y x";
    let graph: Graph = text.parse().unwrap();
    let options = SessionOptions::default().states([input(&graph, "c")]);
    let options = options.update(input(&graph, "w"), output(&graph, "x"));
    let mut session = Session::new(engine, &graph, options).unwrap();
    let mut states = [Tensor::filled(Dtype::F32, [1, 3, 5], 0.0), Tensor::filled(Dtype::F32, [5], 1.0)]
        .map(|tensor| tensor.unwrap().to_device(engine).unwrap());
    for row in 0..3 {
        session.poison().unwrap();
        session.run_with(&[&Tensor::from_i32([1], &[row]).unwrap()], &mut states).unwrap();
    }
    let [cache, weights] = states.map(|state| state.to_array().unwrap().values);
    assert_eq!(cache, [1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0]);
    assert_eq!(weights, [4.0; 5]);
}

#[test]
fn gradient_descent_is_in_place() {
    gradient_descent(&cpu(2, Isa::detect()));
}

#[test]
fn adam_updates_three_states_in_one_kernel() {
    adam(&cpu(2, Isa::detect()));
}

#[test]
fn readers_see_the_value_that_they_ask_for() {
    readers(&cpu(2, Isa::detect()));
}

#[test]
fn other_kernels_write_elsewhere() {
    other_kernels(&cpu(2, Isa::detect()));
}

#[test]
fn states_change_places() {
    swapped(&cpu(2, Isa::detect()));
}

#[test]
fn large_states_are_updated_in_place() {
    large(&cpu(2, Isa::detect()));
}

#[test]
fn caches_come_before_updates() {
    caches_and_updates(&cpu(2, Isa::detect()));
}

#[test]
fn states_on_a_gpu() {
    let Some(engine) = gpu() else { return };
    for case in [gradient_descent, adam, readers, other_kernels, swapped, large, caches_and_updates] {
        case(&engine);
    }
}

#[test]
fn updates_are_checked() {
    let engine = cpu(2, Isa::detect());
    let text = "w = input f32[3,4] ; g = input f32[3,4] ; h = input f32[4,3] ; b = input bf16[3,4]
s = mul g 0.1 ; y = sub w s ; z = add w g ; out y z";
    let graph: Graph = text.parse().unwrap();
    let declare = |updates: &[(NodeId, NodeId)]| {
        let options = updates.iter().fold(SessionOptions::default(), |all, &(state, to)| all.update(state, to));
        match Session::new(&engine, &graph, options) {
            Ok(_) => Ok(()),
            Err(Error::Update { problem, .. }) => Err(problem),
            Err(error) => panic!("{error}"),
        }
    };
    let [w, g, h, b] = ["w", "g", "h", "b"].map(|name| input(&graph, name));
    let (y, z) = (output(&graph, "y"), output(&graph, "z"));
    let s = graph.ids().find(|&id| graph.label(id) == "s").unwrap();
    let foreign: Graph =
        "x = input f32[3] ; a = relu x ; c = relu a ; d = relu c ; e = relu d ; f = relu e ; i = relu f
j = relu i ; k = relu j ; l = relu k ; out l"
            .parse()
            .unwrap();
    let far = output(&foreign, "l");
    assert_eq!(declare(&[(w, y)]), Ok(()));
    assert_eq!(declare(&[(w, y), (g, z)]), Ok(()));
    assert_eq!(declare(&[(y, z)]), Err(UpdateProblem::NoInput));
    assert_eq!(declare(&[(far, z)]), Err(UpdateProblem::NoInput));
    assert_eq!(declare(&[(w, y), (w, z)]), Err(UpdateProblem::StateTwice));
    assert_eq!(declare(&[(w, w)]), Err(UpdateProblem::NotComputed));
    assert_eq!(declare(&[(w, g)]), Err(UpdateProblem::NotComputed));
    assert_eq!(declare(&[(w, s)]), Err(UpdateProblem::NoOutput));
    assert_eq!(declare(&[(w, far)]), Err(UpdateProblem::NoOutput));
    assert_eq!(declare(&[(w, y), (g, y)]), Err(UpdateProblem::ResultTwice));
    let other = |expected: &str| Err(UpdateProblem::Type { expected: expected.into(), got: "f32[3,4]".into() });
    assert_eq!(declare(&[(h, y)]), other("f32[4,3]"));
    assert_eq!(declare(&[(b, y)]), other("bf16[3,4]"));
    let error = Session::new(&engine, &graph, SessionOptions::default().update(h, y)).map(|_| ()).unwrap_err();
    assert_eq!(error.to_string(), "state `h`, updated to `y`: expected f32[4,3], got f32[3,4]");
    let transposed = Layout::contiguous(&[4, 3].into()).view(&View::Transpose(vec![1, 0])).unwrap();
    let mut layouts: Vec<Layout> = graph.inputs().iter().map(|&id| Layout::contiguous(&graph.node(id).shape)).collect();
    layouts[0] = transposed;
    let lying = Session::new(&engine, &graph, SessionOptions::default().layouts(layouts).update(w, y)).map(|_| ());
    assert!(matches!(lying, Err(Error::StateLayout(name)) if name == "w"));
}

#[test]
fn a_state_is_declared_in_one_way() {
    let text = "c = input f32[2,9,4] ; r = input f32[2,1,4] ; p = input i32[2] ; y = append c r p batch=0 ; out y";
    let graph: Graph = text.parse().unwrap();
    let (c, y) = (input(&graph, "c"), output(&graph, "y"));
    let twice =
        Session::new(&cpu(2, Isa::detect()), &graph, SessionOptions::default().states([c]).update(c, y)).map(|_| ());
    assert!(matches!(twice, Err(Error::Update { problem: UpdateProblem::StateTwice, .. })));
}
