//! Times attention on the CPU: `cargo run --release -p deuteron-attention --example attention [threads]`.
//!
//! 12 heads of 64, 1024 positions, as `[heads, positions, width]` and as a fused `[positions, 3, heads, width]`: causal
//! forward and backward; and one query against the caches of 12 layers in turn, 1024 keys each, so that keys and values come
//! from as far away as in a model. Variants take turns; medians in milliseconds, of one layer.
#![allow(missing_docs)]

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use deuteron_attention::cpu::{
    Backward, Forward, Heads, Inputs, Output, Shared, Used, backward, combine, finish, forward,
};
use deuteron_attention::{Attention, ScoreRules};
use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::simd::amx::Amx;
use deuteron_codegen::cpu::task::Floats;
use deuteron_graph::Dtype;

const ROUNDS: usize = 15;
/// Layers of a short problem, and how often all of them run while it is timed.
const LAYERS: usize = 12;
const DECODES: usize = 5;

fn main() {
    let threads = std::env::args().nth(1).and_then(|word| word.parse().ok()).unwrap_or(2);
    let mut problems: Vec<Problem> = Vec::new();
    for (queries, fused) in [(1024, false), (1024, true), (1, false)] {
        for (dtype, amx) in [(Dtype::F32, None), (Dtype::Bf16, None), (Dtype::Bf16, Amx::detect()), (Dtype::F16, None)]
        {
            problems.push(Problem { fused, ..Problem::new(dtype, queries, amx) });
        }
    }
    let mut times = vec![[Vec::new(), Vec::new()]; problems.len()];
    for _ in 0..ROUNDS {
        for (problem, times) in problems.iter_mut().zip(&mut times) {
            let start = Instant::now();
            let layers = problem.layers;
            let runs = if layers > 1 { DECODES } else { 1 };
            problem.forward(threads, runs);
            times[0].push(start.elapsed().as_secs_f64() * 1e3 / (runs * layers) as f64);
            if problem.attention.queries > 1 {
                let start = Instant::now();
                problem.backward(threads);
                times[1].push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    for (problem, times) in problems.iter().zip(&mut times) {
        let Attention { dtype, queries, keys, .. } = problem.attention;
        let amx = if problem.amx.is_some() { "amx" } else { "" };
        let form = if problem.fused { "fused" } else { "plain" };
        for (name, times) in ["forward", "backward"].into_iter().zip(times) {
            times.sort_by(f64::total_cmp);
            if let (Some(least), Some(median)) = (times.first(), times.get(times.len() / 2)) {
                println!(
                    "{name:8} {dtype} {amx:3} {form} {queries:4} x {keys}: median {median:.3} ms, least {least:.3} ms"
                );
            }
        }
    }
}

struct Problem {
    attention: Attention,
    amx: Option<Amx>,
    fused: bool,
    layers: usize,
    tensors: Vec<Vec<u8>>,
    statistics: Vec<f32>,
    partials: Vec<f32>,
    gradients: Vec<f32>,
}

impl Problem {
    fn new(dtype: Dtype, queries: usize, amx: Option<Amx>) -> Problem {
        let attention = Attention {
            dtype,
            kv: dtype,
            batch: 1,
            heads: 12,
            kv_heads: 12,
            queries,
            keys: 1024,
            width: 64,
            scale: 0.125,
            causal: true,
            scores: ScoreRules::NONE,
            dropout: None,
        };
        let layers = if queries == 1 { LAYERS } else { 1 };
        let positions = if queries == 1 { layers } else { 3 } * 1024;
        let mut state = 1u32;
        let tensors = (0..8).map(|_| {
            let mut bytes = Vec::new();
            for _ in 0..12 * positions * 64 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let x = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
                match dtype {
                    Dtype::F16 => bytes.extend(half::f16::from_f32(x).to_le_bytes()),
                    Dtype::Bf16 => bytes.extend(half::bf16::from_f32(x).to_le_bytes()),
                    _ => bytes.extend(x.to_le_bytes()),
                }
            }
            bytes
        });
        Problem {
            attention,
            amx,
            fused: false,
            layers,
            tensors: tensors.collect(),
            statistics: vec![0.0; 24 * queries],
            partials: vec![0.0; attention.partial_elements()],
            gradients: vec![0.0; attention.gradient_elements()],
        }
    }

    /// `[heads, positions, width]`, or a third of the fused form.
    fn heads(&mut self, tensor: usize) -> Heads {
        let address = self.tensors[tensor].as_mut_ptr();
        let (head, position) = if self.fused { (64, 3 * 12 * 64) } else { (1024 * 64, 64) };
        Heads { address, batch: 0, head, position }
    }

    fn inputs(&mut self, layer: usize) -> Inputs {
        let first = layer * 12 * 1024 * 64 * self.attention.dtype.bytes();
        let [k, v] = [1, 2].map(|tensor| {
            let heads = self.heads(tensor);
            Heads { address: heads.address.wrapping_add(first), ..heads }
        });
        Inputs { q: self.heads(0), k, v, mask: None, slopes: None, documents: None, used: Used::Of(1024) }
    }

    fn forward(&mut self, threads: usize, runs: usize) {
        let (isa, attention) = (Isa::detect(), self.attention);
        let inputs: Vec<Inputs> = (0..self.layers).map(|layer| self.inputs(layer)).collect();
        let (output, amx) = (self.heads(3), self.amx);
        let statistics = Some(Shared(self.statistics.as_mut_ptr()));
        let partials = Shared(self.partials.as_mut_ptr());
        let job = |layer: usize| Forward { attention: &attention, inputs: &inputs[layer], statistics, partials, amx };
        let first = |layer: usize, task: usize, scratch: &mut Floats| {
            // SAFETY: the tensors have these sizes, and each task writes its own part.
            unsafe { forward(isa, &job(layer), &mut Output::Store(output), task, scratch) }
        };
        let second = |layer: usize, task: usize, scratch: &mut Floats| {
            // SAFETY: as above.
            unsafe { combine(isa, &job(layer), &mut Output::Store(output), task, scratch) }
        };
        let steps: [Step; 2] = [(attention.forward_tasks(), &first), (attention.combine_tasks(), &second)];
        each(threads, runs * self.layers, &attention, steps);
    }

    fn backward(&mut self, threads: usize) {
        let (isa, attention, inputs) = (Isa::detect(), self.attention, self.inputs(0));
        let job = Backward {
            attention: &attention,
            inputs: &inputs,
            output: self.heads(3),
            output_dtype: attention.dtype,
            statistics: Shared(self.statistics.as_mut_ptr()),
            output_gradient: self.heads(4),
            query_gradient: self.heads(5),
            key_gradient: self.heads(6),
            value_gradient: self.heads(7),
            partials: Shared(self.gradients.as_mut_ptr()),
            amx: self.amx,
        };
        let first = |_: usize, task: usize, scratch: &mut Floats| {
            // SAFETY: the tensors have these sizes, and each task writes its own part.
            unsafe { backward(isa, &job, task, scratch) }
        };
        let second = |_: usize, task: usize, scratch: &mut Floats| {
            // SAFETY: as above.
            unsafe { finish(isa, &job, task, scratch) }
        };
        let steps: [Step; 2] = [(attention.backward_tasks(), &first), (attention.finish_tasks(), &second)];
        each(threads, 1, &attention, steps);
    }
}

/// A number of tasks, and how to run one of a layer.
type Step<'a> = (usize, &'a (dyn Fn(usize, usize, &mut Floats) + Sync));

/// Runs the steps in order, `runs` times, on threads that take the next task; this thread is one of them.
fn each(threads: usize, runs: usize, attention: &Attention, steps: [Step; 2]) {
    let (next, barrier) = ([AtomicUsize::new(0), AtomicUsize::new(0)], Barrier::new(threads));
    let work = || {
        let mut scratch = Floats::new(attention.scratch_elements());
        for run in 0..runs {
            for (step, (tasks, work)) in steps.iter().enumerate() {
                loop {
                    let task = next[step].fetch_add(1, Ordering::Relaxed);
                    if task >= *tasks {
                        break;
                    }
                    work(run % LAYERS, task, &mut scratch);
                }
                if barrier.wait().is_leader() {
                    next[1 - step].store(0, Ordering::Relaxed);
                }
                barrier.wait();
            }
        }
    };
    std::thread::scope(|scope| {
        (1..threads).for_each(|_| {
            scope.spawn(work);
        });
        work();
    });
}
