//! `cargo xtask mutate`: small mistakes, each made in a copy of the tree, and the test that must find it.
//!
//! The lists are `xtask/mutations/*.toml`. A mutation names a file, a text that occurs in it once, what takes its place, and the test that
//! fails then. The copy is below `target/`, so that the tree itself is never touched, and keeps what it compiled for the next mutation.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::{files, printed, program, root};

/// A test that takes longer than this is stuck in a loop that the mutation made endless.
const LONGEST: Duration = Duration::from_secs(300);

/// Names the interpreter for tests of the Python package, which has the wheel installed.
const PYTHON: &str = "DEUTERON_PYTHON";

/// One mistake.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutation {
    /// from the root of the repository
    file: String,
    /// occurs once in the file
    text: String,
    /// what stands there instead
    becomes: String,
    /// what must fail: a package, perhaps `--lib` or `--test NAME`, and the name of a test; or `python` and what pytest is given
    test: String,
}

/// One file of mutations.
#[derive(Deserialize)]
struct List {
    mutation: Vec<Mutation>,
}

/// What became of a mutation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Killed,
    Survived,
    /// It does not compile: the compiler found it, so it tests nothing.
    Broken,
    /// Nothing here runs its test.
    Skipped,
}

/// Makes the mutations whose file, test or list contains one of the words; all without words. `--csv FILE` before the words appends a
/// row per mutation to a table.
pub fn run(words: &[&str]) -> Result<()> {
    let root = root()?;
    let (table, words) = match words {
        ["--csv", file, words @ ..] => (Some(Table::open(Path::new(file))?), words),
        ["--csv"] => bail!("--csv needs a file"),
        words => (None, words),
    };
    let all = lists(&root)?;
    let stale = stale(&root, &all)?;
    ensure!(stale.is_empty(), "texts that do not occur exactly once:\n{}", stale.join("\n"));
    let is_wanted = |(list, mutation): &&(String, Mutation)| {
        words.is_empty()
            || words.iter().any(|word| list == word || mutation.file.contains(word) || mutation.test.contains(word))
    };
    let chosen: Vec<&(String, Mutation)> = all.iter().filter(is_wanted).collect();
    ensure!(!chosen.is_empty(), "no mutation has {} in its list, file or test", words.join(" or "));
    let copy = Copy::new(&root)?;
    let tests: BTreeSet<&str> = chosen.iter().map(|(_, mutation)| mutation.test.as_str()).collect();
    for test in tests {
        let outcome = copy.test(test)?;
        ensure!(
            matches!(outcome, Outcome::Survived | Outcome::Skipped),
            "{test} fails without any mutation: {outcome:?}"
        );
    }
    let mut counts = [0usize; 4];
    for (number, (list, mutation)) in chosen.iter().enumerate() {
        let start = Instant::now();
        let outcome = copy.with(mutation)?;
        counts[outcome as usize] += 1;
        let seconds = start.elapsed().as_secs_f64();
        if let Some(table) = &table {
            table.add(list, mutation, outcome, seconds)?;
        }
        println!("{:>3}/{} {outcome:?} in {seconds:.0} s: {}", number + 1, chosen.len(), described(mutation));
    }
    let [killed, survived, broken, skipped] = counts;
    println!("{killed} killed, {survived} survived, {broken} that do not compile, {skipped} skipped");
    ensure!(survived + broken == 0, "{survived} mutations survived and {broken} do not compile");
    Ok(())
}

fn described(mutation: &Mutation) -> String {
    let Mutation { file, text, becomes, test } = mutation;
    format!("{file}: `{}` becomes `{}` ({test})", one_line(text), one_line(becomes))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A file with a row per mutation that was made.
struct Table {
    file: PathBuf,
}

impl Table {
    const HEADER: &str = "date,list,file,text,becomes,test,outcome,seconds\n";

    /// Begins the file with a header if it is new.
    fn open(file: &Path) -> Result<Table> {
        let table = Table { file: file.to_path_buf() };
        if !file.exists() {
            table.append(Table::HEADER)?;
        }
        Ok(table)
    }

    fn add(&self, list: &str, mutation: &Mutation, outcome: Outcome, seconds: f64) -> Result<()> {
        let Mutation { file, text, becomes, test } = mutation;
        let quoted = |text: &str| format!("\"{}\"", one_line(text).replace('"', "\"\""));
        let words = [list, file, text, becomes, test].map(quoted).join(",");
        let date = printed(Command::new("date").arg("+%Y-%m-%d"))?;
        self.append(&format!("{date},{words},{},{seconds:.0}\n", format!("{outcome:?}").to_lowercase()))
    }

    fn append(&self, text: &str) -> Result<()> {
        let file = fs::File::options().append(true).create(true).open(&self.file);
        file.and_then(|mut file| file.write_all(text.as_bytes())).with_context(|| self.file.display().to_string())
    }
}

/// All mutations, each with the name of its list.
fn lists(root: &Path) -> Result<Vec<(String, Mutation)>> {
    let mut all = Vec::new();
    for path in files::entries(&root.join("xtask").join("mutations"))? {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path)?;
        let list: List = toml::from_str(&text).with_context(|| path.display().to_string())?;
        all.extend(list.mutation.into_iter().map(|mutation| (name.clone(), mutation)));
    }
    Ok(all)
}

/// Mutations whose text does not occur exactly once, or that change nothing.
fn stale(root: &Path, all: &[(String, Mutation)]) -> Result<Vec<String>> {
    let mut stale = Vec::new();
    for (list, mutation) in all {
        let text = fs::read_to_string(root.join(&mutation.file)).unwrap_or_default();
        let count = text.matches(&mutation.text).count();
        if count != 1 || mutation.text == mutation.becomes {
            stale.push(format!("{list}: {count} times: {}", described(mutation)));
        }
    }
    Ok(stale)
}

/// A copy of the tree.
struct Copy {
    tree: PathBuf,
    target: PathBuf,
}

impl Copy {
    /// Brings the copy up to date.
    fn new(root: &Path) -> Result<Copy> {
        let base = root.join("target").join("mutate");
        let copy = Copy { tree: base.join("tree"), target: base.join("target") };
        files::copy_tree(root, &copy.tree)?;
        Ok(copy)
    }

    /// Makes a mutation, runs its test, and takes it back.
    fn with(&self, mutation: &Mutation) -> Result<Outcome> {
        let path = self.tree.join(&mutation.file);
        let text = fs::read_to_string(&path)?;
        fs::write(&path, text.replacen(&mutation.text, &mutation.becomes, 1))?;
        let outcome = self.test(&mutation.test);
        fs::write(&path, text)?;
        outcome
    }

    fn test(&self, test: &str) -> Result<Outcome> {
        let words: Vec<&str> = test.split_whitespace().collect();
        match words.as_slice() {
            ["python", rest @ ..] => self.python(rest),
            [package, rest @ ..] => self.cargo(package, rest),
            [] => bail!("a mutation without a test"),
        }
    }

    fn cargo(&self, package: &str, words: &[&str]) -> Result<Outcome> {
        let cargo = |last: &[&str]| {
            let mut command = Command::new(program());
            command.args(["test", "--quiet", "--package", package]).args(words).args(last);
            command.current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.target);
            command
        };
        if !cargo(&["--no-run"]).stdout(Stdio::null()).stderr(Stdio::null()).status()?.success() {
            return Ok(Outcome::Broken);
        }
        let (ok, output) = within(&mut cargo(&[]), &self.target)?;
        let ran =
            output.lines().filter_map(|line| line.strip_prefix("running ")?.split(' ').next()?.parse::<usize>().ok());
        ensure!(!ok || ran.sum::<usize>() > 0, "no test is called `{}` in {package}", words.join(" "));
        Ok(if ok { Outcome::Survived } else { Outcome::Killed })
    }

    /// The package of the copy, with the compiled part of the wheel.
    fn python(&self, words: &[&str]) -> Result<Outcome> {
        let Some(python) = std::env::var_os(PYTHON) else {
            println!("warning: {PYTHON} names no interpreter with the wheel: python {} is skipped", words.join(" "));
            return Ok(Outcome::Skipped);
        };
        let find = ["-c", "import deuteron._native as native; print(native.__file__)"];
        let native = PathBuf::from(printed(Command::new(&python).args(find).current_dir(&self.target))?);
        let name = native.file_name().context("the interpreter has no wheel of deuteron")?;
        let package = self.tree.join("python");
        fs::copy(&native, package.join("deuteron").join(name))?;
        let mut command = Command::new(&python);
        command.args(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]).args(words).current_dir(&package);
        command.env("PYTHONPATH", &package).env("PYTHONDONTWRITEBYTECODE", "1");
        let (ok, output) = within(&mut command, &self.target)?;
        ensure!(ok || !output.contains("no tests ran"), "no test is called `{}`", words.join(" "));
        Ok(if ok { Outcome::Survived } else { Outcome::Killed })
    }
}

/// Runs a command, and ends it and all it started after the longest time; whether it succeeded, and what it printed.
fn within(command: &mut Command, folder: &Path) -> Result<(bool, String)> {
    fs::create_dir_all(folder)?;
    let log = folder.join("mutation.log");
    let mut child = command.stdout(fs::File::create(&log)?).stderr(Stdio::null()).process_group(0).spawn()?;
    let start = Instant::now();
    let ok = loop {
        if let Some(status) = child.try_wait()? {
            break status.success();
        }
        if start.elapsed() > LONGEST {
            Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]).status()?;
            child.wait()?;
            break false;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    Ok((ok, String::from_utf8_lossy(&fs::read(&log)?).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_the_table_holds_any_text() {
        let path = std::env::temp_dir().join(format!("deuteron-mutations-{}.csv", std::process::id()));
        let text = "a,\n  \"b\"".to_string();
        let mutation = Mutation { file: "f".into(), text, becomes: String::new(), test: "t".into() };
        for outcome in [Outcome::Killed, Outcome::Survived] {
            Table::open(&path).unwrap().add("list", &mutation, outcome, 2.4).unwrap();
        }
        let written = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let lines: Vec<&str> = written.lines().collect();
        assert_eq!(lines[0], Table::HEADER.trim_end());
        let without_date = |line: &str| line.split_once(',').unwrap().1.to_string();
        assert_eq!(without_date(lines[1]), r#""list","f","a, ""b""","","t",killed,2"#);
        assert_eq!(without_date(lines[2]), r#""list","f","a, ""b""","","t",survived,2"#);
        assert_eq!(lines.len(), 3);
    }

    #[test]
    fn every_mutation_has_a_place_and_a_test() {
        let root = root().unwrap();
        let all = lists(&root).unwrap();
        assert_eq!(stale(&root, &all).unwrap(), Vec::<String>::new());
        assert!(all.len() >= 120, "{} mutations", all.len());
        let sources: String = ["crates", "python/tests"]
            .iter()
            .flat_map(|folder| files::below(&root.join(folder)).unwrap())
            .filter(|path| files::has_extension(path, &["rs", "py"]))
            .map(|path| fs::read_to_string(path).unwrap())
            .collect();
        for (_, mutation) in &all {
            let name = mutation.test.rsplit([' ', ':']).next().unwrap();
            let named = [format!("fn {name}("), format!("def {name}("), format!("mod {name}")];
            assert!(named.iter().any(|name| sources.contains(name)), "no test {name}: {}", described(mutation));
        }
    }
}
