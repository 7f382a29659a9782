//! A kernel compiled with a driver, which creates or reads its operands, runs its grids and reports the results.

use std::fs::{self, DirBuilder};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{EmulatorError, emulated};

/// Files of the machine, by their names below its folder.
macro_rules! machine {
    ($($name:literal)*) => {
        const FILES: &[(&str, &str)] = &[$(($name, include_str!(concat!("machine/", $name)))),*];
    };
}

machine! {
    "accesses.h" "collective.cpp" "collective.h" "cuda.h" "emulator.h" "entries.cpp" "launch.cpp" "launch.h" "machine.cpp" "memory.cpp"
    "memory.h" "run.cpp" "schedule.cpp" "schedule.h" "state.h"
    "tile/async_copy.cpp" "tile/async_copy.h" "tile/cluster.cpp" "tile/cluster.h" "tile/conversions.h" "tile/dependent_launch.h"
    "tile/global_memory.h" "tile/matrix.h" "tile/mbarrier.cpp" "tile/mbarrier.h" "tile/named_barrier.cpp" "tile/named_barrier.h"
    "tile/registers.h" "tile/shared_address.h" "tile/signals.h" "tile/tma.cpp" "tile/tma.h" "tile/wgmma.cpp" "tile/wgmma.h"
}

/// The machine's object file in its folder, and its compiled headers.
const MACHINE_OBJECT: &str = "machine.o";
const MACHINE_HEADERS: &str = "emulator.h.gch";

/// The machine's own driver.
const DRIVER: &str = "run.cpp";

/// The folder of the machine's files, in the one that is named for them.
const MACHINE: &str = "machine";

/// A C++ compiler.
#[derive(Debug, Clone)]
pub struct Toolchain {
    compiler: String,
    /// what it says of itself
    version: Vec<u8>,
    /// whether programs count their accesses
    counts: bool,
    /// where the compiled machine and its files are, if they are there already
    machine: Option<PathBuf>,
}

/// What is compiled.
pub struct Unit<'a> {
    /// where its files go
    pub folder: &'a Path,
    /// the text of a GPU
    pub text: &'a str,
    /// The program that runs its kernels, if it is not the machine's own. It includes `emulator.h` first of all. One that includes `kernel.h` too, the
    /// text, is compiled with it; others are compiled once and run kernels by their names (`host::run_entry`).
    pub driver: Option<&'a Path>,
    /// the kernels that are run; a driver that includes the text has the first as the macro ENTRY, others as `host::first_entry`
    pub entries: &'a [&'a str],
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
        match Command::new(name).arg("--version").output() {
            Ok(output) if output.status.success() => {
                Ok(Toolchain { compiler: name.to_string(), version: output.stdout, counts: false, machine: None })
            }
            _ => Err(EmulatorError::NoCompiler(name.into())),
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

    /// The same with the machine compiled once and kept in a folder, for all programs that name it: that takes 4 s of a core, and a kernel of
    /// 900 lines then 1 s (GCC 12, a core of a Xeon, 2026-11-20). It is compiled anew for another compiler or another text.
    pub fn kept(self, folder: &Path) -> Result<Toolchain, EmulatorError> {
        make_own(folder).map_err(EmulatorError::file(folder))?;
        let place = folder.join(format!("{:016x}", self.key()));
        if !is_complete(&place) {
            // Complete before it has its name: other processes may look for it at this time.
            let own = folder.join(unique("part"));
            let made = self.build_machine(&own);
            let publish = || match fs::rename(&own, &place) {
                // Another process was faster.
                Err(_) if is_complete(&place) => Ok(()),
                renamed => renamed,
            };
            let again = |_| {
                // A part of one is left where someone removed old files.
                let old = folder.join(unique("old"));
                let _ = fs::rename(&place, &old);
                let _ = fs::remove_dir_all(&old);
                publish()
            };
            let named = made.and_then(|()| publish().or_else(again).map_err(EmulatorError::file(&place)));
            // Gone if it has its name now.
            let _ = fs::remove_dir_all(&own);
            named?;
        }
        Ok(Toolchain { machine: Some(place.join(MACHINE)), ..self })
    }

    /// The same for many kernels, with the machine's headers compiled too, which takes 2 s and 56 MB: a kernel of 1,350 lines takes 1.2 s then.
    pub fn prepared(self, folder: &Path) -> Result<Toolchain, EmulatorError> {
        let kept = self.kept(folder)?;
        let Some(machine) = &kept.machine else { return Ok(kept) };
        let headers = machine.join(MACHINE_HEADERS);
        if !headers.is_file() {
            // Under another name first: another process may read them at this time. A compiler that does not look for compiled headers
            // compiles them again.
            let own = machine.join(unique("gch"));
            let mut compile = kept.command();
            compile.args(["-x", "c++-header"]).arg(machine.join("emulator.h")).arg("-o").arg(&own);
            finished(&mut compile, &own)?;
            fs::rename(&own, &headers).map_err(EmulatorError::file(&headers))?;
        }
        Ok(kept)
    }

    /// Of all that the compiled machine depends on.
    fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let command = self.command();
        let words: Vec<_> = [command.get_program()].into_iter().chain(command.get_args()).collect();
        (words, &self.version, FILES).hash(&mut hasher);
        hasher.finish()
    }

    /// The machine and its driver, both at a time.
    fn build_machine(&self, folder: &Path) -> Result<(), EmulatorError> {
        let machine = write_machine(folder)?;
        let object = machine.join(MACHINE_OBJECT);
        let mut command = self.command();
        command.arg("-c").arg(machine.join("machine.cpp")).arg("-o").arg(&object);
        let started =
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(EmulatorError::file(&object))?;
        let driver = Toolchain { counts: false, ..self.clone() }.driver(&machine, None);
        // Ended in any case, so that no process is left running.
        ended(started, &object).and(driver.map(drop))
    }

    /// Compiles a kernel and its driver.
    pub fn compile(&self, unit: &Unit) -> Result<Program, EmulatorError> {
        fs::create_dir_all(unit.folder).map_err(EmulatorError::file(unit.folder))?;
        let Some(machine) = &self.machine else {
            return self.clone().kept(&unit.folder.join("machines"))?.compile(unit);
        };
        write(&unit.folder.join("kernel.h"), &emulated(unit.text)?)?;
        write(&unit.folder.join("entries.h"), entries(unit.entries))?;
        let text = unit.driver.map(|path| fs::read_to_string(path).map_err(EmulatorError::file(path))).transpose()?;
        let includes = unit.driver.filter(|_| text.is_some_and(|text| text.contains("#include \"kernel.h\"")));
        let (object, program) = (unit.folder.join("program.o"), unit.folder.join("program"));
        let mut command = self.unit_command(machine);
        command.arg("-I").arg(unit.folder).arg(format!("-DENTRY={}", unit.entries.first().unwrap_or(&"")));
        let own = machine.join("entries.cpp");
        finished(command.arg("-c").arg(includes.unwrap_or(&own)).arg("-o").arg(&object), &object)?;
        let mut link = self.command();
        link.arg(&object).arg(machine.join(MACHINE_OBJECT));
        if includes.is_none() {
            link.arg(self.driver(machine, unit.driver)?);
        }
        finished(link.arg("-o").arg(&program), &program)?;
        Ok(Program { folder: unit.folder.to_path_buf() })
    }

    /// The object of a driver that is compiled once, beside the machine.
    fn driver(&self, machine: &Path, path: Option<&Path>) -> Result<PathBuf, EmulatorError> {
        let own = machine.join(DRIVER);
        let mut hasher = DefaultHasher::new();
        // The machine's own files are in the name of its folder.
        if let Some(path) = path {
            let folder = path.parent().unwrap_or(Path::new("."));
            let listed = fs::read_dir(folder).map_err(EmulatorError::file(folder))?;
            let mut files: Vec<PathBuf> = listed.flatten().map(|entry| entry.path()).collect();
            // A driver may include another one.
            let text = fs::read_to_string(path).map_err(EmulatorError::file(path))?;
            let included = |file: &Path| {
                file.file_name().is_some_and(|name| text.contains(&format!("#include \"{}\"", name.to_string_lossy())))
            };
            files.retain(|file| file.extension().is_some_and(|extension| extension == "h") || included(file));
            files.sort();
            for file in files.iter().map(PathBuf::as_path).chain([path]) {
                fs::read(file).map_err(EmulatorError::file(file))?.hash(&mut hasher);
            }
        }
        let path = path.unwrap_or(&own);
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let counts = if self.counts { "counting-" } else { "" };
        let object = machine.join(format!("{name}-{counts}{:016x}.o", hasher.finish()));
        if !object.is_file() {
            // Another process or thread may need it at this time.
            let part = machine.join(unique("o"));
            finished(self.unit_command(machine).arg("-c").arg(path).arg("-o").arg(&part), &part)?;
            fs::rename(&part, &object).map_err(EmulatorError::file(&object))?;
        }
        Ok(object)
    }

    /// For what is linked with the machine.
    fn unit_command(&self, machine: &Path) -> Command {
        let mut command = self.command();
        command.arg("-I").arg(machine);
        if self.counts {
            // Calls of the thread sanitizer are compiled in, and what they call is not its library but `accesses.h`. A vector of 16 bytes is
            // one access: GCC does not replace it by its parts.
            command.args(["-fsanitize=thread", "-fno-tree-sra", "-DCOUNT_ACCESSES"]);
        }
        command
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

/// The names of kernels, as `machine/entries.cpp` includes them.
fn entries(names: &[&str]) -> String {
    names.iter().map(|name| format!("RUN({name})\n")).collect()
}

/// A name that no other process or thread uses.
fn unique(extension: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{}.{}.{extension}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
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

/// Whether a folder holds a compiled machine and all of its files: a cleaner may have removed some.
fn is_complete(place: &Path) -> bool {
    let machine = place.join(MACHINE);
    FILES.iter().map(|(name, _)| *name).chain([MACHINE_OBJECT]).all(|name| machine.join(name).is_file())
}

/// Makes a folder that only this user may write to: what is there is linked into programs that run.
fn make_own(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let found = fs::metadata(folder)?;
    let mode = found.mode() & 0o777;
    if fs::metadata("/proc/self").is_ok_and(|process| process.uid() != found.uid()) {
        let owner = found.uid();
        return Err(io::Error::other(format!("expected a folder of the current user, got one of user {owner}")));
    }
    match mode & 0o022 {
        0 => Ok(()),
        _ => Err(io::Error::other(format!(
            "expected a folder that only its owner may write to, got mode {mode:o}; run chmod 700 on it"
        ))),
    }
}

/// Writes the machine's files below a folder, and gives theirs.
fn write_machine(folder: &Path) -> Result<PathBuf, EmulatorError> {
    let machine = folder.join(MACHINE);
    let tile = machine.join("tile");
    fs::create_dir_all(&tile).map_err(EmulatorError::file(&tile))?;
    FILES.iter().try_for_each(|(name, text)| write(&machine.join(name), text))?;
    Ok(machine)
}

pub(crate) fn write(path: &Path, contents: impl AsRef<[u8]>) -> Result<(), EmulatorError> {
    fs::write(path, contents).map_err(EmulatorError::file(path))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

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
        assert_eq!(found, FILES.iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>());
    }

    #[test]
    fn a_compiler_that_is_not_there_is_named() {
        let error = Toolchain::find("no-such-compiler").unwrap_err().to_string();
        assert!(error.contains("no-such-compiler") && error.contains("CXX"), "{error}");
    }
    /// A compiler of this version that notes each file that it compiles.
    fn noting(folder: &Path, version: u32) -> Toolchain {
        let program = folder.join("compiler");
        let text = format!(
            "#!/bin/sh\nif [ \"$1\" = --version ]; then echo {version}; exit; fi\n\
             while [ \"$1\" != -o ]; do before=$1; shift; done\necho \"$before\" >> '{}/compiled'; echo > \"$2\"\n",
            folder.display()
        );
        fs::write(&program, text).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
        // A process that another test starts just now may hold the file open for writing until it has its own program.
        let found = || Toolchain::find(&program.to_string_lossy());
        let wait = || std::thread::sleep(std::time::Duration::from_millis(20));
        (0..100).find_map(|_| found().map_err(|_| wait()).ok()).unwrap_or_else(|| found().unwrap())
    }

    #[test]
    fn a_machine_is_compiled_once_for_each_version_of_a_compiler() {
        let folder = std::env::temp_dir().join(format!("deuteron-machine-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let cache = folder.join("cache");
        let compiled = || {
            let log = fs::read_to_string(folder.join("compiled")).unwrap_or_default();
            let mut names: Vec<_> =
                log.lines().map(|line| line.rsplit('/').next().unwrap_or(line).to_string()).collect();
            names.sort();
            names
        };
        let first = noting(&folder, 1).kept(&cache).unwrap().machine.unwrap();
        assert_eq!(noting(&folder, 1).counting().kept(&cache).unwrap().machine, Some(first.clone()));
        assert_eq!(compiled(), ["machine.cpp", "run.cpp"]);
        assert_eq!(noting(&folder, 1).prepared(&cache).unwrap().machine, Some(first.clone()));
        assert_eq!(noting(&folder, 1).prepared(&cache).unwrap().machine, Some(first.clone()));
        assert_eq!(compiled(), ["emulator.h", "machine.cpp", "run.cpp"]);
        assert_ne!(noting(&folder, 2).kept(&cache).unwrap().machine, Some(first.clone()));
        assert_eq!(compiled().len(), 5);
        fs::remove_file(first.join(MACHINE_OBJECT)).unwrap();
        assert_eq!(noting(&folder, 1).kept(&cache).unwrap().machine, Some(first));
        assert_eq!(compiled().len(), 7);
        assert_eq!(fs::read_dir(&cache).unwrap().count(), 2, "nothing but both machines");
        fs::set_permissions(&cache, fs::Permissions::from_mode(0o777)).unwrap();
        let refused = noting(&folder, 1).kept(&cache).unwrap_err().to_string();
        assert!(refused.contains("got mode 777"), "{refused}");
        fs::remove_dir_all(&folder).unwrap();
    }
}
