//! Row kernels: elementwise work, row reductions and column sums over one space of rows and columns, generated from a body.

#[allow(unsafe_code)]
pub mod cpu;
pub mod cuda;

use crate::argument::{Argument, Lookup};
use crate::body::{Access, ArgSpec, Stage};
use crate::lower::{LoweredRows, RowLaunch};

/// Elements from its first one on that an argument of row work over so many rows and columns reaches.
pub(crate) fn reach(spec: &ArgSpec, binding: &crate::argument::ArgBinding, rows: usize, cols: usize) -> usize {
    if rows == 0 {
        return 0;
    }
    match spec.access {
        Access::Row | Access::GatheredRow { .. } if cols == 0 => 0,
        Access::Row | Access::GatheredRow { .. } => binding.last_row() + cols,
        Access::PerRow => binding.last_row() + 1,
        // Sums over rows are not part of other kernels.
        Access::Columns => 0,
    }
}

impl LoweredRows {
    /// What a device has to know of its arguments.
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
            Access::Row if self.body.flat => rows * cols,
            _ => reach(spec, &args[position], *rows, *cols),
        };
        let specs = self.body.args.iter().enumerate();
        specs.map(|(position, spec)| Argument::new(&args[position], elements(position, spec))).collect()
    }

    /// Where indices of gathered rows stand.
    pub(crate) fn lookups(&self) -> Vec<Lookup> {
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
