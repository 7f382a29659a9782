//! Compiles a kernel's text to a cubin for one architecture, with NVRTC. Needs neither a GPU nor a driver.
//!
//! - Takes: CUDA C++ without `#include`, an architecture (`sm_90a`), options.
//! - Gives: the cubin, and for each entry function what `ptxas` says about registers, spills and memory.
//! - Threads: a [`Compiler`] may be shared, and several threads may compile at once. NVRTC does work in parallel: on two
//!   cores, two threads of 13.4 compile sources of 140 ms 1.9 times as fast as one does, sources of 33 ms 1.6 times.

use std::ffi::{CStr, CString, c_char, c_int};

use cudarc::nvrtc::{result, sys};

use super::error::CudaError;
use super::library::Nvrtc;

/// NVRTC, loaded.
#[derive(Debug, Clone)]
pub struct Compiler {
    library: Nvrtc,
}

/// A source to compile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request<'a> {
    /// The name of the source in the compiler's messages.
    pub name: &'a str,
    /// CUDA C++.
    pub text: &'a str,
    /// A real architecture: `sm_80`, `sm_90a`.
    pub arch: &'a str,
    /// Options beyond those of [`Request::options`].
    pub options: &'a [&'a str],
}

/// A compiled source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cubin {
    /// What the driver loads.
    pub image: Vec<u8>,
    /// Its `__global__` functions, in the order of the compiler's log.
    pub entries: Vec<EntryUsage>,
}

/// Resources of one `__global__` function, as `ptxas` reports them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EntryUsage {
    /// The name to launch it by.
    pub name: String,
    /// Registers a thread.
    pub registers: u32,
    /// Bytes of spill stores per thread, in the entry and in the functions it calls.
    pub spill_stores: u32,
    /// Bytes of spill loads per thread.
    pub spill_loads: u32,
    /// Bytes of stack frame per thread: spills and arrays with computed indices.
    pub stack: u32,
    /// Bytes of static shared memory, without the dynamic shared memory of a launch.
    pub shared: u32,
    /// Bytes of constant memory in all banks, arguments among them; not given for `sm_90` and later.
    pub constant: Option<u32>,
    /// Named barriers.
    pub barriers: u32,
}

impl Cubin {
    /// The usage of one function.
    pub fn entry(&self, name: &str) -> Option<&EntryUsage> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

impl Request<'_> {
    /// All options as NVRTC gets them.
    pub fn options(&self) -> Vec<String> {
        let fixed = ["--std=c++17", "--ptxas-options=-v"];
        let mut options = vec![format!("--gpu-architecture={}", self.arch)];
        options.extend(fixed.iter().chain(self.options).map(|option| option.to_string()));
        options
    }

    fn failed(&self, log: String) -> CudaError {
        CudaError::Compile {
            kernel: self.name.to_string(),
            arch: self.arch.to_string(),
            log,
            source: self.text.to_string(),
        }
    }
}

impl Compiler {
    /// The token proves that NVRTC is loaded.
    pub fn new(library: Nvrtc) -> Compiler {
        Compiler { library }
    }

    /// NVRTC's version: major, minor.
    pub fn version(&self) -> (u32, u32) {
        self.library.version()
    }

    /// Compiles a source for an architecture.
    pub fn compile(&self, request: &Request<'_>) -> Result<Cubin, CudaError> {
        let terminated = |text: &str| {
            CString::new(text)
                .map_err(|_| request.failed("the source, its name or an option holds a NUL byte".to_string()))
        };
        let (text, name) = (terminated(request.text)?, terminated(request.name)?);
        let options = request.options().iter().map(|option| terminated(option)).collect::<Result<Vec<_>, _>>()?;
        let program = Program::new(&text, &name)?;
        let compiled = program.compile(&options);
        let log = program.log()?;
        match compiled {
            Ok(()) => {
                let mut entries = usage(&log);
                if entries.is_empty() {
                    // Newer compilers remember what they compiled in this process, and then have no report of it.
                    entries = report_again(&text, &name, &options);
                }
                Ok(Cubin { image: program.cubin()?, entries })
            }
            Err(sys::nvrtcResult::NVRTC_ERROR_BUILTIN_OPERATION_FAILURE) if log.contains("libnvrtc-builtins") => {
                Err(CudaError::LibraryMissing {
                    library: "libnvrtc-builtins",
                    remedy: "it belongs beside libnvrtc: install the whole package again",
                    looked_in: vec![self.library.path().display().to_string(), log.trim_end().to_string()],
                })
            }
            Err(code) => Err(request.failed(format!("{log}\n{code:?}"))),
        }
    }
}

/// Resources of each kernel, by a separate compilation. None if the compiler does not report
/// them; the kernels are usable all the same.
fn report_again(text: &CStr, name: &CStr, options: &[CString]) -> Vec<EntryUsage> {
    let Ok(program) = Program::new(text, name) else { return Vec::new() };
    let options: Vec<CString> = options.iter().cloned().chain([c"--no-cache".to_owned()]).collect();
    match program.compile(&options) {
        Ok(()) => program.log().map_or(Vec::new(), |log| usage(&log)),
        Err(_) => Vec::new(),
    }
}

/// A program of NVRTC's, destroyed when dropped. It may keep pointers to its text and name.
struct Program<'a> {
    handle: sys::nvrtcProgram,
    _text: &'a CStr,
    _name: &'a CStr,
}

impl<'a> Program<'a> {
    fn new(text: &'a CStr, name: &'a CStr) -> Result<Program<'a>, CudaError> {
        let handle = result::create_program(text, Some(name)).map_err(|error| failed("nvrtcCreateProgram", error.0))?;
        Ok(Program { handle, _text: text, _name: name })
    }

    fn compile(&self, options: &[CString]) -> Result<(), sys::nvrtcResult> {
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the handle is alive until drop; `pointers` holds as many strings as it says, all alive during the call.
        let code = unsafe { sys::nvrtcCompileProgram(self.handle, pointers.len() as c_int, pointers.as_ptr()) };
        code.result().map_err(|error| error.0)
    }

    fn log(&self) -> Result<String, CudaError> {
        let mut length = 0;
        // SAFETY: the handle is alive until drop, `length` is ours.
        check("nvrtcGetProgramLogSize", unsafe { sys::nvrtcGetProgramLogSize(self.handle, &mut length) })?;
        let mut bytes = vec![0u8; length];
        // SAFETY: NVRTC writes exactly the `length` bytes it just asked for.
        check("nvrtcGetProgramLog", unsafe { sys::nvrtcGetProgramLog(self.handle, bytes.as_mut_ptr().cast()) })?;
        // The length counts the closing NUL.
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>, CudaError> {
        let mut length = 0;
        // SAFETY: the handle is alive until drop, `length` is ours.
        check("nvrtcGetCUBINSize", unsafe { sys::nvrtcGetCUBINSize(self.handle, &mut length) })?;
        let mut image = vec![0u8; length];
        // SAFETY: NVRTC writes exactly the `length` bytes it just asked for.
        check("nvrtcGetCUBIN", unsafe { sys::nvrtcGetCUBIN(self.handle, image.as_mut_ptr().cast()) })?;
        Ok(image)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle came from `create_program` and is destroyed here only. Failing to free has no remedy.
        let _ = unsafe { result::destroy_program(self.handle) };
    }
}

fn check(call: &'static str, code: sys::nvrtcResult) -> Result<(), CudaError> {
    code.result().map_err(|error| failed(call, error.0))
}

fn failed(call: &'static str, code: sys::nvrtcResult) -> CudaError {
    CudaError::Compiler { call, code: code as i32, name: format!("{code:?}") }
}

/// Reads the log of `ptxas -v`. A function without a `Used ... registers` line is left out rather than shown as free.
///
/// Functions that an entry calls and that were not inlined follow in its part of the log; their spills are the entry's.
fn usage(log: &str) -> Vec<EntryUsage> {
    let mut entries: Vec<EntryUsage> = Vec::new();
    for part in log.split("Compiling entry function '").skip(1) {
        let Some((name, part)) = part.split_once('\'') else { continue };
        let Some(used) = part.lines().find(|line| line.contains("Used ") && line.contains(" registers")) else {
            continue;
        };
        let of_all = |unit: &str| part.lines().filter_map(|line| before(line, unit)).sum();
        let banks: Vec<u32> = used.split(',').filter_map(|part| before(part, " bytes cmem[")).collect();
        entries.push(EntryUsage {
            name: name.to_string(),
            registers: before(used, " registers").unwrap_or(0),
            spill_stores: of_all(" bytes spill stores"),
            spill_loads: of_all(" bytes spill loads"),
            stack: of_all(" bytes stack frame"),
            shared: before(used, " bytes smem").unwrap_or(0),
            constant: (!banks.is_empty()).then(|| banks.iter().sum()),
            barriers: before(used, " barriers").unwrap_or(0),
        });
    }
    entries
}

/// The number that stands before `unit`, if the unit is named: `ptxas` leaves out most of what is zero.
fn before(line: &str, unit: &str) -> Option<u32> {
    let (left, _) = line.split_once(unit)?;
    let start = left.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    left[start..].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::library::{self, Search};

    /// As NVRTC 13.4 prints it for `sm_80`; the second entry calls a function that was not inlined.
    const LOG: &str = "\
ptxas info    : 0 bytes gmem, 32 bytes cmem[3]
ptxas info    : Compiling entry function 'spills' for 'sm_80'
ptxas info    : Function properties for spills
ptxas         .     760 bytes stack frame, 848 bytes spill stores, 1084 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 760 bytes cumulative stack size, 4096 bytes smem, 372 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compile time = 28.763 ms
ptxas info    : Compiling entry function 'calls' for 'sm_80'
ptxas info    : Function properties for calls
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 42 registers, used 0 barriers, 364 bytes cmem[0]
ptxas info    : Compile time = 5.162 ms
ptxas info    : Function properties for _Z6helperfi
ptxas         .     248 bytes stack frame, 68 bytes spill stores, 72 bytes spill loads
";

    #[test]
    fn a_log_is_read_entry_by_entry() {
        let spills = EntryUsage {
            name: "spills".to_string(),
            registers: 32,
            spill_stores: 848,
            spill_loads: 1084,
            stack: 760,
            shared: 4096,
            constant: Some(380),
            barriers: 1,
        };
        let calls = EntryUsage {
            name: "calls".to_string(),
            registers: 42,
            spill_stores: 68,
            spill_loads: 72,
            stack: 248,
            shared: 0,
            constant: Some(364),
            barriers: 0,
        };
        assert_eq!(usage(LOG), [spills, calls]);
    }

    #[test]
    fn a_log_without_constants_says_so_and_an_unfinished_entry_is_left_out() {
        let log = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'plain' for 'sm_90a'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
ptxas info    : Compiling entry function 'unfinished' for 'sm_90a'
";
        let plain = EntryUsage { name: "plain".to_string(), registers: 10, ..EntryUsage::default() };
        assert_eq!(usage(log), [plain]);
        assert_eq!(usage(""), []);
    }

    #[test]
    fn a_request_spells_out_all_its_options() {
        let request = Request { name: "k", text: "", arch: "sm_90a", options: &["--use_fast_math"] };
        let expected = ["--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v", "--use_fast_math"];
        assert_eq!(request.options(), expected);
    }

    #[test]
    fn a_compiler_can_be_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Compiler>();
        // Where NVRTC is absent, the answer is an error and no panic.
        if let Err(error) = library::nvrtc(&Search::default()) {
            assert!(matches!(error, CudaError::LibraryMissing { library: "libnvrtc", .. }), "{error}");
        }
    }
}
