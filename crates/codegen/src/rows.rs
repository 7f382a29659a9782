//! Arguments of row work, alone or around the core of another kernel: their reach, results that replace operands,
//! and locations of indices.

use deuteron_graph::NodeId;

use crate::argument::{ArgBinding, Argument, Lookup};
use crate::body::{Access, ArgSpec, Body, Stage};
use crate::cpu::program::TileProgram;
use crate::kernel::InPlace;
use crate::lower::{LoweredRows, RowLaunch};

/// Positions of an operand and of the result that is written in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArgUpdate {
    /// position of what is read
    pub operand: usize,
    /// position of what is written
    pub result: usize,
}

/// Arguments of which some results are in place of operands.
pub fn in_place(mut arguments: Vec<Argument>, updates: &[ArgUpdate]) -> Vec<Argument> {
    for update in updates {
        arguments[update.result].in_place_of = Some(update.operand);
    }
    arguments
}

/// Types with the arguments of a row kernel.
pub trait RowArguments {
    /// in the order of a launch
    fn row_arguments(&self) -> &[ArgSpec];
}

impl RowArguments for Body {
    fn row_arguments(&self) -> &[ArgSpec] {
        &self.args
    }
}

impl RowArguments for TileProgram {
    fn row_arguments(&self) -> &[ArgSpec] {
        &self.args
    }
}

/// Elements from its first one on that an argument of row work over this many rows and columns reaches.
pub fn reach(spec: &ArgSpec, binding: &ArgBinding, rows: usize, cols: usize) -> usize {
    if rows == 0 {
        return 0;
    }
    match spec.access {
        Access::Row | Access::GatheredRow { .. } if cols == 0 => 0,
        Access::Row | Access::GatheredRow { .. } => binding.last_row().saturating_add(cols),
        Access::PerRow => binding.last_row().saturating_add(1),
        // Beside other work, sums over rows are of all columns.
        Access::Columns => cols,
    }
}

impl LoweredRows {
    /// Its arguments, as a device needs them.
    pub fn arguments(&self) -> Vec<Argument> {
        let RowLaunch { args, rows, cols, .. } = &self.launch;
        let width = |position: usize| {
            let widths = self.body.stages.iter().filter_map(|stage| match *stage {
                Stage::ColumnSum { arg, width, .. } => (usize::from(arg) == position).then_some(width),
                Stage::RowReduce { .. } | Stage::Store { .. } => None,
            });
            widths.max().unwrap_or(0)
        };
        let elements = |position: usize, spec: &ArgSpec| match spec.access {
            Access::Columns => width(position),
            Access::Row if self.body.flat => rows.saturating_mul(*cols),
            _ => reach(spec, &args[position], *rows, *cols),
        };
        let specs = self.body.args.iter().enumerate();
        specs.map(|(position, spec)| Argument::new(&args[position], elements(position, spec))).collect()
    }

    /// The same where results are in place of operands.
    pub fn arguments_in_place(&self, updates: &[ArgUpdate]) -> Vec<Argument> {
        in_place(self.arguments(), updates)
    }

    /// Results whose elements lie where the elements of their operand do, one for one, and whose operand is read nowhere else.
    /// Whether each element is read before it is written is for the backend to say. An operand of one element is left out: it
    /// may be read by many threads.
    pub fn updates(&self, wanted: &[InPlace]) -> Vec<ArgUpdate> {
        let (args, specs) = (&self.launch.args, &self.body.args);
        let only = |base: NodeId| {
            let mut positions = (0..args.len()).filter(|&position| args[position].base == base);
            let whole = |&position: &usize| specs[position].access == Access::Row && args[position].offset == 0;
            positions.next().filter(|_| positions.next().is_none()).filter(whole)
        };
        let found = wanted.iter().filter_map(|&InPlace { operand, result }| {
            let (operand, result) = (only(operand)?, only(result)?);
            let fits = !args[operand].written && args[result].written && args[operand].dtype == args[result].dtype;
            (fits && self.body.flat).then_some(ArgUpdate { operand, result })
        });
        found.collect()
    }

    /// Where indices of gathered rows stand.
    pub fn lookups(&self) -> Vec<Lookup> {
        let args = &self.launch.args;
        let specs = self.body.args.iter().enumerate().filter_map(|(argument, spec)| match spec.access {
            Access::GatheredRow { index } => {
                let (indices, table_rows) = (usize::from(index), args[argument].table_rows);
                let (offset, axes) = (args[indices].offset, args[indices].leading.clone());
                Some(Lookup { argument, indices, offset, axes, table_rows })
            }
            Access::Row | Access::PerRow | Access::Columns => None,
        });
        specs.collect()
    }
}
