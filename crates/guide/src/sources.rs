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
    let source = without_comments(source);
    if !source.contains("__shfl_") {
        return Ok(Verdict::wrong("no shuffle: the last five steps are within one warp, so __shfl_xor_sync does them"));
    }
    let counted = format!("{COUNTERS}{source}");
    let judged = judged(&counted, workshop, Ladder::NormAct, "l3_block_a_row", &graph)?;
    let count = |word: &str| judged.printed.lines().filter(|line| *line == word).count();
    let (barriers, shuffles) = (count("barrier"), count("shuffle"));
    let is_done = (LEAST_BARRIERS..=MOST_BARRIERS).contains(&barriers) && shuffles >= LEAST_SHUFFLES;
    if !judged.verdict.right {
        return Ok(judged.verdict);
    }
    if !is_done {
        return Ok(Verdict::wrong(format!(
            "the result is right, but a row takes {barriers} barriers and {shuffles} shuffles per thread: the rung takes {BARRIERS} barriers, and \
             with the last five steps of both sums by shuffles {LEAST_BARRIERS} to {MOST_BARRIERS} and at least {LEAST_SHUFFLES} shuffles are left; \
             end the loop when 32 sums are left"
        )));
    }
    // Shuffles that the sum does not need are not those of the exercise.
    let without = self::judged(&format!("{NO_SHUFFLES}{source}"), workshop, Ladder::NormAct, "l3_block_a_row", &graph)?;
    Ok(match without.verdict.right {
        true => Verdict::wrong(
            "the result is the same where every lane keeps its own value: the shuffles take no part in the sum",
        ),
        false => judged.verdict,
    })
}

/// Shuffles that give each lane what it had.
const NO_SHUFFLES: &str = r#"
#define __shfl_xor_sync(mask, value, ...) (value)
#define __shfl_sync(mask, value, ...) (value)
"#;

/// Barriers and shuffles that one thread of the first block counts, by lines that it prints.
const COUNTERS: &str = r#"
#define COUNTED(word) (blockIdx.x == 0 && threadIdx.x == 0 ? printf(word "\n") : 0)
#define __syncthreads() (COUNTED("barrier"), __syncthreads())
#define __shfl_xor_sync(...) (COUNTED("shuffle"), __shfl_xor_sync(__VA_ARGS__))
#define __shfl_sync(...) (COUNTED("shuffle"), __shfl_sync(__VA_ARGS__))
"#;

/// Barriers of the rung per row: two sums, each with one before its eight steps, one after each, and one behind.
const BARRIERS: usize = 20;

/// One before the steps of each sum, which other warps wrote, and one behind them.
const LEAST_BARRIERS: usize = 2 * 2;

/// The same without those of five steps, but with one for the sum that the shuffles leave.
const MOST_BARRIERS: usize = BARRIERS - 2 * 4;

/// Five for each of two sums.
const LEAST_SHUFFLES: usize = 10;

pub fn online_softmax(source: &str, workshop: Workshop) -> Result<Verdict, Error> {
    let op = FusedOp::find("attention")?;
    let heads = Heads { positions: 40, width: 64 };
    let sizes = Sizes { heads, ..Sizes::new(40, 64, Dtype::Bf16) };
    let graph = op.graph(&op.operand_types_of(&sizes))?;
    let code = without_comments(source);
    let softmax = code.split("softmax(").nth(1).and_then(|rest| rest.split("extern \"C\"").next());
    let dense = |text: &str| text.split_whitespace().collect::<String>();
    let loops =
        |text: &str| ["for(", "while(", "goto"].iter().map(|word| dense(text).matches(word).count()).sum::<usize>();
    match softmax.map(loops) {
        None => return Ok(Verdict::wrong("there is no kernel `softmax` in the source")),
        Some(loops) if loops > 2 => {
            return Ok(Verdict::wrong(format!("the softmax has {loops} loops; the exercise asks for two")));
        }
        Some(_) => {}
    }
    let verdict = run(source, workshop, Ladder::Attention, "l1_naive", &graph)?;
    if !verdict.right {
        return Ok(verdict);
    }
    let text = graph.to_string();
    let large: Graph = text.replace("scale=0.125", &format!("scale={LARGE}")).parse()?;
    Ok(match run(source, workshop, Ladder::Attention, "l1_naive", &large)?.right {
        true => verdict,
        false => Verdict::wrong(
            "the result is right of small scores only: large ones overflow where the largest so far is not subtracted",
        ),
    })
}

/// A factor of scores that makes them hundreds.
const LARGE: f64 = 30.0;

/// A text without what follows `//` in its lines.
fn without_comments(source: &str) -> String {
    source.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

fn run(source: &str, workshop: Workshop, ladder: Ladder, rung: &str, graph: &Graph) -> Result<Verdict, Error> {
    Ok(judged(source, workshop, ladder, rung, graph)?.verdict)
}

/// What the emulator found, and what the source printed.
struct Judged {
    verdict: Verdict,
    printed: String,
}

fn judged(source: &str, workshop: Workshop, ladder: Ladder, rung: &str, graph: &Graph) -> Result<Judged, Error> {
    let rung: Option<&Rung> = ladder.rungs().iter().find(|known| known.name == rung);
    let choice = Choice { rung, text: Some(source.to_string()) };
    let Workshop { toolchain, folder } = workshop;
    let mut printed = String::new();
    let verdict = match emulate(toolchain, folder, graph, Strategy::Greedy, &choice, SCHEDULES) {
        Ok(emulation) if emulation.verification.holds() => {
            emulation.kernels.iter().for_each(|kernel| printed.push_str(&kernel.printed));
            Verdict::right(format!("within its bound of f64, under {SCHEDULES} orders of its threads."))
        }
        Ok(emulation) => {
            let worst = emulation.verification.worst().map(|worst| worst.comparison);
            let (index, error) = worst.map_or((0, f64::NAN), |worst| (worst.worst_index, worst.error));
            Verdict::wrong(format!("the result is wrong: element {index} is off by {error:.2e}; is a barrier missing?"))
        }
        Err(Error::Emulator(
            error @ (EmulatorError::Kernel(_) | EmulatorError::Compile(_) | EmulatorError::Declaration(_)),
        )) => Verdict::wrong(without_prints(&error.to_string())),
        Err(error) => return Err(error),
    };
    Ok(Judged { verdict, printed })
}

/// A message of the emulator without what the source printed before.
fn without_prints(message: &str) -> String {
    message.lines().filter(|line| !line.starts_with("printf: ")).collect::<Vec<_>>().join("\n")
}
