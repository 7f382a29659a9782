//! One kernel with each of its launch shapes: verified, then timed in turn with the suggested one.

use std::time::Duration;

use deuteron_codegen::cuda::RowConfig;
use deuteron_device::{DeviceError, Executable, Inputs, Job, Launching, NoStates, Place, Step};
use deuteron_graph::{NodeId, Output, extract};

use super::proof::Proof;
use super::values::{Values, bases};
use super::{DropReason, Dropped, Made, Shaped, Subject, Timed, TunedKernel, in_a_line, is_of_one_kernel};
use crate::bench::{Sets, copies, runs_of_a_sample};
use crate::engine::Engine;
use crate::error::Error;
use crate::tensor::Tensor;
use crate::times::median;

/// Samples of each launch shape in the first round.
const FIRST_LOOK: usize = 3;

/// Number of fastest candidates measured again.
const FINALISTS: usize = 3;

/// Samples of each in one of the two rounds that decide.
const SAMPLES: usize = 9;

/// Minimum saving to replace the suggested launch shape. The same kernel, timed twice in turn, differs by less.
const WORTH: f64 = 0.98;

/// Verifies and times all launch shapes of a kernel.
pub(super) fn measure(
    engine: &Engine,
    subject: &Subject,
    values: &Values,
    kernels: Vec<Made>,
) -> Result<TunedKernel, Error> {
    let bed = Bed::new(engine, subject, values)?;
    let mut field = subject.configs.iter().zip(kernels);
    let Some((config, kernel)) = field.next() else {
        return Err(bed.defect(None, "no launch shape is suggested".into()));
    };
    let kernel = kernel.map_err(|reason| bed.defect(Some(config), reason.to_string()))?;
    let mut suggested = bed.load(&kernel).map_err(|problem| bed.broken(config, problem))?;
    let proof = bed.prove(config, &mut suggested)?;
    suggested.warm(&bed.sets).map_err(|problem| bed.broken(config, problem))?;
    let mut dropped = Vec::new();
    let mut promising: Vec<(f64, &RowConfig, Shaped)> = Vec::new();
    for (config, kernel) in field {
        match bed.first_look(&mut suggested, config, kernel, &proof)? {
            Ok((share, kernel)) => promising.push((share, config, kernel)),
            Err(reason) => dropped.push(Dropped { config: config.clone(), reason }),
        }
    }
    promising.retain(|(share, ..)| *share < 1.0);
    promising.sort_by(|a, b| a.0.total_cmp(&b.0));
    promising.truncate(FINALISTS);
    let mut field = vec![(config, suggested)];
    for (_, config, kernel) in &promising {
        let mut trial = bed.load(kernel).map_err(|problem| bed.broken(config, problem))?;
        trial.warm(&bed.sets).map_err(|problem| bed.broken(config, problem))?;
        field.push((config, trial));
    }
    let rounds = [bed.round(&mut field)?, bed.round(&mut field)?];
    let timed = |index: usize| {
        let (config, us) = (field[index].0.clone(), (rounds[0][index] + rounds[1][index]).as_secs_f64() * 5e5);
        Timed { config, us }
    };
    Ok(TunedKernel {
        name: subject.group.name.clone(),
        key: subject.key.clone(),
        suggested: timed(0),
        chosen: timed(winner(&rounds)),
        tried: subject.configs.len(),
        dropped,
    })
}

/// The position of the fastest, by its median times of two rounds; the first, unless another is clearly faster in both.
fn winner(rounds: &[Vec<Duration>; 2]) -> usize {
    let wins = |index: &usize| rounds.iter().all(|round| round[*index] <= round[0].mul_f64(WORTH));
    let clear = (1..rounds[0].len()).filter(wins);
    clear.min_by_key(|&index| rounds[0][index] + rounds[1][index]).unwrap_or(0)
}

/// What all launch shapes of a kernel share.
struct Bed<'a> {
    engine: &'a Engine,
    subject: &'a Subject<'a>,
    inputs: Vec<NodeId>,
    outputs: Vec<NodeId>,
    tensors: Vec<Tensor>,
    sets: Sets,
}

impl<'a> Bed<'a> {
    fn new(engine: &'a Engine, subject: &'a Subject<'a>, values: &Values) -> Result<Bed<'a>, Error> {
        let (inputs, outputs) = (bases(&subject.arguments, false), bases(&subject.arguments, true));
        let tensors = values.of(&inputs);
        let sets = copies(engine, subject.group.traffic.total().0, &tensors)?;
        Ok(Bed { engine, subject, inputs, outputs, tensors, sets })
    }

    /// The kernel alone, ready to run.
    fn load(&self, shaped: &Shaped) -> Result<Trial, DeviceError> {
        let place = |list: &[NodeId], base: NodeId| list.iter().position(|&known| known == base).unwrap_or(0);
        let places = self.subject.arguments.iter().map(|arg| match arg.written {
            true => Place::Output(place(&self.outputs, arg.base)),
            false => Place::Input(place(&self.inputs, arg.base)),
        });
        let step = Step { kernel: shaped.kernel.clone(), launch: shaped.launch.clone(), places: places.collect() };
        let job = Job {
            inputs: self.inputs.len(),
            states: Vec::new(),
            outputs: self.outputs.iter().map(|&node| self.subject.graph.node(node).bytes()).collect(),
            arena: 0,
            steps: vec![step],
        };
        Ok(Trial { executable: self.engine.device().load(job)?, runs: 1 })
    }

    /// What it writes.
    fn results(&self, trial: &mut Trial) -> Result<Vec<Tensor>, Error> {
        trial.executable.poison()?;
        let set = &self.sets[0];
        trial.executable.run(&|index| set[index].memory(), &mut NoStates, Launching::Eager)?;
        let read = |(slot, &node): (usize, &NodeId)| {
            let node = self.subject.graph.node(node);
            Tensor::read(node.dtype, node.shape.clone(), |bytes| Ok(trial.executable.read(slot, bytes)?))
        };
        self.outputs.iter().enumerate().map(read).collect()
    }

    /// The reference of other launch shapes; the suggested one is compared with f64 if the kernel is small.
    fn prove(&self, config: &RowConfig, suggested: &mut Trial) -> Result<Proof, Error> {
        let outputs = self.outputs.iter().map(|&node| Output { name: format!("out{}", node.index()), node });
        let part = extract(self.subject.graph, &outputs.collect::<Vec<_>>(), &self.inputs)?;
        let results = self.results(suggested)?;
        let Some(proof) = Proof::exact(&part, &self.tensors)? else { return Proof::like(&part, results) };
        match proof.problem(&results)? {
            Some(problem) => Err(self.defect(Some(config), problem)),
            None => Ok(proof),
        }
    }

    /// Verifies a launch shape and times it in turn with the suggested one; returns its time relative to the suggested one.
    fn first_look(
        &self,
        suggested: &mut Trial,
        config: &RowConfig,
        kernel: Made,
        proof: &Proof,
    ) -> Result<Result<(f64, Shaped), DropReason>, Error> {
        let shaped = match kernel {
            Ok(shaped) => shaped,
            Err(reason) => return Ok(Err(reason)),
        };
        let spilled: u32 = shaped.kernel.usage().iter().map(|entry| entry.spill_stores + entry.spill_loads).sum();
        if spilled > 0 {
            return Ok(Err(DropReason::Spilled(spilled)));
        }
        let loaded = self.load(&shaped).map_err(Error::from);
        let tried = loaded.and_then(|mut trial| self.results(&mut trial).map(|results| (trial, results)));
        let (mut trial, results) = match tried {
            Ok(tried) => tried,
            Err(Error::Device(problem)) if is_of_one_kernel(&problem) => {
                return Ok(Err(DropReason::NotRun(in_a_line(&problem))));
            }
            Err(Error::Device(problem)) => return Err(self.broken(config, problem)),
            Err(error) => return Err(error),
        };
        if let Some(problem) = proof.problem(&results)? {
            return Ok(Err(DropReason::Wrong(problem)));
        }
        drop(results);
        let mut times: [Vec<Duration>; 2] = Default::default();
        let mut sample = || -> Result<(), DeviceError> {
            trial.warm(&self.sets)?;
            for _ in 0..FIRST_LOOK {
                times[0].push(suggested.sample(&self.sets)?);
                times[1].push(trial.sample(&self.sets)?);
            }
            Ok(())
        };
        sample().map_err(|problem| self.broken(config, problem))?;
        let [suggested, own] = times.map(median);
        Ok(Ok((own.as_secs_f64() / suggested.as_secs_f64().max(1e-12), shaped)))
    }

    /// Median times of all, in turn.
    fn round(&self, field: &mut [(&RowConfig, Trial)]) -> Result<Vec<Duration>, Error> {
        let mut times = vec![Vec::with_capacity(SAMPLES); field.len()];
        for _ in 0..SAMPLES {
            for ((config, trial), times) in field.iter_mut().zip(&mut times) {
                times.push(trial.sample(&self.sets).map_err(|problem| self.broken(config, problem))?);
            }
        }
        Ok(times.into_iter().map(median).collect())
    }

    fn broken(&self, config: &RowConfig, problem: DeviceError) -> Error {
        Error::Trial { kernel: self.subject.group.name.clone(), config: config.to_string(), problem: Box::new(problem) }
    }

    fn defect(&self, config: Option<&RowConfig>, problem: String) -> Error {
        let config = config.map_or("no launch shape".into(), RowConfig::to_string);
        Error::WrongKernel { kernel: self.subject.group.name.clone(), config, problem }
    }
}

/// A kernel with one launch shape, loaded.
struct Trial {
    executable: Box<dyn Executable>,
    /// of a sample
    runs: usize,
}

impl Trial {
    /// Runs over every set, and finds out how many runs make a sample.
    fn warm(&mut self, sets: &Sets) -> Result<(), DeviceError> {
        self.runs = sets.len().max(3);
        self.sample(sets)?;
        self.runs = runs_of_a_sample(self.sample(sets)?, sets.len());
        Ok(())
    }

    /// The time of one run among as many as make a sample.
    fn sample(&mut self, sets: &Sets) -> Result<Duration, DeviceError> {
        let memory: Vec<_> = sets.iter().map(|set| move |index: usize| set[index].memory()).collect();
        let inputs: Vec<Inputs> = memory.iter().map(|set| set as Inputs).collect();
        self.executable.time(&inputs, &mut NoStates, self.runs, Launching::Graph)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use deuteron_codegen::cuda::{Arch, CudaTarget};
    use deuteron_codegen::{Argument, Kernel};
    use deuteron_graph::Graph;
    use deuteron_kernels::{CudaCatalog, render};
    use deuteron_plan::{Group, Machine, Plan, Strategy, Target, plan};

    /// A kernel of a plan as a CPU runs it: trials are the same on every device, only launch shapes are not.
    fn kernel(engine: &Engine, graph: &Graph, plan: &Plan, group: &Group) -> Shaped {
        let draft = group.draft(graph, &plan.placement);
        let Kernel { source, launch } = render(draft, engine.device().backend()).unwrap();
        Shaped { kernel: engine.device().compile(vec![source]).unwrap().swap_remove(0), launch }
    }

    /// Launch shapes of any kernel: here they are no more than names.
    fn configs(count: usize) -> Vec<RowConfig> {
        let graph = "x = input f32[99,768] ; y = relu x ; out y".parse().unwrap();
        let machine = Machine::profile("h200").unwrap();
        let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
        let cuda = CudaTarget::new(Arch::Sm90a, 132);
        let (_, configs) = super::super::launch_shapes(&graph, Strategy::Greedy, target, &cuda).unwrap().swap_remove(0);
        configs.into_iter().cycle().take(count).collect()
    }

    #[test]
    fn a_wrong_kernel_is_out_and_a_right_one_is_timed() {
        let engine = Engine::cpu();
        // The norm reads what a product makes, and an index picks from a table.
        let text = |act: &str| {
            format!(
                "t = input f32[9,24] ; i = input i32[1,40] ; e = gather t i ; l = linear e m[24,32] c[32]
                 n, mean, rstd = layer_norm l w[32] b[32] ; y = {act} n ; out y mean"
            )
        };
        let graphs: Vec<Graph> = ["gelu", "relu"].iter().map(|act| text(act).parse().unwrap()).collect();
        let plans: Vec<Plan> =
            graphs.iter().map(|graph| plan(graph, engine.device().target(), Strategy::Greedy, &[]).unwrap()).collect();
        let (graph, plan) = (&graphs[0], &plans[0]);
        let last = plan.groups.len() - 1;
        let [right, wrong] =
            [0, 1].map(|index| kernel(&engine, &graphs[index], &plans[index], &plans[index].groups[last]));
        let subject = |index: usize, arguments: &[Argument], count: usize| Subject {
            graph,
            plan,
            group: &plan.groups[index],
            key: "key".into(),
            arguments: arguments.to_vec(),
            configs: configs(count),
        };
        let tuned = subject(last, right.launch.arguments(), 4);
        let values = Values::new(&engine, std::slice::from_ref(&tuned)).unwrap();
        let broken = DropReason::NotCompiled("error".into());
        let kernels = vec![Ok(right.clone()), Ok(wrong.clone()), Err(broken.clone()), Ok(right)];
        let report = measure(&engine, &tuned, &values, kernels).unwrap();
        assert!(report.suggested.us > 0.0 && report.chosen.us <= report.suggested.us);
        assert_eq!((report.key.as_str(), report.tried), ("key", 4));
        let [first, second] = report.dropped.try_into().unwrap();
        assert!(matches!(&first.reason, DropReason::Wrong(problem) if problem.contains("f64")), "{first:?}");
        assert_eq!(second, Dropped { config: tuned.configs[2].clone(), reason: broken });
        // What is suggested must be right.
        let error = measure(&engine, &tuned, &values, vec![Ok(wrong)]).unwrap_err();
        assert!(matches!(error, Error::WrongKernel { .. }), "{error}");
        // Every other kernel of the plan can be tried on its own too.
        for index in 0..last {
            let kernel = kernel(&engine, graph, plan, &plan.groups[index]);
            let subject = subject(index, kernel.launch.arguments(), 1);
            let values = Values::new(&engine, std::slice::from_ref(&subject)).unwrap();
            let report = measure(&engine, &subject, &values, vec![Ok(kernel)]).unwrap();
            assert_eq!(report.chosen, report.suggested);
        }
    }

    fn win(rounds: [&[u64]; 2]) -> usize {
        winner(&rounds.map(|round| round.iter().copied().map(Duration::from_nanos).collect()))
    }

    #[test]
    fn only_a_clear_winner_of_both_rounds_replaces_what_is_suggested() {
        assert_eq!(win([&[1000], &[1000]]), 0);
        assert_eq!(win([&[1000, 985], &[1000, 985]]), 0, "less than 2 %");
        assert_eq!(win([&[1000, 900], &[1000, 990]]), 0, "one lucky round");
        assert_eq!(win([&[1000, 980], &[1000, 980]]), 1);
        assert_eq!(win([&[1000, 980, 900, 800], &[1000, 970, 900, 1200]]), 2, "the fastest of those that win both");
    }
}
