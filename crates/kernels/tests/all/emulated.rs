//! Kernels for Hopper on a CPU: the text that a GPU would be given runs on the emulator (`deuteron_emulator`). It checks synchronisation and
//! index arithmetic, not speed. It needs a C++ compiler: `$CXX`, else `c++`.
//!
//! A kernel has a driver of its own in `emulator/`, which makes its operands and knows what it should compute.

mod accesses;
mod attention;
mod attention_gradient;
mod bytes;
mod cross_entropy;
mod experts;
mod gradient_places;
mod joined;
mod ladder;
mod masks;
mod matmul;
mod meeting;
mod tf32;

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget, Grids};
use deuteron_codegen::tile::Part;
use deuteron_codegen::{Kernel, Launch, Source};
use deuteron_emulator::{Lanes, Program, Schedule, Toolchain, Unit, is_emulated, written};
use deuteron_graph::Graph;
use deuteron_kernels::{Backend, CudaCatalog, render};
use deuteron_plan::{Machine, Plan, Strategy, Target, plan};

/// The C++ compiler, if there is one, with the machine and its headers compiled once.
fn compiler() -> Option<&'static Toolchain> {
    static FOUND: OnceLock<Option<Toolchain>> = OnceLock::new();
    let find = || {
        let found = Toolchain::find(&std::env::var("CXX").unwrap_or_else(|_| "c++".into()));
        if found.is_err() {
            // Not by a macro, whose lines are shown of tests that fail alone.
            let _ = std::io::Write::write_all(&mut std::io::stderr(), b"skipped: no C++ compiler\n");
        }
        let machine = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator");
        found.ok().map(|found| found.prepared(&machine).unwrap_or_else(|error| panic!("{error}")))
    };
    FOUND.get_or_init(find).as_ref()
}

/// A kernel with a driver of `emulator/`.
struct TileProgram(Program);

impl TileProgram {
    /// `driver` is a file of `emulator/` that runs kernels of the text, `entry` first of all.
    fn compile(compiler: &Toolchain, name: &str, driver: &str, entry: &str, text: &str) -> TileProgram {
        let folder: PathBuf = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated").join(name);
        let driver = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulator").join(driver);
        let unit = Unit { folder: &folder, text, driver: Some(&driver), entries: &entries(text, entry) };
        TileProgram(compiler.compile(&unit).unwrap_or_else(|error| panic!("{name}: {error}")))
    }

    /// What it says of a launch, and whether all went well. A text may have mistakes, of which this one is made; none is 0.
    fn run(&self, launch: &str, resident: usize, lanes: Lanes, seeds: Range<u64>, mistake: usize) -> (bool, String) {
        let said = self.0.run(launch, &Schedule { resident, lanes, seeds }, mistake).unwrap();
        (said.ok, said.text)
    }
}

/// The names of a text's kernels, that of `entry` first if it has a name.
fn entries<'a>(text: &'a str, entry: &'a str) -> Vec<&'a str> {
    let name = |rest: &'a str| -> Option<&'a str> {
        let (before, _) = rest.split(['{', ';']).next()?.rsplit_once('(')?;
        before.rsplit([' ', ')']).next()
    };
    let all = text.split("extern \"C\" __global__ void ").skip(1).filter_map(name);
    [entry].into_iter().filter(|entry| !entry.is_empty()).chain(all.filter(|name| *name != entry)).collect()
}

#[test]
fn the_machine_itself() {
    let Some(compiler) = compiler() else { return };
    let program = TileProgram::compile(compiler, "the_machine_itself", "machine.cpp", "", "");
    let run = |which: &str, resident: &str, seed: &str| {
        let said = program.0.run_words(&[which, resident, seed]).unwrap();
        // Its last line says the same as its exit code.
        let said_before = said.text.replace(&format!("{which}: ok\n"), "");
        (said.ok, said_before)
    };
    for seed in ["1", "2", "3"] {
        assert_eq!(run("products", "1", seed), (true, String::new()));
        assert_eq!(run("cut", "1", seed), (true, String::new()));
        assert_eq!(run("cluster", "1", seed), (true, String::new()));
        assert_eq!(run("cluster", "8", seed), (true, String::new()));
        let (ok, said) = run("missing", "4", seed);
        assert!(!ok && said.contains("deadlock") && said.contains("the mbarrier"), "{said}");
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
type Mistake<'a> = (&'a str, &'a str, &'a str);

/// A kernel, its launch as its driver reads it, and the driver.
struct Launched {
    source: CudaSource,
    entry: &'static str,
    launch: String,
    driver: &'static str,
}

/// Every mistake of a list is noticed, alone, for some of this many seeds, while this many blocks run at once; a text without one is right.
fn check_mistakes(name: &str, launched: Launched, resident: usize, seeds: u64, mistakes: &[Mistake]) {
    let Some(compiler) = compiler() else { return };
    let Launched { source, entry, launch, driver } = launched;
    let text = with_mistakes(&source.text, mistakes);
    let program = TileProgram::compile(compiler, name, driver, entry, &text);
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
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../emulator/src/machine/tile");
    let paths = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let headers = paths.filter(|path| path.extension().is_some_and(|extension| extension == "h"));
    let mut files: Vec<String> = headers.map(|path| path.file_stem().unwrap().to_string_lossy().into_owned()).collect();
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
