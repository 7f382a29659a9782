//! Ladders as `deuteron bench --ladder --json` describes them, a row per rung; or what measures them, as long as nothing has.
//!
//! Files may be appended to: the newest row of a rung is shown.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::rows::{Row, Rows, Table, percent, three, times};

/// The columns that tell one rung from another.
const KEYS: [&str; 5] = ["op", "rows", "cols", "dtype", "rung"];

/// What measures ladders on a CPU.
const CPU: &str = "cargo xtask bench --machine xeon-2core --ladders";

/// What a table shows of a rung beside its name and its time.
#[derive(Clone, Copy)]
enum Shown {
    /// launches as the driver counts them, and the share of a copy's bandwidth
    Copy,
    /// launches, and the speed-up over the first rung
    First,
    /// kernels and both
    Both,
}

/// Row work on a GPU.
pub fn rows(root: &Path) -> Result<String> {
    table(root, "h200-row-ladder.csv", "on an H200", "bash bench/gpu.sh ladders", Shown::Copy)
}

/// The same for the guide's first step: the ops that it reads, at the size at which memory limits them.
pub fn large_rows(root: &Path) -> Result<String> {
    let is_shown = |line: &&str| !line.starts_with("| softmax") && !line.contains("_act 1024x768");
    Ok(rows(root)?.lines().filter(is_shown).map(|line| format!("{line}\n")).collect())
}

/// Attention with residual and norm, on a GPU.
pub fn launches(root: &Path) -> Result<String> {
    table(root, "h200-launch-ladder.csv", "on an H200", "bash bench/gpu.sh ladders", Shown::First)
}

/// On a CPU.
pub fn cpu(root: &Path) -> Result<String> {
    table(root, "xeon-2core-ladder.csv", "on the 2-core Xeon", CPU, Shown::Both)
}

fn table(root: &Path, file: &str, machine: &str, command: &str, shown: Shown) -> Result<String> {
    let rows = match Rows::read_or(root, file, machine, command)? {
        Ok(rows) => rows,
        Err(missing) => return Ok(missing),
    };
    let latest = rows.latest(&KEYS)?;
    let copy = |row: Row<'_>| row.number("fraction_of_copy").map(percent);
    let first = |row: Row<'_>| row.number("speedup").map(times);
    let launches = |row: Row<'_>| row.text("launches").map(String::from);
    match shown {
        Shown::Copy => {
            let mut table = Table::new(["op", "rung", "what it adds", "launches", "microseconds", "of a copy"]);
            for row in latest {
                let [op, rung, about, us] = rung(row)?;
                table.row([op, rung, about, launches(row)?, us, copy(row)?]);
            }
            Ok(table.end())
        }
        Shown::First => {
            let mut table = Table::new(["op", "rung", "what it adds", "launches", "microseconds", "over the first"]);
            for row in latest {
                let [op, rung, about, us] = rung(row)?;
                table.row([op, rung, about, launches(row)?, us, first(row)?]);
            }
            Ok(table.end())
        }
        Shown::Both => {
            let header = ["op", "rung", "what it adds", "kernels", "microseconds", "over the first", "of a copy"];
            let mut table = Table::new(header);
            for row in latest {
                let [op, rung, about, us] = rung(row)?;
                let kernels = row.text("kernels")?.into();
                table.row([op, rung, about, kernels, us, first(row)?, copy(row)?]);
            }
            Ok(table.end())
        }
    }
}

/// Op with its size, rung, what it adds, microseconds.
fn rung(row: Row<'_>) -> Result<[String; 4]> {
    let [op, rows, cols, dtype] = ["op", "rows", "cols", "dtype"].map(|column| row.text(column));
    let op = format!("{} {}x{} {}", op?, rows?, cols?, dtype?);
    Ok([op, row.text("rung")?.into(), row.text("about")?.into(), three(row.number("us")?)])
}

/// A matmul followed by GELU, on a CPU.
pub fn cpu_matmul(root: &Path) -> Result<String> {
    let file = "xeon-2core-matmul-ladder.csv";
    let rows = match Rows::read_or(root, file, "on the 2-core Xeon", CPU)? {
        Ok(rows) => rows,
        Err(missing) => return Ok(missing),
    };
    let mut table = Table::new(["rung", "what it adds", "runs as", "milliseconds", "GFLOP/s", "over the first"]);
    for row in rows.latest(&["rows", "inner", "columns", "dtype", "rung"])? {
        let [rung, about, variant] = ["rung", "about", "variant"].map(|column| row.text(column).map(String::from));
        let (us, gflops) = (row.number("us")?, row.number("tflops")? * 1e3);
        table.row([rung?, about?, variant?, three(us / 1e3), three(gflops), times(row.number("speedup")?)]);
    }
    Ok(table.end())
}

/// Attention alone on a GPU: one sequence of 1024 beside eight.
pub fn attention(root: &Path) -> Result<String> {
    let rows = Rows::read(root, ATTENTION)?;
    let mut table =
        Table::new(["rung", "what it adds", "one sequence of 1024, us", "eight, us", "over the one before", "TFLOP/s"]);
    let mut before: Option<f64> = None;
    for large in attention_rungs(&rows)? {
        let name = large.text("rung")?;
        let one = [("op", "attention"), ("rows", "1024"), ("cols", "768"), ("dtype", "bf16"), ("rung", name)];
        let small = rows.newest(&one)?;
        let us = large.number("us")?;
        let over = before.map(|before| times(before / us)).unwrap_or_default();
        before = Some(us);
        let tflops = format!("{:.1}", large.number("tflops")?);
        table.row([name.into(), large.text("about")?.into(), three(small.number("us")?), three(us), over, tflops]);
    }
    Ok(table.end())
}

/// What the shipped kernel of attention reaches, of eight sequences.
pub fn attention_shipped(root: &Path) -> Result<String> {
    let rows = Rows::read(root, ATTENTION)?;
    let all = attention_rungs(&rows)?;
    let last = all.last().with_context(|| format!("{ATTENTION} has no rung of eight sequences"))?;
    let (us, tflops) = (three(last.number("us")?), last.number("tflops")?);
    Ok(format!("The shipped kernel needs {us} microseconds: it reaches {tflops:.0} of 780 TFLOP/s.\n"))
}

/// The rows of attention alone.
pub const ATTENTION: &str = "h200-attention-ladder.csv";

/// The rungs of attention at eight sequences, from naive to shipped.
pub fn attention_rungs(rows: &Rows) -> Result<Vec<Row<'_>>> {
    let latest = rows.latest(&KEYS)?.into_iter();
    let is = |row: &Row<'_>, column: &str, value: &str| row.text(column).is_ok_and(|text| text == value);
    let sized = |row: &Row<'_>| is(row, "rows", "8192") && is(row, "cols", "768") && is(row, "dtype", "bf16");
    let rungs: Vec<Row<'_>> = latest.filter(|row| is(row, "op", "attention") && sized(row)).collect();
    ensure!(!rungs.is_empty(), "{ATTENTION} has no row of attention of bf16[8192,768]");
    Ok(rungs)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    /// A folder with a file of results, which is removed with it.
    struct Results(PathBuf);

    impl Results {
        fn new(test: &str, file: &str, text: &str) -> Results {
            let root = std::env::temp_dir().join(format!("deuteron-ladders-{test}-{}", std::process::id()));
            fs::create_dir_all(root.join("bench/results")).unwrap();
            fs::write(root.join("bench/results").join(file), text).unwrap();
            Results(root)
        }
    }

    impl Drop for Results {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    /// The columns that `csv_rows` of `bench/gpu.sh` writes: those of `LadderRow`, then commit and date.
    const HEADER: &str = "op,rows,cols,dtype,device,rung,about,kernels,launches,other_nodes,verified,worst_ratio,us,gbps,copy_gbps,\
                          fraction_of_copy,tflops,speedup,registers,commit,date\n";

    #[test]
    fn rows_are_shown_once_they_are_there() {
        let text = "op,rows,cols,dtype,rung,about,kernels,us,speedup,fraction_of_copy\n\
                    softmax,8,768,f32,fused,one kernel,1,13.5,1.9,0.20\nsoftmax,8,768,f32,fused,one kernel,1,12.5,2.0,0.25\n";
        let results = Results::new("cpu", "xeon-2core-ladder.csv", text);
        let after = cpu(&results.0).unwrap();
        assert!(
            after.ends_with("---|\n| softmax 8x768 f32 | fused | one kernel | 1 | 12.5 | 2.00x | 25 % |\n"),
            "{after}"
        );
        let before = rows(&results.0).unwrap();
        assert!(before.starts_with("Not measured on an H200 yet: `bash bench/gpu.sh ladders`"), "{before}");
    }

    /// As `cargo xtask bench --ladders` writes them.
    #[test]
    fn rungs_of_a_matmul_on_a_cpu_are_shown() {
        let text = "date,commit,machine,rows,inner,columns,dtype,rung,about,variant,us,tflops,speedup,worst_ratio,device\n\
                    2026-11-19,abc,xeon-2core,256,768,3072,f32,l1_scalar,three loops; then GELU,2 kernels; 1 thread,2500.000,0.00048,1.000,0.100,cpu\n";
        let results = Results::new("matmul", "xeon-2core-matmul-ladder.csv", text);
        let table = cpu_matmul(&results.0).unwrap();
        let expected = "---|\n| l1_scalar | three loops; then GELU | 2 kernels; 1 thread | 2.50 | 0.480 | 1.00x |\n";
        assert!(table.ends_with(expected), "{table}");
    }

    #[test]
    fn rungs_of_row_work_on_a_gpu_are_shown_with_their_launches() {
        let rung = "add_act,1024,768,bf16,cuda 0,l1_two_launches,\"one, two\",1,2,0,True,0.3,9.5,300.0,3000.0,0.1,,1.0,16,abc,2026-11-19\n";
        let results = Results::new("rows", "h200-row-ladder.csv", &[HEADER, rung].concat());
        let table = rows(&results.0).unwrap();
        let expected = "---|\n| add_act 1024x768 bf16 | l1_two_launches | one, two | 2 | 9.50 | 10 % |\n";
        assert!(table.ends_with(expected), "{table}");
    }

    #[test]
    fn rungs_of_launches_are_shown_with_their_launches_and_speed() {
        let rung = "attention_block,1024,768,bf16,cuda 0,1 launch,all,1,1,0,True,0.3,9.5,300.0,3000.0,0.1,12.0,3.25,255,abc,2026-11-19\n";
        let results = Results::new("launches", "h200-launch-ladder.csv", &[HEADER, rung].concat());
        let table = launches(&results.0).unwrap();
        assert!(
            table.ends_with("---|\n| attention_block 1024x768 bf16 | 1 launch | all | 1 | 9.50 | 3.25x |\n"),
            "{table}"
        );
    }

    /// Rows as `bench/gpu.sh` writes them, appended to older ones.
    #[test]
    fn the_newest_rungs_of_attention_are_shown() {
        let rung = |rows: usize, name: &str, us: f64| {
            format!(
                "attention,{rows},768,bf16,cuda 0,{name},new,1,1,0,True,0.1,{us},,,,{:.3},1.0,31,abc,2026-11-19\n",
                1e4 / us
            )
        };
        let old = [rung(1024, "l1_naive", 5000.0), rung(8192, "l1_naive", 50000.0), rung(8192, "l2_tiled", 40000.0)];
        let new = [rung(1024, "l1_naive", 2000.0), rung(1024, "l2_tiled", 200.0), rung(8192, "l1_naive", 10000.0)];
        let text = [HEADER, &old.concat(), &new.concat(), &rung(8192, "l2_tiled", 500.0)].concat();
        let results = Results::new("attention", ATTENTION, &text);
        let table = attention(&results.0).unwrap();
        let expected =
            "---|\n| l1_naive | new | 2000 | 10000 |  | 1.0 |\n| l2_tiled | new | 200 | 500 | 20.00x | 20.0 |\n";
        assert!(table.ends_with(expected), "{table}");
        let sentence = attention_shipped(&results.0).unwrap();
        assert_eq!(sentence, "The shipped kernel needs 500 microseconds: it reaches 20 of 780 TFLOP/s.\n");
    }

    #[test]
    fn a_file_without_rungs_of_attention_is_refused() {
        let results = Results::new("none", ATTENTION, HEADER);
        for made in [attention(&results.0), attention_shipped(&results.0)] {
            assert_eq!(made.unwrap_err().to_string(), format!("{ATTENTION} has no row of attention of bf16[8192,768]"));
        }
    }
}
