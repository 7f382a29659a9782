//! Addresses of inputs, states and outputs, checked and put into the parameters of the kernels.

use cudarc::driver::sys;

use super::CudaExecutable;
use crate::check::{check_inputs, check_states};
use crate::cuda::frame::Frame;
use crate::device::{Inputs, States};
use crate::error::DeviceError;
use crate::job::Place;
use crate::memory::{BorrowedMemory, Memory};

impl CudaExecutable {
    /// Puts the addresses of borrowed memory into the words.
    pub(super) fn bind_borrowed(&mut self, borrowed: &BorrowedMemory<'_>) -> Result<(), DeviceError> {
        let context = &self.gpu.context;
        for (input, span) in borrowed.inputs.iter().enumerate() {
            let bytes = self.program.input_alignment[input];
            if self.program.input_bytes[input] > 0 && !span.address.is_multiple_of(bytes as u64) {
                return Err(DeviceError::InputAlignment { input, bytes });
            }
            self.frames[0].set(context, Place::Input(input), span.address)?;
        }
        for (state, span) in borrowed.states.iter().enumerate() {
            let alignment = self.program.state_alignment[state];
            if self.program.state_bytes[state] > 0 && !span.address.is_multiple_of(alignment as u64) {
                return Err(DeviceError::StatePlace { state, expected: "the GPU" });
            }
            self.frames[0].set(context, Place::State(state), span.address)?;
        }
        for (output, span) in borrowed.outputs.iter().enumerate() {
            self.frames[0].set(context, Place::Output(output), span.address)?;
        }
        Ok(())
    }

    /// Copies the inputs of a run to where kernels read them if necessary, and writes their addresses into the words.
    pub(super) fn bind(&mut self, frame: usize, input: Inputs<'_, '_>) -> Result<(), DeviceError> {
        check_inputs(&self.program.input_bytes, input)?;
        self.use_own_scratch(frame)?;
        self.frames[frame].use_own_outputs(&self.gpu, &self.program, &self.stream)?;
        for index in 0..self.program.input_bytes.len() {
            let expected = self.program.input_bytes[index];
            let memory = input(index);
            // The memory that is used is the one that is checked, whatever the function answers next time.
            if memory.len() < expected {
                return Err(DeviceError::InputSize { input: index, expected, got: memory.len() });
            }
            if expected == 0 {
                continue;
            }
            match memory {
                Memory::Host(buffer) => {
                    let to = self.frames[frame].staging(&self.gpu, index, expected, &self.stream)?;
                    // SAFETY: the staging buffer has `expected` bytes and lives as long as the frame.
                    unsafe { self.gpu.copies.upload(to, &buffer.bytes()[..expected], &self.stream)? };
                    self.frames[frame].set(&self.gpu.context, Place::Input(index), to)?;
                }
                Memory::Device(memory) => {
                    let address = memory.address();
                    if address.is_multiple_of(self.program.input_alignment[index] as u64) {
                        self.place_input(frame, index, address)?;
                    } else {
                        self.gpu.check_memory(index, address)?;
                        let to = self.frames[frame].staging(&self.gpu, index, expected, &self.stream)?;
                        // SAFETY: both have `expected` bytes; the source is borrowed until the run has ended.
                        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to, address, expected, self.stream.handle()) };
                        self.gpu.context.check("cuMemcpyDtoDAsync", code)?;
                        self.frames[frame].set(&self.gpu.context, Place::Input(index), to)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Puts the addresses of the states into the words of the first `frames` frames. They are used where they are.
    pub(super) fn bind_states(&mut self, frames: usize, states: &mut dyn States) -> Result<(), DeviceError> {
        check_states(&self.program.state_bytes, states)?;
        let (mut state, mut bound) = (0, Ok(()));
        states.each(&mut |memory| {
            if bound.is_ok() && state < self.program.state_bytes.len() {
                bound = self.bind_state(frames, state, memory);
                state += 1;
            }
        });
        bound?;
        // Fewer were passed than `count` states.
        if state < self.program.state_bytes.len() { Err(DeviceError::SharedState { state }) } else { Ok(()) }
    }

    fn bind_state(&mut self, frames: usize, state: usize, memory: Option<&mut Memory>) -> Result<(), DeviceError> {
        let (expected, alignment) = (self.program.state_bytes[state], self.program.state_alignment[state]);
        let Memory::Device(memory) = memory.ok_or(DeviceError::SharedState { state })? else {
            return Err(DeviceError::StatePlace { state, expected: "the GPU" });
        };
        let (address, got) = (memory.address(), memory.len());
        if got < expected {
            return Err(DeviceError::StateSize { state, expected, got });
        }
        // What is on another GPU, or not where vectors may stand, was not made for this one.
        let new = self.frames[0].address(Place::State(state)) != address;
        let strange = new && expected > 0 && self.gpu.check_memory(state, address).is_err();
        if strange || !address.is_multiple_of(alignment as u64) {
            return Err(DeviceError::StatePlace { state, expected: "the GPU" });
        }
        for frame in &mut self.frames[..frames] {
            frame.set(&self.gpu.context, Place::State(state), address)?;
        }
        if expected > 0 && (0..state).any(|other| self.frames[0].address(Place::State(other)) == address) {
            return Err(DeviceError::SharedState { state });
        }
        Ok(())
    }

    /// An input that is used in place. An address that is new is looked up first.
    fn place_input(&mut self, frame: usize, index: usize, address: u64) -> Result<(), DeviceError> {
        if self.frames[frame].address(Place::Input(index)) != address && self.program.input_bytes[index] > 0 {
            self.gpu.check_memory(index, address)?;
        }
        self.frames[frame].set(&self.gpu.context, Place::Input(index), address)?;
        Ok(())
    }

    /// Frames for `sets` sets of inputs, bound.
    pub(super) fn bind_sets(&mut self, sets: &[Inputs<'_, '_>]) -> Result<(), DeviceError> {
        while self.frames.len() < sets.len() {
            self.frames.push(Frame::new(&self.gpu, &self.program, self.fixed, &self.stream)?);
        }
        for (frame, input) in sets.iter().enumerate() {
            self.bind(frame, *input)?;
        }
        Ok(())
    }
}
