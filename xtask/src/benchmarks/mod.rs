//! `cargo xtask benchmarks`: tables, sentences and pictures of documents, from the rows in `bench/results`.
//!
//! A document marks what is generated: the lines between `<!-- rows NAME -->` and `<!-- end -->` are written by the function of that
//! name in [`BLOCKS`], or with `op NAME` by [`op::measured`]. All other lines are prose, written by hand. Pictures are whole files below `docs/pictures`.

mod cpu;
mod gpu;
mod ladders;
mod layers;
mod losses;
mod matmul;
mod op;
mod pictures;
mod rows;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::{files, root};

/// Documents with generated blocks.
const DOCUMENTS: [&str; 7] = [
    "README.md",
    "docs/benchmarks.md",
    "docs/guide/src/step-1.md",
    "docs/guide/src/step-2.md",
    "docs/guide/src/step-3.md",
    "docs/guide/src/step-4.md",
    "docs/guide/src/rejected.md",
];

/// Where the pages of ops are, as `op-NAME.md`.
const GUIDE: &str = "docs/guide/src";

/// Makes the text of a block.
type Block = fn(&Path) -> Result<String>;

const BLOCKS: [(&str, Block); 35] = [
    ("summary", gpu::summary),
    ("h200-ops", gpu::ops),
    ("h200-losses", gpu::losses),
    ("worst-losses", losses::worst),
    ("h200-matmul", matmul::gpu),
    ("h200-matmul-ladder", matmul::ladder),
    ("h200-matmul-designs", matmul::designs),
    ("h200-experts", matmul::experts),
    ("h200-experts-int8", matmul::experts_int8),
    ("h200-layers", layers::all),
    ("h200-ffn-crossover", layers::crossover),
    ("h200-ncu-matmul", layers::limits),
    ("h200-ncu", gpu::counters),
    ("h200-gpt2", gpu::gpt2),
    ("h200-python", gpu::python),
    ("h200-attention", gpu::attention),
    ("h200-heads", gpu::heads),
    ("h200-launches", gpu::all_launches),
    ("h200-crossover", gpu::crossover),
    ("h200-decode", gpu::decode),
    ("h200-attention-ladder", ladders::attention),
    ("h200-attention-shipped", ladders::attention_shipped),
    ("h200-row-ladder", ladders::rows),
    ("h200-row-ladder-large", ladders::large_rows),
    ("h200-launch-ladder", ladders::launches),
    ("cpu-ladder", ladders::cpu),
    ("cpu-matmul-ladder", ladders::cpu_matmul),
    ("cpu-ops", cpu::ops),
    ("cpu-fusion", cpu::fusion),
    ("cpu-matmul", matmul::cpu),
    ("cpu-gpt2", cpu::gpt2),
    ("cpu-gpt2-f32", cpu::gpt2_f32),
    ("cpu-gpt2-facts", cpu::gpt2_facts),
    ("planner", cpu::planner),
    ("model", cpu::model),
];

/// Writes everything anew, or with `--check` fails where that would change a file. `words` are those after `benchmarks`.
pub fn run(words: &[&str]) -> Result<()> {
    let root = root()?;
    let made = generated(&root)?;
    match words {
        [] => {
            for (file, text) in stale(&root, &made) {
                let path = root.join(file);
                fs::create_dir_all(path.parent().context("a file has a folder")?)?;
                fs::write(&path, text)?;
                println!("wrote {file}");
            }
            Ok(())
        }
        ["--check"] => check(&root, &made),
        _ => bail!("expected nothing or --check after `benchmarks`, got {}", words.join(" ")),
    }
}

fn check(root: &Path, made: &[(String, String)]) -> Result<()> {
    let files: Vec<&str> = stale(root, made).map(|(file, _)| file.as_str()).collect();
    ensure!(
        files.is_empty(),
        "{} differ from the rows in bench/results: run `cargo xtask benchmarks`",
        files.join(", ")
    );
    Ok(())
}

/// Files whose text differs from what is generated.
fn stale<'a>(root: &'a Path, made: &'a [(String, String)]) -> impl Iterator<Item = &'a (String, String)> {
    made.iter().filter(|(file, text)| fs::read_to_string(root.join(file)).ok().as_ref() != Some(text))
}

/// Every generated file with its text.
fn generated(root: &Path) -> Result<Vec<(String, String)>> {
    let mut made = Vec::new();
    for document in documents(root)? {
        let text = fs::read_to_string(root.join(&document)).with_context(|| document.clone())?;
        let block = |name: &str| {
            if let Some(op) = name.strip_prefix("op ") {
                return op::measured(root, op);
            }
            let known = BLOCKS.iter().find(|(known, _)| *known == name);
            let (_, make) = known.with_context(|| format!("no block is called {name}"))?;
            make(root)
        };
        let text = filled(&text, block).with_context(|| document.clone())?;
        made.push((document, text));
    }
    made.extend(pictures::all(root)?);
    Ok(made)
}

/// All documents with blocks: those above, and the page of each op.
fn documents(root: &Path) -> Result<Vec<String>> {
    let pages = files::entries(&root.join(GUIDE))?.into_iter().filter_map(|path| {
        let name = path.file_name()?.to_str()?;
        name.starts_with("op-").then(|| format!("{GUIDE}/{name}"))
    });
    Ok(DOCUMENTS.into_iter().map(String::from).chain(pages).collect())
}

/// A document with its blocks made anew.
fn filled(text: &str, block: impl Fn(&str) -> Result<String>) -> Result<String> {
    let mut out = String::new();
    let mut open: Option<&str> = None;
    for line in text.lines() {
        let name = line.strip_prefix("<!-- rows ").and_then(|rest| rest.strip_suffix(" -->"));
        match (open, name) {
            (Some(outer), Some(_)) => bail!("block {outer} has no end"),
            (Some(_), None) if line != "<!-- end -->" => continue,
            (Some(_), None) => open = None,
            (None, Some(name)) => {
                open = Some(name);
                out.push_str(&format!("{line}\n{}", block(name)?));
                continue;
            }
            (None, None) => {}
        }
        out.push_str(line);
        out.push('\n');
    }
    ensure!(open.is_none(), "block {} has no end", open.unwrap_or_default());
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_and_pictures_are_what_the_rows_say() {
        let root = root().unwrap();
        check(&root, &generated(&root).unwrap()).unwrap();
    }

    /// A number that is typed by hand is not checked against its row.
    #[test]
    fn every_table_of_the_benchmarks_is_generated_and_every_block_is_used() {
        let texts = DOCUMENTS.map(|document| fs::read_to_string(root().unwrap().join(document)).unwrap());
        let by_hand = filled(&texts[1], |_| Ok(String::new())).unwrap();
        let tables: Vec<&str> = by_hand.lines().filter(|line| line.starts_with('|')).collect();
        assert!(tables.is_empty(), "{tables:?}");
        for (name, _) in BLOCKS {
            let marker = format!("<!-- rows {name} -->");
            assert!(texts.iter().any(|text| text.contains(&marker)), "no document has {marker}");
        }
    }

    #[test]
    fn a_block_is_replaced_and_prose_is_kept() {
        let block = |name: &str| Ok(format!("made {name}\n"));
        let text = "a\n<!-- rows x -->\nold\n<!-- end -->\nb\n";
        let made = filled(text, block).unwrap();
        assert_eq!(made, "a\n<!-- rows x -->\nmade x\n<!-- end -->\nb\n");
        assert_eq!(filled(&made, block).unwrap(), made);
        for bad in ["<!-- rows x -->\n", "<!-- rows x -->\n<!-- rows y -->\n<!-- end -->\n"] {
            assert_eq!(filled(bad, block).unwrap_err().to_string(), "block x has no end");
        }
    }
}
