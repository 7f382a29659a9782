//! Row work around a matmul, as each worker runs it: the prologue on rows of the left operand, the epilogue on blocks of accumulators.

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::cpu::bind::bind;
use deuteron_codegen::cpu::program::TileProgram;
use deuteron_codegen::cpu::simd::{self, Axis, BoundArg, Fault, Isa};
use deuteron_graph::Dtype;

use super::{SumBlock, Wanted};
use crate::kernel::{Epilogue, Matmul, MatmulLaunch, Prologue, Role};

/// What a worker needs to run a row program before or after the matmul.
pub(super) struct RowWork {
    /// Its arguments, including the passed ones.
    pub args: Vec<BoundArg>,
    memory: simd::Scratch,
}

impl RowWork {
    /// For a program over this many rows, without addresses, of a launch that touches this many bytes.
    pub fn new(program: &TileProgram, bindings: &SideBindings<'_>, rows: usize, touched: usize) -> RowWork {
        let bound = |arg: usize| match bindings.position(arg) {
            Some(position) => {
                let arg = &bindings.launch.args[position];
                bind(&arg.leading, arg.table_rows, touched)
            }
            // Handed over: the stride of its rows comes with each block.
            None => bind(&[(rows, 0)], 0, 0),
        };
        RowWork { args: (0..program.args.len()).map(bound).collect(), memory: simd::Scratch::for_program(program) }
    }

    /// Makes rows of the left operand, whole ones.
    ///
    /// # Safety
    /// The arguments have addresses, valid for these rows.
    pub unsafe fn fill(&mut self, isa: Isa, prologue: &Prologue<TileProgram>, axes: &[Axis], wanted: Wanted<'_>) {
        debug_assert_eq!((wanted.inner, wanted.count), (0, prologue.body.cols), "whole rows");
        // The program counts rows of the whole operand; those that are wanted lie at `to`.
        let made = &mut self.args[prologue.made];
        made.base = wanted.to.as_mut_ptr().wrapping_sub(wanted.row * wanted.stride).cast();
        made.dims[0].stride = wanted.stride;
        let launch = simd::Launch { program: &prologue.body, args: &self.args, axes, window: None };
        let span = wanted.row..wanted.row + wanted.rows;
        // SAFETY: the caller's promise for these rows of what is read; `to` has room for whole rows. No index is looked up, so
        // there is no fault.
        let _ = unsafe { simd::run(isa, &launch, span, &mut self.memory, &mut []) };
    }

    /// Runs the epilogue of a matmul on a block of accumulators, whose rows are counted over all batches.
    ///
    /// # Safety
    /// The arguments have addresses, valid for the rows and columns of the block, and what is written there is ours alone.
    pub unsafe fn follow(
        &mut self,
        isa: Isa,
        epilogue: &Epilogue<TileProgram>,
        axes: &[Axis],
        block: SumBlock<'_>,
    ) -> Result<(), Fault> {
        // The program counts rows and columns of the whole result; the block is where its own are.
        let back = block.row * block.stride + block.column;
        for (&arg, values) in epilogue.sums.iter().zip([block.sums, block.second]) {
            let sums = &mut self.args[arg];
            sums.base = values.as_mut_ptr().wrapping_sub(back).cast();
            sums.dims[0].stride = block.stride;
        }
        let window = (block.columns < epilogue.body.cols).then_some((block.column, block.column + block.columns));
        let launch = simd::Launch { program: &epilogue.body, args: &self.args, axes, window };
        // SAFETY: the caller's promise for the rows and columns of the block; its sums are the worker's own.
        unsafe { simd::run(isa, &launch, block.row..block.row + block.rows, &mut self.memory, &mut []) }
    }
}

/// Where the arguments of a prologue or an epilogue stand in the launch of its matmul.
pub(super) struct SideBindings<'a> {
    launch: &'a MatmulLaunch,
    roles: Vec<Role>,
    role: fn(usize) -> Role,
}

impl<'a> SideBindings<'a> {
    pub fn new(product: &Matmul<TileProgram>, launch: &'a MatmulLaunch, role: fn(usize) -> Role) -> SideBindings<'a> {
        SideBindings { launch, roles: product.roles(), role }
    }

    /// The position of an argument; none if it is passed.
    pub fn position(&self, arg: usize) -> Option<usize> {
        self.roles.iter().position(|&known| known == (self.role)(arg))
    }

    /// All arguments of a program, with passed ones as `f32` arguments.
    pub fn arguments(&self, program: &TileProgram) -> Vec<ArgBinding> {
        let args = &self.launch.args;
        let binding = |arg| match self.position(arg) {
            Some(position) => args[position].clone(),
            None => args[0].internal(Dtype::F32),
        };
        (0..program.args.len()).map(binding).collect()
    }
}
