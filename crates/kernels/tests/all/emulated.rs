//! Kernels for Hopper on a CPU: the text that a GPU would be given runs on the machine of `emulator/emulator.h`, which stands
//! in for the instructions. It checks synchronisation and index arithmetic, not speed. It needs a C++ compiler: `$CXX`, else
//! `c++`.
//!
//! A kernel has a driver of its own in `emulator/`, which makes its operands and knows what it should compute.

mod attention;
mod bytes;
mod cross_entropy;
mod experts;
mod ladder;
mod matmul;
mod meeting;

use std::fmt::Write;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget, Grid, Grids, Mapped, Word};
use deuteron_codegen::tile::Part;
use deuteron_codegen::{Kernel, Launch, Source};
use deuteron_graph::Graph;
use deuteron_kernels::{Backend, CudaCatalog, render};
use deuteron_plan::{Machine, Plan, Strategy, Target, plan};

/// What is replaced in a text, and by what.
// A kernel with less patience releases slots more often, and sooner where few blocks run.
const REPLACED: (&str, &str) = ("constexpr int PATIENCE = 100;", "constexpr int PATIENCE = 5;");

/// Parts of the device-side library that the emulator implements in `emulator/tile/`; others are plain C++.
fn is_emulated(part: Part) -> bool {
    !matches!(part, Part::Words | Part::Philox | Part::Warp)
}

/// A text for the emulator.
fn emulated(text: &str) -> String {
    let mut text = text.replace(REPLACED.0, REPLACED.1);
    for part in Part::ALL.into_iter().filter(|&part| is_emulated(part)) {
        text = text.replace(part.text(), "");
    }
    const EXTERN: &str = "extern __shared__ ";
    const SHARED: &str = "__shared__ ";
    while let Some(start) = text.find(EXTERN) {
        let end = start + text[start..].find("[];").expect("an array of unknown size");
        let (element, name) = text[start + EXTERN.len()..end].rsplit_once(' ').expect("a type and a name");
        let pointer = format!("{element}* const {name} = ({element}*)shared_memory();");
        text.replace_range(start..end + "[];".len(), &pointer);
    }
    let mut number = 0;
    while let Some(start) = text.find(SHARED) {
        let end = start + text[start..].find(';').expect("the end of a declaration");
        let (of, names) = text[start + SHARED.len()..end].split_once(' ').expect("a type and a name");
        let variable = |name: &str| {
            number += 1;
            let (name, sizes) = name.split_at(name.find('[').unwrap_or(name.len()));
            format!("{of} (&{name}){sizes} = shared_variable<{number}, {of}{sizes}>()")
        };
        let variables: Vec<String> = names.split(", ").map(variable).collect();
        text.replace_range(start..end, &variables.join("; "));
    }
    text
}

/// The C++ compiler, if there is one.
fn compiler() -> Option<String> {
    let name = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let found = Command::new(&name).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        // Not by a macro, whose lines are shown of tests that fail alone.
        let _ = std::io::Write::write_all(&mut std::io::stderr(), b"skipped: no C++ compiler\n");
    }
    found.then_some(name)
}

/// A kernel that is compiled, and where its files are.
struct TileProgram {
    folder: PathBuf,
}

impl TileProgram {
    /// `driver` is a file of `emulator/` that includes `kernel.h`, the text, and runs ENTRY.
    fn compile(compiler: &str, name: &str, driver: &str, entry: &str, text: &str) -> TileProgram {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated").join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("kernel.h"), emulated(text)).unwrap();
        let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulator");
        let output = Command::new(compiler)
            .args(["-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", "-I"])
            .arg(&own)
            .arg(format!("-DENTRY={entry}"))
            .arg("-I")
            .arg(&folder)
            .arg(own.join(driver))
            .arg("-o")
            .arg(folder.join("program"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        TileProgram { folder }
    }

    /// What it says of a launch, and whether all went well. A text may have mistakes, of which this one is made; none is 0.
    fn run(&self, launch: &str, resident: usize, lanes: Lanes, seeds: Range<u64>, mistake: usize) -> (bool, String) {
        let file = self.folder.join("launch");
        fs::write(&file, launch).unwrap();
        let lanes = if lanes == Lanes::Apart { "apart" } else { "together" };
        let mut command = Command::new(self.folder.join("program"));
        command.arg(file).arg(resident.to_string()).arg(lanes).args(seeds.map(|seed| seed.to_string()));
        let output = command.env("MISTAKE", mistake.to_string()).output().unwrap();
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.success(), said.concat())
    }
}

/// Whether the lanes of a warp run one after another before another warp does, as they mostly do on a GPU, or at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lanes {
    Together,
    Apart,
}

/// A grid as `emulator/launch.h` reads it.
fn written(grid: &Grid) -> String {
    assert_eq!(grid.blocks[1..], [1, 1]);
    let mut text = format!("grid {} {} {} {}\n", grid.blocks[0], grid.threads, grid.shared, grid.cluster);
    for word in &grid.words {
        match word {
            Word::Number(number) => writeln!(text, "n {}", *number as i64),
            Word::Argument { position, offset } | Word::Unwritten { position, offset } => {
                writeln!(text, "a {position} {offset}")
            }
            Word::Workspace(offset) => writeln!(text, "w {offset}"),
            Word::Persistent(offset) => writeln!(text, "k {offset}"),
            Word::Fault => writeln!(text, "f 0"),
            Word::Map(map) => {
                let position = match map.of {
                    Mapped::Argument(position) => position as i64,
                    Mapped::Workspace => -1,
                };
                let list = |numbers: &[u64]| numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
                let (sizes, strides, tile) = (list(&map.sizes), list(&map.strides), list(&map.tile.map(u64::from)));
                writeln!(text, "m {position} {} {} {sizes} {strides} {tile}", map.offset, map.rank)
            }
        }
        .unwrap();
    }
    text + "end\n"
}

#[test]
fn the_machine_itself() {
    let Some(compiler) = compiler() else { return };
    let program = TileProgram::compile(&compiler, "the_machine_itself", "machine.cpp", "", "");
    let run = |which: &str, resident: &str, seed: &str| {
        let output = Command::new(program.folder.join("program")).args([which, resident, seed]).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for seed in ["1", "2", "3"] {
        assert_eq!(run("products", "1", seed), (true, String::new()));
        assert_eq!(run("cluster", "1", seed), (true, String::new()));
        assert_eq!(run("cluster", "8", seed), (true, String::new()));
        let (ok, said) = run("missing", "4", seed);
        assert!(!ok && said.contains("deadlock") && said.contains("the barrier"), "{said}");
        assert_eq!(run("waiting", "8", seed), (true, String::new()));
        assert_eq!(
            run("waiting", "2", seed),
            (true, String::new()),
            "block 0 stays, the others come one after another"
        );
        let (ok, said) = run("waiting", "1", seed);
        assert!(!ok && said.contains("deadlock") && said.contains("polls"), "{said}");
    }
}

/// What stands in a text, what stands there by mistake, and what is said of it.
type Mistake = (&'static str, &'static str, &'static str);

/// A kernel, its launch as its driver reads it, and the driver.
struct Launched {
    source: CudaSource,
    entry: &'static str,
    launch: String,
    driver: &'static str,
}

/// Every mistake of a list is noticed, alone, for some of so many seeds, while so many blocks run at once; a text without one is right.
fn check_mistakes(name: &str, launched: Launched, resident: usize, seeds: u64, mistakes: &[Mistake]) {
    let Some(compiler) = compiler() else { return };
    let Launched { source, entry, launch, driver } = launched;
    let text = with_mistakes(&source.text, mistakes);
    let program = TileProgram::compile(&compiler, name, driver, entry, &text);
    let run = |mistake: usize| program.run(&launch, resident, Lanes::Together, 1..seeds + 1, mistake);
    let (ok, said) = run(0);
    assert!(ok, "{said}");
    for (i, (right, _, notice)) in mistakes.iter().enumerate() {
        let (ok, said) = run(i + 1);
        assert!(!ok && said.contains("FAILED") && said.contains(notice), "a mistake at {right}:\n{said}");
    }
}

/// A text that makes one mistake of a list, the one that the environment numbers, or none.
fn with_mistakes(text: &str, mistakes: &[Mistake]) -> String {
    let mut text = String::from("static const int mistake = atoi(getenv(\"MISTAKE\"));\n") + text;
    for (i, (right, wrong, _)) in mistakes.iter().enumerate() {
        assert_eq!(text.matches(right).count(), 1, "{right}");
        let number = i + 1;
        let both = match right.strip_suffix(';') {
            Some(_) => format!("if (mistake == {number}) {{ {wrong} }} else {{ {right} }}"),
            None => format!("(mistake == {number} ? {wrong} : {right})"),
        };
        text = text.replace(right, &both);
    }
    text
}

/// The only kernel of a graph, its launch and its grids.
fn only(graph: &Graph, plan: &Plan, processors: usize) -> (CudaSource, Launch, Grids) {
    let [group] = plan.groups.as_slice() else { panic!("not one kernel: {plan}") };
    let cuda = CudaTarget::new(Arch::Sm90a, processors);
    let Kernel { source, launch } = render(group.draft(graph, &plan.placement), &Backend::Cuda(cuda)).unwrap();
    let Source::Cuda(source) = source else { panic!("{source}") };
    let grids = launch.grids().expect("grids").clone();
    (source, launch, grids)
}

fn greedy(graph: &Graph) -> Plan {
    let machine = Machine::profile("h200").unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
    plan(graph, target, Strategy::Greedy, &[]).unwrap()
}

/// A part with instructions of a GPU has a file of the emulator, and one without them has none.
#[test]
fn the_emulator_mirrors_the_device_side_library() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulator/tile");
    let mut files: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    files.sort();
    let mut emulated: Vec<&str> = Part::ALL.into_iter().filter(|&part| is_emulated(part)).map(Part::name).collect();
    emulated.sort_unstable();
    assert_eq!(files, emulated);
    for part in Part::ALL {
        assert!(is_emulated(part) || !part.text().contains("asm"), "{part:?}");
        for name in functions(part.text()).into_iter().filter(|_| is_emulated(part)) {
            let file = fs::read_to_string(folder.join(part.name()).with_extension("h")).unwrap();
            assert!(file.contains(&format!("{name}(")), "{part:?} has {name}");
        }
    }
}

/// Names of the functions that a text defines.
fn functions(text: &str) -> Vec<&str> {
    let name = |line: &'_ str| -> Option<usize> { line.contains("__forceinline__").then(|| line.find('('))? };
    let before = text.lines().filter_map(|line| name(line).map(|end| &line[..end]));
    before.filter_map(|before| before.rsplit([' ', '*', '&']).next()).collect()
}
