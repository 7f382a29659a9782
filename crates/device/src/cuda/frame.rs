//! One set of the memory that a run writes, and the parameters that point to it.

use std::collections::HashMap;

use super::context::Context;
use super::error::CudaError;
use super::gpu::Gpu;
use super::load::{Fix, LoadedJob, Target, Value};
use super::memory::{Allocation, Copies, Zones};
use super::stream::Stream;
use super::tensor_map::encode;
use crate::error::DeviceError;
use crate::job::Place;

pub(crate) struct Frame {
    arena: Arena,
    /// Our own outputs, allocated by the first run that is not on the caller's memory.
    own: Vec<Allocation>,
    /// Copies of inputs that kernels cannot read in place.
    staged: Vec<Option<Allocation>>,
    bound: Bound,
    /// Addresses of intermediates and workspace, as in the words.
    scratch: Scratch,
    /// Words that depend on them.
    arena_fixes: Vec<Fix>,
    workspace_fixes: Vec<Fix>,
    /// The program's words with every address filled in.
    words: Vec<u64>,
    /// Changes whenever a word does.
    version: u64,
}

/// Memory that may change with each run: its address, as in the words, and the words that depend on it.
struct Bound {
    inputs: Vec<(u64, Vec<Fix>)>,
    states: Vec<(u64, Vec<Fix>)>,
    outputs: Vec<(u64, Vec<Fix>)>,
}

impl Bound {
    /// That of a place; none of one in the arena.
    fn get(&mut self, place: Place) -> Option<&mut (u64, Vec<Fix>)> {
        match place {
            Place::Input(input) => self.inputs.get_mut(input),
            Place::State(state) => self.states.get_mut(state),
            Place::Output(output) => self.outputs.get_mut(output),
            Place::Arena { .. } => None,
        }
    }
}

/// Intermediates of our own: one allocation, made for the first run that is not on the workspace of a stream; or one for each range,
/// if red zones must reveal overruns into a neighbour.
enum Arena {
    Whole(Option<Allocation>),
    Ranges(HashMap<(usize, usize), Allocation>),
}

/// Temporary memory of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Scratch {
    /// intermediates
    pub arena: u64,
    /// scratch of one step at a time
    pub workspace: u64,
}

/// Memory that all frames share.
#[derive(Clone, Copy)]
pub(crate) struct Fixed {
    pub persistent: u64,
    pub faults: u64,
}

impl Frame {
    /// Allocates memory that cannot be in a stream's workspace. The context must be entered.
    pub fn new(gpu: &Gpu, program: &LoadedJob, fixed: Fixed, stream: &Stream) -> Result<Frame, CudaError> {
        let allocate = |bytes: usize| Allocation::painted(&gpu.context, bytes, gpu.zones, stream);
        let arena = if gpu.zones == Zones::On && program.ranges_are_separate() {
            let mut ranges = HashMap::new();
            for place in program.steps.iter().flat_map(|step| &step.places) {
                if let Place::Arena { offset, bytes } = *place
                    && !ranges.contains_key(&(offset, bytes))
                {
                    ranges.insert((offset, bytes), allocate(bytes)?);
                }
            }
            Arena::Ranges(ranges)
        } else {
            Arena::Whole(None)
        };
        let inputs = program.input_bytes.len();
        let mut frame = Frame {
            arena,
            own: Vec::new(),
            staged: (0..inputs).map(|_| None).collect(),
            bound: Bound {
                inputs: vec![(0, Vec::new()); inputs],
                states: vec![(0, Vec::new()); program.state_bytes.len()],
                outputs: vec![(0, Vec::new()); program.outputs.len()],
            },
            scratch: Scratch::default(),
            arena_fixes: Vec::new(),
            workspace_fixes: Vec::new(),
            words: program.words.clone(),
            version: 0,
        };
        frame.fill_in(&gpu.context, &program.fixes, fixed)?;
        Ok(frame)
    }

    /// Fills in the addresses known by now, and notes those that depend on inputs, states, outputs and workspace.
    fn fill_in(&mut self, context: &Context, fixes: &[Fix], fixed: Fixed) -> Result<(), CudaError> {
        for fix in fixes {
            let start = match fix.target {
                Target::Place(place) => match self.bound.get(place) {
                    Some((_, fixes)) => {
                        fixes.push(fix.clone());
                        continue;
                    }
                    None if matches!(self.arena, Arena::Whole(_)) => {
                        self.arena_fixes.push(fix.clone());
                        continue;
                    }
                    None => self.address(place),
                },
                Target::Workspace => {
                    self.workspace_fixes.push(fix.clone());
                    continue;
                }
                Target::Persistent => fixed.persistent,
                Target::Fault(step) => fixed.faults + 8 * step as u64,
            };
            put(&mut self.words, context, fix, start)?;
        }
        Ok(())
    }

    /// Where a place is.
    pub fn address(&self, place: Place) -> u64 {
        match (place, &self.arena) {
            (Place::Input(input), _) => self.bound.inputs[input].0,
            (Place::State(state), _) => self.bound.states[state].0,
            (Place::Output(output), _) => self.bound.outputs[output].0,
            (Place::Arena { offset, .. }, Arena::Whole(_)) => self.scratch.arena + offset as u64,
            // Every range of the program has one.
            (Place::Arena { offset, bytes }, Arena::Ranges(ranges)) => {
                ranges.get(&(offset, bytes)).map_or(0, Allocation::address)
            }
        }
    }

    /// Writes the address of an input, a state or an output into all words that depend on it.
    pub fn set(&mut self, context: &Context, place: Place, address: u64) -> Result<(), CudaError> {
        let Some((known, fixes)) = self.bound.get(place).filter(|(known, _)| *known != address) else {
            return Ok(());
        };
        // Not known until all words say it.
        *known = 0;
        fixes.iter().try_for_each(|fix| put(&mut self.words, context, fix, address))?;
        *known = address;
        self.version += 1;
        Ok(())
    }

    /// Writes the addresses of intermediates and workspace into all words that depend on them.
    pub fn set_scratch(&mut self, context: &Context, scratch: Scratch) -> Result<(), CudaError> {
        if self.scratch == scratch {
            return Ok(());
        }
        // Not known until all words say it.
        self.scratch = Scratch::default();
        self.version += 1;
        let arena = self.arena_fixes.iter().map(|fix| (fix, scratch.arena + arena_offset(fix)));
        let workspace = self.workspace_fixes.iter().map(|fix| (fix, scratch.workspace));
        for (fix, start) in arena.chain(workspace) {
            put(&mut self.words, context, fix, start)?;
        }
        self.scratch = scratch;
        Ok(())
    }

    /// Allocates our own intermediates if there are none, and uses them with the workspace at `workspace`. Returns the allocated bytes.
    /// The context must be entered.
    pub fn use_own_scratch(
        &mut self,
        gpu: &Gpu,
        program: &LoadedJob,
        workspace: u64,
        stream: &Stream,
    ) -> Result<usize, CudaError> {
        let (mut made, mut arena) = (0, 0);
        if let Arena::Whole(memory) = &mut self.arena {
            if memory.is_none() && program.arena > 0 {
                *memory = Some(Allocation::painted(&gpu.context, program.arena, gpu.zones, stream)?);
                made = program.arena;
            }
            arena = memory.as_ref().map_or(0, Allocation::address);
        }
        self.set_scratch(&gpu.context, Scratch { arena, workspace })?;
        Ok(made)
    }

    /// Scratch of steps, as the words say.
    pub fn workspace(&self) -> u64 {
        self.scratch.workspace
    }

    /// Allocates our own outputs if there are none, and uses them. The context must be entered.
    pub fn use_own_outputs(&mut self, gpu: &Gpu, program: &LoadedJob, stream: &Stream) -> Result<(), CudaError> {
        for &bytes in &program.outputs[self.own.len()..] {
            self.own.push(Allocation::painted(&gpu.context, bytes, gpu.zones, stream)?);
        }
        for output in 0..self.own.len() {
            self.set(&gpu.context, Place::Output(output), self.own[output].address())?;
        }
        Ok(())
    }

    /// The buffer for a copy of an input, allocated at the first call. The context must be entered.
    pub fn staging(&mut self, gpu: &Gpu, input: usize, bytes: usize, stream: &Stream) -> Result<u64, CudaError> {
        if let Some(memory) = &self.staged[input] {
            return Ok(memory.address());
        }
        let memory = Allocation::painted(&gpu.context, bytes, gpu.zones, stream)?;
        let address = memory.address();
        self.staged[input] = Some(memory);
        Ok(address)
    }

    /// An output of our own, once there are such.
    pub fn output(&self, index: usize) -> Option<&Allocation> {
        self.own.get(index)
    }

    pub fn words(&self) -> &[u64] {
        &self.words
    }

    pub fn version(&self) -> u64 {
        self.version
    }

    /// Fills outputs and intermediates.
    pub fn poison(&self, stream: &Stream) -> Result<(), CudaError> {
        let arena: Vec<&Allocation> = match &self.arena {
            Arena::Whole(memory) => memory.iter().collect(),
            Arena::Ranges(ranges) => ranges.values().collect(),
        };
        arena.into_iter().chain(&self.own).try_for_each(|memory| memory.fill(0xFF, stream))
    }

    /// Checks every red zone. All work must have finished.
    pub fn check_zones(&self, copies: &Copies) -> Result<(), DeviceError> {
        let arena: Vec<(String, &Allocation)> = match &self.arena {
            Arena::Whole(memory) => memory.iter().map(|memory| ("the arena".into(), memory)).collect(),
            Arena::Ranges(ranges) => {
                let name = |(offset, bytes): &(usize, usize)| format!("the arena's {bytes} bytes at {offset}");
                ranges.iter().map(|(range, memory)| (name(range), memory)).collect()
            }
        };
        let outputs = self.own.iter().enumerate().map(|(index, memory)| (format!("output {index}"), memory));
        let staged = self.staged.iter().enumerate();
        let staged =
            staged.filter_map(|(index, memory)| Some((format!("the copy of input {index}"), memory.as_ref()?)));
        arena.into_iter().chain(outputs).chain(staged).try_for_each(|(name, memory)| check_zone(name, memory, copies))
    }
}

/// The arena offset of a word's address.
fn arena_offset(fix: &Fix) -> u64 {
    match fix.target {
        Target::Place(Place::Arena { offset, .. }) => offset as u64,
        _ => 0,
    }
}

/// Writes the words that depend on an address.
fn put(words: &mut [u64], context: &Context, fix: &Fix, start: u64) -> Result<(), CudaError> {
    match &fix.value {
        Value::Address(offset) => words[fix.word] = start + offset,
        Value::Map(map) => {
            let encoded = encode(context, map, start)?;
            words[fix.word..fix.word + encoded.len()].copy_from_slice(&encoded);
        }
    }
    Ok(())
}

/// An error if a red zone of a buffer was written to.
pub(crate) fn check_zone(buffer: String, memory: &Allocation, copies: &Copies) -> Result<(), DeviceError> {
    match memory.damage(copies)? {
        Some(side) => Err(DeviceError::RedZone { buffer, side }),
        None => Ok(()),
    }
}
