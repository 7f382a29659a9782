//! Checkers of CUDA source: the emulator runs it in place of a rung.

use deuteron::emulate::{Choice, EmulatorError, emulate};
use deuteron::ladder::{Ladder, Rung};
use deuteron::{Dtype, Error, FusedOp, Graph, Heads, Sizes, Strategy};

use crate::{Verdict, Workshop};

/// Orders of the threads under which a source must be right.
const SCHEDULES: u64 = 3;

pub fn shuffled_sum(source: &str, workshop: Workshop) -> Result<Verdict, Error> {
    let op = FusedOp::find("norm_act")?;
    let graph = op.graph(&op.operand_types(4, 768, Dtype::F32))?;
    if !without_comments(source).contains("__shfl_xor_sync") {
        return Ok(Verdict::wrong("no shuffle: the last five steps are within one warp, so __shfl_xor_sync does them"));
    }
    if source.contains("step > 0") {
        return Ok(Verdict::wrong("the loop still has all eight steps; end it when 32 sums are left"));
    }
    run(source, workshop, Ladder::NormAct, "l3_block_a_row", &graph)
}

pub fn online_softmax(source: &str, workshop: Workshop) -> Result<Verdict, Error> {
    let op = FusedOp::find("attention")?;
    let heads = Heads { positions: 40, width: 64 };
    let sizes = Sizes { heads, ..Sizes::new(40, 64, Dtype::Bf16) };
    let graph = op.graph(&op.operand_types_of(&sizes))?;
    let code = without_comments(source);
    let softmax = code.split("softmax(").nth(1).and_then(|rest| rest.split("extern \"C\"").next());
    match softmax.map(|text| text.matches("for (").count()) {
        None => Ok(Verdict::wrong("there is no kernel `softmax` in the source")),
        Some(loops) if loops > 2 => {
            Ok(Verdict::wrong(format!("the softmax has {loops} loops; the exercise asks for two")))
        }
        Some(_) => run(source, workshop, Ladder::Attention, "l1_naive", &graph),
    }
}

/// A text without what follows `//` in its lines.
fn without_comments(source: &str) -> String {
    source.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

fn run(source: &str, workshop: Workshop, ladder: Ladder, rung: &str, graph: &Graph) -> Result<Verdict, Error> {
    let rung: Option<&Rung> = ladder.rungs().iter().find(|known| known.name == rung);
    let choice = Choice { rung, text: Some(source.to_string()) };
    let Workshop { toolchain, folder } = workshop;
    match emulate(toolchain, folder, graph, Strategy::Greedy, &choice, SCHEDULES) {
        Ok(emulation) if emulation.verification.holds() => {
            Ok(Verdict::right(format!("within its bound of f64, under {SCHEDULES} orders of its threads.")))
        }
        Ok(emulation) => {
            let worst = emulation.verification.worst().map(|worst| worst.comparison);
            let (index, error) = worst.map_or((0, f64::NAN), |worst| (worst.worst_index, worst.error));
            Ok(Verdict::wrong(format!("the result is wrong: element {index} is off by {error:.2e}")))
        }
        Err(Error::Emulator(
            error @ (EmulatorError::Kernel(_) | EmulatorError::Compile(_) | EmulatorError::Declaration(_)),
        )) => Ok(Verdict::wrong(error.to_string())),
        Err(error) => Err(error),
    }
}
