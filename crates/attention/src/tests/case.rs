//! One problem with its data, and how to run it.

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::simd::amx::Amx;
use deuteron_codegen::cpu::task::Floats;
use deuteron_graph::Dtype;
use half::{bf16, f16};

use super::Numbers;
use super::formula::Formula;
use crate::cpu::{Backward, Forward, Heads, Inputs, Mask, Output, Shared, Used, backward, combine, finish, forward};
use crate::{Attention, Dropout, ScoreRules};

/// How positions and heads lie.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Layout {
    /// `[batch, heads, positions, width]`
    HeadsFirst,
    /// `[batch, positions, 3, heads, width]`, of which one third is used.
    Fused,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MaskKind {
    /// Same for all heads, `f32`.
    Shared,
    /// One for each head, in the storage type.
    Own,
}

/// Instruction set and matrix tiles.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    pub isa: Isa,
    pub amx: Option<Amx>,
}

pub fn machines(dtype: Dtype) -> Vec<Machine> {
    let mut machines: Vec<Machine> = Isa::available().into_iter().map(|isa| Machine { isa, amx: None }).collect();
    if dtype == Dtype::Bf16 && Amx::detect().is_some() {
        machines.push(Machine { isa: Isa::detect(), amx: Amx::detect() });
    }
    machines
}

/// Elements at strides, in storage.
#[derive(Clone)]
pub struct Tensor {
    pub bytes: Vec<u8>,
    pub dtype: Dtype,
    /// Elements before the first, and strides of batch, head and position.
    pub place: [usize; 4],
}

impl Tensor {
    pub fn at(&self, index: [usize; 4]) -> usize {
        let [first, batch, head, position] = self.place;
        first + index[0] * batch + index[1] * head + index[2] * position + index[3]
    }

    pub fn get(&self, index: [usize; 4]) -> f64 {
        let at = self.at(index) * self.dtype.bytes();
        let bytes = &self.bytes[at..at + self.dtype.bytes()];
        match self.dtype {
            Dtype::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
            Dtype::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
            _ => f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
        }
    }

    pub fn set(&mut self, index: [usize; 4], x: f32) {
        let at = self.at(index) * self.dtype.bytes();
        let to = &mut self.bytes[at..at + self.dtype.bytes()];
        match self.dtype {
            Dtype::F16 => to.copy_from_slice(&f16::from_f32(x).to_le_bytes()),
            Dtype::Bf16 => to.copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
            _ => to.copy_from_slice(&x.to_le_bytes()),
        }
    }

    pub fn heads(&mut self) -> Heads {
        let [first, batch, head, position] = self.place;
        Heads { address: self.bytes[first * self.dtype.bytes()..].as_mut_ptr(), batch, head, position }
    }
}

pub struct Case {
    pub attention: Attention,
    pub used: usize,
    pub layout: Layout,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub output_gradient: Tensor,
    pub mask: Option<Tensor>,
    /// One for each head.
    pub slopes: Vec<f32>,
    /// One for each key of each sequence.
    pub documents: Vec<i32>,
    /// The order of tasks.
    pub first_tasks_first: bool,
}

/// What a run gave.
#[derive(Clone)]
pub struct Run {
    pub o: Tensor,
    pub statistics: Vec<f32>,
    pub gradients: [Tensor; 3],
}

impl Case {
    /// Random numbers; NaN where nothing may be read.
    pub fn new(
        attention: Attention,
        used: usize,
        layout: Layout,
        mask: Option<MaskKind>,
        numbers: &mut Numbers,
    ) -> Case {
        let Attention { batch, heads, kv_heads, queries, keys, .. } = attention;
        let of_keys = Attention { dtype: attention.kv, ..attention };
        let mut case = Case {
            attention,
            used,
            layout,
            q: tensor(&attention, layout, heads, queries, 0),
            k: tensor(&of_keys, layout, kv_heads, keys, 1),
            v: tensor(&of_keys, layout, kv_heads, keys, 2),
            output_gradient: tensor(&attention, layout, heads, queries, 0),
            mask: None,
            slopes: (0..heads).map(|head| [0.05, -0.03, 0.01][head % 3]).collect(),
            // Three, one after the other, of other lengths in each sequence.
            documents: (0..batch * keys).map(|at| ((at % keys) * (3 + at / keys) / (keys + 1)) as i32).collect(),
            first_tasks_first: false,
        };
        for (heads, positions, tensor) in [
            (heads, queries, &mut case.q),
            (kv_heads, used, &mut case.k),
            (kv_heads, used, &mut case.v),
            (heads, queries, &mut case.output_gradient),
        ] {
            each([batch, heads, positions, attention.width], |index| tensor.set(index, numbers.unit()));
        }
        case.mask = mask.map(|kind| {
            let (dtype, mask_heads, strides) = match kind {
                MaskKind::Shared => (Dtype::F32, 1, [0, 0, keys]),
                MaskKind::Own => (attention.dtype, heads, [heads * queries * keys, queries * keys, keys]),
            };
            let batches = if kind == MaskKind::Own { batch } else { 1 };
            let elements = (batches * mask_heads * queries * keys).max(1);
            let [b, h, p] = strides;
            let mut tensor = Tensor { bytes: vec![0xff; elements * dtype.bytes()], dtype, place: [0, b, h, p] };
            each([batches, mask_heads, queries, used], |index| {
                let hidden = numbers.word().is_multiple_of(5);
                tensor.set(index, if hidden { f32::NEG_INFINITY } else { numbers.unit() });
            });
            tensor
        });
        case
    }

    fn ordered(&self, tasks: usize) -> impl Iterator<Item = usize> + use<> {
        let first = self.first_tasks_first;
        (0..tasks).map(move |task| if first { task } else { tasks - 1 - task })
    }

    pub fn formula(&self) -> Formula {
        Formula::new(self)
    }

    /// Forward and, if asked, backward; tasks in an order of their own, scratch poisoned before each.
    pub fn run(&mut self, machine: Machine, with_gradients: bool) -> Run {
        let attention = self.attention;
        let Attention { batch, heads, kv_heads, queries, keys, .. } = attention;
        let rows = batch * heads * queries;
        let mut run = Run {
            o: tensor(&attention, self.layout, heads, queries, 0),
            statistics: vec![f32::NAN; 2 * rows],
            gradients: [(heads, queries, 0), (kv_heads, keys, 1), (kv_heads, keys, 2)]
                .map(|(heads, positions, third)| tensor(&attention, self.layout, heads, positions, third)),
        };
        let inputs = Inputs {
            q: self.q.heads(),
            k: self.k.heads(),
            v: self.v.heads(),
            mask: self.mask.as_mut().map(|mask| Mask { dtype: mask.dtype, elements: mask.heads() }),
            slopes: attention.scores.slopes.then(|| numbers_of(self.slopes.as_mut_ptr().cast(), 0, 1)),
            documents: attention.scores.documents.then(|| numbers_of(self.documents.as_mut_ptr().cast(), keys, 0)),
            used: Used::Of(self.used),
        };
        let mut partials = vec![f32::NAN; attention.partial_elements()];
        let job = Forward {
            attention: &attention,
            inputs: &inputs,
            statistics: Some(Shared(run.statistics.as_mut_ptr())),
            partials: Shared(partials.as_mut_ptr()),
            amx: machine.amx,
        };
        let mut scratch = Floats::new(attention.scratch_elements());
        let mut output = Output::Store(run.o.heads());
        for task in self.ordered(attention.forward_tasks()) {
            scratch.fill(f32::NAN);
            // SAFETY: all tensors were made for these sizes, and nothing else uses them.
            unsafe { forward(machine.isa, &job, &mut output, task, &mut scratch) };
        }
        for task in self.ordered(attention.combine_tasks()) {
            scratch.fill(f32::NAN);
            // SAFETY: as above, and forward is done.
            unsafe { combine(machine.isa, &job, &mut output, task, &mut scratch) };
        }
        if with_gradients {
            let mut partials = vec![f32::NAN; attention.gradient_elements()];
            let [q, k, v] = &mut run.gradients;
            let job = Backward {
                attention: &attention,
                inputs: &inputs,
                output: run.o.heads(),
                output_dtype: attention.dtype,
                statistics: Shared(run.statistics.as_mut_ptr()),
                output_gradient: self.output_gradient.heads(),
                query_gradient: q.heads(),
                key_gradient: k.heads(),
                value_gradient: v.heads(),
                partials: Shared(partials.as_mut_ptr()),
                amx: machine.amx,
            };
            for task in self.ordered(attention.backward_tasks()) {
                scratch.fill(f32::NAN);
                // SAFETY: as above.
                unsafe { backward(machine.isa, &job, task, &mut scratch) };
            }
            for task in self.ordered(attention.finish_tasks()) {
                scratch.fill(f32::NAN);
                // SAFETY: as above, and backward is done.
                unsafe { finish(machine.isa, &job, task, &mut scratch) };
            }
        }
        run
    }
}

/// Numbers, or rows of numbers, of sequences and heads.
fn numbers_of(address: *mut u8, batch: usize, head: usize) -> Heads {
    Heads { address, batch, head, position: 0 }
}

/// A tensor of NaN.
pub fn tensor(attention: &Attention, layout: Layout, heads: usize, positions: usize, third: usize) -> Tensor {
    let Attention { dtype, batch, width, .. } = *attention;
    let columns = heads * width;
    let (elements, place) = match layout {
        Layout::HeadsFirst => (batch * positions * columns, [0, positions * columns, positions * width, width]),
        Layout::Fused => {
            (3 * batch * positions * columns, [third * columns, 3 * positions * columns, width, 3 * columns])
        }
    };
    Tensor { bytes: vec![0xff; (elements + 3 * columns) * dtype.bytes()], dtype, place }
}

pub fn each(sizes: [usize; 4], mut visit: impl FnMut([usize; 4])) {
    for b in 0..sizes[0] {
        for h in 0..sizes[1] {
            for i in 0..sizes[2] {
                for d in 0..sizes[3] {
                    visit([b, h, i, d]);
                }
            }
        }
    }
}

pub fn plain(dtype: Dtype, [heads, kv_heads]: [usize; 2], [queries, keys, width]: [usize; 3]) -> Attention {
    let scale = 1.0 / (width as f32).sqrt();
    let (kv, batch, causal, dropout) = (dtype, 2, false, None);
    let scores = ScoreRules::NONE;
    Attention { dtype, kv, batch, heads, kv_heads, queries, keys, width, scale, causal, scores, dropout }
}

pub fn dropout() -> Option<Dropout> {
    Some(Dropout { probability: 0.3, seed: 77, offset: 5 })
}
