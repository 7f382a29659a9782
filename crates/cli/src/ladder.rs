//! `deuteron ladder`: prints the kernels of an op from naive to shipped.

use anyhow::{Context, Result, bail};
use clap::Args;
use deuteron::ladder::{Ladder, Rung};

use crate::Outcome;
use crate::show;

#[derive(Args)]
pub struct Arguments {
    /// add_act, norm_act, softmax, attention, attention_add_norm or matmul
    op: String,
    /// Print this rung's CUDA source
    #[arg(long, value_name = "RUNG")]
    show: Option<String>,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let ladder = find(&arguments.op)?;
    match &arguments.show {
        Some(name) => {
            let rung = rung(ladder, name)?;
            let shipped = || {
                format!(
                    "`{name}` is a kernel that is shipped; `deuteron kernel {} --device sm_90a` prints it",
                    ladder.op()
                )
            };
            outln!("// {}: {}", rung.name, rung.about);
            out!("{}", rung.text().with_context(shipped)?);
        }
        None => {
            let lines = ladder.rungs().iter().map(|rung| vec![rung.name.to_string(), rung.about.to_string()]);
            outln!("{}", show::table(&["rung", "what is new"], lines.collect(), 9));
            outln!("`deuteron ladder {} --show RUNG` prints one.", ladder.op());
        }
    }
    Ok(Outcome::Good)
}

/// The ladder of an op.
pub fn find(op: &str) -> Result<Ladder> {
    let names: Vec<&str> = Ladder::ALL.iter().map(|ladder| ladder.op()).collect();
    Ladder::of(op).with_context(|| format!("`{op}` has no ladder; expected one of {}", names.join(", ")))
}

/// A rung by its name.
pub fn rung(ladder: Ladder, name: &str) -> Result<&'static Rung> {
    let rungs = ladder.rungs();
    let names: Vec<&str> = rungs.iter().map(|rung| rung.name).collect();
    match rungs.iter().find(|rung| rung.name == name) {
        Some(rung) => Ok(rung),
        None => bail!("the ladder of {} has no rung `{name}`; expected one of {}", ladder.op(), names.join(", ")),
    }
}
