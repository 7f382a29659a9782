//! Row kernels on the CPU: rows are divided into chunks, and chunks are tasks.
//!
//! Chunks depend on the size alone, never on the number of threads, and column sums are kept per chunk and added in
//! order: so the result has the same bits for any number of threads.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use deuteron_codegen::body::Origin;
use deuteron_codegen::cpu::bind::{bind, bind_axes};
use deuteron_codegen::cpu::count::Counter;
use deuteron_codegen::cpu::emit::{emit, emit_with_origins};
use deuteron_codegen::cpu::family::{CpuTarget, assemble, touched};
use deuteron_codegen::cpu::in_place::reads_before_storing;
use deuteron_codegen::cpu::machine::{LargeResults, Uncovered};
use deuteron_codegen::cpu::program::TileProgram;
use deuteron_codegen::cpu::simd::{self, Axis, BoundArg, Fault, Isa};
use deuteron_codegen::cpu::task::{CpuLaunch, CpuSource, CpuTask, PerWorker, Run, ScratchSizes, TaskError, TileUse};
use deuteron_codegen::cpu::{Chunks, chunks};
use deuteron_codegen::kernel::{Family, InPlace, Kernel, Offer, Request, offered_lowered};
use deuteron_codegen::lower::{LoweredRows, RowLaunch, lower_with_origins};
use deuteron_graph::memory;
use deuteron_plan::{Structure, Work};

/// Row kernels as tile programs.
pub(crate) struct RowFamily;

impl Family<CpuTarget> for RowFamily {
    fn offer<'a>(&self, request: Request<'a>, _: &'a CpuTarget) -> Option<Box<dyn Offer + 'a>> {
        let Request { group, in_place } = request;
        if *group.structure != Structure::Row {
            return None;
        }
        offered_lowered(move || lower_with_origins(&group).0, work, move |lowered| kernel(lowered, in_place))
    }
}

fn work(LoweredRows { body, launch }: LoweredRows) -> Work {
    let RowLaunch { args, rows, cols, .. } = &launch;
    Counter { program: &emit(&body), args, rows: *rows, cols: *cols }.work()
}

fn kernel(lowered: LoweredRows, in_place: &[InPlace]) -> Kernel {
    stored(lowered, in_place, true)
}

/// The kernel with ordinary stores at any size.
pub(crate) fn with_ordinary_stores(lowered: LoweredRows) -> Kernel {
    stored(lowered, &[], false)
}

fn stored(lowered: LoweredRows, in_place: &[InPlace], may_stream: bool) -> Kernel {
    let program = Arc::new(emit(&lowered.body));
    let mut updates = lowered.updates(in_place);
    updates.retain(|update| reads_before_storing(&program, update.operand as u16, update.result as u16));
    let arguments = lowered.arguments_in_place(&updates);
    let tiles = TileUse { tiles: program.tiles, kept_rows: program.kept, passes: program.passes.len() };
    let source = CpuSource::new(program.clone()).with_tiles(tiles);
    // Results stream where what is touched is large, except into lines that were just read: these are in the cache, so a streaming store
    // saves no read of them and evicts them (`bench/peers_optim.py` times such updates).
    let touched = if may_stream { touched(&arguments) } else { 0 };
    let streamed = arguments.iter().map(|argument| if argument.in_place_of.is_some() { 0 } else { touched }).collect();
    let tasks = RowTasks { program, launch: lowered.launch, streamed };
    // SAFETY: the program has the accesses of the body that the arguments' reach was taken of, and runs over the same rows and columns.
    unsafe { assemble(source, arguments, tasks) }
}

/// The lines of a tile program, each with what it came from in the body.
pub(crate) fn tagged_lines(lowered: &LoweredRows) -> Vec<(String, Option<Origin>)> {
    let (program, passes) = emit_with_origins(&lowered.body);
    // The listing has a line an instruction, row work before strip work, after a line for each pass.
    let mut instructions = passes.iter().flat_map(|pass| pass.row.iter().chain(&pass.strip)).copied();
    let is_instruction = |text: &str| text.starts_with("  row ") || text.starts_with("  strip ");
    let listing = program.to_string();
    let lines = listing.lines().map(|text| {
        let origin = if is_instruction(text) { instructions.next() } else { None };
        (text.to_string(), origin)
    });
    lines.collect()
}

/// A launch of a row kernel.
#[derive(Debug)]
struct RowTasks {
    program: Arc<TileProgram>,
    launch: RowLaunch,
    /// For each argument, the bytes within reach of all of them; 0 where it may not stream.
    streamed: Vec<usize>,
}

impl CpuLaunch for RowTasks {
    fn prepare(&self, threads: usize, isa: Isa) -> Box<dyn CpuTask> {
        let RowLaunch { args, rows, cols, axes } = &self.launch;
        let program = &*self.program;
        let Chunks { length, chunk, chunks } = chunks(program, *rows, *cols);
        let has_partials = !program.partials.is_empty();
        let partial_width: usize = program.partials.iter().map(|partial| partial.width).sum();
        let bound = self.bound();
        // What has no machine code is interpreted.
        let compiled = simd::compile(isa, program, &bound, LargeResults::of(threads)).ok();
        let scratch = || match &compiled {
            Some(compiled) => simd::Scratch::with_code(program, compiled.clone()),
            None => simd::Scratch::for_program(program),
        };
        Box::new(RowTask {
            isa,
            args: bound,
            offsets: args.iter().map(|arg| arg.start()).collect(),
            axes: bind_axes(axes),
            length,
            chunk,
            chunks,
            scratch: (0..threads).map(|_| PerWorker::new(scratch())).collect(),
            partials: match has_partials {
                true => (0..chunks).map(|_| PerWorker::new(memory::zeros(partial_width))).collect(),
                false => Vec::new(),
            },
            finished: memory::zeros(if has_partials { chunks * partial_width } else { 0 }),
            program: self.program.clone(),
        })
    }

    fn machine_code(&self, threads: usize, isa: Isa) -> Option<Result<Vec<String>, Uncovered>> {
        Some(simd::machine_code(isa, &self.program, &self.bound(), LargeResults::of(threads)))
    }
}

impl RowTasks {
    /// The arguments without their addresses.
    fn bound(&self) -> Vec<BoundArg> {
        let args = self.launch.args.iter().zip(&self.streamed);
        args.map(|(arg, &touched)| bind(&arg.leading, arg.table_rows, touched)).collect()
    }
}

struct RowTask {
    program: Arc<TileProgram>,
    isa: Isa,
    args: Vec<BoundArg>,
    offsets: Vec<usize>,
    axes: Vec<Axis>,
    /// Rows, or elements of a flat kernel.
    length: usize,
    chunk: usize,
    chunks: usize,
    /// One for each worker.
    scratch: Vec<PerWorker<simd::Scratch>>,
    /// `chunks` blocks of partial sums.
    partials: Vec<PerWorker<Vec<f32>>>,
    finished: Vec<f32>,
}

impl CpuTask for RowTask {
    fn scratch(&self) -> ScratchSizes {
        ScratchSizes::default()
    }

    unsafe fn run(&mut self, run: Run<'_>) -> Result<(), TaskError> {
        for ((arg, &address), &offset) in self.args.iter_mut().zip(run.addresses).zip(&self.offsets) {
            // An argument without elements may lie anywhere, so this is no more than a number until it is used.
            arg.base = address.wrapping_add(offset);
        }
        let fault: Mutex<Option<Fault>> = Mutex::new(None);
        let this = &*self;
        let work = |worker: usize, chunk: usize| {
            // SAFETY: the caller's promise; chunks are disjoint ranges of rows, each handed out once.
            if let Err(found) = unsafe { this.run_chunk(worker, chunk) } {
                let mut first = fault.lock().unwrap_or_else(PoisonError::into_inner);
                // The lowest row is reported whatever the order of threads.
                if first.is_none_or(|known| found.row < known.row) {
                    *first = Some(found);
                }
            }
        };
        run.workers.run(self.chunks, &work)?;
        if let Some(fault) = fault.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(fault.into());
        }
        if !self.program.partials.is_empty() {
            // SAFETY: the caller's promise.
            unsafe { self.finish() };
        }
        Ok(())
    }
}

impl RowTask {
    unsafe fn run_chunk(&self, worker: usize, chunk: usize) -> Result<(), Fault> {
        let span: Range<usize> = chunk * self.chunk..((chunk + 1) * self.chunk).min(self.length);
        let launch = simd::Launch { program: &self.program, args: &self.args, axes: &self.axes, window: None };
        // SAFETY: a worker runs one chunk at a time, so its scratch is its own.
        let scratch = unsafe { self.scratch[worker].get() };
        let partials: &mut [f32] = match self.partials.get(chunk) {
            // SAFETY: each chunk is run once, by one worker.
            Some(partials) => unsafe { partials.get() },
            None => &mut [],
        };
        partials.fill(0.0);
        // SAFETY: the caller's promise covers all rows of the launch, so these too.
        unsafe { simd::run(self.isa, &launch, span, scratch, partials) }
    }

    unsafe fn finish(&mut self) {
        let width = self.finished.len().checked_div(self.chunks).unwrap_or(0);
        for (chunk, partials) in self.partials.iter_mut().enumerate() {
            self.finished[chunk * width..(chunk + 1) * width].copy_from_slice(partials.get_mut());
        }
        let launch = simd::Launch { program: &self.program, args: &self.args, axes: &self.axes, window: None };
        // SAFETY: the caller's promise covers the column sums.
        unsafe { simd::finish(self.isa, &launch, &self.finished, self.chunks) };
    }
}
