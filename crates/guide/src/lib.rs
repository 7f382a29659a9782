//! Exercises of the guide (`docs/guide`), with checkers that compute the right answer.
#![forbid(unsafe_code)]

mod answers;
mod sources;

use std::path::Path;

use answers::Right;
use deuteron::Error;
use deuteron::emulate::Toolchain;

/// A question of the guide.
pub struct Exercise {
    /// step and number: `1.2`
    pub number: &'static str,
    /// the question
    pub question: &'static str,
    /// the kind of answer
    pub takes: Takes,
    check: Check,
}

/// The kind of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takes {
    /// a number
    Number,
    /// a file with a graph in text form
    Graph,
    /// a file with CUDA source, for the emulator
    Source,
}

/// Whether an answer is right, with a comment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// whether it is right
    pub right: bool,
    /// a sentence or two
    pub text: String,
}

impl Verdict {
    fn right(text: impl Into<String>) -> Verdict {
        Verdict { right: true, text: text.into() }
    }

    fn wrong(text: impl Into<String>) -> Verdict {
        Verdict { right: false, text: text.into() }
    }
}

/// The requirements of a checker of CUDA source.
#[derive(Clone, Copy)]
pub struct Workshop<'a> {
    /// the compiler for the emulator
    pub toolchain: &'a Toolchain,
    /// the folder for its files
    pub folder: &'a Path,
}

enum Check {
    Number(fn() -> Result<Right, Error>),
    Graph(fn(&str) -> Result<Verdict, Error>),
    Source(fn(&str, Workshop) -> Result<Verdict, Error>),
}

/// All exercises, in the order of the guide.
pub const ALL: [Exercise; 12] = [
    number("1.1", "Bytes that gelu(x + r) moves in one kernel, x and r bf16[2000,768]", answers::fused_bytes),
    number("1.2", "The same with one kernel for the sum and one for the GELU", answers::unfused_bytes),
    graph(
        "1.3",
        "A graph of three inputs f32[256,768] that gives gelu(x + r + s) in one kernel",
        answers::three_inputs,
    ),
    source(
        "1.4",
        "The rung l3_block_a_row of norm_act with shuffles instead of barriers for the last five of its eight steps",
        sources::shuffled_sum,
    ),
    number(
        "2.1",
        "Bytes that attention moves with its scores in memory (the eager plan): 8 sequences of 1024, 12 heads of 64, bf16, on an H200",
        answers::eager_attention_bytes,
    ),
    number(
        "2.2",
        "Floating-point operations of its two products, counting only the keys that a query sees",
        answers::attention_flops,
    ),
    number(
        "2.3",
        "The smallest whole number c for which a score of 64 products c * c overflows f16",
        answers::f16_overflow,
    ),
    source(
        "2.4",
        "The rung l1_naive of attention with a softmax of two loops instead of three",
        sources::online_softmax,
    ),
    number(
        "3.1",
        "Bytes that attention + residual + LayerNorm moves in one launch, sizes as in 2.1",
        answers::one_launch_bytes,
    ),
    graph(
        "3.2",
        "A graph that the planner keeps as one kernel on an H200: a matmul of bf16[8192,768] by bf16[768,3072], a bias and a GELU",
        answers::matmul_epilogue,
    ),
    number("4.1", "Kernels of the chosen plan of GPT-2 124M, batch 8, bf16, on an H200", answers::gpt2_kernels),
    number(
        "4.2",
        "Bytes of keys and values that GPT-2 124M keeps for one sequence of 1024 tokens in bf16",
        answers::cache_bytes,
    ),
];

const fn number(number: &'static str, question: &'static str, check: fn() -> Result<Right, Error>) -> Exercise {
    Exercise { number, question, takes: Takes::Number, check: Check::Number(check) }
}

const fn graph(number: &'static str, question: &'static str, check: fn(&str) -> Result<Verdict, Error>) -> Exercise {
    Exercise { number, question, takes: Takes::Graph, check: Check::Graph(check) }
}

const fn source(
    number: &'static str,
    question: &'static str,
    check: fn(&str, Workshop) -> Result<Verdict, Error>,
) -> Exercise {
    Exercise { number, question, takes: Takes::Source, check: Check::Source(check) }
}

impl Exercise {
    /// The exercise of that number.
    pub fn find(number: &str) -> Option<&'static Exercise> {
        ALL.iter().find(|exercise| exercise.number == number)
    }

    /// Checks an answer. CUDA source needs a workshop.
    pub fn check(&self, answer: &str, workshop: Option<Workshop>) -> Result<Verdict, Error> {
        match (&self.check, workshop) {
            (Check::Number(right), _) => Ok(right()?.compare(answer)),
            (Check::Graph(check), _) => check(answer),
            (Check::Source(check), Some(workshop)) => check(answer, workshop),
            (Check::Source(_), None) => {
                Ok(Verdict::wrong("CUDA source is checked on the emulator, which needs a C++ compiler"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use deuteron::ladder::Ladder;

    use super::*;

    /// The first answer is right, the three after it are not. A number is computed once.
    fn check(number: &str, answers: [&str; 4]) {
        let exercise = Exercise::find(number).unwrap();
        let found = match exercise.check {
            Check::Number(right) => {
                let right = right().unwrap();
                answers.map(|answer| right.compare(answer).right)
            }
            _ => answers.map(|answer| exercise.check(answer, None).unwrap().right),
        };
        assert_eq!(found, [true, false, false, false], "{number}");
    }

    #[test]
    fn numbers() {
        check("1.1", ["9216000", "15360000", "9216", "nine"]);
        check("1.2", ["15,360,000", "9216000", "12288000", ""]);
        check("2.1", ["1660944384", "50331648", "1660.9", "-1"]);
        check("2.2", ["12897484800", "25769803776", "6448742400", "NaN"]);
        check("2.3", ["32", "31", "33", "65504"]);
        check("3.1", ["75500544", "138.4", "75497472", "50331648"]);
        check("4.1", ["86", "136", "85", "299"]);
        check("4.2", ["37748736", "18874368", "75497472", "3145728"]);
    }

    #[test]
    fn graphs() {
        let inputs = "x = input f32[256,768] ; r = input f32[256,768] ; s = input f32[256,768] ; ";
        let answer = |rest: &str| format!("{inputs}{rest}");
        check(
            "1.3",
            [
                &answer("a = add r s ; b = add a x ; y = gelu b ; out y"),
                &answer("a = add x r ; y = gelu a ; z = add y s ; out z"),
                &answer("a = add x r ; b = add a s ; y = gelu b kind=erf ; out y"),
                "x = input f32[256,768] ; y = gelu x ; out y",
            ],
        );
        let inputs = "x = input bf16[8192,768] ; w = weight bf16[768,3072] ; b = weight bf16[3072] ; ";
        let answer = |rest: &str| format!("{inputs}{rest}");
        check(
            "3.2",
            [
                &answer("h = linear x w b ; y = gelu h ; out y"),
                &answer("m = matmul x w ; g = gelu m ; y = add g b ; out y"),
                &answer("h = linear x w b ; out h"),
                "x = input bf16[64,768] ; w = weight bf16[768,3072] ; b = weight bf16[3072] ; h = linear x w b ; y = gelu h ; out y",
            ],
        );
        // Spaces in a shape do not matter, and a comment is no operand.
        let spaced = answer("h = linear x w b ; y = gelu h ; out y").replace("[8192,768]", "[8192, 768]");
        let commented = "# bf16[8192,768]\nx = input bf16[16,768]\nw = weight bf16[768,3072]\nb = weight bf16[3072]\nh = linear x w b\n\
                         y = gelu h\nout y";
        check("3.2", [&spaced, commented, &answer("h = linear x w b ; out h"), &answer("y = gelu x ; out y")]);
    }

    /// A rung's text with replacements.
    fn changed(ladder: Ladder, name: &str, changes: &[(&str, &str)]) -> String {
        let rung = ladder.rungs().iter().find(|rung| rung.name == name).unwrap();
        let text = rung.text().unwrap();
        changes.iter().fold(text, |text, (from, to)| {
            assert!(text.contains(from), "{name} has no {from}");
            text.replacen(from, to, 1)
        })
    }

    fn check_sources(number: &str, answers: [String; 4]) {
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let Ok(toolchain) = Toolchain::find(&compiler) else {
            // Not by a macro, whose lines are shown of tests that fail alone.
            let _ = std::io::Write::write_all(&mut std::io::stderr(), b"skipped: no C++ compiler\n");
            return;
        };
        let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tmp/emulator");
        let toolchain = toolchain.prepared(&machine).unwrap();
        let folder = std::env::temp_dir().join(format!("deuteron-guide-{number}-{}", std::process::id()));
        let workshop = Workshop { toolchain: &toolchain, folder: &folder };
        let exercise = Exercise::find(number).unwrap();
        let verdicts = answers.map(|answer| exercise.check(&answer, Some(workshop)).unwrap());
        std::fs::remove_dir_all(folder).unwrap();
        assert_eq!(verdicts.each_ref().map(|verdict| verdict.right), [true, false, false, false], "{verdicts:?}");
    }

    #[test]
    fn sums_by_shuffles() {
        let shuffles = "float sum = s_sums[threadIdx.x % 32];\n\
             for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);";
        let (steps, last) = (("step > 0", "step >= 32"), ("const float sum = s_sums[0];", shuffles));
        let changed = |changes: &[(&str, &str)]| changed(Ladder::NormAct, "l3_block_a_row", changes);
        let unsynchronised = ("s_sums[threadIdx.x] = x;\n    __syncthreads();", "s_sums[threadIdx.x] = x;");
        check_sources(
            "1.4",
            [changed(&[steps, last]), changed(&[]), changed(&[last]), changed(&[steps, last, unsynchronised])],
        );
        // The name of the loop's variable does not matter; a shuffle that does nothing, and a step too few, do.
        let named = shuffles.replace("mask", "step");
        let dead = "const float unused = __shfl_xor_sync(0xffffffffu, 0.0f, 1), sum = s_sums[0];";
        let four = shuffles.replace("% 32", "% 16").replace("mask = 16", "mask = 8");
        let less = ("step > 0", "step >= 16");
        check_sources(
            "1.4",
            [
                changed(&[steps, (last.0, &named)]),
                changed(&[(last.0, dead)]),
                changed(&[less, (last.0, &four)]),
                changed(&[less, last]),
            ],
        );
        // A rung without barriers, and shuffles beside a sum that needs none.
        let warp = Ladder::NormAct.rungs().iter().find(|rung| rung.name == "l4_warp_a_row").unwrap().text().unwrap();
        let beside = "float sum = 0.0f; for (int i = 0; i < 32; ++i) sum += s_sums[i];\n\
             for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, 0.0f, mask);";
        check_sources(
            "1.4",
            [changed(&[steps, last]), warp.to_string(), changed(&[steps, (last.0, beside)]), changed(&[less, last])],
        );
    }

    #[test]
    fn a_softmax_of_two_loops() {
        let (largest, sum) = (
            "for (int j = 0; j < seen; ++j) most = fmaxf(most, g_row[j]);\n    ",
            "for (int j = 0; j < seen; ++j) sum += expf(g_row[j] - most);",
        );
        let online = |factor: &str| {
            format!(
                "for (int j = 0; j < seen; ++j) {{ const float larger = fmaxf(most, g_row[j]);\n\
                 sum = sum * {factor} + expf(g_row[j] - larger); most = larger; }}"
            )
        };
        let (right, unscaled) = (online("expf(most - larger)"), online("1.0f"));
        let changed = |changes: &[(&str, &str)]| changed(Ladder::Attention, "l1_naive", changes);
        let too_far = right.replace("j < seen", "j < seen - 1");
        check_sources(
            "2.4",
            [
                changed(&[(largest, ""), (sum, &right)]),
                changed(&[]),
                changed(&[(largest, ""), (sum, &unscaled)]),
                changed(&[(largest, ""), (sum, &too_far)]),
            ],
        );
        // No maximum, a constant in its place, and three passes by another word.
        let constant = |value: &str| changed(&[(largest, &format!("most = {value};\n    "))]);
        let passes = "int i = 0; while (i < seen) { sum += expf(g_row[i] - most); ++i; }";
        check_sources(
            "2.4",
            [
                changed(&[(largest, ""), (sum, &right)]),
                constant("0.0f"),
                constant("g_row[0]"),
                changed(&[(sum, passes)]),
            ],
        );
    }
}
