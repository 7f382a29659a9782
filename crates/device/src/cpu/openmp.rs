//! The OpenMP runtime of another library in this process, such as PyTorch's.
//!
//! OpenMP's threads spin for milliseconds after a parallel region, in case another one follows. Our own threads would compete with them for the
//! cores: right after an op of PyTorch a kernel took up to twice its usual time. A parallel region of the same runtime finds its
//! threads awake and idle.

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use deuteron_codegen::cpu::task::Panicked;

use crate::cpu::threads::{Tasks, Work};

/// Runs a function once on each thread of a team: `GOMP_parallel(function, data, threads, flags)`.
type Parallel = unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

/// `omp_get_thread_num()`, `omp_get_max_threads()`.
type Number = unsafe extern "C" fn() -> c_int;

/// Entry points of an OpenMP runtime. GNU's runtime defines these names; LLVM's and Intel's provide them for compatibility.
#[derive(Clone, Copy)]
pub struct Runtime {
    parallel: Parallel,
    thread_number: Number,
    max_threads: Number,
}

impl Runtime {
    /// The runtime that `library` is linked with. None if the process has not loaded the library, or if it uses no OpenMP.
    pub fn of(library: &Path) -> Option<Runtime> {
        let path = CString::new(library.as_os_str().as_bytes()).ok()?;
        // SAFETY: the path is a C string. RTLD_NOLOAD loads nothing, so no initialiser runs. The handle is never closed, so the library
        // and its dependencies stay loaded as long as the process.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            return None;
        }
        let find = |name: &CStr| {
            // A lookup by handle also searches the library's dependencies: the runtime it calls itself.
            // SAFETY: an open handle and a C string.
            let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
            (!address.is_null()).then_some(address)
        };
        let (parallel, thread_number, max_threads) =
            (find(c"GOMP_parallel")?, find(c"omp_get_thread_num")?, find(c"omp_get_max_threads")?);
        // SAFETY: GNU's binary interface and the OpenMP standard define functions of these names with these types.
        unsafe {
            Some(Runtime {
                parallel: std::mem::transmute::<*mut c_void, Parallel>(parallel),
                thread_number: std::mem::transmute::<*mut c_void, Number>(thread_number),
                max_threads: std::mem::transmute::<*mut c_void, Number>(max_threads),
            })
        }
    }

    /// How many threads a parallel region of the calling thread may have, at least one.
    pub fn max_threads(&self) -> usize {
        // SAFETY: it takes no arguments and only reads the runtime's settings.
        usize::try_from(unsafe { (self.max_threads)() }).map_or(1, |threads| threads.max(1))
    }

    /// Runs `work(worker, task)` for every task in one parallel region of at most `threads` threads.
    pub(super) fn run(&self, threads: usize, tasks: usize, work: Work<'_>) -> Result<(), Panicked> {
        let region = Region { tasks: Tasks::new(tasks), work, threads, thread_number: self.thread_number };
        let data = (&raw const region).cast_mut().cast::<c_void>();
        let requested = c_uint::try_from(threads).unwrap_or(c_uint::MAX);
        // SAFETY: `enter` only reads the region through a shared reference. The call returns after all threads have left `enter`, so the
        // region outlives every use.
        unsafe { (self.parallel)(enter, data, requested, 0) };
        region.tasks.outcome()
    }
}

/// The shared data of a parallel region.
struct Region<'a> {
    tasks: Tasks,
    work: Work<'a>,
    threads: usize,
    thread_number: Number,
}

/// The part of one thread in a parallel region. [`Tasks::take`] catches panics, so none unwinds into the runtime.
///
/// # Safety
/// `data` points to a [`Region`] that is valid and not written to while this runs.
unsafe extern "C" fn enter(data: *mut c_void) {
    // SAFETY: the caller's promise.
    let region = unsafe { &*data.cast::<Region<'_>>() };
    // SAFETY: it takes no arguments and only reads.
    let worker = usize::try_from(unsafe { (region.thread_number)() }).unwrap_or(usize::MAX);
    // Each worker owns the scratch memory of its number. A thread whose number has none takes no task.
    if worker < region.threads {
        region.tasks.take(worker, region.work);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_library_that_is_not_loaded_has_no_runtime() {
        assert!(Runtime::of(Path::new("/nowhere/libtorch_cpu.so")).is_none());
        assert!(Runtime::of(Path::new("a\0b")).is_none());
    }

    /// A fake runtime: a team of scoped threads, numbered from 0, with one thread more than requested.
    mod team {
        use std::cell::Cell;

        use super::*;

        std::thread_local! { static NUMBER: Cell<c_int> = const { Cell::new(0) } }

        struct Shared(*mut c_void);
        // SAFETY: `enter` only reads what it points to.
        unsafe impl Sync for Shared {}

        pub unsafe extern "C" fn parallel(
            function: unsafe extern "C" fn(*mut c_void),
            data: *mut c_void,
            threads: c_uint,
            _: c_uint,
        ) {
            let data = &Shared(data);
            std::thread::scope(|scope| {
                for number in 0..=threads as c_int {
                    scope.spawn(move || {
                        NUMBER.set(number);
                        // SAFETY: as of `parallel`; the data outlives the scope.
                        unsafe { function(data.0) }
                    });
                }
            });
        }

        pub unsafe extern "C" fn thread_number() -> c_int {
            NUMBER.get()
        }

        pub unsafe extern "C" fn max_threads() -> c_int {
            3
        }
    }

    fn team() -> Runtime {
        Runtime { parallel: team::parallel, thread_number: team::thread_number, max_threads: team::max_threads }
    }

    #[test]
    fn a_parallel_region_runs_every_task_once_on_workers_below_the_limit() {
        let counts: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
        let work = |worker: usize, task: usize| {
            assert!(worker < 3, "the fourth thread has no scratch memory");
            counts[task].fetch_add(1, Ordering::Relaxed);
        };
        assert_eq!(team().run(3, 1000, &work), Ok(()));
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn a_panic_does_not_unwind_into_the_runtime() {
        let work = |_: usize, task: usize| {
            if task == 7 {
                std::panic::resume_unwind(Box::new("planned"));
            }
        };
        assert_eq!(team().run(2, 20, &work), Err(Panicked));
    }
}
