//! Sources to modules: several at once, each through the cache on disk.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use deuteron_codegen::cuda::CudaSource;

use super::cache::{DiskCache, Key};
use super::error::CudaError;
use super::nvrtc::{Compiler, Cubin, Request};

/// Maximum number of compiling threads: more would need too much memory.
const THREADS: usize = 16;

/// Compiles each source. Returns the first failure, by position.
pub(crate) fn compile(
    compiler: &Compiler,
    cache: Option<&DiskCache>,
    arch: &str,
    sources: &[&CudaSource],
) -> Result<Vec<Cubin>, CudaError> {
    on_all_cores(sources, |source| one(compiler, cache, arch, source)).into_iter().collect()
}

impl Compiler {
    /// Compiles all sources on all cores, except those that the cache has: a result for each, in their order.
    pub fn compile_all(&self, requests: &[Request<'_>], cache: Option<&DiskCache>) -> Vec<Result<Cubin, CudaError>> {
        on_all_cores(requests, |request| cached(self, cache, request))
    }
}

fn on_all_cores<S: Sync>(
    sources: &[S],
    build: impl Fn(&S) -> Result<Cubin, CudaError> + Sync,
) -> Vec<Result<Cubin, CudaError>> {
    let results: Vec<Mutex<Option<Result<Cubin, CudaError>>>> = sources.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((source, result)) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            sources.get(index).zip(results.get(index))
        } {
            let made = build(source);
            *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(made);
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let helpers = cores.min(THREADS).min(sources.len()).saturating_sub(1);
    std::thread::scope(|scope| {
        for _ in 0..helpers {
            // Where no thread can be had, this one does all.
            if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    let results = results.into_iter().map(|result| result.into_inner().unwrap_or_else(PoisonError::into_inner));
    let missing = || CudaError::Compiler { call: "a thread that compiles", code: 0, name: "no result".to_string() };
    results.map(|result| result.unwrap_or_else(|| Err(missing()))).collect()
}

fn one(compiler: &Compiler, cache: Option<&DiskCache>, arch: &str, source: &CudaSource) -> Result<Cubin, CudaError> {
    cached(compiler, cache, &Request { name: &source.name, text: &source.text, arch, options: &[] })
}

fn cached(compiler: &Compiler, cache: Option<&DiskCache>, request: &Request<'_>) -> Result<Cubin, CudaError> {
    let build = || compiler.compile(request);
    match cache {
        Some(cache) => Ok(cache.get_or_build(&Key::new(request, compiler.version()), build)?.0),
        None => build(),
    }
}
