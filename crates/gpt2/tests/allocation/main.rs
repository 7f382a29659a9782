//! Memory that runs out: every large allocation of a public path fails in turn. Each time the answer is a typed error, and the next call
//! gives what it gave before.

mod allocator;
// Written for the tests of ONNX files; not all of it is needed here.
#[path = "../../../onnx/tests/all/support/writer.rs"]
#[allow(dead_code)]
mod writer;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::ControlFlow;
use std::path::Path;

use deuteron::onnx::{self, OnnxError};
use deuteron::reference::{Array, ReferenceError};
use deuteron::verify::Expected;
use deuteron::{
    DeviceError, Dtype, Engine, FusedOp, Graph, Session, SessionOptions, Strategy, Tensor, differentiate, seed,
};
use deuteron_gpt2::{Checkpoint, CheckpointError, Config, GenerateOptions, Gpt2, Sampling, Weights};
use deuteron_testkit::{Scratch, drill};

use allocator::{Fails, LARGE, with};
use writer::{Size, Writer};

/// What a path may answer.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Engine(#[from] deuteron::Error),
    #[error(transparent)]
    Onnx(#[from] OnnxError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Model(#[from] deuteron_gpt2::Error),
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl Failure {
    /// Whether it says that there was no memory.
    fn is_memory(&self) -> bool {
        use deuteron::Error::{Device, Reference};
        match self {
            Failure::Engine(error) | Failure::Model(deuteron_gpt2::Error::Engine(error)) => {
                matches!(error, Device(DeviceError::OutOfMemory { .. }) | Reference(ReferenceError::OutOfMemory { .. }))
            }
            Failure::Onnx(OnnxError::OutOfMemory { .. }) => true,
            Failure::Onnx(OnnxError::Unreadable { why, .. }) => why.contains("out of memory"),
            Failure::Io(error) => error.kind() == std::io::ErrorKind::OutOfMemory,
            Failure::Checkpoint(_) | Failure::Model(_) | Failure::Onnx(_) => false,
        }
    }
}

/// A fingerprint of results.
fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// Has every large allocation of a path fail: alone, or with all that follow; a drill tries both. Gives how often one failed.
fn survives(what: &str, path: impl Fn() -> Result<u64, Failure>) -> usize {
    let expected = path().unwrap_or_else(|error| panic!("{what}: {error}"));
    let (_, count) = with(Fails::None, &path);
    assert!(count > 0, "{what} has no allocation of {LARGE} bytes: nothing is tested");
    let mut tried = 0;
    for number in 1.. {
        let both = [Fails::One(number), Fails::From(number)];
        let chosen = if drill::is_drill() { &both[..] } else { &both[number % 2..][..1] };
        let mut last = true;
        for &fails in chosen {
            let (answer, count) = with(fails, &path);
            if count < number {
                continue;
            }
            (last, tried) = (false, tried + 1);
            match answer {
                Err(error) if error.is_memory() => {}
                Err(error) => panic!("{what}, {fails:?}: expected an error about memory, got {error}"),
                Ok(_) => panic!("{what}, {fails:?}: an allocation failed and nothing was said"),
            }
        }
        // The next call gives what it gave before.
        if last || drill::is_drill() || number % 8 == 1 {
            let after = path().unwrap_or_else(|error| panic!("{what}, after allocation {number} failed: {error}"));
            assert_eq!(after, expected, "{what}, after allocation {number} failed");
        }
        if last {
            break;
        }
    }
    tried
}

/// One test, so that nothing else allocates meanwhile.
#[test]
fn every_large_allocation_may_fail() {
    let engine = Engine::cpu();
    let parts = [runs(&engine), states(&engine), references(), weights(&engine), models()];
    let catalogue = if drill::is_drill() { catalogue(&engine) } else { 0 };
    drill::tried(parts.iter().sum::<usize>() + catalogue, "allocations that failed");
}

/// Copies of tensors, a session, a run, and what it gives.
fn run(engine: &Engine, graph: &Graph, tensors: &[Tensor], strategy: Strategy) -> Result<u64, Failure> {
    let copy = |tensor: &Tensor| Tensor::from_bytes(tensor.dtype(), tensor.shape().clone(), &tensor.to_bytes()?);
    let tensors = tensors.iter().map(copy).collect::<Result<Vec<Tensor>, _>>()?;
    let inputs: Vec<&Tensor> = tensors.iter().collect();
    let mut session = Session::new(engine, graph, strategy)?;
    session.run(&inputs)?;
    let mut all = 0u64;
    for index in 0..graph.outputs().len() {
        let output = session.output(index)?;
        all = all.wrapping_mul(31).wrapping_add(digest(&output.to_bytes()?));
        all = all.wrapping_add(output.to_f32()?.iter().map(|x| u64::from(x.to_bits())).sum());
    }
    Ok(all)
}

fn graph_survives(engine: &Engine, graph: &Graph, strategy: Strategy) -> usize {
    let tensors = seed::inputs(graph, 1).unwrap();
    survives(&graph.to_string(), || run(engine, graph, &tensors, strategy))
}

/// A kernel of every family, with workspaces, partial sums and intermediates above the limit.
fn runs(engine: &Engine) -> usize {
    let graphs = [
        // Row work, and sums of columns by chunks.
        "x = input f32[520,520] ; y, m, r = layer_norm x w[520] b[520] ; z = gelu y ; s = column_sum z ; out z s",
        "x = input bf16[8,270000] ; s = column_sum x ; out s",
        // Intermediates.
        "x = input f32[520,64] ; a = matmul x w[64,520] ; g = gelu a ; y = matmul g v[520,64] ; out y",
        // Keys in ranges, whose results are combined.
        "q = input bf16[64,1,64] ; k = input bf16[64,700,64] ; v = input bf16[64,700,64] ; a = attention q k v ; out a",
        "x = input i32[140000] ; u = input f32[140000,2] ; y = scatter_add x u rows=140000 ; out y",
        "c = input f32[2,2,1000,70] ; r = input f32[2,2,1,70] ; p = input i32[2] ; y = append c r p batch=0 ; out y",
    ];
    let mut tried = 0;
    for text in graphs {
        let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        for strategy in [Strategy::Unfused, Strategy::Fused] {
            tried += graph_survives(engine, &graph, strategy);
        }
    }
    let text = "q = input f32[4,280,64] ; k = input f32[4,280,64] ; v = input f32[4,280,64]
a = attention q k v mask=causal ; out a";
    let attention: Graph = text.parse().unwrap();
    let backward = differentiate(&attention, attention.inputs()).unwrap();
    tried + graph_survives(engine, &backward.graph, Strategy::Greedy)
}

/// All ops of the catalogue, both ways.
fn catalogue(engine: &Engine) -> usize {
    let mut tried = 0;
    for op in FusedOp::catalog() {
        let types = op.operand_types(512, 768, Dtype::F32);
        tried += graph_survives(engine, &op.graph(&types).unwrap(), Strategy::Greedy);
        if op.has_backward() {
            tried += graph_survives(engine, &op.backward_graph(&types).unwrap(), Strategy::Greedy);
        }
    }
    tried
}

/// States that a session updates, by a copy and in place.
fn states(engine: &Engine) -> usize {
    let text = "w = input f32[520,520] ; g = input f32[520,520] ; s = mul g 0.1 ; y = sub w s ; out y";
    let graph: Graph = text.parse().unwrap();
    let tensors = seed::inputs(&graph, 1).unwrap();
    survives(text, || {
        let mut states = [Tensor::from_array(Dtype::F32, &tensors[0].to_array()?)?];
        let inputs = [&tensors[1]];
        let options = SessionOptions::from(Strategy::Fused).update(graph.inputs()[0], graph.outputs()[0].node);
        let mut session = Session::new(engine, &graph, options)?;
        session.run_with(&inputs, &mut states)?;
        Ok(digest(&states[0].to_bytes()?))
    })
}

/// The reference, its bounds, and a comparison: every kind of primitive.
fn references() -> usize {
    let graphs = [
        "x = input bf16[368,368] ; s = softmax x ; z = matmul s v:bf16[368,368] ; out z",
        "x = input f32[70000,2] ; m = row_max x ; c = lt x m ; z = const 0 f32 ; s = select c x z ; q = cast s i8 ; t = column_sum s ; out q t",
        "e = input f32[1000,140] ; i = input i32[1000] ; g = gather e i ; u = scatter_add i g rows=1000 ; k = concat g u axis=0
t = transpose k [1,0] ; a = row_argmax t ; r = reshape t [280000] ; out r a",
    ];
    let of = |text: &str| {
        let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        let tensors = seed::inputs(&graph, 1).unwrap();
        survives(text, || {
            let inputs = tensors.iter().map(Tensor::to_array).collect::<Result<Vec<Array>, _>>()?;
            let expected = Expected::new(&graph, &inputs)?;
            let exact = expected.outputs().iter().zip(graph.outputs());
            let exact =
                exact.map(|(bounded, output)| Tensor::from_array(graph.node(output.node).dtype, &bounded.exact));
            let verified = expected.verify(&graph, &exact.collect::<Result<Vec<Tensor>, _>>()?)?;
            Ok(verified.outputs.iter().map(|output| output.comparison.shares.exact).sum())
        })
    };
    graphs.into_iter().map(of).sum()
}

const SIZES: Config =
    Config { name: Config::OTHER, layers: 1, heads: 4, hidden: 256, vocabulary: 4500, context: 2048, ..Config::SMALL };

/// A checkpoint of some megabytes.
fn checkpoint(folder: &Path) {
    let config = format!(
        "{{\"model_type\":\"gpt2\",\"n_layer\":{},\"n_head\":{},\"n_embd\":{},\"vocab_size\":{},\"n_positions\":{}}}",
        SIZES.layers, SIZES.heads, SIZES.hidden, SIZES.vocabulary, SIZES.context
    );
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for (number, (name, shape)) in SIZES.weights().into_iter().enumerate() {
        let begin = data.len();
        let value = |index: usize| (((index * 97 + number * 13) % 257) as f32 / 128.0 - 1.0) * 0.05;
        data.extend((0..shape.elements()).flat_map(|index| value(index).to_le_bytes()));
        header.push(format!(
            "\"{name}\":{{\"dtype\":\"F32\",\"shape\":{:?},\"data_offsets\":[{begin},{}]}}",
            &shape[..],
            data.len()
        ));
    }
    let header = format!("{{{}}}", header.join(","));
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
    std::fs::write(folder.join("config.json"), config).unwrap();
    std::fs::write(folder.join("model.safetensors"), file).unwrap();
}

/// Weights of a checkpoint in every form, a prompt and steps with a cache that grows.
fn weights(engine: &Engine) -> usize {
    let folder = Scratch::make();
    checkpoint(&folder);
    let sampling = Sampling { temperature: 0.0, top_k: None, top_p: None, seed: 1 };
    let options = GenerateOptions { max_tokens: 2, sampling, end_of_text: None };
    let prompts: Vec<Vec<u32>> = (0..8).map(|prompt| (0..60).map(|token| token * 7 + prompt).collect()).collect();
    let of = |kind: Weights| {
        survives(kind.name(), || {
            let mut model = Gpt2::new(engine, &Checkpoint::open(&folder)?, kind)?;
            let texts = model.generate(&prompts, &options, |_, _| ControlFlow::Continue(()))?;
            Ok(texts
                .iter()
                .flat_map(|text| &text.tokens)
                .fold(0u64, |all, &token| all.wrapping_mul(5003) + u64::from(token)))
        })
    };
    let kinds: &[Weights] = if drill::is_drill() { &Weights::ALL } else { &[Weights::Bf16, Weights::Int8] };
    kinds.iter().copied().map(of).sum()
}

/// A model in a file: a weight, one that is computed, and a mask that is a constant.
fn models() -> usize {
    let mask: Vec<f32> = (0..380 * 380).map(|at| if at % 380 <= at / 380 { 0.0 } else { -1e9 }).collect();
    let model = Writer::default()
        .typed_input("x", writer::F32, &[Size::Is(380), Size::Is(380)])
        .weight("w", &[380, 380])
        .floats("mask", &[380, 380], &mask)
        .floats("half", &[1], &[0.5])
        .node("Mul", &["mask", "half"], "softer")
        .node("Add", &["softer", "mask"], "hidden")
        .node("MatMul", &["x", "w"], "y")
        .node("Add", &["y", "hidden"], "z")
        .output("z")
        .finish();
    let folder = Scratch::make();
    let path = folder.join("model.onnx");
    std::fs::write(&path, model).unwrap();
    survives("an ONNX model", || {
        let imported = onnx::import_file(&path, &onnx::Options::default())?;
        let file = std::fs::read(&path)?;
        let mut all = 0u64;
        for weight in &imported.weights {
            all = all.wrapping_mul(31).wrapping_add(digest(&weight.read(&file)?.bytes));
        }
        Ok(all)
    })
}
