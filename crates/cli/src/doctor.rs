//! `deuteron doctor`: what this machine has.

use anyhow::Result;
use clap::Args;
use deuteron::Bytes;
use deuteron::doctor::doctor;

use crate::Outcome;
use crate::input::DeviceArguments;
use crate::show;

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    device: DeviceArguments,
    /// Print {version, device, instruction_sets, copy, cuda} as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let engine = arguments.device.engine()?;
    let bar = show::progress(None);
    bar.set_message("measuring copies");
    let report = doctor(&engine, &[256 << 10, 4 << 20, 32 << 20, 1 << 30])?;
    bar.finish_and_clear();
    if arguments.json {
        show::json(&report)?;
        return Ok(Outcome::Good);
    }
    println!("deuteron {}", report.version);
    println!("device            {}", report.device);
    println!("instruction sets  {}", report.instruction_sets.join(", "));
    println!("gpu               {}", report.cuda);
    let lines = report.copy.iter().map(|row| {
        vec![
            Bytes(row.bytes as u64).to_string(),
            format!("{:.1}", row.ordinary_gbps),
            format!("{:.1}", row.streaming_gbps),
            format!("{:.1}", row.copy_gbps),
        ]
    });
    let header = ["copy of", "ordinary GB/s", "streaming GB/s", "copy GB/s"];
    println!("{}", show::table(&header, lines.collect(), 1));
    println!("Read and written bytes both counted, medians. \"copy\" is the faster of the two.");
    Ok(Outcome::Good)
}
