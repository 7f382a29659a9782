//! Graphs of a step against f64.

use deuteron::cuda::Arch;
use deuteron::listing::{OfflineGpu, kernels_for};
use deuteron::reference::Array;
use deuteron::verify::Expected;
use deuteron::{Dtype, Engine, Graph, Optimizer, Saving, Session, SessionOptions, Strategy, Tensor, seed};
use deuteron_gpt2::Config;
use deuteron_train::{Precision, Stateful, Step, StepOptions};

use crate::support::{ADAMW, options, small};

/// Inputs of a training step: weights and data from a seed, numbers as a run has them, second moments above 0.
fn inputs(graph: &Graph) -> Vec<Tensor> {
    let made = seed::inputs(graph, 5).unwrap();
    for (&id, tensor) in graph.inputs().iter().zip(&made) {
        // A target that is no class is refused.
        let in_range = |index: &f64| (0.0..37.0).contains(index);
        let indexes = matches!(graph.label(id).as_str(), "tokens" | "targets");
        assert!(!indexes || tensor.to_array().unwrap().values.iter().all(in_range), "{} are in range", graph.label(id));
    }
    let each = graph.inputs().iter().zip(made).map(|(&id, tensor)| {
        let number = |value: f64| Tensor::filled(Dtype::F32, [], value).unwrap();
        let scaled = |factor: f64, f: fn(f64) -> f64| {
            let mut array = tensor.to_array().unwrap();
            array.values.iter_mut().for_each(|value| *value = factor * f(*value));
            Tensor::from_array(tensor.dtype(), &array).unwrap()
        };
        match graph.label(id).as_str() {
            "rate" => number(1e-2),
            "clip" => number(0.25),
            "decay" => number(0.1),
            "no_decay" => number(0.0),
            "d_loss" => number(1.0),
            "fresh" => number(0.0),
            "correction1" => number(10.0 / 3.0),
            "correction2" => number(6.0),
            name if name.starts_with("sum.") || name.starts_with("moment1.") => scaled(1e-2, |value| value),
            // Well above 0, so that a root of nearly nothing divides nothing.
            name if name.starts_with("moment2.") => scaled(1e-4, |value| value * value + 0.5),
            _ => tensor,
        }
    });
    each.collect()
}

/// Runs a graph as a function, and holds every output against f64.
fn assert_right(engine: &Engine, stateful: &Stateful, what: &str) {
    let graph = &stateful.graph;
    let inputs = inputs(graph);
    let mut session = Session::new(engine, graph, Strategy::Fused).unwrap();
    session.poison().unwrap();
    session.run(&inputs.iter().collect::<Vec<_>>()).unwrap();
    let outputs: Vec<Tensor> = (0..graph.outputs().len()).map(|index| session.output(index).unwrap()).collect();
    let arrays: Vec<Array> = inputs.iter().map(|tensor| tensor.to_array().unwrap()).collect();
    let verification = Expected::new(graph, &arrays).unwrap().verify(graph, &outputs).unwrap();
    let worst = verification.worst().unwrap();
    assert!(verification.holds(), "{what}: {} is off: {:?}", worst.name, worst.comparison);
}

#[test]
fn gradients_of_the_whole_model_are_those_of_f64() {
    gradients(&Engine::cpu());
}

pub fn gradients(engine: &Engine) {
    use Precision::{Bf16, F32};
    for (layers, precision, dropout) in [(1, F32, 0.0), (1, F32, 0.2), (1, Bf16, 0.0), (1, Bf16, 0.2), (2, F32, 0.2)] {
        let options = StepOptions { micro_batches: 2, dropout, ..options(precision) };
        let config = small(layers);
        // The new sums are the old ones and the gradients.
        let stateful = Step::new(&config, &options, Saving::Traffic).accumulate().unwrap();
        assert_eq!(stateful.updates.len(), config.weights().len());
        assert_right(engine, &stateful, &format!("{} dropout {dropout}", precision.name()));
    }
}

#[test]
fn a_step_of_every_optimiser_is_that_of_f64() {
    optimizers(&Engine::cpu());
}

pub fn optimizers(engine: &Engine) {
    let lion = Optimizer::Lion { beta1: 0.9, beta2: 0.99 };
    let optimizers = [ADAMW, lion, Optimizer::Sgd { momentum: 0.9 }, Optimizer::Sgd { momentum: 0.0 }];
    for precision in [Precision::F32, Precision::Bf16] {
        for (index, optimizer) in optimizers.into_iter().enumerate() {
            let micro_batches = 1 + index % 2;
            let options = StepOptions { optimizer, micro_batches, ..options(precision) };
            let stateful = Step::new(&small(1), &options, Saving::Traffic).step().unwrap();
            assert_right(engine, &stateful, &format!("{} {}", precision.name(), optimizer.name()));
        }
    }
}

/// Forward reads the weights of before the step though it writes them: the bits are those of a session without states.
#[test]
fn states_in_place_have_the_bits_of_a_function() {
    states(&Engine::cpu());
}

pub fn states(engine: &Engine) {
    for precision in [Precision::F32, Precision::Bf16] {
        let Stateful { graph, updates } = Step::new(&small(1), &options(precision), Saving::Traffic).step().unwrap();
        let inputs = inputs(&graph);
        let mut function = Session::new(engine, &graph, Strategy::Fused).unwrap();
        function.run(&inputs.iter().collect::<Vec<_>>()).unwrap();
        let options = updates.iter().fold(SessionOptions::default(), |all, &(state, new)| all.update(state, new));
        let mut session = Session::new(engine, &graph, options).unwrap();
        let position = |id| graph.inputs().iter().position(|&input| input == id).unwrap();
        let is_state = |at: usize| updates.iter().any(|&(state, _)| position(state) == at);
        let data: Vec<&Tensor> = (0..inputs.len()).filter(|&at| !is_state(at)).map(|at| &inputs[at]).collect();
        let mut states: Vec<Tensor> =
            updates.iter().map(|&(state, _)| inputs[position(state)].to_device(engine).unwrap()).collect();
        session.run_with(&data, &mut states).unwrap();
        for ((_, new), state) in updates.iter().zip(&states) {
            let output = graph.outputs().iter().position(|output| output.node == *new).unwrap();
            let expected = function.output(output).unwrap();
            let name = &graph.outputs()[output].name;
            assert_eq!(state.to_bytes().unwrap(), expected.to_bytes().unwrap(), "{name} {}", precision.name());
        }
        let names: Vec<&str> = graph.outputs().iter().take(2).map(|output| output.name.as_str()).collect();
        assert_eq!(names, ["loss", "norm"]);
    }
}

/// What a GPU would run, without one: every kernel is generated, and attention's gradient and each update are one kernel.
#[test]
fn a_step_of_gpt2_is_generated_for_hopper() {
    let gpu = OfflineGpu::of_arch(Arch::Sm90a, None).unwrap();
    let config = Config { name: Config::OTHER, layers: 2, ..Config::SMALL };
    let options = StepOptions { batch: 8, sequence: 1024, ..options(Precision::Bf16) };
    let stateful = Step::new(&config, &options, Saving::Traffic).step().unwrap();
    let kernels = kernels_for(&gpu, &stateful.graph, Strategy::Fused).unwrap();
    let count = |part: &str| kernels.iter().filter(|kernel| kernel.name.contains(part)).count();
    assert_eq!(count("grad(attention)"), 2);
    assert!(count("adamw") <= config.weights().len(), "{} updates", count("adamw"));
    assert!(kernels.iter().all(|kernel| !kernel.source.is_empty()));
}
