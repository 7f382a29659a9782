//! `deuteron bench matmul`: every matmul variant that the GPU supports, or the ladder from a naive kernel to ours, also on a CPU.

use std::str::FromStr;

use anyhow::{Result, ensure};
use clap::Args;
use deuteron::bench::{
    MatmulCase, MatmulEpilogue, MatmulRung, MatmulRungCheck, VariantCheck, VariantRow, VariantRun, check_matmul,
    check_matmul_ladder, matmul_ladder, matmul_variants, run_fastest,
};
use deuteron::{Dtype, Engine};

use crate::Outcome;
use crate::show;

/// Arguments of `bench matmul` beside rows and dtype.
#[derive(Args)]
pub struct MatmulArguments {
    /// For matmul: sizes of the weights, inner size x columns, with a suffix t if they are stored transposed [default: those of GPT-2 124M; 768x3072 with --ladder]
    #[arg(long, value_delimiter = ',', value_name = "KxN")]
    weights: Vec<Weights>,
    /// For matmul: epilogues to measure, one or more of none, bias, gelu, residual, norm [default: none]
    #[arg(long, value_delimiter = ',')]
    epilogue: Vec<MatmulEpilogue>,
    /// For matmul with --once: run only the library, our variant that is predicted to be the fastest and the one that plans choose, at the
    /// full size and without a check, for a profiler
    #[arg(long, requires = "once", conflicts_with = "ladder")]
    pub fastest: bool,
}

/// The layout of a weight.
#[derive(Clone, Copy)]
struct Weights {
    inner: usize,
    columns: usize,
    transposed: bool,
}

impl FromStr for Weights {
    type Err = String;

    fn from_str(word: &str) -> Result<Weights, String> {
        let expected = || format!("expected sizes such as 768x2304, or 768x50257t for transposed weights; got {word}");
        let (sizes, transposed) = word.strip_suffix('t').map_or((word, false), |sizes| (sizes, true));
        let (inner, columns) = sizes.split_once('x').ok_or_else(expected)?;
        let size = |word: &str| word.parse().ok().filter(|&size| size > 0).ok_or_else(expected);
        Ok(Weights { inner: size(inner)?, columns: size(columns)?, transposed })
    }
}

/// The projections of a layer of GPT-2 124M, and its head.
const GPT2: [(usize, usize, bool); 5] =
    [(768, 2304, false), (768, 768, false), (768, 3072, false), (3072, 768, false), (768, 50257, true)];

/// The weights of its ladder: those of the layer's first linear after the norm, which has the most work.
const LADDER: [(usize, usize, bool); 1] = [(768, 3072, false)];

impl MatmulArguments {
    /// Whether none of them is given.
    pub fn is_empty(&self) -> bool {
        self.weights.is_empty() && self.epilogue.is_empty() && !self.fastest
    }

    /// The given weights, or these if none are given.
    fn cases(&self, rows: &[usize], dtype: Dtype, weights: &[(usize, usize, bool)]) -> Result<Vec<MatmulCase>> {
        ensure!(rows.iter().all(|&rows| rows > 0), "expected one row or more, got 0");
        let usual = weights.iter().map(|&(inner, columns, transposed)| Weights { inner, columns, transposed });
        let usual: Vec<Weights> = usual.collect();
        let weights = if self.weights.is_empty() { &usual } else { &self.weights };
        let epilogues = if self.epilogue.is_empty() { &[MatmulEpilogue::None][..] } else { &self.epilogue };
        let mut cases = Vec::new();
        for &rows in rows {
            for &Weights { inner, columns, transposed } in weights {
                let case = |&epilogue| MatmulCase { rows, inner, columns, transposed, epilogue, dtype };
                cases.extend(epilogues.iter().map(case));
            }
        }
        Ok(cases)
    }

    /// Measures all variants and prints the results.
    pub fn run(&self, engine: &Engine, rows: &[usize], dtype: Dtype, json: bool) -> Result<Outcome> {
        let all = each(&self.cases(rows, dtype, &GPT2)?, |case| matmul_variants(engine, case))?;
        if json {
            show::json(&all)?;
        } else {
            print(&all);
        }
        Ok(Outcome::of(all.iter().all(|row| row.verified)))
    }

    /// Times every rung of the ladder and prints the results.
    pub fn run_ladder(&self, engine: &Engine, rows: &[usize], dtype: Dtype, json: bool) -> Result<Outcome> {
        let all = each(&self.cases(rows, dtype, &LADDER)?, |case| matmul_ladder(engine, case))?;
        show::report(&all, json, |all| print_ladder(all))?;
        Ok(Outcome::of(all.iter().all(|row| row.verified)))
    }

    /// Runs every rung of the ladder once, and prints its error.
    pub fn check_ladder(&self, engine: &Engine, rows: &[usize], dtype: Dtype, json: bool) -> Result<Outcome> {
        let all: Vec<MatmulRungCheck> =
            each(&self.cases(rows, dtype, &LADDER)?, |case| check_matmul_ladder(engine, case))?;
        show::report(&all, json, |all| {
            for row in all {
                let wrong = if row.verified { "" } else { " WRONG" };
                outln!("matmul {}: error {:.2} of its bound{wrong}", row.rung, row.worst_ratio);
            }
        })?;
        Ok(Outcome::of(all.iter().all(|row| row.verified)))
    }

    /// Runs the variants that matter once, and prints the names of their launches.
    pub fn run_fastest(&self, engine: &Engine, rows: &[usize], dtype: Dtype, json: bool) -> Result<Outcome> {
        let all: Vec<VariantRun> = each(&self.cases(rows, dtype, &GPT2)?, |case| run_fastest(engine, case))?;
        show::report(&all, json, |all| {
            for run in all {
                let VariantRun { rows, inner, columns, epilogue, dtype, variant, launches, .. } = run;
                let chosen = if run.chosen { ", in plans" } else { "" };
                let launches = if launches.is_empty() { "launches of its choice".into() } else { launches.join(", ") };
                outln!("{rows}x{inner}x{columns} {dtype} {epilogue}: {variant}{chosen}: {launches}");
            }
        })?;
        Ok(Outcome::Good)
    }

    /// Runs every variant once, and prints its error.
    pub fn check(&self, engine: &Engine, rows: &[usize], dtype: Dtype, json: bool) -> Result<Outcome> {
        let all: Vec<VariantCheck> = each(&self.cases(rows, dtype, &GPT2)?, |case| check_matmul(engine, case))?;
        let failed: Vec<&VariantCheck> = all.iter().filter(|check| !check.verified).collect();
        if json {
            show::json(&all)?;
        } else {
            outln!("{} kernels ran once; {} exceeded their bounds.", all.len(), failed.len());
            failed.iter().for_each(|check| outln!("{}: {:.2} of its bound", check.variant, check.worst_ratio));
        }
        Ok(if failed.is_empty() { Outcome::Good } else { Outcome::Failed })
    }
}

/// The results of all cases, with a progress bar.
fn each<T>(cases: &[MatmulCase], find: impl Fn(&MatmulCase) -> Result<Vec<T>, deuteron::Error>) -> Result<Vec<T>> {
    let bar = show::progress(Some(cases.len() as u64));
    let mut all = Vec::new();
    for case in cases {
        all.extend(find(case)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(all)
}

fn print(rows: &[VariantRow]) {
    let header = ["rows x inner x columns", "epilogue", "variant", "in plans", "verified", "time", "TFLOP/s"];
    let line = |row: &VariantRow| {
        let transposed = if row.transposed { "t" } else { "" };
        vec![
            format!("{}x{}x{}{transposed} {}", row.rows, row.inner, row.columns, row.dtype),
            row.epilogue.clone(),
            row.variant.clone(),
            if row.chosen { "yes" } else { "" }.to_string(),
            if row.verified { "yes" } else { "NO" }.to_string(),
            show::milliseconds(row.us / 1e3),
            format!("{:.0}", row.tflops),
        ]
    };
    outln!("{}", show::table(&header, rows.iter().map(line).collect(), 5));
    if let Some(row) = rows.first() {
        outln!("{}, medians, variants in turn over rotating buffers. `t`: transposed weights.", row.device);
    }
}

fn print_ladder(rows: &[MatmulRung]) {
    let header = [
        "rows x inner x columns",
        "rung",
        "what is new",
        "cut",
        "in plans",
        "time",
        "TFLOP/s",
        "vs first",
        "of cuBLASLt",
        "registers",
        "error / bound",
    ];
    let line = |row: &MatmulRung| {
        vec![
            format!("{}x{}x{} {}", row.rows, row.inner, row.columns, row.dtype),
            row.rung.clone(),
            row.about.clone(),
            row.variant.clone(),
            if row.chosen { "yes" } else { "" }.to_string(),
            show::milliseconds(row.us / 1e3),
            if row.tflops < 1.0 { format!("{:.4}", row.tflops) } else { format!("{:.1}", row.tflops) },
            format!("{:.2}x", row.speedup),
            row.over_library.map_or("-".into(), |ratio| format!("{ratio:.2}x")),
            row.registers.map_or("-".into(), |registers| registers.to_string()),
            format!("{:.2}{}", row.worst_ratio, if row.verified { "" } else { " WRONG" }),
        ]
    };
    outln!("{}", show::table(&header, rows.iter().map(line).collect(), 5));
    if let Some(row) = rows.first() {
        let buffers = if row.registers.is_some() { " over rotating buffers" } else { "" };
        outln!("{}, medians, rungs in turn{buffers}.", row.device);
    }
}
