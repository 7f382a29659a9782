//! Rows appended to a cache, attention over it, and caches kept in place: against the reference, and against each other.

use deuteron::reference::{Array, Rounding, interpret};
use deuteron::{
    DeviceError, Dtype, Engine, Error, Graph, GroupKind, Isa, Launching, Layout, NodeId, Session, SessionOptions,
    Strategy, Tensor, View, seed,
};

use crate::support::{assert_holds, cpu, expected, gpu};

fn engine() -> Engine {
    cpu(2, Isa::detect())
}

/// The CPU, and a GPU if there is one.
fn engines() -> Vec<Engine> {
    std::iter::once(engine()).chain(gpu()).collect()
}

/// Inputs from a seed, but for these positions.
fn inputs(graph: &Graph, positions: &[i32]) -> Vec<Tensor> {
    let mut inputs = seed::inputs(graph, 5).unwrap();
    let place = graph.inputs().iter().position(|&id| graph.label(id) == "p").unwrap();
    inputs[place] = Tensor::from_i32([positions.len()], positions).unwrap();
    inputs
}

fn node(graph: &Graph, name: &str) -> NodeId {
    graph.inputs().iter().copied().find(|&id| graph.label(id) == name).unwrap()
}

fn run(session: &mut Session, inputs: &[Tensor]) -> Result<(), Error> {
    session.poison()?;
    session.run(&inputs.iter().collect::<Vec<_>>())
}

fn append(dtype: Dtype, cache: &str, rows: &str, batch: usize, sequences: usize) -> Graph {
    append_text(dtype, cache, rows, batch, sequences).parse().unwrap()
}

#[test]
fn appended_rows_are_those_of_the_reference() {
    let engines = engines();
    let cases: [(&str, &str, usize, &[i32]); 7] = [
        ("[3,7,5]", "[3,1,5]", 0, &[0, 6, 3]),
        ("[2,3,4,127,17]", "[2,3,4,129,17]", 1, &[]),
        ("[2,3,4,127,17]", "[2,3,4,5,17]", 1, &[0, 122, 61]),
        ("[2,2,2,33,64]", "[2,2,2,33,64]", 2, &[0, 0]),
        ("[2,2,9,1]", "[2,2,2,1]", 0, &[7, 1]),
        ("[2,2,9,4]", "[2,2,0,4]", 1, &[9, 0]),
        ("[2,0,9,4]", "[2,0,3,4]", 0, &[6, 0]),
    ];
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8, Dtype::I32] {
        for (cache, rows, batch, positions) in cases {
            if positions.is_empty() {
                let text = append_text(dtype, cache, rows, batch, 3);
                assert!(text.parse::<Graph>().is_err(), "more rows than the cache has");
                continue;
            }
            let graph = append(dtype, cache, rows, batch, positions.len());
            let inputs = inputs(&graph, positions);
            let arrays: Vec<Array> = inputs.iter().map(|tensor| tensor.to_array().unwrap()).collect();
            let expected = interpret(&graph, &arrays, Rounding::Exact).unwrap().outputs.remove(0);
            for engine in &engines {
                let mut session = Session::new(engine, &graph, Strategy::Fused).unwrap();
                run(&mut session, &inputs).unwrap();
                assert_eq!(session.output(0).unwrap().to_array().unwrap(), expected, "{dtype} {cache} {rows}");
            }
        }
    }
}

fn append_text(dtype: Dtype, cache: &str, rows: &str, batch: usize, sequences: usize) -> String {
    format!(
        "c = input {dtype}{cache} ; r = input {dtype}{rows} ; p = input i32[{sequences}]
y = append c r p batch={batch} ; out y"
    )
}

#[test]
fn rows_that_do_not_fit_are_an_index_error() {
    let graph = append(Dtype::F32, "[2,3,9,4]", "[2,3,4,4]", 1, 3);
    for engine in engines() {
        rows_that_do_not_fit(&graph, Session::new(&engine, &graph, Strategy::Fused).unwrap());
    }
}

fn rows_that_do_not_fit(graph: &Graph, mut session: Session) {
    for (positions, wrong, row) in [([0, 6, 5], 6, 1), ([0, 5, -1], -1, 2), ([i32::MAX, 5, 5], i64::from(i32::MAX), 0)]
    {
        let inputs = inputs(graph, &positions);
        let error = run(&mut session, &inputs).unwrap_err();
        let Error::Device(DeviceError::Index { fault, .. }) = error else { panic!("{error}") };
        assert_eq!((fault.arg, fault.row, fault.index, fault.table_rows), (2, row, wrong, 6));
        let arrays: Vec<Array> = inputs.iter().map(|tensor| tensor.to_array().unwrap()).collect();
        let error = interpret(graph, &arrays, Rounding::Exact).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("append") && error.contains("6 rows"), "{error}");
    }
}

/// Sequences of unequal lengths, one query and many, more heads than keys have, positions before, at and beyond the last key.
#[test]
fn cached_attention_is_that_of_the_reference() {
    let engine = engine();
    let cases: [([usize; 5], &[i32]); 8] = [
        ([3, 2, 1, 129, 24], &[0, 77, 128]),
        ([2, 12, 1, 1024, 64], &[127, 1000]),
        ([1, 12, 1, 300, 64], &[255]),
        ([2, 3, 3, 700, 17], &[697, 5]),
        ([2, 2, 70, 200, 40], &[130, 1]),
        ([4, 1, 129, 129, 8], &[0, 0, 0, 0]),
        ([2, 1, 5, 7, 16], &[100, -3]),
        ([1, 1, 1, 1, 1], &[0]),
    ];
    for dtype in Dtype::FLOATS {
        for ([batch, heads, queries, keys, width], positions) in cases {
            let text = format!(
                "q = input {dtype}[{batch},{heads},{queries},{width}] ; k = input {dtype}[{batch},{heads},{keys},{width}]
v = input {dtype}[{batch},{heads},{keys},{width}] ; p = input i32[{batch}]
a = attention q k v p mask=cached ; out a"
            );
            let graph: Graph = text.parse().unwrap();
            assert_eq!(graph.to_string().parse::<Graph>().unwrap(), graph);
            let inputs = inputs(&graph, positions);
            let expected = expected(&graph, &inputs);
            for strategy in Strategy::ALL {
                let mut session = Session::new(&engine, &graph, strategy).unwrap();
                run(&mut session, &inputs).unwrap();
                assert_holds(
                    &expected,
                    &graph,
                    &[session.output(0).unwrap()],
                    format_args!("{dtype} {strategy}\n{text}"),
                );
                let one = session.plan().groups.iter().any(|group| group.kind == GroupKind::Attention);
                assert!(one || matches!(strategy, Strategy::Naive | Strategy::Eager | Strategy::Fused), "{text}");
            }
        }
    }
}

/// What lies behind the last key is not read, whatever it is.
#[test]
fn keys_that_are_not_there_yet_are_not_seen() {
    let text = "q = input f32[2,3,2,16] ; k = input f32[2,3,300,16] ; v = input f32[2,3,300,16] ; p = input i32[2]
a = attention q k v p mask=cached ; out a";
    let graph: Graph = text.parse().unwrap();
    let mut session = Session::new(&engine(), &graph, Strategy::Unfused).unwrap();
    let mut inputs = inputs(&graph, &[3, 270]);
    run(&mut session, &inputs).unwrap();
    let before = session.output(0).unwrap();
    for operand in [1, 2] {
        let mut values = inputs[operand].to_f32().unwrap();
        for (index, value) in values.iter_mut().enumerate() {
            let (sequence, key) = (index / (3 * 300 * 16), index / 16 % 300);
            if key > [4, 271][sequence] {
                *value = f32::NAN;
            }
        }
        inputs[operand] = Tensor::from_f32(Dtype::F32, [2, 3, 300, 16], &values).unwrap();
    }
    run(&mut session, &inputs).unwrap();
    assert!(session.output(0).unwrap().is_bitwise(&before));
}

/// A layer as GPT-2 has it: keys and values are views of the fused projection.
fn layer(dtype: Dtype, sequence: usize) -> Graph {
    let text = format!(
        "c = input {dtype}[2,3,4,40,8] ; x = input {dtype}[3,{sequence},96] ; p = input i32[3]
kv = slice x axis=2 start=32 length=64 ; rows = reshape kv [3,{sequence},2,4,8] ; r = transpose rows [2,0,3,1,4]
y = append c r p batch=1
qs = slice x axis=2 start=0 length=32 ; qr = reshape qs [3,{sequence},4,8] ; q = transpose qr [0,2,1,3]
ks = slice y axis=0 start=0 length=1 ; k = reshape ks [3,4,40,8]
vs = slice y axis=0 start=1 length=1 ; v = reshape vs [3,4,40,8]
a = attention q k v p mask=cached ; out a y"
    );
    text.parse().unwrap()
}

#[test]
fn a_cache_kept_in_place_gives_the_bits_of_one_that_is_copied() {
    engines().iter().for_each(kept_in_place);
}

fn kept_in_place(engine: &Engine) {
    for dtype in Dtype::FLOATS {
        for strategy in [Strategy::Naive, Strategy::Unfused, Strategy::Fused] {
            let mut copied = Tensor::filled(dtype, [2, 3, 4, 40, 8], 0.0).unwrap();
            let mut kept = [copied.contiguous().unwrap().to_device(engine).unwrap()];
            for (sequence, positions) in [(7, [0, 0, 0]), (1, [7, 5, 3]), (1, [8, 6, 4]), (9, [9, 31, 5])] {
                let graph = layer(dtype, sequence);
                let copies = |session: &Session| {
                    session.plan().groups.iter().filter(|group| group.kind == GroupKind::Copy).count()
                };
                let mut functional = Session::new(engine, &graph, strategy).unwrap();
                let states = [node(&graph, "c")];
                let mut in_place = Session::new(engine, &graph, SessionOptions::from(strategy).states(states)).unwrap();
                assert_eq!(copies(&in_place), 0, "rows are read where they lie");
                let mut inputs = inputs(&graph, &positions);
                inputs[0] = copied;
                run(&mut functional, &inputs).unwrap();
                copied = functional.output(1).unwrap();
                for launching in [Launching::Eager, Launching::Graph, Launching::Graph] {
                    in_place.set_launching(launching);
                    in_place.poison().unwrap();
                    in_place.run_with(&[&inputs[1], &inputs[2]], &mut kept).unwrap();
                }
                let (ours, theirs) = (in_place.output(0).unwrap(), functional.output(0).unwrap());
                assert!(ours.is_bitwise(&theirs), "{dtype} {strategy} {sequence}");
                let same = |kept: &[Tensor]| kept[0].to_bytes().unwrap() == copied.to_bytes().unwrap();
                assert!(same(&kept), "{dtype} {strategy} {sequence}");
                let own = [inputs.remove(1), inputs.remove(1)];
                in_place.run_timed_with(&own.each_ref(), &mut kept).unwrap();
                in_place.time_with(&[own.to_vec()], &mut kept, 3, Launching::Graph).unwrap();
                assert!(same(&kept), "the same rows again");
            }
        }
    }
}

#[test]
fn states_that_are_none_are_refused() {
    let engine = engine();
    let declare = |text: &str, name: &str| {
        let graph: Graph = text.parse().unwrap();
        Session::new(&engine, &graph, SessionOptions::default().states([node(&graph, name)])).map(|_| ())
    };
    let head = "c = input f32[2,9,4] ; r = input f32[2,1,4] ; p = input i32[2]";
    assert!(declare(&format!("{head}\ny = append c r p batch=0 ; out y"), "c").is_ok());
    for (rest, name) in [
        ("y = append c r p batch=0 ; out y", "r"),
        ("y = append c r p batch=0 ; z = relu y ; out z", "c"),
        ("y = append c r p batch=0 ; z = relu c ; out y z", "c"),
        ("y = append c r p batch=0 ; out y c", "c"),
        ("y = append c r p batch=0 ; z = append c r p batch=0 ; out y z", "c"),
        ("y = append c c p batch=0 ; z = relu r ; out y z", "c"),
    ] {
        let refused = declare(&format!("{head}\n{rest}"), name);
        assert!(matches!(&refused, Err(Error::NoState(state)) if state == name), "{rest}: {refused:?}");
    }
    let graph: Graph = format!("{head}\ny = append c r p batch=0 ; out y").parse().unwrap();
    let c = node(&graph, "c");
    let twice = Session::new(&engine, &graph, SessionOptions::default().states([c, c])).map(|_| ());
    assert!(matches!(twice, Err(Error::NoState(_))));
    let transposed = Layout::contiguous(&[2, 4, 9].into()).view(&View::Transpose(vec![0, 2, 1])).unwrap();
    let layouts = [transposed, Layout::contiguous(&[2, 1, 4].into()), Layout::contiguous(&[2].into())];
    let options = SessionOptions::default().layouts(layouts).states([c]);
    let lying = Session::new(&engine, &graph, options).map(|_| ());
    assert!(matches!(lying, Err(Error::StateLayout(name)) if name == "c"));
    let other: Graph = format!("{head}\nx = input f32[3] ; y = append c r p batch=0 ; out y x").parse().unwrap();
    let foreign = *other.inputs().last().unwrap();
    let foreign = Session::new(&engine, &graph, SessionOptions::default().states([foreign])).map(|_| ());
    assert!(matches!(foreign, Err(Error::NoState(_))));
}

#[test]
fn states_of_a_run_are_checked() {
    let engine = engine();
    let text = "c = input f32[2,9,4] ; r = input f32[2,1,4] ; p = input i32[2] ; y = append c r p batch=0 ; out y";
    let graph: Graph = text.parse().unwrap();
    let mut session = Session::new(&engine, &graph, SessionOptions::default().states([node(&graph, "c")])).unwrap();
    let r = Tensor::filled(Dtype::F32, [2, 1, 4], 1.0).unwrap();
    let p = Tensor::from_i32([2], &[8, 0]).unwrap();
    let state = |shape: [usize; 3]| [Tensor::filled(Dtype::F32, shape, 0.0).unwrap()];
    let mut good = state([2, 9, 4]);
    session.run_with(&[&r, &p], &mut good).unwrap();
    let values = good[0].to_f32().unwrap();
    let ones: Vec<usize> = (0..72).filter(|&index| values[index] == 1.0).collect();
    assert_eq!(ones, [32, 33, 34, 35, 36, 37, 38, 39]);
    assert!(matches!(session.output(0), Err(Error::OutputIsState(name)) if name == "y"));

    let clone = good[0].clone();
    assert!(matches!(session.run_with(&[&r, &p], &mut good), Err(Error::SharedState(name)) if name == "c"));
    drop(clone);
    session.run_with(&[&r, &p], &mut good).unwrap();
    assert!(matches!(session.run_with(&[&r, &p], &mut state([2, 8, 4])), Err(Error::Input { .. })));
    assert!(matches!(session.run_with(&[&r, &p], &mut []), Err(Error::StateCount { expected: 1, got: 0, .. })));
    assert!(matches!(session.run(&[&good[0], &r, &p]), Err(Error::StateCount { .. })));
    assert!(matches!(session.run_with(&[&r], &mut good), Err(Error::InputCount { expected: 2, got: 1, .. })));
    // A run that fails writes nothing.
    let before = good[0].to_bytes().unwrap();
    let outside = Tensor::from_i32([2], &[0, 9]).unwrap();
    assert!(session.run_with(&[&r, &outside], &mut good).is_err());
    assert_eq!(good[0].to_bytes().unwrap(), before);
}
