//! Blocks about layers around matmuls, and about what limits their kernels.

use std::path::Path;

use anyhow::Result;

use super::rows::{Row, Rows, Table, least, maybe, three, times};

/// Every layer beside torch.
pub fn all(root: &Path) -> Result<String> {
    of(root, "")
}

/// Layers whose name starts with this one.
pub fn of(root: &Path, name: &str) -> Result<String> {
    let rows = Rows::read(root, "h200-layers.csv")?;
    let mut table = Table::new([
        "layer",
        "rows",
        "sizes",
        "dtype",
        "torch eager",
        "torch.compile",
        "beside",
        "ours",
        "over the best of torch",
        "MiB: torch, torch.compile, ours",
    ]);
    for row in rows.latest(&["layer", "rows", "inner", "columns", "dtype"])? {
        if !row.text("layer")?.starts_with(name) {
            continue;
        }
        let [torch, compiled, ours, other] = measured(row, ["torch_us", "compile_us", "ours_us", "other_us"])?;
        let best = least([torch, compiled].into_iter().flatten());
        let memory = measured(row, ["torch_mib", "compile_mib", "ours_mib"])?.map(maybe);
        table.row([
            row.text("layer")?.into(),
            row.text("rows")?.into(),
            format!("{} to {}", row.text("inner")?, row.text("columns")?),
            row.text("dtype")?.into(),
            maybe(torch),
            maybe(compiled),
            other.map(|us| format!("{}: {}", row.text("other").unwrap_or_default(), three(us))).unwrap_or_default(),
            maybe(ours),
            ours.filter(|_| best.is_finite()).map(|ours| times(best / ours)).unwrap_or_default(),
            if memory.iter().all(String::is_empty) { String::new() } else { memory.join(", ") },
        ]);
    }
    Ok(table.end())
}

fn measured<const N: usize>(row: Row<'_>, columns: [&str; N]) -> Result<[Option<f64>; N]> {
    let mut found = [None; N];
    for (slot, column) in found.iter_mut().zip(columns) {
        *slot = row.measured(column)?;
    }
    Ok(found)
}

/// A feed-forward network of few rows as one launch, which was dropped, and as two.
pub fn crossover(root: &Path) -> Result<String> {
    let rows = Rows::read(root, "h200-ffn-crossover.csv")?;
    let mut table = Table::new(["columns", "rows", "one launch", "two launches", "one over two"]);
    for row in rows.latest(&["cols", "rows"])? {
        let (one, two) = (row.number("one_launch_us")?, row.number("two_launches_us")?);
        table.row([row.text("cols")?.into(), row.text("rows")?.into(), three(one), three(two), times(two / one)]);
    }
    Ok(table.end())
}

/// What limits the matmul kernels whose bars are missed.
pub fn limits(root: &Path) -> Result<String> {
    let rows = match Rows::read_or(root, "h200-ncu-matmul.csv", "on an H200", "bash bench/gpu.sh limits")? {
        Ok(rows) => rows,
        Err(missing) => return Ok(missing),
    };
    let mut table = Table::new([
        "matmul",
        "variant",
        "kernel",
        "us",
        "DRAM, MB",
        "DRAM",
        "L2 hits",
        "L2",
        "tensor pipe",
        "issue",
        "occupancy",
        "registers",
        "warps wait for",
    ]);
    for row in rows.latest(&["case", "rows", "inner", "columns", "dtype", "variant", "kernel"])? {
        let share = |column: &str| {
            Ok::<_, anyhow::Error>(row.measured(column)?.map(|of| format!("{of:.0} %")).unwrap_or_default())
        };
        let wait = |words: &str, count: &str| -> Result<String> {
            let count = row.measured(count)?.map(|count| format!(" {count:.1}")).unwrap_or_default();
            Ok(format!("{}{count}", row.text(words)?))
        };
        table.row([
            format!(
                "{}: {} rows, {} to {}, {}",
                row.text("case")?,
                row.text("rows")?,
                row.text("inner")?,
                row.text("columns")?,
                row.text("dtype")?
            ),
            row.text("variant")?.into(),
            format!("`{}`", row.text("kernel")?),
            three(row.number("time_us")?),
            three(row.number("dram_bytes")? / 1e6),
            share("dram_percent")?,
            share("l2_hit_percent")?,
            share("l2_percent")?,
            share("tensor_percent")?,
            share("issue_percent")?,
            share("occupancy_percent")?,
            row.text("registers")?.into(),
            format!("{}, {}", wait("waits_for", "waits")?, wait("waits_next_for", "waits_next")?),
        ]);
    }
    Ok(table.end())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::benchmarks::matmul;

    /// Tables whose rows a later run writes: a sentence before, and then the rows.
    #[test]
    fn rows_of_limits_and_of_int8_experts_are_shown_once_they_are_there() {
        let root = std::env::temp_dir().join(format!("deuteron-layers-{}", std::process::id()));
        let results = root.join("bench/results");
        fs::create_dir_all(&results).unwrap();
        for (before, part) in [(limits(&root).unwrap(), "limits"), (matmul::experts_int8(&root).unwrap(), "experts")] {
            assert!(
                before.starts_with(&format!("Not measured on an H200 yet: `bash bench/gpu.sh {part}`")),
                "{before}"
            );
        }
        let text = "case,rows,inner,columns,dtype,variant,kernel,chosen,launches,time_us,dram_bytes,dram_percent,l2_hit_percent,l2_percent,\
                    tensor_percent,issue_percent,occupancy_percent,registers,waits_for,waits,waits_next_for,waits_next\n\
                    gelu,8192,768,3072,bf16,\"tiles, in turn\",turns,True,1,63.5,55000000,20.1,80.2,,71.9,30.4,18,168,wgmma,3.14,memory,1.06\n";
        fs::write(results.join("h200-ncu-matmul.csv"), text).unwrap();
        let text = "rows,inner,columns,experts,bf16_us,int8_us,matmuls_us,triton_us,bf16_mib,int8_mib\n\
                    64,4096,4096,8,50,60,,75,0.5,64\n";
        fs::write(results.join("h200-experts-int8.csv"), text).unwrap();
        let (limits, experts) = (limits(&root).unwrap(), matmul::experts_int8(&root).unwrap());
        fs::remove_dir_all(&root).unwrap();
        let line = "| gelu: 8192 rows, 768 to 3072, bf16 | tiles, in turn | `turns` | 63.5 | 55.0 | 20 % | 80 % | 72 % | 30 % | 18 % | 168 | \
                    wgmma 3.1, memory 1.1 |\n";
        assert!(limits.ends_with(line), "{limits}");
        assert!(experts.ends_with("| 8 | 64 | 75.0 | 50.0 | 1.50x | 60.0 | 0.500 |\n"), "{experts}");
    }
}
