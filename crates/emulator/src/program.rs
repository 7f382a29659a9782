//! A kernel compiled with a driver, which creates or reads its operands, runs its grids and reports the results.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::{EmulatorError, emulated};

/// Files of the machine, by their names below its folder.
macro_rules! machine {
    ($($name:literal)*) => {
        const MACHINE: &[(&str, &str)] = &[$(($name, include_str!(concat!("machine/", $name)))),*];
    };
}

machine! {
    "accesses.h" "collective.cpp" "collective.h" "cuda.h" "emulator.h" "launch.cpp" "launch.h" "machine.cpp" "memory.cpp"
    "memory.h" "run.cpp" "schedule.cpp" "schedule.h" "state.h"
    "tile/async_copy.cpp" "tile/async_copy.h" "tile/cluster.cpp" "tile/cluster.h" "tile/conversions.h" "tile/dependent_launch.h"
    "tile/global_memory.h" "tile/matrix.h" "tile/mbarrier.cpp" "tile/mbarrier.h" "tile/named_barrier.cpp" "tile/named_barrier.h"
    "tile/registers.h" "tile/shared_address.h" "tile/signals.h" "tile/tma.cpp" "tile/tma.h" "tile/wgmma.cpp" "tile/wgmma.h"
}

/// The machine's object file in its folder.
const MACHINE_OBJECT: &str = "machine.o";

/// A C++ compiler.
#[derive(Debug, Clone)]
pub struct Toolchain {
    compiler: String,
    /// whether programs count their accesses
    counts: bool,
    /// where the machine's files are, if they are there already
    machine: Option<PathBuf>,
}

/// What is compiled.
pub struct Unit<'a> {
    /// where its files go
    pub folder: &'a Path,
    /// the text of a GPU
    pub text: &'a str,
    /// the program that includes `emulator.h`, first of all, and `kernel.h`, the text, and runs it; if none, the machine's own
    pub driver: Option<&'a Path>,
    /// the kernel that a driver of one kernel runs, as the macro ENTRY; empty where it runs several
    pub entry: &'a str,
}

/// A kernel that is compiled, and where its files are.
#[derive(Debug)]
pub struct Program {
    folder: PathBuf,
}

/// The orders in which threads run.
#[derive(Debug, Clone)]
pub struct Schedule {
    /// blocks that run at once
    pub resident: usize,
    /// lanes of a warp
    pub lanes: Lanes,
    /// an order for each
    pub seeds: Range<u64>,
}

/// Whether the lanes of a warp run before another warp does, as they mostly do on a GPU, or at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lanes {
    /// warp by warp
    Together,
    /// each by itself
    Apart,
}

/// The output of a program, and whether it succeeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// whether all went well
    pub ok: bool,
    /// what it printed: what kernels did, then messages
    pub text: String,
    /// what kernels printed
    pub printed: String,
}

impl Toolchain {
    /// The compiler of that name, if it runs.
    pub fn find(name: &str) -> Result<Toolchain, EmulatorError> {
        let found = Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
        if found {
            Ok(Toolchain { compiler: name.to_string(), counts: false, machine: None })
        } else {
            Err(EmulatorError::NoCompiler(name.into()))
        }
    }

    /// The same, but that programs of the machine's own driver count what accesses of memory cost.
    pub fn counting(self) -> Toolchain {
        Toolchain { counts: true, ..self }
    }

    /// Whether programs count their accesses.
    pub fn counts(&self) -> bool {
        self.counts
    }

    /// The same for many kernels: the machine is compiled here and now, its headers too. A unit of 1,350 lines takes 1.2 s then instead of
    /// 3.9 with the machine as part of it (GCC 12, a core of a Xeon, 2026-11-19).
    pub fn prepared(self, folder: &Path) -> Result<Toolchain, EmulatorError> {
        let machine = write_machine(folder)?;
        // Under other names first: another process may read them at this time. A compiler that does not look for compiled headers compiles them again.
        let own = |name: &str| machine.join(format!("{}.{name}", std::process::id()));
        let (headers, object) = (own("gch"), own("o"));
        let mut compile = self.command();
        compile.args(["-x", "c++-header"]).arg(machine.join("emulator.h")).arg("-o").arg(&headers);
        let compiled = self.start_machine(&machine, &object)?;
        let done = finished(&mut compile, &headers);
        ended(compiled, &object).and(done)?;
        for (from, to) in [(headers, machine.join("emulator.h.gch")), (object, machine.join(MACHINE_OBJECT))] {
            fs::rename(&from, &to).map_err(EmulatorError::file(&to))?;
        }
        Ok(Toolchain { machine: Some(machine), ..self })
    }

    /// Compiles a kernel and its driver.
    pub fn compile(&self, unit: &Unit) -> Result<Program, EmulatorError> {
        let prepared = self.machine.clone();
        let machine = prepared.clone().map_or_else(|| write_machine(unit.folder), Ok)?;
        fs::create_dir_all(unit.folder).map_err(EmulatorError::file(unit.folder))?;
        write(&unit.folder.join("kernel.h"), &emulated(unit.text)?)?;
        let (object, program) = (unit.folder.join("program.o"), unit.folder.join("program"));
        let compiled = match prepared {
            Some(_) => None,
            None => Some(self.start_machine(&machine, &machine.join(MACHINE_OBJECT))?),
        };
        let mut command = self.command();
        command.arg("-I").arg(&machine).arg("-I").arg(unit.folder).arg(format!("-DENTRY={}", unit.entry));
        if self.counts {
            // Calls of the thread sanitizer are compiled in, and what they call is not its library but `accesses.h`. A vector of 16 bytes is
            // one access: GCC does not replace it by its parts.
            command.args(["-fsanitize=thread", "-fno-tree-sra", "-DCOUNT_ACCESSES"]);
        }
        let own = machine.join("run.cpp");
        let done = finished(command.arg("-c").arg(unit.driver.unwrap_or(&own)).arg("-o").arg(&object), &object);
        // Ended in any case, so that no process is left running.
        compiled.map_or(Ok(()), |compiled| ended(compiled, &machine)).and(done)?;
        let mut link = self.command();
        finished(link.arg(&object).arg(machine.join(MACHINE_OBJECT)).arg("-o").arg(&program), &program)?;
        Ok(Program { folder: unit.folder.to_path_buf() })
    }

    /// Starts to compile what a machine needs nothing of a kernel for.
    fn start_machine(&self, machine: &Path, object: &Path) -> Result<Child, EmulatorError> {
        let mut command = self.command();
        command.arg("-c").arg(machine.join("machine.cpp")).arg("-o").arg(object);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(EmulatorError::file(object))
    }

    /// The compiler with its fixed flags: precompiled headers are used if all of them are equal.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.compiler);
        command.args(["-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE"]);
        // The machine throws nothing. Without tables for it a unit of 800 lines takes 3.3 s instead of 4.1 (GCC 12, a core of a Xeon, 2026-11-18).
        command.args(["-fno-exceptions", "-fno-asynchronous-unwind-tables"]);
        command
    }
}

/// Compiles a file.
fn finished(command: &mut Command, file: &Path) -> Result<(), EmulatorError> {
    succeeded(command.output().map_err(EmulatorError::file(file))?)
}

/// Waits for a compiler.
fn ended(compiler: Child, file: &Path) -> Result<(), EmulatorError> {
    succeeded(compiler.wait_with_output().map_err(EmulatorError::file(file))?)
}

fn succeeded(output: Output) -> Result<(), EmulatorError> {
    match output.status.success() {
        true => Ok(()),
        false => Err(EmulatorError::Compile(String::from_utf8_lossy(&output.stderr).into_owned())),
    }
}

impl Program {
    /// Where its files are; it runs there.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Runs it on a launch, which its driver reads. A text may have mistakes, of which it makes this one; none is 0.
    pub fn run(&self, launch: &str, schedule: &Schedule, mistake: usize) -> Result<Said, EmulatorError> {
        let file = self.folder.join("launch");
        write(&file, launch)?;
        let lanes = if schedule.lanes == Lanes::Apart { "apart" } else { "together" };
        let mut words = vec![schedule.resident.to_string(), lanes.to_string()];
        words.extend(schedule.seeds.clone().map(|seed| seed.to_string()));
        self.start(Command::new(self.folder.join("program")).arg(&file).args(words).env("MISTAKE", mistake.to_string()))
    }

    /// Runs it with words of its own.
    pub fn run_words(&self, words: &[&str]) -> Result<Said, EmulatorError> {
        self.start(Command::new(self.folder.join("program")).args(words))
    }

    fn start(&self, command: &mut Command) -> Result<Said, EmulatorError> {
        let output = command.current_dir(&self.folder).output().map_err(EmulatorError::file(&self.folder))?;
        let [printed, messages] =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        Ok(Said { ok: output.status.success(), text: printed.clone() + &messages, printed })
    }
}

/// Writes the machine's files below a folder, and gives theirs.
fn write_machine(folder: &Path) -> Result<PathBuf, EmulatorError> {
    let machine = folder.join("machine");
    let tile = machine.join("tile");
    fs::create_dir_all(&tile).map_err(EmulatorError::file(&tile))?;
    MACHINE.iter().try_for_each(|(name, text)| write(&machine.join(name), text))?;
    Ok(machine)
}

pub(crate) fn write(path: &Path, contents: impl AsRef<[u8]>) -> Result<(), EmulatorError> {
    fs::write(path, contents).map_err(EmulatorError::file(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_machine_is_compiled_in() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/machine");
        let names = |folder: &Path, before: &str| -> Vec<String> {
            let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
            let files = entries.filter(|entry| entry.file_type().unwrap().is_file());
            files.map(|entry| format!("{before}{}", entry.file_name().to_string_lossy())).collect()
        };
        let mut found = [names(&folder, ""), names(&folder.join("tile"), "tile/")].concat();
        found.sort();
        assert_eq!(found, MACHINE.iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>());
    }

    #[test]
    fn a_compiler_that_is_not_there_is_named() {
        let error = Toolchain::find("no-such-compiler").unwrap_err().to_string();
        assert!(error.contains("no-such-compiler") && error.contains("CXX"), "{error}");
    }
}
