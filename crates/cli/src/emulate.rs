//! `deuteron kernel --emulate`: kernels for a GPU on a CPU.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use deuteron::emulate::{Accesses, Choice, Emulation, EmulatorError, Toolchain, Traffic, emulate};
use deuteron::{Graph, Strategy};

use crate::Outcome;
use crate::device::cache_folder;
use crate::ladder;

/// The kernels to run.
pub struct Request<'a> {
    pub graph: &'a Graph,
    pub strategy: Strategy,
    pub rung: Option<&'a str>,
    pub source: Option<&'a PathBuf>,
    pub schedules: u64,
    /// whether memory accesses are counted
    pub accesses: bool,
}

pub fn run(request: &Request) -> Result<Outcome> {
    let toolchain = toolchain()?;
    let toolchain = if request.accesses { toolchain.counting() } else { toolchain };
    let rung = request.rung.map(|name| ladder::rung(ladder::find(request.graph.name())?, name)).transpose()?;
    let text =
        request.source.map(|path| fs::read_to_string(path).with_context(|| path.display().to_string())).transpose()?;
    let folder = Folder::new()?;
    let choice = Choice { rung, text };
    let ran = emulate(&toolchain, folder.path(), request.graph, request.strategy, &choice, request.schedules);
    match ran {
        Ok(emulation) => Ok(print(request, &emulation)),
        // What the emulator found is the answer, and no failure of the command.
        Err(deuteron::Error::Emulator(EmulatorError::Kernel(said))) => {
            outln!("The emulator found a mistake:\n{said}");
            Ok(Outcome::Failed)
        }
        Err(error) => Err(error.into()),
    }
}

fn print(request: &Request, emulation: &Emulation) -> Outcome {
    let count = emulation.kernels.len();
    for (index, kernel) in emulation.kernels.iter().enumerate() {
        outln!("kernel {index} of {count}: {}, launched as {}", kernel.name, kernel.launches.join(", "));
        kernel.accesses.iter().for_each(print_accesses);
        kernel.printed.lines().for_each(|line| outln!("  printf: {line}"));
    }
    match request.schedules {
        1 => outln!("Ran on the emulator under one order of its threads."),
        orders => outln!("Ran on the emulator under {orders} orders of its threads, with equal bits."),
    }
    let holds = emulation.verification.holds();
    if let Some(worst) = emulation.verification.worst() {
        let (error, bound, name) = (worst.comparison.error, worst.comparison.bound, &worst.name);
        let at = if holds { String::new() } else { format!(", element {}", worst.comparison.worst_index) };
        let word = if holds { "Verified against f64" } else { "WRONG against f64" };
        outln!("{word}: largest error {error:.2e}, bound {bound:.2e} (output {name}{at}).");
    }
    Outcome::of(holds)
}

/// The cost of memory accesses, by kind; kinds that a kernel does not use are left out.
fn print_accesses(accesses: &Accesses) {
    let Accesses { global_reads, global_writes, shared_reads, shared_writes } = accesses;
    for (name, Traffic { accesses, served, .. }, used) in
        [("reads", global_reads, global_reads.used()), ("writes", global_writes, global_writes.used())]
    {
        if *accesses > 0 {
            let used = 100.0 * used;
            outln!(
                "  global {name}: {accesses} by warps, {served} sectors of 32 bytes, {used:.1} % of their bytes used"
            );
        }
    }
    for (name, Traffic { accesses, served, .. }, conflicts) in
        [("reads", shared_reads, shared_reads.conflicts()), ("writes", shared_writes, shared_writes.conflicts())]
    {
        if *accesses > 0 {
            outln!("  shared {name}: {accesses} by warps, {served} wavefronts, {conflicts} of them by bank conflicts");
        }
    }
}

/// The C++ compiler, with the emulator's own part compiled once for all commands, which takes 3 s. Where it cannot be kept, each command
/// compiles it.
pub fn toolchain() -> Result<Toolchain> {
    let name = std::env::var("CXX").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| "c++".into());
    let found = Toolchain::find(&name)?;
    let Some(folder) = cache_folder("emulator") else { return Ok(found) };
    match found.clone().kept(&folder) {
        Err(EmulatorError::File { .. }) => Ok(found),
        kept => Ok(kept?),
    }
}

/// A folder for files of the emulator, which is removed with it.
pub struct Folder(PathBuf);

impl Folder {
    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn new() -> Result<Folder> {
        let folder = std::env::temp_dir().join(format!("deuteron-emulator-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        Ok(Folder(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed stays with the system's other temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}
