//! Ladders as `deuteron bench --ladder --json` describes them, a row per rung; or what measures them, as long as nothing has.

use std::path::Path;

use anyhow::Result;

use super::rows::{Rows, Table, percent, three};

/// Row work on a GPU.
pub fn rows(root: &Path) -> Result<String> {
    table(root, "h200-row-ladder.csv", "on an H200", "bash bench/gpu.sh ladders")
}

/// Attention with residual and norm, on a GPU.
pub fn launches(root: &Path) -> Result<String> {
    table(root, "h200-launch-ladder.csv", "on an H200", "bash bench/gpu.sh ladders")
}

/// On a CPU.
pub fn cpu(root: &Path) -> Result<String> {
    let command = "cargo xtask bench --machine xeon-2core --ladders";
    table(root, "xeon-2core-ladder.csv", "on the 2-core Xeon", command)
}

fn table(root: &Path, file: &str, machine: &str, command: &str) -> Result<String> {
    if !Rows::exists(root, file) {
        return Ok(format!("Not measured {machine} yet: `{command}` writes the rows (`{file}`) that belong here.\n"));
    }
    let rows = Rows::read(root, file)?;
    let mut table = Table::new(["op", "rung", "what it adds", "microseconds", "of a copy"]);
    for row in rows.all() {
        let op = ["op", "rows", "cols", "dtype"].map(|column| row.text(column));
        let [op, rows, cols, dtype] = op;
        let op = format!("{} {}x{} {}", op?, rows?, cols?, dtype?);
        let (rung, about) = (row.text("rung")?.into(), row.text("about")?.into());
        table.row([op, rung, about, three(row.number("us")?), percent(row.number("fraction_of_copy")?)]);
    }
    Ok(table.end())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn rows_are_shown_once_they_are_there() {
        let root = std::env::temp_dir().join(format!("deuteron-ladders-{}", std::process::id()));
        let results = root.join("bench/results");
        fs::create_dir_all(&results).unwrap();
        let before = cpu(&root).unwrap();
        assert!(before.starts_with("Not measured on the 2-core Xeon yet: `cargo xtask bench"), "{before}");
        let text = "op,rows,cols,dtype,rung,about,us,fraction_of_copy\nsoftmax,8,768,f32,fused,one kernel,12.5,0.25\n";
        fs::write(results.join("xeon-2core-ladder.csv"), text).unwrap();
        let after = cpu(&root).unwrap();
        fs::remove_dir_all(&root).unwrap();
        assert!(after.ends_with("| softmax 8x768 f32 | fused | one kernel | 12.5 | 25 % |\n"), "{after}");
    }
}
