//! `deuteron kernel`: the generated source.

use anyhow::Result;
use clap::Args;
use deuteron::listing::kernels;
use deuteron::{Bytes, Strategy};

use crate::Outcome;
use crate::input::{DeviceArguments, GraphArguments};
use crate::show;

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    graph: GraphArguments,
    #[command(flatten)]
    device: DeviceArguments,
    /// naive, eager, unfused or fused
    #[arg(long, default_value = "fused")]
    plan: String,
    /// Print the graph in text form instead
    #[arg(long)]
    text: bool,
    /// Print an array of {name, kind, bytes_read, bytes_written, tiles, kept_rows, passes, source}
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let engine = arguments.device.engine()?;
    let strategy: Strategy = arguments.plan.parse()?;
    let graph = arguments.graph.graph()?;
    if arguments.text {
        print!("{graph}");
        return Ok(Outcome::Good);
    }
    let listings = kernels(&engine, &graph, strategy)?;
    if arguments.json {
        show::json(&listings)?;
        return Ok(Outcome::Good);
    }
    for (index, listing) in listings.iter().enumerate() {
        let (read, written) = (Bytes(listing.bytes_read), Bytes(listing.bytes_written));
        println!("kernel {index}: {}  [{}; reads {read}, writes {written}]", listing.name, listing.kind);
        println!("{}", listing.source);
    }
    Ok(Outcome::Good)
}
