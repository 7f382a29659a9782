//! Rows written into a cache that is a state.

use deuteron_codegen::ArgBinding;
use deuteron_codegen::cpu::simd::Isa;
use deuteron_device::{Cpu, Device, DeviceError, Job, Launching, Memory, NoStates, Place, States, Step};
use deuteron_graph::Dtype;
use deuteron_kernels::AppendShape;
use deuteron_kernels::append::{Append, cpu};

use super::{argument, loaded, step};

/// Two caches of three rows of one byte, and a row for each.
fn job(device: &Cpu, change: impl Fn(&mut AppendShape), places: [[Place; 2]; 2]) -> Option<Job> {
    let arg = |position: usize| {
        let dtype = if position == 2 { Dtype::I32 } else { Dtype::I8 };
        ArgBinding { dtype, ..argument(position == 3) }
    };
    let step = |[cache, result]: [Place; 2]| {
        let leading = vec![(1, 1)];
        let mut shape = AppendShape { leading, batch: 0, rows: 1, stride: 1, capacity: 3, cols: 1, in_place: true };
        change(&mut shape);
        let kernel = cpu::kernel(Append { element: 1, args: [0, 1, 2, 3].map(arg), shape })?;
        Some(step(device, kernel, vec![cache, Place::Input(0), Place::Input(1), result]))
    };
    let steps = places.into_iter().map(step).collect::<Option<Vec<Step>>>()?;
    Some(Job { steps, inputs: 2, states: vec![3, 3], outputs: vec![3], arena: 0 })
}

const KEPT: [[Place; 2]; 2] = [[Place::State(0); 2], [Place::State(1); 2]];

struct Given<'a>(Vec<&'a mut Memory>);

impl States for Given<'_> {
    fn count(&self) -> usize {
        2
    }

    fn each<'a>(&'a mut self, take: &mut dyn FnMut(Option<&'a mut Memory>)) {
        self.0.iter_mut().for_each(|memory| take(Some(memory)));
    }
}

#[test]
fn a_state_keeps_what_runs_write() {
    let cpu = Cpu::with(2, Isa::detect());
    let mut executable = loaded(&cpu, job(&cpu, |_| {}, KEPT)).unwrap();
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
fn a_position_at_which_rows_do_not_fit_is_a_fault() {
    let cpu = Cpu::with(1, Isa::detect());
    let mut executable = loaded(&cpu, job(&cpu, |_| {}, KEPT)).unwrap();
    let [mut first, mut second] = [[1, 2, 3], [4, 5, 6]].map(|bytes| cpu.upload(&bytes).unwrap());
    let inputs = [cpu.upload(&[7]).unwrap(), cpu.upload(&i32::to_le_bytes(3)).unwrap()];
    let mut states = Given(vec![&mut first, &mut second]);
    let outcome = executable.run(&|index| &inputs[index], &mut states, Launching::Eager);
    let Err(DeviceError::Index { step: 0, fault }) = outcome else { panic!("{outcome:?}") };
    assert_eq!((fault.arg, fault.row, fault.index, fault.table_rows), (2, 0, 3, 3));
    assert_eq!(first.host().unwrap(), [1, 2, 3], "nothing is written");
}

#[test]
fn only_a_cache_kept_in_place_is_written_where_it_is_read() {
    let cpu = Cpu::with(1, Isa::detect());
    let refused =
        |change: fn(&mut AppendShape), places: [Place; 2]| loaded(&cpu, job(&cpu, change, [places, KEPT[1]])).is_none();
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
    assert!(loaded(&cpu, job(&cpu, |shape| shape.in_place = false, copied)).is_some());
    let written = |places: [Place; 2]| loaded(&cpu, job(&cpu, |shape| shape.in_place = false, [places; 2])).is_some();
    assert!(written([Place::State(0), Place::State(1)]), "another state than the one that is read");
    assert!(written([Place::Input(0), Place::State(1)]));
    assert!(!written([Place::State(1), Place::State(1)]), "a state that is read is written in place alone");
    assert!(!written([Place::State(0), Place::State(2)]), "there is no such state");
}
