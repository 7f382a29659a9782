//! A loaded job: functions found, and parameters laid out as words in which only addresses are missing.

use std::ops::Range;
use std::sync::Arc;

use deuteron_codegen::argument::VECTOR_BYTES;
use deuteron_codegen::cuda::{Grids, Mapped, TensorMap, Word};
use deuteron_codegen::{Execution, Launch, Source};

use super::cublas_lt;
use super::gpu::Gpu;
use super::launch::Grid;
use super::module::Module;
use crate::check::{check, mismatch};
use crate::error::DeviceError;
use crate::job::{CompiledKernel, Job, Place};

/// Parameters are read from the words by address, and no kernel takes more than this; old drivers do not report how many
/// a kernel takes, so this many words are added after the last one.
const LONGEST_PARAMETER: usize = 4096 / 8;
/// Alignment of a step's persistent memory, so that steps share no cache line.
const PERSISTENT_ALIGNMENT: usize = 256;

/// Alignment of the workspace in a block, like that of a separate allocation.
const BLOCK_ALIGNMENT: usize = 256;

/// All steps of a job.
pub(crate) struct LoadedJob {
    pub steps: Vec<Step>,
    /// Parameters of all grids, one after another; addresses are 0 until they are known.
    pub words: Vec<u64>,
    /// Where addresses go.
    pub fixes: Vec<Fix>,
    /// Bytes each input must have.
    pub input_bytes: Vec<usize>,
    /// Required alignment of each input.
    pub input_alignment: Vec<usize>,
    /// Bytes each state must have.
    pub state_bytes: Vec<usize>,
    /// Required alignment of each state.
    pub state_alignment: Vec<usize>,
    pub outputs: Vec<usize>,
    pub arena: usize,
    pub workspace: usize,
    /// Bytes of persistent memory, of all steps together.
    pub persistent: usize,
}

/// Words that depend on an address.
#[derive(Debug, Clone)]
pub(crate) struct Fix {
    pub word: usize,
    pub target: Target,
    pub value: Value,
}

/// The form of an address in the words.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    /// the address, at this byte offset in the target
    Address(u64),
    /// the words of a tensor map
    Map(Box<TensorMap>),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Target {
    Place(Place),
    Workspace,
    Persistent,
    /// the fault word of a step
    Fault(usize),
}

pub(crate) struct Step {
    pub work: Work,
    pub launch: Launch,
    pub places: Vec<Place>,
    /// Whether its fault word must be checked.
    pub checks_indices: bool,
    /// Keeps the functions loaded.
    _kernel: Arc<CompiledKernel>,
}

pub(crate) enum Work {
    Grids(Vec<Grid>),
    Library {
        call: cublas_lt::Prepared,
        /// addresses of the arguments, in the words
        words: Range<usize>,
    },
}

impl LoadedJob {
    /// Checks a job and finds its functions. The context must be entered.
    pub fn new(gpu: &Gpu, job: Job) -> Result<LoadedJob, DeviceError> {
        let input_bytes = check(&job)?;
        // A range of no bytes has an address too.
        let uses_arena =
            job.steps.iter().flat_map(|step| &step.places).any(|place| matches!(place, Place::Arena { .. }));
        let mut program = LoadedJob {
            steps: Vec::with_capacity(job.steps.len()),
            words: Vec::new(),
            fixes: Vec::new(),
            input_alignment: vec![1; job.inputs],
            input_bytes,
            state_alignment: vec![1; job.states.len()],
            state_bytes: job.states,
            outputs: job.outputs,
            arena: if uses_arena { job.arena.max(1) } else { 0 },
            workspace: 0,
            persistent: 0,
        };
        for step in job.steps {
            program.push(gpu, step)?;
        }
        program.words.resize(program.words.len() + LONGEST_PARAMETER, 0);
        Ok(program)
    }

    fn push(&mut self, gpu: &Gpu, step: crate::job::Step) -> Result<(), DeviceError> {
        let index = self.steps.len();
        self.check_alignment(index, &step)?;
        let source = &step.kernel.source;
        if matches!(source, Source::Cuda(_) | Source::Library(_)) && !step.launch.is_of(source) {
            return Err(mismatch(index, 0, "its launch was made for another kernel".into()));
        }
        let mut kernel = step.kernel.clone();
        let (work, checks_indices) = match (&step.kernel.source, &step.kernel.module, step.launch.execution()) {
            (Source::Cuda(_), Some(module), Execution::Grids(grids)) => {
                (self.grids(module, grids, &step.places)?, grids.checks_indices)
            }
            (Source::Library(call), _, Execution::Library(launch)) => {
                match gpu.library_call(call, &launch.shape, &launch.offsets)? {
                    Some(call) => {
                        self.workspace = self.workspace.max(call.workspace());
                        let arguments: Vec<Word> =
                            (0..step.places.len()).map(|position| Word::Argument { position, offset: 0 }).collect();
                        let words = self.lay_out(index, &arguments, &step.places, 0)?;
                        (Work::Library { call, words }, false)
                    }
                    None => {
                        kernel = gpu.fallback(&launch.fallback)?;
                        let module = kernel.module.as_ref().ok_or(DeviceError::ForeignKernel { step: index })?;
                        (self.grids(module, &launch.grids, &step.places)?, false)
                    }
                }
            }
            _ => return Err(DeviceError::ForeignKernel { step: index }),
        };
        let crate::job::Step { launch, places, .. } = step;
        self.steps.push(Step { work, launch, places, checks_indices, _kernel: kernel });
        Ok(())
    }

    /// Finds the functions of grids and lays out their parameters.
    fn grids(&mut self, module: &Module, grids: &Grids, places: &[Place]) -> Result<Work, DeviceError> {
        self.workspace = self.workspace.max(grids.workspace);
        let persistent = self.persistent;
        self.persistent += grids.persistent.next_multiple_of(PERSISTENT_ALIGNMENT);
        let mut list = Vec::new();
        for grid in grids.list.iter().filter(|grid| !grid.blocks.contains(&0)) {
            let function = module.function(grid)?;
            let words = self.lay_out(self.steps.len(), &grid.words, places, persistent)?;
            let mut launched = Grid::new(function, grid, words);
            if grid.walks && grid.cluster > 1 {
                launched.blocks[0] = launched.blocks[0].min(module.blocks_at_once(function, grid)?);
            }
            list.push(launched);
        }
        Ok(Work::Grids(list))
    }

    /// Appends the words of a parameter and notes which are addresses. The step's persistent memory begins at `persistent`.
    fn lay_out(
        &mut self,
        step: usize,
        words: &[Word],
        places: &[Place],
        persistent: usize,
    ) -> Result<Range<usize>, DeviceError> {
        let start = self.words.len();
        for word in words {
            let at = self.words.len();
            let place = |position: usize| match places.get(position) {
                Some(&place) => Ok(Target::Place(place)),
                None => Err(mismatch(step, position, "its kernel takes more arguments".into())),
            };
            let address = |offset: usize| Value::Address(offset as u64);
            self.words.resize(at + word.count(), 0);
            let (target, value) = match *word {
                Word::Number(number) => {
                    self.words[at] = number;
                    continue;
                }
                Word::Argument { position, offset } => (place(position)?, address(offset)),
                Word::Unwritten { position, offset } => match place(position)? {
                    // No kernel writes to an input: `check` has seen to it.
                    input @ Target::Place(Place::Input(_)) => (input, address(offset)),
                    _ => continue,
                },
                Word::Workspace(offset) => (Target::Workspace, address(offset)),
                Word::Fault => (Target::Fault(step), address(0)),
                Word::Persistent(offset) => (Target::Persistent, address(persistent + offset)),
                Word::Map(map) => {
                    let target = match map.of {
                        Mapped::Argument(position) => place(position)?,
                        Mapped::Workspace => Target::Workspace,
                    };
                    (target, Value::Map(Box::new(map)))
                }
            };
            self.fixes.push(Fix { word: at, target, value });
        }
        Ok(start..self.words.len())
    }

    /// Arena offsets must be multiples of the widest vector; inputs and states must start where their readers need it.
    fn check_alignment(&mut self, index: usize, step: &crate::job::Step) -> Result<(), DeviceError> {
        for (position, (place, argument)) in step.places.iter().zip(step.launch.arguments()).enumerate() {
            match *place {
                Place::Arena { offset, .. } if !offset.is_multiple_of(VECTOR_BYTES) => {
                    let problem =
                        format!("expected an arena offset that is a multiple of {VECTOR_BYTES}, got {offset}");
                    return Err(mismatch(index, position, problem));
                }
                Place::Input(input) => {
                    self.input_alignment[input] = self.input_alignment[input].max(argument.alignment);
                }
                Place::State(state) => {
                    self.state_alignment[state] = self.state_alignment[state].max(argument.alignment);
                }
                Place::Arena { .. } | Place::Output(_) => {}
            }
        }
        Ok(())
    }

    /// Bytes of intermediates and scratch in one block, and where in it scratch begins.
    pub fn block(&self) -> (usize, usize) {
        let scratch = self.arena.next_multiple_of(BLOCK_ALIGNMENT);
        (scratch + self.workspace, scratch)
    }

    /// Grids and library calls of one run.
    pub fn launches(&self) -> usize {
        let count = |step: &Step| match &step.work {
            Work::Grids(grids) => grids.len(),
            Work::Library { .. } => 1,
        };
        self.steps.iter().map(count).sum()
    }

    /// Whether every range of the arena that is read was written as that same range before: then each may have an
    /// allocation of its own.
    pub fn ranges_are_separate(&self) -> bool {
        let mut written: Vec<Place> = Vec::new();
        for step in &self.steps {
            for (place, arg) in step.places.iter().zip(step.launch.arguments()) {
                if matches!(place, Place::Arena { .. }) && !arg.written && !written.contains(place) {
                    return false;
                }
            }
            let args = step.places.iter().zip(step.launch.arguments());
            written.extend(args.filter(|(_, arg)| arg.written).map(|(place, _)| *place));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use deuteron_codegen::cuda::MAP_WORDS;

    use super::*;

    fn empty() -> LoadedJob {
        LoadedJob {
            steps: Vec::new(),
            words: Vec::new(),
            fixes: Vec::new(),
            input_bytes: Vec::new(),
            input_alignment: Vec::new(),
            state_bytes: Vec::new(),
            state_alignment: Vec::new(),
            outputs: Vec::new(),
            arena: 0,
            workspace: 0,
            persistent: 0,
        }
    }

    #[test]
    fn scratch_follows_intermediates() {
        let block = |arena, workspace| LoadedJob { arena, workspace, ..empty() }.block();
        assert_eq!([block(0, 0), block(0, 10), block(1, 10), block(512, 0)], [(0, 0), (10, 0), (266, 256), (512, 512)]);
    }

    #[test]
    fn only_inputs_are_given() {
        let mut program = empty();
        let places = [Place::Input(3), Place::State(0), Place::Output(0), Place::Arena { offset: 0, bytes: 16 }];
        let words = [0, 1, 2, 3].map(|position| Word::Unwritten { position, offset: 8 });
        assert_eq!(program.lay_out(0, &words, &places, 0).unwrap(), 0..4);
        assert_eq!(program.words, [0; 4]);
        let [Fix { word: 0, target: Target::Place(Place::Input(3)), value: Value::Address(8) }] = program.fixes[..]
        else {
            panic!("{:?}", program.fixes)
        };
        assert!(program.lay_out(0, &[Word::Unwritten { position: 4, offset: 0 }], &places, 0).is_err());
    }

    #[test]
    fn a_map_takes_its_words_and_what_follows_stands_behind_it() {
        let mut program = LoadedJob { words: vec![7], ..empty() };
        let (sizes, strides, tile) = ([64, 9, 2, 1, 1], [128, 1152, 16, 16], [64, 64, 1, 1, 1]);
        let map = TensorMap { of: Mapped::Argument(1), offset: 32, rank: 4, sizes, strides, tile };
        let words = [Word::Map(map), Word::Number(5), Word::Argument { position: 0, offset: 8 }];
        let places = [Place::Output(0), Place::Input(0)];
        let taken = program.lay_out(0, &words, &places, 0).unwrap();
        assert_eq!(taken, 1..1 + MAP_WORDS + 2);
        assert_eq!(program.words[taken], [[0; MAP_WORDS].as_slice(), &[5, 0]].concat());
        let [first, second] = &program.fixes[..] else { panic!("{:?}", program.fixes) };
        assert!(matches!(first.target, Target::Place(Place::Input(0))) && first.word == 1, "{first:?}");
        assert!(matches!(&first.value, Value::Map(found) if **found == map), "{first:?}");
        assert!(matches!(second.target, Target::Place(Place::Output(0))) && second.word == 18, "{second:?}");
        assert!(matches!(second.value, Value::Address(8)), "{second:?}");
        // A map of what the launch does not have.
        assert!(program.lay_out(0, &[Word::Map(TensorMap { of: Mapped::Argument(2), ..map })], &places, 0).is_err());
    }
}
