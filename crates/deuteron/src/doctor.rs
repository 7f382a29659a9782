//! What this machine has, and how fast it copies.

use deuteron_codegen::cpu::simd::Isa;
use serde::Serialize;

use crate::engine::Engine;
use crate::error::Error;
use crate::fuse::median;

/// What `doctor` found. The JSON form has these fields.
#[derive(Debug, Clone, Serialize)]
pub struct DoctorReport {
    /// of this program
    pub version: String,
    /// the device that `auto` picks
    pub device: String,
    /// instruction sets this processor runs, best first
    pub instruction_sets: Vec<String>,
    /// copies of several sizes
    pub copy: Vec<CopyRow>,
    /// the word on GPUs
    pub cuda: String,
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

/// Looks at the machine and measures copies of these sizes.
pub fn doctor(engine: &Engine, sizes: &[usize]) -> Result<DoctorReport, Error> {
    Ok(DoctorReport {
        version: env!("CARGO_PKG_VERSION").to_string(),
        device: engine.device().describe(),
        instruction_sets: Isa::available().into_iter().map(|isa| isa.name().to_string()).collect(),
        copy: sizes.iter().map(|&bytes| copy_row(engine, bytes)).collect::<Result<_, _>>()?,
        cuda: "this version runs on the CPU; GPU kernels are not in it yet".to_string(),
    })
}

fn copy_row(engine: &Engine, bytes: usize) -> Result<CopyRow, Error> {
    let mut probe = engine.device().copy_probe(bytes)?;
    let repeats = ((1usize << 30) / bytes.max(1)).clamp(7, 401);
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
