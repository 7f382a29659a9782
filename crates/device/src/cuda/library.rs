//! Finding and loading the three libraries of CUDA that we call: the driver, NVRTC and cuBLASLt.
//!
//! Each function gives a token that proves that its library is in the process and new enough; the code that calls into a
//! library asks for the token, since cudarc panics on a library that is not there.
//!
//! The search uses the first library found, in this order: one that the process has already loaded (PyTorch's, in a Python
//! process), the folders of [`Search`], the dynamic loader's own path, the usual folders of the system. A file found in a
//! folder is loaded by its absolute path; cudarc's own `dlopen` by name then meets it in the process. Two limits follow. A
//! process uses one copy of a library, the first: a later search with other folders changes nothing. And where the
//! loader's path holds an unversioned `libnvrtc.so`, cudarc takes that one; `path()` says which one it was.
//!
//! NVRTC opens `libnvrtc-builtins` by name. Some find the file beside them by their own `RPATH=$ORIGIN` (13.4), some do not (13.0, as a
//! Python package), so it is loaded from there first.

use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use cudarc::{cublaslt, driver as cuda, nvrtc as compiler};

use super::error::CudaError;

/// The oldest driver, NVRTC and cuBLASLt that we call: CUDA 12.0, the first with `sm_90a` and tensor maps.
pub const OLDEST: (u32, u32) = (12, 0);

/// Folders to look into. Built by the command line: nothing here reads an environment variable.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Search {
    /// The root of a CUDA toolkit.
    pub cuda_home: Option<PathBuf>,
    /// Roots of Python environments, or `site-packages` folders, that may hold NVIDIA's `nvidia-*` packages.
    pub environments: Vec<PathBuf>,
}

/// Proof that the driver is loaded, with every function of CUDA 12.0. It does not imply that there is a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driver {
    path: PathBuf,
    version: (u32, u32),
}

/// Proof that NVRTC is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nvrtc {
    path: PathBuf,
    version: (u32, u32),
}

/// Proof that cuBLASLt is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CublasLt {
    path: PathBuf,
    version: (u32, u32),
}

/// Loads the driver, `libcuda`.
pub fn driver(search: &Search) -> Result<Driver, CudaError> {
    let path = load(&DRIVER, search.driver_places())?;
    let mut number: c_int = 0;
    // SAFETY: `load` found the library and this function in it; the pointer is to an integer of ours.
    let result = unsafe { cuda::sys::cuDriverGetVersion(&mut number) };
    result.result().map_err(|error| CudaError::driver("cuDriverGetVersion", error))?;
    let version = thousands(number);
    new_enough(&DRIVER, &path, version)?;
    Ok(Driver { path, version })
}

/// Loads the compiler, `libnvrtc`.
pub fn nvrtc(search: &Search) -> Result<Nvrtc, CudaError> {
    let path = load(&NVRTC, search.toolkit_places())?;
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    // SAFETY: `load` found the library and this function in it; the pointers are to integers of ours.
    let result = unsafe { compiler::sys::nvrtcVersion(&mut major, &mut minor) };
    result.result().map_err(|error| CudaError::Compiler {
        call: "nvrtcVersion",
        code: error.0 as i32,
        name: format!("{:?}", error.0),
    })?;
    let version = (major.unsigned_abs(), minor.unsigned_abs());
    new_enough(&NVRTC, &path, version)?;
    // Where it is missing, the first compilation says so.
    let builtins = path.with_file_name(format!("libnvrtc-builtins.so.{}.{}", version.0, version.1));
    let _ = open(builtins.as_os_str(), libc::RTLD_NOW | libc::RTLD_GLOBAL);
    Ok(Nvrtc { path, version })
}

/// Loads `libcublasLt`.
pub fn cublaslt(search: &Search) -> Result<CublasLt, CudaError> {
    let path = load(&CUBLASLT, search.toolkit_places())?;
    // SAFETY: `load` found the library and this function in it.
    let number = unsafe { cublaslt::sys::cublasLtGetVersion() };
    let version = ((number / 10_000) as u32, (number / 100 % 100) as u32);
    new_enough(&CUBLASLT, &path, version)?;
    Ok(CublasLt { path, version })
}

impl Driver {
    /// The file it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The newest CUDA version that this driver supports: major, minor.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Whether the driver has a function. To be asked before calling through cudarc what came after CUDA 12.0: it
    /// panics on a missing one. (`cuEventElapsedTime_v2`, behind its safe event timing, came with 12.8.)
    pub fn has(&self, function: &CStr) -> bool {
        (DRIVER.symbol)(function).is_some()
    }
}

impl Nvrtc {
    /// The file it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version: major, minor.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }
}

impl CublasLt {
    /// The file it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version: major, minor.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }
}

/// What is known about a library before it is found.
struct Wanted {
    name: &'static str,
    /// File names under which cudarc finds it once it is in the process, newest first.
    files: &'static [&'static str],
    /// The function that returns the version. Every version has it, so a file without it is not the library.
    version: &'static CStr,
    remedy: &'static str,
    /// Whether cudarc finds it.
    present: fn() -> bool,
    /// The address of a function in the copy that cudarc uses. Only to be called once `present` said yes.
    symbol: fn(&CStr) -> Option<*const c_void>,
}

const DRIVER: Wanted = Wanted {
    name: "libcuda",
    files: &["libcuda.so.1", "libcuda.so"],
    version: c"cuDriverGetVersion",
    remedy: "install NVIDIA's driver, or use the CPU",
    // SAFETY: asks the loader for a library by name; NVIDIA's may run its initialisers in any thread.
    present: || unsafe { cuda::sys::is_culib_present() },
    // SAFETY: the address is only compared and looked up, never called or read through.
    symbol: |name| unsafe { cuda::sys::culib().get::<*const c_void>(name) }.ok().map(|symbol| *symbol),
};

const NVRTC: Wanted = Wanted {
    name: "libnvrtc",
    files: &["libnvrtc.so.13", "libnvrtc.so.12"],
    version: c"nvrtcVersion",
    remedy: "`pip install nvidia-cuda-nvrtc` into a Python environment and name it, or name the root of a CUDA toolkit",
    // SAFETY: as for the driver.
    present: || unsafe { compiler::sys::is_culib_present() },
    // SAFETY: as for the driver.
    symbol: |name| unsafe { compiler::sys::culib().get::<*const c_void>(name) }.ok().map(|symbol| *symbol),
};

const CUBLASLT: Wanted = Wanted {
    name: "libcublasLt",
    files: &["libcublasLt.so.13", "libcublasLt.so.12"],
    version: c"cublasLtGetVersion",
    remedy: "`pip install nvidia-cublas` into a Python environment and name it, or name the root of a CUDA toolkit",
    // SAFETY: as for the driver.
    present: || unsafe { cublaslt::sys::is_culib_present() },
    // SAFETY: as for the driver.
    symbol: |name| unsafe { cublaslt::sys::culib().get::<*const c_void>(name) }.ok().map(|symbol| *symbol),
};

/// A place of the search, as shown in messages.
struct Place {
    label: String,
    kind: Kind,
}

enum Kind {
    /// These folders, those that exist.
    Folders(Vec<PathBuf>),
    /// Wherever the dynamic loader looks by itself.
    Loader,
}

impl Search {
    fn toolkit_places(&self) -> Vec<Place> {
        let mut places: Vec<Place> = self.cuda_home.iter().map(|home| toolkit(home)).collect();
        places.extend(self.environments.iter().flat_map(|root| environment(root)));
        places.push(loader());
        places.push(system_toolkits());
        places
    }

    fn driver_places(&self) -> Vec<Place> {
        // Beyond the loader's path: WSL, NixOS, and the forward-compatible driver of a toolkit.
        let mut places = vec![loader(), folder("/usr/lib/wsl/lib"), folder("/run/opengl-driver/lib")];
        places.extend(self.cuda_home.iter().map(|home| folder(home.join("compat"))));
        places
    }
}

fn loader() -> Place {
    Place { label: "the dynamic loader's path (LD_LIBRARY_PATH, ldconfig)".to_string(), kind: Kind::Loader }
}

fn folder(path: impl Into<PathBuf>) -> Place {
    let path = path.into();
    Place { label: path.display().to_string(), kind: Kind::Folders(vec![path]) }
}

fn toolkit(home: &Path) -> Place {
    let label = format!("{}/{{lib64,lib,targets/*/lib}}", home.display());
    Place { label, kind: Kind::Folders(toolkit_folders(home)) }
}

fn system_toolkits() -> Place {
    let homes = matching(Path::new("/usr/local"), |name| name.starts_with("cuda"));
    let folders = homes.iter().flat_map(|home| toolkit_folders(home)).collect();
    Place { label: "/usr/local/cuda*/{lib64,lib,targets/*/lib}".to_string(), kind: Kind::Folders(folders) }
}

fn toolkit_folders(home: &Path) -> Vec<PathBuf> {
    let targets = matching(&home.join("targets"), |_| true);
    let mut folders = vec![home.join("lib64"), home.join("lib")];
    folders.extend(targets.iter().map(|target| target.join("lib")));
    folders
}

/// Both readings of a root: an environment with a `lib/python3*` inside, or the folder of packages itself. A folder with the name of one is
/// no environment.
fn environment(root: &Path) -> Vec<Place> {
    let itself = Place { label: format!("{}/nvidia/*/lib", root.display()), kind: Kind::Folders(nvidia(root)) };
    if root.file_name().is_some_and(|name| name == "site-packages" || name == "dist-packages") {
        return vec![itself];
    }
    let inside = matching(&root.join("lib"), |name| name.starts_with("python3"))
        .iter()
        .flat_map(|python| [python.join("site-packages"), python.join("dist-packages")])
        .flat_map(|packages| nvidia(&packages))
        .collect();
    let label = format!("{}/lib/python3*/site-packages/nvidia/*/lib", root.display());
    let within = Place { label, kind: Kind::Folders(inside) };
    vec![within, itself]
}

/// 12.x packages put a library under its own name (`nvidia/cuda_nvrtc/lib`), 13.x all into one (`nvidia/cu13/lib`).
fn nvidia(packages: &Path) -> Vec<PathBuf> {
    matching(&packages.join("nvidia"), |_| true).iter().map(|package| package.join("lib")).collect()
}

/// The entries of a folder whose name passes, in reverse order of names, so that newer versions come first; none if
/// the folder cannot be read.
fn matching(folder: &Path, passes: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(&passes))
        .map(|entry| entry.path())
        .collect();
    paths.sort_unstable_by(|a, b| b.cmp(a));
    paths
}

/// Brings a library into the process, by the order of the search, and says which file it is.
fn load(wanted: &Wanted, places: Vec<Place>) -> Result<PathBuf, CudaError> {
    let mut looked_in = Vec::new();
    let loaded = wanted.files.iter().any(|file| open(OsStr::new(file), libc::RTLD_LAZY | libc::RTLD_NOLOAD).is_ok());
    if !loaded {
        preload(wanted, places, &mut looked_in);
    }
    // Asked in any case, since cudarc opens the library by itself and panics where it does not find it.
    if !(wanted.present)() {
        return Err(CudaError::LibraryMissing { library: wanted.name, remedy: wanted.remedy, looked_in });
    }
    match (wanted.symbol)(wanted.version) {
        Some(address) => Ok(file_of(address)),
        None => Err(CudaError::Unsupported {
            what: format!("the file that the loader has as {}", wanted.name),
            expected: format!("a library with the function `{}`", wanted.version.to_string_lossy()),
            got: "one without it".to_string(),
        }),
    }
}

/// Opens the first file that loads and keeps it open for good.
fn preload(wanted: &Wanted, places: Vec<Place>, looked_in: &mut Vec<String>) {
    for place in places {
        looked_in.push(place.label);
        let candidates: Vec<PathBuf> = match place.kind {
            Kind::Loader => wanted.files.iter().map(PathBuf::from).collect(),
            Kind::Folders(folders) => {
                // Absolute, or `dlopen` would search for a name without a slash.
                let folders = folders.iter().filter_map(|folder| std::path::absolute(folder).ok());
                let files = folders.flat_map(|folder| wanted.files.iter().map(move |file| folder.join(file)));
                files.filter(|file| file.exists()).collect()
            }
        };
        for candidate in candidates {
            match open(candidate.as_os_str(), libc::RTLD_NOW | libc::RTLD_GLOBAL) {
                Ok(()) => return,
                Err(reason) if candidate.is_absolute() => looked_in.push(format!("  did not load: {reason}")),
                // A plain name that the loader does not know is the ordinary case.
                Err(_) => {}
            }
        }
    }
}

/// `dlopen` without a matching `dlclose`: unloading NVIDIA's libraries is not safe.
fn open(file: &OsStr, flags: c_int) -> Result<(), String> {
    let Ok(name) = CString::new(file.as_bytes()) else { return Err("a path with a NUL byte".to_string()) };
    // SAFETY: `name` ends with NUL and outlives the call. The files opened are NVIDIA's libraries by name, whose
    // initialisers may run in any thread; a hostile file of that name in a folder the user named is the user's.
    let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
    if !handle.is_null() {
        return Ok(());
    }
    // SAFETY: the message belongs to this thread until its next call of the loader, and is copied before that.
    let reason = unsafe {
        let message = libc::dlerror();
        if message.is_null() { None } else { Some(CStr::from_ptr(message).to_string_lossy().into_owned()) }
    };
    Err(reason.unwrap_or_else(|| "no reason given".to_string()))
}

/// The file that holds an address, or an empty path where the loader does not say.
fn file_of(address: *const c_void) -> PathBuf {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `dladdr` accepts any address and writes at most one `Dl_info`, of which all zeros is a valid value. A name it
    // gives belongs to a library that is never unloaded (`open` keeps a reference) and ends with NUL.
    unsafe {
        if libc::dladdr(address, info.as_mut_ptr()) == 0 {
            return PathBuf::new();
        }
        let name = info.assume_init().dli_fname;
        if name.is_null() { PathBuf::new() } else { PathBuf::from(OsStr::from_bytes(CStr::from_ptr(name).to_bytes())) }
    }
}

/// Decodes CUDA's version numbers: 12040 is 12.4.
fn thousands(number: c_int) -> (u32, u32) {
    let number = number.unsigned_abs();
    (number / 1000, number % 1000 / 10)
}

fn new_enough(wanted: &Wanted, path: &Path, found: (u32, u32)) -> Result<(), CudaError> {
    if found >= OLDEST {
        return Ok(());
    }
    let what = format!("{} ({})", wanted.name, path.display());
    Err(CudaError::TooOld { what, needed: OLDEST, found, remedy: wanted.remedy })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(places: &[Place]) -> Vec<&str> {
        places.iter().map(|place| place.label.as_str()).collect()
    }

    #[test]
    fn folders_named_by_the_user_come_before_the_loader_and_the_system() {
        let search = Search { cuda_home: Some("toolkit".into()), environments: vec!["one".into(), "two".into()] };
        let expected = [
            "toolkit/{lib64,lib,targets/*/lib}",
            "one/lib/python3*/site-packages/nvidia/*/lib",
            "one/nvidia/*/lib",
            "two/lib/python3*/site-packages/nvidia/*/lib",
            "two/nvidia/*/lib",
            "the dynamic loader's path (LD_LIBRARY_PATH, ldconfig)",
            "/usr/local/cuda*/{lib64,lib,targets/*/lib}",
        ];
        assert_eq!(labels(&search.toolkit_places()), expected);
    }

    #[test]
    fn a_folder_of_packages_is_not_searched_as_an_environment() {
        for name in ["site-packages", "dist-packages"] {
            let root = PathBuf::from("lib/python3.12").join(name);
            assert_eq!(labels(&environment(&root)), [format!("{}/nvidia/*/lib", root.display())]);
        }
    }

    #[test]
    fn both_layouts_of_the_python_packages_are_found() {
        let root = std::env::temp_dir().join(format!("deuteron-library-{}", std::process::id()));
        for package in ["cu13", "cuda_nvrtc"] {
            std::fs::create_dir_all(root.join("lib/python3.12/site-packages/nvidia").join(package).join("lib"))
                .unwrap();
        }
        let packages = root.join("lib/python3.12/site-packages");
        let expected = ["cuda_nvrtc", "cu13"].map(|package| packages.join("nvidia").join(package).join("lib"));
        let folders = |place: Place| match place.kind {
            Kind::Folders(folders) => folders,
            Kind::Loader => panic!("expected folders"),
        };
        for searched in [&root, &packages] {
            let found: Vec<PathBuf> = environment(searched).into_iter().flat_map(folders).collect();
            assert_eq!(found, expected);
        }
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn versions_are_read_and_compared() {
        assert_eq!(thousands(12_040), (12, 4));
        assert_eq!(thousands(13_000), (13, 0));
        assert_eq!(new_enough(&DRIVER, Path::new("libcuda.so.1"), (12, 0)), Ok(()));
        let error = new_enough(&DRIVER, Path::new("libcuda.so.1"), (11, 8)).unwrap_err();
        let expected = "libcuda (libcuda.so.1) is too old: expected version 12.0 or newer, got 11.8; install NVIDIA's \
                        driver, or use the CPU";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn a_library_that_is_nowhere_is_an_error_with_every_place_and_reason() {
        let root = std::env::temp_dir().join(format!("deuteron-broken-library-{}", std::process::id()));
        std::fs::create_dir_all(&root).unwrap();
        std::fs::write(root.join("libdeuteron-none.so.1"), "not a library").unwrap();
        let wanted = Wanted {
            name: "libdeuteron-none",
            files: &["libdeuteron-none.so.1"],
            version: c"none",
            remedy: "this one does not exist",
            present: || false,
            symbol: |_| None,
        };
        let Err(CudaError::LibraryMissing { looked_in, .. }) = load(&wanted, vec![folder(&root), loader()]) else {
            panic!("expected a missing library")
        };
        assert_eq!(looked_in.len(), 3, "{looked_in:?}");
        assert_eq!(looked_in[0], root.display().to_string());
        assert!(looked_in[1].starts_with("  did not load: ") && looked_in[1].contains("libdeuteron-none.so.1"));
        assert!(looked_in[2].starts_with("the dynamic loader"));
        std::fs::remove_dir_all(&root).unwrap();
    }
}
