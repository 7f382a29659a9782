//! Devices and libraries of this machine, and its copy bandwidth.

use std::path::{Path, PathBuf};

use deuteron_codegen::cpu::simd::Isa;
use deuteron_device::Cuda;
use deuteron_plan::MachineKind;
use serde::Serialize;

use crate::cuda::{CudaError, Options, Search, library};
use crate::engine::Engine;
use crate::error::Error;
use crate::times::median;

/// The result of `doctor`. The JSON form has these fields.
#[derive(Debug, Clone, Serialize)]
pub struct DoctorReport {
    /// of this program
    pub version: String,
    /// the device that `auto` chooses
    pub device: String,
    /// instruction sets that this processor supports, best first
    pub instruction_sets: Vec<String>,
    /// copies of several sizes
    pub copy: Vec<CopyRow>,
    /// GPUs
    pub cuda: CudaReport,
}

/// GPUs, and what is needed to use them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CudaReport {
    /// the usable GPUs
    pub gpus: Vec<GpuRow>,
    /// why there is none, if there is none
    pub problem: Option<String>,
    /// the driver, the compiler and the matmul library
    pub libraries: Vec<LibraryRow>,
    /// the folder of compiled kernels
    pub cache: Option<CacheRow>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GpuRow {
    /// its number, as in `--device cuda:N`
    pub ordinal: usize,
    /// its name
    pub name: String,
    /// its instruction set
    pub arch: String,
    /// such as `9.0`
    pub compute_capability: String,
    /// multiprocessors
    pub processors: usize,
    /// its total memory
    pub memory_bytes: usize,
    /// its free memory
    pub free_bytes: usize,
    /// the newest CUDA version that its driver supports
    pub driver: String,
}

/// A library of CUDA.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LibraryRow {
    /// `driver`, `nvrtc` or `cublasLt`
    pub name: String,
    /// where it was found
    pub path: Option<PathBuf>,
    /// its version
    pub version: Option<String>,
    /// why it cannot be used, and what to do
    pub problem: Option<String>,
}

/// The folder of compiled kernels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CacheRow {
    /// where it is
    pub folder: PathBuf,
    /// kernels in it
    pub entries: usize,
    /// their size
    pub bytes: u64,
}

/// The speed of a copy of one size.
#[derive(Debug, Clone, Serialize)]
pub struct CopyRow {
    /// bytes of the source
    pub bytes: usize,
    /// GB/s, read and written both counted, with stores through the caches
    pub ordinary_gbps: f64,
    /// with stores past them
    pub streaming_gbps: f64,
    /// the faster of the two
    pub copy_gbps: f64,
}

/// Inspects the machine and measures copies of these sizes. CUDA is searched as a command would search for it.
pub fn doctor(engine: &Engine, sizes: &[usize], search: &Search, cache: Option<&Path>) -> Result<DoctorReport, Error> {
    Ok(DoctorReport {
        version: env!("CARGO_PKG_VERSION").to_string(),
        device: engine.device().describe(),
        instruction_sets: Isa::available().into_iter().map(|isa| isa.name().to_string()).collect(),
        copy: sizes.iter().map(|&bytes| copy_row(engine, bytes)).collect::<Result<_, _>>()?,
        cuda: cuda(search, cache),
    })
}

/// The installed parts of CUDA. Missing parts are reported and are not an error.
fn cuda(search: &Search, cache: Option<&Path>) -> CudaReport {
    let libraries = vec![
        row("driver", library::driver(search).map(|found| (found.path().to_path_buf(), found.version()))),
        row("nvrtc", library::nvrtc(search).map(|found| (found.path().to_path_buf(), found.version()))),
        row("cublasLt", library::cublaslt(search).map(|found| (found.path().to_path_buf(), found.version()))),
    ];
    let driver = libraries[0].version.clone().unwrap_or_default();
    let (mut gpus, mut problem) = (Vec::new(), None);
    loop {
        match gpu(search, gpus.len(), &driver) {
            Ok(gpu) => gpus.push(gpu),
            Err(error) => {
                // The number after the last is no problem.
                problem = problem.or(Some(error).filter(|_| gpus.is_empty()).map(|error| first_line(&error)));
                break;
            }
        }
    }
    CudaReport { gpus, problem, libraries, cache: cache.map(cache_row) }
}

fn row(name: &str, found: Result<(PathBuf, (u32, u32)), CudaError>) -> LibraryRow {
    let name = name.to_string();
    match found {
        Ok((path, (major, minor))) => {
            LibraryRow { name, path: Some(path), version: Some(format!("{major}.{minor}")), problem: None }
        }
        Err(error) => LibraryRow { name, path: None, version: None, problem: Some(error.to_string()) },
    }
}

fn gpu(search: &Search, ordinal: usize, driver: &str) -> Result<GpuRow, CudaError> {
    let device = Cuda::new(&Options { ordinal, search: search.clone(), ..Options::default() })?;
    let (free_bytes, memory_bytes) = device.memory()?;
    let arch = device.cuda_target().arch.to_string();
    let digits: String = arch.chars().filter(char::is_ascii_digit).collect();
    let (major, minor) = digits.split_at(digits.len().saturating_sub(1));
    Ok(GpuRow {
        ordinal,
        name: device.name().to_string(),
        compute_capability: format!("{major}.{minor}"),
        arch,
        processors: device.cuda_target().processors,
        memory_bytes,
        free_bytes,
        driver: driver.to_string(),
    })
}

fn first_line(error: &CudaError) -> String {
    error.to_string().lines().next().unwrap_or_default().trim_end_matches("; looked in:").to_string()
}

/// Kernels of a folder; none where there is no folder yet.
fn cache_row(folder: &Path) -> CacheRow {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let kernels = files.filter(|file| file.path().extension().is_some_and(|extension| extension == "kernel"));
    let sizes: Vec<u64> = kernels.filter_map(|file| Some(file.metadata().ok()?.len())).collect();
    CacheRow { folder: folder.to_path_buf(), entries: sizes.len(), bytes: sizes.iter().sum() }
}

fn copy_row(engine: &Engine, bytes: usize) -> Result<CopyRow, Error> {
    let mut probe = engine.device().copy_probe(bytes)?;
    let repeats = match engine.device().machine().kind {
        MachineKind::Cpu => ((1usize << 30) / bytes.max(1)).clamp(7, 401),
        // Each is a series of copies.
        MachineKind::Gpu => 9,
    };
    let (mut ordinary, mut streaming) = (Vec::new(), Vec::new());
    for _ in 0..repeats {
        ordinary.push(probe.ordinary()?);
        streaming.push(probe.streaming()?);
    }
    let moved = probe.bytes() as f64 / 1e9;
    let rate = |times| moved / median(times).as_secs_f64().max(1e-12);
    let (ordinary_gbps, streaming_gbps) = (rate(ordinary), rate(streaming));
    Ok(CopyRow { bytes, ordinary_gbps, streaming_gbps, copy_gbps: ordinary_gbps.max(streaming_gbps) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said() {
        let folder = std::env::temp_dir().join(format!("deuteron-doctor-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("a.kernel"), [0; 100]).unwrap();
        std::fs::write(folder.join("b.other"), [0; 100]).unwrap();
        let report = cuda(&Search::default(), Some(&folder));
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(report.cache, Some(CacheRow { folder, entries: 1, bytes: 100 }));
        assert_eq!(report.gpus.is_empty(), report.problem.is_some());
        assert!(report.libraries.iter().all(|row| row.path.is_some() != row.problem.is_some()));
    }
}
