//! `deuteron ladder`: prints the kernels of an op from naive to shipped.

use anyhow::{Context, Result, bail};
use clap::Args;
use deuteron::bench::{BenchCase, MatmulCase, MatmulEpilogue, RungText, ladder_texts, matmul_texts};
use deuteron::ladder::{Ladder, Rung};
use deuteron::{Dtype, ExpertSizes, FusedOp, Heads, listing};

use crate::Outcome;
use crate::device;
use crate::kernel;
use crate::show;

#[derive(Args)]
pub struct Arguments {
    /// add_act, norm_act, softmax, attention, attention_add_norm or matmul
    op: String,
    /// Print this rung's source: CUDA, and on a CPU the tile programs and loops of its kernels
    #[arg(long, value_name = "RUNG")]
    show: Option<String>,
    /// Print all of it: also the device-side code that rungs and kernels share, at 1024 rows of 768 in bf16
    #[arg(long, requires = "show", conflicts_with = "cpu")]
    full: bool,
    /// The rungs of the CPU instead of those of a GPU
    #[arg(long)]
    cpu: bool,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let ladder = find(&arguments.op)?;
    if arguments.cpu {
        return on_cpu(ladder, arguments.show.as_deref());
    }
    match &arguments.show {
        Some(name) => {
            let rung = rung(ladder, name)?;
            outln!("// {}: {}", rung.name, rung.about);
            match rung.text() {
                Some(text) if !arguments.full => out!("{text}"),
                // It is generated for a size.
                _ => out!("{}", kernel::text(&[listing::rung(ladder, rung)?], arguments.full)?),
            }
        }
        None => print(ladder, "", ladder.rungs().iter().map(|rung| (rung.name, rung.about))),
    }
    Ok(Outcome::Good)
}

/// A table of rungs, and how one is printed.
fn print<'a>(ladder: Ladder, flag: &str, rungs: impl Iterator<Item = (&'a str, &'a str)>) {
    let lines = rungs.map(|(name, about)| vec![name.to_string(), about.to_string()]);
    outln!("{}", show::table(&["rung", "what is new"], lines.collect(), 9));
    outln!("`deuteron ladder {}{flag} --show RUNG` prints one.", ladder.op());
}

/// The rungs of f32 on the CPU, at the sizes at which a GPU's are listed.
fn on_cpu(ladder: Ladder, name: Option<&str>) -> Result<Outcome> {
    let engine = device::cpu(None)?;
    let (rows, cols, dtype) = (1024, 768, Dtype::F32);
    let rungs = match ladder {
        Ladder::Matmul => {
            let epilogue = MatmulEpilogue::None;
            let case = MatmulCase { rows, inner: cols, columns: 3072, transposed: false, epilogue, dtype };
            matmul_texts(&engine, &case)?
        }
        Ladder::AddAct | Ladder::NormAct | Ladder::Softmax | Ladder::Attention | Ladder::AttentionAddNorm => {
            let (op, heads, experts) = (FusedOp::find(ladder.op())?, Heads::default(), ExpertSizes::default());
            ladder_texts(&engine, &BenchCase { op, rows, cols, dtype, backward: false, heads, experts })?
        }
    };
    let Some(name) = name else {
        print(ladder, " --cpu", rungs.iter().map(|rung| (rung.rung.as_str(), rung.about.as_str())));
        return Ok(Outcome::Good);
    };
    let Some(RungText { rung, about, text }) = rungs.iter().find(|rung| rung.rung == name) else {
        return unknown(ladder, name, rungs.iter().map(|rung| rung.rung.as_str()));
    };
    out!("// {rung}: {about}\n{text}");
    Ok(Outcome::Good)
}

fn unknown<'a, T>(ladder: Ladder, name: &str, known: impl Iterator<Item = &'a str>) -> Result<T> {
    let known = known.collect::<Vec<_>>().join(", ");
    bail!("the ladder of {} has no rung `{name}`; expected one of {known}", ladder.op())
}

/// The ladder of an op.
pub fn find(op: &str) -> Result<Ladder> {
    let names: Vec<&str> = Ladder::ALL.iter().map(|ladder| ladder.op()).collect();
    Ladder::of(op).with_context(|| format!("`{op}` has no ladder; expected one of {}", names.join(", ")))
}

/// A rung by its name.
pub fn rung(ladder: Ladder, name: &str) -> Result<&'static Rung> {
    let rungs = ladder.rungs();
    match rungs.iter().find(|rung| rung.name == name) {
        Some(rung) => Ok(rung),
        None => unknown(ladder, name, rungs.iter().map(|rung| rung.name)),
    }
}
