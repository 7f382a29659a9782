//! Where to run: the CPU, or a GPU if there is one.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::Args;
use deuteron::cuda::{self, Compiler, Options, Search, Tuning};
use deuteron::{Cpu, Engine, Isa, Machine};

use crate::machine_file;
use crate::tuning_file::{Choice, TuningArguments};

/// Where to run.
#[derive(Args)]
pub struct DeviceArguments {
    /// auto (a GPU if there is one, else the CPU), cpu, cuda, or cuda:N for GPU number N
    #[arg(long, default_value = "auto")]
    device: String,
    /// Threads to use on the CPU [default: all cores]
    #[arg(long)]
    threads: Option<usize>,
    #[command(flatten)]
    tuning: TuningArguments,
}

/// Parses the arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// a GPU if there is one, else the CPU
    Auto,
    /// the CPU
    Cpu,
    /// the GPU of that number
    Cuda(usize),
}

/// Whether buffers on a GPU are surrounded by bytes that are checked after each run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RedZones {
    /// they are not
    Off,
    /// they are
    On,
}

impl DeviceArguments {
    /// The engine to run on.
    pub fn engine(&self) -> Result<Engine> {
        self.engine_with(RedZones::Off)
    }

    /// The same, with buffers guarded or not.
    pub fn engine_with(&self, red_zones: RedZones) -> Result<Engine> {
        self.open(red_zones, &self.tuning.choice()?)
    }

    /// Stores launch shapes measured on an engine for later commands, and returns the path; stores nothing if `--tuning`
    /// froze them.
    pub fn keep(&self, engine: &Engine, measured: Tuning) -> Result<Option<PathBuf>> {
        self.tuning.choice()?.keep(&engine.device().machine().name, measured)
    }

    /// The device of an engine, opened again with the launch shapes measured on it.
    pub fn engine_tuned(&self, engine: &Engine, measured: Tuning) -> Result<Engine> {
        let mut tuning = self.tuning.choice()?.of(&engine.device().machine().name);
        tuning.merge(measured);
        self.open(RedZones::Off, &Choice::Frozen(tuning))
    }

    fn open(&self, red_zones: RedZones, tuning: &Choice) -> Result<Engine> {
        let cpu = cpu(self.threads)?;
        match self.wanted()? {
            Wanted::Cpu if self.tuning.is_given() => {
                bail!("--tuning is for kernels of a GPU; got --device cpu")
            }
            Wanted::Cpu => Ok(cpu),
            Wanted::Cuda(_) if self.threads.is_some() => {
                bail!("--threads is for the CPU; got --device {}", self.device)
            }
            Wanted::Cuda(ordinal) => {
                gpu(ordinal, red_zones, tuning, &[]).with_context(|| format!("device `{}`", self.device))
            }
            Wanted::Auto => Ok(gpu(0, red_zones, tuning, &[]).unwrap_or_else(|error| {
                if is_surprising(&error) {
                    errln!("note: running on the CPU: {error:#}");
                }
                cpu
            })),
        }
    }

    /// The options for opening the requested GPU.
    pub fn gpu_options(&self) -> Result<Options> {
        let ordinal = match self.wanted()? {
            Wanted::Cuda(ordinal) => ordinal,
            Wanted::Auto => 0,
            Wanted::Cpu => bail!("this is measured on a GPU; expected --device cuda or cuda:N, got `{}`", self.device),
        };
        let opened = open_gpu(ordinal, RedZones::Off, &self.tuning.choice()?, &[]);
        Ok(opened.with_context(|| format!("device `{}`", self.device))?.1)
    }

    /// Whether the CPU runs with as many threads as it has cores.
    pub fn uses_all_threads(&self) -> bool {
        let all = std::thread::available_parallelism().map_or(1, usize::from);
        self.threads.is_none_or(|threads| threads == all)
    }

    /// Parses the arguments.
    pub fn wanted(&self) -> Result<Wanted> {
        parse(&self.device)?
            .with_context(|| format!("unknown device `{}`; expected auto, cpu, cuda or cuda:N", self.device))
    }
}

/// An engine on the CPU with the given number of threads.
pub fn cpu(threads: Option<usize>) -> Result<Engine> {
    Ok(Engine::on(open_cpu(threads)?))
}

/// The CPU with the given number of threads, by default all cores. The planner uses measured numbers of this CPU if there are any.
pub fn open_cpu(threads: Option<usize>) -> Result<Arc<Cpu>> {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.unwrap_or(all);
    if threads == 0 || threads > 1024 {
        bail!("--threads must be from 1 to 1024, got {threads}");
    }
    let machine = machine_file::load("cpu").unwrap_or_else(Machine::cpu);
    Ok(Arc::new(Cpu::like(threads, Isa::detect(), machine)))
}

/// A device by its name; none if the name is not that of a device.
pub fn parse(text: &str) -> Result<Option<Wanted>> {
    Ok(match text.to_ascii_lowercase().as_str() {
        "auto" => Some(Wanted::Auto),
        "cpu" => Some(Wanted::Cpu),
        "cuda" => Some(Wanted::Cuda(0)),
        lower => match lower.strip_prefix("cuda:") {
            Some(number) => match number.parse() {
                Ok(ordinal) => Some(Wanted::Cuda(ordinal)),
                Err(_) => bail!("device `{text}`: expected cuda:N with a whole number N, got `{number}`"),
            },
            None => None,
        },
    })
}

/// An engine on a GPU, planned with measured numbers if there are any. Libraries are also searched in `packages`: folders of
/// Python's packages or roots of such environments.
pub fn gpu(ordinal: usize, red_zones: RedZones, tuning: &Choice, packages: &[PathBuf]) -> Result<Engine> {
    Ok(open_gpu(ordinal, red_zones, tuning, packages)?.0)
}

/// The same, with the options it was opened with.
fn open_gpu(ordinal: usize, red_zones: RedZones, tuning: &Choice, packages: &[PathBuf]) -> Result<(Engine, Options)> {
    let mut options = Options {
        ordinal,
        search: search(packages),
        cache: kernel_cache(),
        red_zones: red_zones == RedZones::On,
        ..Options::default()
    };
    let mut opened = cuda::open(&options);
    if opened.as_ref().is_err_and(cuda::is_missing_library) {
        // Only now: asking Python takes longer than all other places together.
        options.search.environments.extend(python_packages());
        opened = cuda::open(&options);
    }
    let engine = opened?;
    let name = &engine.device().machine().name;
    options.machine = machine_file::load(name);
    options.tuning = tuning.of(name);
    match options.machine.is_some() || !options.tuning.is_empty() {
        true => Ok((cuda::open(&options)?, options)),
        false => Ok((engine, options)),
    }
}

/// NVRTC alone, for kernels that are compiled but not run.
pub fn compiler(packages: &[PathBuf]) -> Result<Compiler> {
    let mut search = search(packages);
    let mut found = cuda::compiler(&search);
    if found.as_ref().is_err_and(cuda::is_missing_library) {
        search.environments.extend(python_packages());
        found = cuda::compiler(&search);
    }
    Ok(found?)
}

/// Whether `--device auto` should print why no GPU is used. A machine without a driver or a GPU needs no note.
fn is_surprising(error: &anyhow::Error) -> bool {
    error.downcast_ref::<deuteron::Error>().is_none_or(|error| !cuda::is_no_gpu(error))
}

/// Where to search CUDA's libraries: first known package folders, then those that the environment names.
pub fn search(packages: &[PathBuf]) -> Search {
    let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let named = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(folder);
    Search {
        cuda_home: folder("CUDA_HOME").or_else(|| folder("CUDA_PATH")),
        environments: packages.iter().cloned().chain(named).collect(),
    }
}

/// The package folders of the Python on the path.
pub fn python_packages() -> Vec<PathBuf> {
    const ASK: &str = "import site, sys; print('\\n'.join([*site.getsitepackages(), site.getusersitepackages()]))";
    let output = Command::new("python3").args(["-c", ASK]).output();
    match output {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).filter(|path| path.is_dir()).collect()
        }
        _ => Vec::new(),
    }
}

/// The cache of compiled kernels.
pub fn kernel_cache() -> Option<PathBuf> {
    cache_folder("kernels")
}

/// A cache of that name: `$XDG_CACHE_HOME/deuteron/NAME`, or under `~/.cache`. None without a home.
pub fn cache_folder(name: &str) -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(cache.join("deuteron").join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_as_the_help_says() {
        assert_eq!(parse("auto").unwrap(), Some(Wanted::Auto));
        assert_eq!(parse("cpu").unwrap(), Some(Wanted::Cpu));
        assert_eq!(parse("cuda").unwrap(), Some(Wanted::Cuda(0)));
        assert_eq!(parse("cuda:3").unwrap(), Some(Wanted::Cuda(3)));
        assert_eq!(parse("CUDA:3").unwrap(), Some(Wanted::Cuda(3)));
        assert_eq!(parse("h200").unwrap(), None);
        assert!(parse("cuda:x").unwrap_err().to_string().contains("whole number"));
    }
}
