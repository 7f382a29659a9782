//! A job made ready: functions found, and parameters laid out as words of which only addresses are still open.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;
use deuteron_codegen::cuda::{Family, Mapped, TensorMap, Word, grids};
use deuteron_codegen::{Access, Geometry, Launch, Source};

use super::Gpu;
use super::matmul;
use super::module::Function;
use crate::check::{Form, RowForm, check, mismatch};
use crate::error::DeviceError;
use crate::job::{Job, Kernel, Place};

/// Parameters are read from the words by address, and no kernel takes more than this; old drivers do not tell how many
/// one takes, so as many words follow the last one.
const LONGEST_PARAMETER: usize = 4096 / 8;
/// Row kernels, products and attention use the widest vectors wherever strides allow it, so their buffers start at one.
const VECTOR: usize = 16;
/// What a step keeps begins at a multiple of this: no line of the cache is shared with another.
const KEPT_ALIGNMENT: usize = 256;

/// All steps of a job.
pub(crate) struct Program {
    pub steps: Vec<Step>,
    /// Parameters of all grids, one after another; addresses are 0 until they are known.
    pub words: Vec<u64>,
    /// Where addresses go.
    pub fixes: Vec<Fix>,
    /// Bytes each input must have.
    pub input_bytes: Vec<usize>,
    /// What each input's address must be a multiple of.
    pub input_alignment: Vec<usize>,
    /// Bytes each state must have.
    pub state_bytes: Vec<usize>,
    /// What each state's address must be a multiple of.
    pub state_alignment: Vec<usize>,
    pub outputs: Vec<usize>,
    pub arena: usize,
    pub workspace: usize,
    /// Bytes that steps keep from run to run, each its own.
    pub kept: usize,
}

/// Words that depend on an address.
#[derive(Debug, Clone)]
pub(crate) struct Fix {
    pub word: usize,
    pub target: Target,
    pub value: Value,
}

/// What stands for an address.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    /// the address, so many bytes from the start of the target
    Address(u64),
    /// the words of a tensor map
    Map(Box<TensorMap>),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Target {
    Place(Place),
    Workspace,
    Kept,
    /// the fault word of a step
    Fault(usize),
}

pub(crate) struct Step {
    pub work: Work,
    pub launch: Launch,
    pub places: Vec<Place>,
    /// Whether its fault word must be looked at.
    pub checks_indices: bool,
    /// Keeps the functions loaded.
    kernel: Arc<Kernel>,
}

pub(crate) enum Work {
    Grids(Vec<Grid>),
    Product {
        product: matmul::Prepared,
        /// addresses of the arguments, in the words
        words: Range<usize>,
    },
}

/// One launch of a function.
pub(crate) struct Grid {
    pub function: Function,
    pub blocks: [u32; 3],
    pub threads: u32,
    pub cluster: u32,
    pub shared: u32,
    /// whether it waits for earlier grids by itself
    pub waits: bool,
    /// its parameter, in the words
    pub words: Range<usize>,
}

impl Program {
    /// Checks a job and finds its functions. The context must be entered.
    pub fn new(gpu: &Gpu, job: Job) -> Result<Program, DeviceError> {
        let input_bytes = check(&job, form)?;
        let mut program = Program {
            steps: Vec::with_capacity(job.steps.len()),
            words: Vec::new(),
            fixes: Vec::new(),
            input_alignment: vec![1; job.inputs],
            input_bytes,
            state_alignment: vec![1; job.states.len()],
            state_bytes: job.states,
            outputs: job.outputs,
            arena: job.arena,
            workspace: 0,
            kept: 0,
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
        let mut checks_indices = false;
        let work = match (&step.kernel.source, &step.kernel.module, &step.launch.geometry) {
            (Source::Cuda(source), Some(module), _) => {
                let grids = grids(source, &step.launch, &gpu.target);
                self.workspace = self.workspace.max(grids.workspace);
                let kept = self.kept;
                self.kept += grids.kept.next_multiple_of(KEPT_ALIGNMENT);
                checks_indices = grids.checks_indices;
                let mut list = Vec::new();
                for grid in grids.list.iter().filter(|grid| !grid.blocks.contains(&0)) {
                    let function = module.function(grid)?;
                    let words = self.lay_out(index, &grid.words, &step.places, kept)?;
                    let (threads, cluster, shared, waits) = (grid.threads, grid.cluster, grid.shared, grid.waits);
                    list.push(Grid { function, blocks: grid.blocks, threads, cluster, shared, waits, words });
                }
                Work::Grids(list)
            }
            (Source::Matmul(kernel), _, Geometry::Matmul(shape)) => {
                let offsets: Vec<usize> = step.launch.args.iter().map(|arg| arg.offset).collect();
                let Some(product) = gpu.product(kernel, shape, &offsets)? else {
                    let kernel = gpu.plain_product(kernel)?;
                    return self.push(gpu, crate::job::Step { kernel, ..step });
                };
                self.workspace = self.workspace.max(product.workspace());
                let arguments: Vec<Word> =
                    (0..step.places.len()).map(|position| Word::Argument { position, offset: 0 }).collect();
                let words = self.lay_out(index, &arguments, &step.places, 0)?;
                Work::Product { product, words }
            }
            _ => return Err(DeviceError::ForeignKernel { step: index }),
        };
        let crate::job::Step { kernel, launch, places } = step;
        self.steps.push(Step { work, launch, places, checks_indices, kernel });
        Ok(())
    }

    /// Appends the words of a parameter and notes which are addresses. What the step keeps begins at `kept`.
    fn lay_out(
        &mut self,
        step: usize,
        words: &[Word],
        places: &[Place],
        kept: usize,
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
                Word::Given { position, offset } => match place(position)? {
                    // No kernel writes to an input: `check` has seen to it.
                    input @ Target::Place(Place::Input(_)) => (input, address(offset)),
                    _ => continue,
                },
                Word::Workspace(offset) => (Target::Workspace, address(offset)),
                Word::Fault => (Target::Fault(step), address(0)),
                Word::Kept(offset) => (Target::Kept, address(kept + offset)),
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

    /// Arena offsets must be multiples of the widest vector; inputs are asked for what their readers need.
    fn check_alignment(&mut self, index: usize, step: &crate::job::Step) -> Result<(), DeviceError> {
        let wide = match &step.kernel.source {
            Source::Cuda(source) => {
                let attends = matches!(source.family, Family::Attention(_) | Family::AttentionBackward(_));
                attends
                    || matches!(source.family, Family::AttentionRows(_) | Family::AttentionBlock(_))
                    || matches!(source.family, Family::Row(_) | Family::Skinny(_) | Family::FixedAttention(..))
            }
            _ => true,
        };
        for (position, (place, arg)) in step.places.iter().zip(&step.launch.args).enumerate() {
            match *place {
                Place::Arena { offset, .. } if !offset.is_multiple_of(VECTOR) => {
                    let problem = format!("expected an arena offset that is a multiple of {VECTOR}, got {offset}");
                    return Err(mismatch(index, position, problem));
                }
                Place::Input(input) => {
                    let needed = if wide { VECTOR } else { arg.dtype.bytes() };
                    self.input_alignment[input] = self.input_alignment[input].max(needed);
                }
                Place::State(state) => {
                    let needed = if wide { VECTOR } else { arg.dtype.bytes() };
                    self.state_alignment[state] = self.state_alignment[state].max(needed);
                }
                Place::Arena { .. } | Place::Output(_) => {}
            }
        }
        Ok(())
    }

    /// Grids and products of one run.
    pub fn launches(&self) -> usize {
        let count = |step: &Step| match &step.work {
            Work::Grids(grids) => grids.len(),
            Work::Product { .. } => 1,
        };
        self.steps.iter().map(count).sum()
    }

    /// Whether every range of the arena that is read was written as that same range before: then each may have an
    /// allocation of its own.
    pub fn ranges_are_separate(&self) -> bool {
        let mut written: Vec<Place> = Vec::new();
        for step in &self.steps {
            for (place, arg) in step.places.iter().zip(&step.launch.args) {
                if matches!(place, Place::Arena { .. }) && !arg.written && !written.contains(place) {
                    return false;
                }
            }
            let args = step.places.iter().zip(&step.launch.args);
            written.extend(args.filter(|(_, arg)| arg.written).map(|(place, _)| *place));
        }
        true
    }
}

impl Step {
    /// Where the index stands that a fault of `argument` at `row` is about.
    pub fn index_of(&self, argument: usize, row: usize) -> Option<IndexPlace> {
        let Source::Cuda(source) = &self.kernel.source else { return None };
        match (&source.family, &self.launch.geometry) {
            (Family::Row(kernel), _) => {
                let Access::GatheredRow { index } = kernel.args.get(argument)?.access else { return None };
                let binding = self.launch.args.get(usize::from(index))?;
                let (mut element, mut rest) = (binding.offset, row);
                for &(size, stride) in binding.leading.iter().rev() {
                    element += rest % size.max(1) * stride;
                    rest /= size.max(1);
                }
                let table_rows = self.launch.args.get(argument)?.table_rows;
                Some(IndexPlace { position: usize::from(index), element, table_rows })
            }
            (Family::Append(_), Geometry::Append(shape)) => {
                let element = self.launch.args.get(argument)?.offset + row;
                Some(IndexPlace { position: argument, element, table_rows: shape.places() })
            }
            (Family::ScatterAdd(_), Geometry::ScatterAdd { rows, .. }) => {
                let element = self.launch.args.first()?.offset + row;
                Some(IndexPlace { position: 0, element, table_rows: *rows })
            }
            _ => None,
        }
    }
}

/// Where an index stands, and the table it picks from.
pub(crate) struct IndexPlace {
    /// the argument that holds it
    pub position: usize,
    pub element: usize,
    pub table_rows: usize,
}

/// What the checks need to know of a kernel; none if it is for another device.
fn form(source: &Source) -> Option<Form<'_>> {
    match source {
        Source::Cuda(source) => Some(match &source.family {
            Family::Row(kernel) => Form::Row(RowForm {
                cols: kernel.cols,
                flat: kernel.flat,
                args: &kernel.args,
                axes: usize::from(kernel.axes),
                partials: kernel.partials.clone(),
            }),
            Family::Copy(bytes) => Form::Copy(*bytes),
            Family::ScatterAdd(dtype) => Form::ScatterAdd(*dtype),
            Family::Append(bytes) => Form::Append(*bytes),
            Family::Product(kernel) => Form::Matmul(*kernel),
            Family::Attention(attention) => Form::Attention(attention.kernel),
            Family::FixedAttention(kernel, _) => Form::Attention(*kernel),
            Family::AttentionRows(rows) => {
                Form::AttentionRow(rows.kernel.attention, (&rows.kernel.tail).into(), rows.kernel.result)
            }
            Family::AttentionBlock(block) => {
                Form::AttentionBlock(block.kernel.attention, (&block.kernel.product).into())
            }
            Family::AttentionBackward(backward) => Form::AttentionBackward(backward.kernel),
            Family::Skinny(kernel) => Form::Product((&kernel.product).into()),
        }),
        Source::Matmul(kernel) => Some(Form::Matmul(*kernel)),
        Source::Row(_) | Source::Product(_) => None,
        Source::Attention(_) | Source::AttentionBackward(_) => None,
        Source::AttentionRows(_) | Source::AttentionBlock(_) => None,
        Source::ScatterAdd(_) | Source::Append(_) | Source::Copy(_) => None,
    }
}

impl Grid {
    /// Enqueues it; if it is `early`, it may start before the one before it on the stream has ended.
    ///
    /// # Safety
    /// The stream lives and is of the function's context; `words` are the program's with every address filled in, each
    /// valid for what the kernel reads and writes there. An early one waits by itself, and so does the kernel before it: else what
    /// that one has not waited for could still run.
    pub unsafe fn launch(&self, words: &[u64], stream: sys::CUstream, early: bool) -> sys::CUresult {
        let parameter = &words[self.words.start..];
        let mut parameters = [parameter.as_ptr().cast::<std::ffi::c_void>().cast_mut()];
        let [x, y, z] = self.blocks;
        if self.cluster <= 1 && !early {
            let none = std::ptr::null_mut();
            let parameters = parameters.as_mut_ptr();
            // SAFETY: the caller's; the driver copies the parameter before it returns, and at least a longest one follows.
            return unsafe {
                sys::cuLaunchKernel(self.function.0, x, y, z, self.threads, 1, 1, self.shared, stream, parameters, none)
            };
        }
        use sys::CUlaunchAttributeID_enum as Id;
        // SAFETY: all zeros is a value of this plain structure of numbers.
        let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
        attributes[0].id = Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[0].value.clusterDim =
            sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: self.cluster, y: 1, z: 1 };
        attributes[1].id = Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[1].value.programmaticStreamSerializationAllowed = 1;
        // A grid without clusters does not mention them.
        let used = &mut attributes[usize::from(self.cluster <= 1)..1 + usize::from(early)];
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared,
            hStream: stream,
            attrs: used.as_mut_ptr(),
            numAttrs: used.len() as u32,
        };
        // SAFETY: as above; the attributes outlive the call.
        unsafe { sys::cuLaunchKernelEx(&config, self.function.0, parameters.as_mut_ptr(), std::ptr::null_mut()) }
    }
}

#[cfg(test)]
mod tests {
    use deuteron_codegen::cuda::MAP_WORDS;

    use super::*;

    fn empty() -> Program {
        Program {
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
            kept: 0,
        }
    }

    #[test]
    fn only_inputs_are_given() {
        let mut program = empty();
        let places = [Place::Input(3), Place::State(0), Place::Output(0), Place::Arena { offset: 0, bytes: 16 }];
        let words = [0, 1, 2, 3].map(|position| Word::Given { position, offset: 8 });
        assert_eq!(program.lay_out(0, &words, &places, 0).unwrap(), 0..4);
        assert_eq!(program.words, [0; 4]);
        let [Fix { word: 0, target: Target::Place(Place::Input(3)), value: Value::Address(8) }] = program.fixes[..]
        else {
            panic!("{:?}", program.fixes)
        };
        assert!(program.lay_out(0, &[Word::Given { position: 4, offset: 0 }], &places, 0).is_err());
    }

    #[test]
    fn a_map_takes_its_words_and_what_follows_stands_behind_it() {
        let mut program = Program { words: vec![7], ..empty() };
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
