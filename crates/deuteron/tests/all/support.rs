//! What tests of sessions do: open engines, run graphs over poisoned memory, hold what came against f64.

use std::fmt::Display;
use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use deuteron::cuda::{self, Compiler, Options, Search};
use deuteron::emulate::Toolchain;
use deuteron::reference::Array;
use deuteron::verify::Expected;
use deuteron::{Cpu, Dtype, Engine, Error, Graph, Isa, Session, Strategy, Tensor, seed};
use deuteron_testkit::hardware;

/// A CPU of this many threads.
pub fn cpu(threads: usize, isa: Isa) -> Engine {
    Engine::on(Arc::new(Cpu::with(threads, isa)))
}

/// Where CUDA's libraries may be.
fn search() -> Search {
    Search { cuda_home: hardware::cuda_home(), environments: hardware::environments() }
}

/// NVRTC, or a note that a test of kernels is skipped.
pub fn compiler() -> Option<Compiler> {
    match cuda::compiler(&search()) {
        Ok(compiler) => Some(compiler),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "skipped: kernels are not compiled: {error}");
            None
        }
    }
}

/// The emulator with its machine and headers compiled once for all tests, or a note that a test of kernels is skipped.
pub fn emulator() -> Option<&'static Toolchain> {
    static FOUND: OnceLock<Option<Toolchain>> = OnceLock::new();
    let find = || {
        let found = Toolchain::find(&std::env::var("CXX").unwrap_or_else(|_| "c++".into()));
        if found.is_err() {
            let _ = writeln!(std::io::stderr(), "skipped: no C++ compiler");
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator");
        found.ok().map(|found| found.prepared(&folder).unwrap_or_else(|error| panic!("{error}")))
    };
    FOUND.get_or_init(find).as_ref()
}

fn open(red_zones: bool) -> Result<Engine, Error> {
    cuda::open(&Options { search: search(), red_zones, ..Options::default() })
}

pub fn gpu() -> Option<Engine> {
    hardware::gpu(|| open(false))
}

/// With red zones around all memory.
pub fn guarded_gpu() -> Option<Engine> {
    hardware::gpu(|| open(true))
}

/// A graph whose elements are of a dtype wherever its text says `float`.
pub fn parsed(text: &str, dtype: Dtype) -> Graph {
    text.replace("float", &dtype.to_string()).parse().unwrap()
}

/// A session that has run over poisoned results.
pub fn ran(engine: &Engine, graph: &Graph, strategy: Strategy, inputs: &[Tensor]) -> Session {
    let mut session = Session::new(engine, graph, strategy).unwrap();
    session.poison().unwrap();
    session.run(&inputs.iter().collect::<Vec<_>>()).unwrap();
    session
}

pub fn outputs(session: &Session) -> Vec<Tensor> {
    (0..session.graph().outputs().len()).map(|index| session.output(index).unwrap()).collect()
}

pub fn bits(session: &Session) -> Vec<u32> {
    outputs(session).iter().flat_map(|output| output.to_f32().unwrap()).map(f32::to_bits).collect()
}

/// What a graph gives by f64, and how far results may be off.
pub fn expected(graph: &Graph, inputs: &[Tensor]) -> Expected {
    let arrays: Vec<Array> = inputs.iter().map(|tensor| tensor.to_array().unwrap()).collect();
    Expected::new(graph, &arrays).unwrap()
}

/// Inputs from a seed, and what is expected of them.
pub fn seeded(graph: &Graph, seed: u64) -> (Vec<Tensor>, Expected) {
    let inputs = seed::inputs(graph, seed).unwrap();
    let expected = expected(graph, &inputs);
    (inputs, expected)
}

#[track_caller]
pub fn assert_holds(expected: &Expected, graph: &Graph, outputs: &[Tensor], what: impl Display) {
    let verification = expected.verify(graph, outputs).unwrap();
    assert!(verification.holds(), "{what}: {:?}", verification.worst());
}

/// Changes one element.
pub fn set(tensor: &mut Tensor, element: usize, value: f32) {
    let mut values = tensor.to_f32().unwrap();
    values[element] = value;
    *tensor = Tensor::from_f32(tensor.dtype(), tensor.shape().clone(), &values).unwrap();
}

/// The results of a session that runs twice over poisoned memory, and gives the same bits both times.
pub fn twice(session: &mut Session, inputs: &[Tensor]) -> Vec<Tensor> {
    let mut first: Option<Vec<Tensor>> = None;
    for _ in 0..2 {
        session.poison().unwrap();
        session.run(&inputs.iter().collect::<Vec<_>>()).unwrap();
        let found = outputs(session);
        let same = first.iter().flatten().zip(&found).all(|(a, b)| a.is_bitwise(b));
        assert!(same, "the same bits in every run: {}", session.plan());
        first = Some(found);
    }
    first.unwrap_or_default()
}
