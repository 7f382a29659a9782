//! Runs one kernel on bytes, as a device would, but with every check.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use deuteron_codegen::cuda::{CudaSource, Grids};
use deuteron_codegen::{Execution, Kernel, Source};

use crate::program::write;
use crate::{Accesses, EmulatorError, Schedule, Toolchain, Unit, written};

/// How a text asks for shared memory that starts at a multiple of 1024; otherwise it starts anywhere.
const ALIGNED: &str = "extern __shared__ __align__(1024) ";

/// The results of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// arguments as they are afterwards
    pub results: Vec<Vec<u8>>,
    /// under the first seed, from a toolchain that counts
    pub accesses: Option<Accesses>,
    /// by `printf` under the first seed
    pub printed: String,
}

/// Runs a kernel on its arguments, in their order, under every seed of a schedule. All seeds must give the same bits. Files go to `folder`.
pub fn run(
    toolchain: &Toolchain,
    folder: &Path,
    kernel: &Kernel,
    arguments: &[&[u8]],
    schedule: &Schedule,
) -> Result<Ran, EmulatorError> {
    let (source, grids) = grids_of(kernel)?;
    fs::create_dir_all(folder).map_err(EmulatorError::file(folder))?;
    let launch = launch_of(kernel, source, grids, arguments)?;
    for (position, bytes) in arguments.iter().enumerate() {
        write(&folder.join(format!("argument{position}")), bytes)?;
    }
    let mut entries: Vec<&str> = grids.list.iter().map(|grid| grid.entry).collect();
    entries.sort_unstable();
    entries.dedup();
    let program = toolchain.compile(&Unit { folder, text: &source.text, driver: None, entries: &entries })?;
    let said = program.run(&launch, schedule, 0)?;
    if !said.ok {
        let printed: String = said.printed.lines().map(|line| format!("printf: {line}\n")).collect();
        return Err(EmulatorError::Kernel(printed + said.text[said.printed.len()..].trim_end()));
    }
    let read = |position: usize| {
        let path = folder.join(format!("result{position}"));
        fs::read(&path).map_err(EmulatorError::file(&path))
    };
    let results = (0..arguments.len()).map(read).collect::<Result<_, _>>()?;
    let accesses = if toolchain.counts() { Some(counted(&folder.join("accesses"))?) } else { None };
    Ok(Ran { results, accesses, printed: said.printed })
}

fn counted(path: &Path) -> Result<Accesses, EmulatorError> {
    let text = fs::read_to_string(path).map_err(EmulatorError::file(path))?;
    let wrong = || EmulatorError::file(path)(std::io::Error::other("no totals of accesses"));
    Accesses::parse(&text).ok_or_else(wrong)
}

fn grids_of(kernel: &Kernel) -> Result<(&CudaSource, &Grids), EmulatorError> {
    match (&kernel.source, kernel.launch.execution()) {
        (Source::Cuda(source), Execution::Grids(grids)) => Ok((source, grids)),
        (Source::Library(_), _) => Err(EmulatorError::NotCuda("library call")),
        _ => Err(EmulatorError::NotCuda("program of a CPU")),
    }
}

/// The launch as `machine/run.cpp` reads it.
fn launch_of(kernel: &Kernel, source: &CudaSource, grids: &Grids, given: &[&[u8]]) -> Result<String, EmulatorError> {
    let arguments = kernel.launch.arguments();
    let mut text = format!("arguments {}\n", arguments.len());
    for (position, argument) in arguments.iter().enumerate() {
        let got = given.get(position).map_or(0, |bytes| bytes.len());
        if got < argument.reach {
            return Err(EmulatorError::Argument { position, reach: argument.reach, got });
        }
        // Arguments of one buffer share their memory.
        let first = arguments[..position].iter().position(|other| other.base == argument.base);
        let place = argument.in_place_of.or(first).map_or(-1, |position| position as i64);
        let _ = writeln!(text, "{got} {} {place}", u8::from(argument.written));
    }
    let aligned = u8::from(source.text.contains(ALIGNED));
    let _ = writeln!(text, "memory {} {} {aligned}", grids.workspace, grids.persistent);
    let _ = writeln!(text, "grids {}", grids.list.len());
    for grid in &grids.list {
        text.push_str(&format!("{}\n{}", grid.entry, written(grid)));
    }
    Ok(text)
}
