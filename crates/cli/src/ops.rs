//! `deuteron ops`: the catalogue.

use anyhow::Result;
use clap::Args;
use deuteron::{Dtype, FusedOp};
use serde::Serialize;

use crate::Outcome;
use crate::show;

#[derive(Args)]
pub struct Arguments {
    /// Print an array of {name, formula, forward, backward, cpu, cuda, dtypes}
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    formula: &'static str,
    forward: bool,
    backward: bool,
    cpu: bool,
    cuda: bool,
    dtypes: Vec<&'static str>,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let rows: Vec<Row> = FusedOp::catalog()
        .iter()
        .map(|op| Row {
            name: op.name(),
            formula: op.formula(),
            forward: true,
            backward: op.has_backward(),
            cpu: true,
            cuda: true,
            dtypes: Dtype::FLOATS.iter().map(|dtype| dtype.name()).collect(),
        })
        .collect();
    show::report(&rows, arguments.json, |rows| {
        let lines = rows.iter().map(|row| {
            let backward = if row.backward { "yes" } else { "no" };
            vec![row.name.into(), row.formula.into(), backward.into(), row.dtypes.join(" ")]
        });
        outln!("{}", show::table(&["op", "computes", "backward", "dtypes"], lines.collect(), 9));
    })?;
    Ok(Outcome::Good)
}
