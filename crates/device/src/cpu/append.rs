//! Rows written into a cache, from a position of each sequence on.

use deuteron_codegen::AppendShape;
use deuteron_codegen::cpu::simd::Fault;

use crate::cpu::copy::PARALLEL_FROM;
use crate::cpu::pool::Pool;
use crate::error::DeviceError;

/// The argument that holds positions.
const POSITIONS: usize = 2;

pub(crate) struct AppendTask {
    shape: AppendShape,
    /// Bytes of an element.
    element: usize,
    /// Elements from the start of each argument's buffer.
    offsets: [usize; 4],
}

impl AppendTask {
    pub fn new(element: usize, shape: AppendShape, offsets: [usize; 4]) -> AppendTask {
        AppendTask { shape, element, offsets }
    }

    /// # Safety
    /// As for a row task: addresses valid for the checked extents, the result overlaps nothing but the cache that it is,
    /// and is ours alone.
    pub unsafe fn run(&mut self, pool: &Pool, addresses: &[*mut u8], step: usize) -> Result<(), DeviceError> {
        let at = |argument: usize, element: usize| addresses[argument].wrapping_add(self.offsets[argument] * element);
        let positions = at(POSITIONS, 4).cast_const().cast::<i32>();
        for row in 0..self.shape.sequences() {
            // SAFETY: there is a position for each sequence.
            let index = i64::from(unsafe { positions.add(row).read_unaligned() });
            if index < 0 || index >= self.shape.places() as i64 {
                let fault = Fault { arg: POSITIONS, row, index, table_rows: self.shape.places() };
                return Err(DeviceError::Index { step, fault });
            }
        }
        let ends =
            Ends { cache: at(0, self.element), rows: at(1, self.element), positions, result: at(3, self.element) };
        let this = &*self;
        let work = |_: usize, block: usize| {
            // SAFETY: the caller's promise; blocks are disjoint, and all positions are places where the rows fit.
            unsafe { this.block(ends, block) };
        };
        let blocks = self.shape.blocks();
        let written = if self.shape.in_place { self.shape.rows } else { self.shape.capacity };
        if blocks * written * self.shape.cols * self.element < PARALLEL_FROM {
            (0..blocks).for_each(|block| work(0, block));
            return Ok(());
        }
        pool.run(blocks, &work).map_err(|_| DeviceError::WorkerPanicked { step })
    }

    /// The rows of one block, after the block itself where the cache is not kept in place.
    unsafe fn block(&self, ends: Ends, block: usize) {
        let AppendShape { rows, stride, capacity, cols, in_place, .. } = self.shape;
        let (sequence, from) = self.shape.source(block);
        let (row, whole) = (cols * self.element, capacity * cols * self.element);
        // SAFETY: the caller's promise; cache and result are one or apart, and the rows overlap neither.
        unsafe {
            let result = ends.result.add(block * whole);
            if !in_place {
                std::ptr::copy_nonoverlapping(ends.cache.add(block * whole), result, whole);
            }
            let position = ends.positions.add(sequence).read_unaligned() as usize;
            let to = result.add(position * row);
            for index in 0..rows {
                let from = ends.rows.add((from + index * stride) * self.element);
                std::ptr::copy_nonoverlapping(from, to.add(index * row), row);
            }
        }
    }
}

/// Where the arguments begin.
#[derive(Clone, Copy)]
struct Ends {
    cache: *const u8,
    rows: *const u8,
    positions: *const i32,
    result: *mut u8,
}

// SAFETY: only numbers; the tasks that use them write to disjoint blocks.
unsafe impl Send for Ends {}
// SAFETY: as above.
unsafe impl Sync for Ends {}

#[cfg(test)]
mod tests {
    use deuteron_codegen::cpu::simd::Isa;
    use deuteron_codegen::{ArgBinding, Geometry, Launch, Source};
    use deuteron_graph::{Dtype, Graph};

    use super::*;
    use crate::job::{Job, Place, Step};
    use crate::{Cpu, Device, Launching, Memory, NoStates, States};

    /// Two caches of three rows of one byte, and a row for each.
    fn job(cpu: &Cpu, change: impl Fn(&mut AppendShape), places: [[Place; 2]; 2]) -> Job {
        let graph: Graph = "x = input f32[1] ; out x".parse().unwrap();
        let base = graph.inputs()[0];
        let arg = |position: usize| {
            let dtype = if position == 2 { Dtype::I32 } else { Dtype::I8 };
            ArgBinding { base, dtype, written: position == 3, offset: 0, leading: Vec::new(), table_rows: 0 }
        };
        let step = |[cache, result]: [Place; 2]| {
            let kernel = cpu.compile(vec![Source::Append(1)]).unwrap().remove(0);
            let leading = vec![(1, 1)];
            let mut shape = AppendShape { leading, batch: 0, rows: 1, stride: 1, capacity: 3, cols: 1, in_place: true };
            change(&mut shape);
            let launch = Launch { args: (0..4).map(arg).collect(), geometry: Geometry::Append(shape) };
            Step { kernel, launch, places: vec![cache, Place::Input(0), Place::Input(1), result] }
        };
        Job { steps: places.map(step).to_vec(), inputs: 2, states: vec![3, 3], outputs: vec![3], arena: 0 }
    }

    const KEPT: [[Place; 2]; 2] = [[Place::State(0); 2], [Place::State(1); 2]];

    struct Given<'a>(Vec<&'a mut Memory>);

    impl States for Given<'_> {
        fn count(&self) -> usize {
            2
        }

        fn state(&mut self, index: usize) -> Option<&mut Memory> {
            let last = self.0.len() - 1;
            self.0.get_mut(index.min(last)).map(|memory| &mut **memory)
        }
    }

    #[test]
    fn a_state_keeps_what_runs_write() {
        let cpu = Cpu::with(2, Isa::detect());
        let mut executable = cpu.load(job(&cpu, |_| {}, KEPT)).unwrap();
        let [mut first, mut second] = [[1, 2, 3], [4, 5, 6]].map(|bytes| cpu.upload(&bytes).unwrap());
        for (row, position) in [(7, 2), (8, 0)] {
            let inputs = [cpu.upload(&[row]).unwrap(), cpu.upload(&i32::to_le_bytes(position)).unwrap()];
            let mut states = Given(vec![&mut first, &mut second]);
            executable.run(&|index| &inputs[index], &mut states, Launching::Eager).unwrap();
            let mut one = Given(vec![&mut first]);
            let shared = executable.run(&|index| &inputs[index], &mut one, Launching::Eager);
            assert_eq!(shared, Err(DeviceError::SharedState { state: 1 }));
        }
        assert_eq!([first.host().unwrap(), second.host().unwrap()], [&[8, 2, 7], &[8, 5, 7]]);
        let input = cpu.upload(&[0; 4]).unwrap();
        let none = executable.run(&|_| &input, &mut NoStates, Launching::Eager);
        assert_eq!(none, Err(DeviceError::StateCount { expected: 2, got: 0 }));
        let mut short = cpu.upload(&[0; 2]).unwrap();
        let short = executable.run(&|_| &input, &mut Given(vec![&mut short]), Launching::Eager);
        assert_eq!(short, Err(DeviceError::StateSize { state: 0, expected: 3, got: 2 }));
    }

    #[test]
    fn only_a_cache_kept_in_place_is_written_where_it_is_read() {
        let cpu = Cpu::with(1, Isa::detect());
        let refused = |change: fn(&mut AppendShape), places: [Place; 2]| {
            matches!(cpu.load(job(&cpu, change, [places, KEPT[1]])), Err(DeviceError::Job { step: 0, .. }))
        };
        let (input, output, state) = (Place::Input(0), Place::Output(0), Place::State(0));
        assert!(!refused(|_| {}, [state, state]));
        assert!(refused(|_| {}, [state, Place::State(1)]));
        assert!(refused(|_| {}, [input, input]));
        assert!(refused(|_| {}, [output, output]));
        assert!(refused(|_| {}, [state, output]), "in place means one memory");
        assert!(refused(|shape| shape.rows = 4, [state, state]));
        assert!(refused(|shape| shape.batch = 1, [state, state]));
        assert!(refused(|shape| shape.capacity = 4, [state, state]), "the state is shorter");
        let copied = [[Place::State(0), Place::Output(0)]; 2];
        assert!(cpu.load(job(&cpu, |shape| shape.in_place = false, copied)).is_ok());
        let onto = [[Place::State(0), Place::State(1)]; 2];
        assert!(
            cpu.load(job(&cpu, |shape| shape.in_place = false, onto)).is_err(),
            "states are written in place alone"
        );
    }
}
