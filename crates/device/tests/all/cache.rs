//! The kernel cache under other processes, sudden death, damaged files and folders that cannot be used.
//!
//! What an entry must hold follows from its number alone, so that every reader can tell a right kernel from a wrong one.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use deuteron_device::cuda::cache::{DiskCache, Key, Origin};
use deuteron_device::cuda::error::CudaError;
use deuteron_device::cuda::nvrtc::{Cubin, EntryUsage, Request};
use deuteron_testkit::drill;

/// Set for a process that this file starts: what it is to do.
const TASK: &str = "DEUTERON_CACHE_TASK";
/// A user that owns nothing.
const NOBODY: u32 = 65_534;

/// A folder that goes away with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("deuteron-cache-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        DirBuilder::new().mode(0o700).create(&path).unwrap();
        Folder(path)
    }

    fn files(&self, suffix: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.to_string_lossy().ends_with(suffix)).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A sequence of numbers that looks random and is the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

fn key(number: u64) -> Key {
    let text = format!("kernel {number}");
    Key::new(&Request { name: "test", text: &text, arch: "sm_80", options: &[] }, (13, 0))
}

/// `number` in every part, and sizes from one byte to half a megabyte.
fn cubin(number: u64) -> Cubin {
    let mut image = vec![0; 1 + (number as usize * 7919) % 500_000];
    blake3::Hasher::new().update(&number.to_le_bytes()).finalize_xof().fill(&mut image);
    let entry = |index: u32| EntryUsage {
        name: format!("entry_{number}_{index}"),
        registers: number as u32 + index,
        constant: number.is_multiple_of(2).then_some(index),
        ..EntryUsage::default()
    };
    Cubin { image, entries: (0..number as u32 % 4).map(entry).collect() }
}

/// Gets an entry and compares all of it with what it must be.
fn get(cache: &DiskCache, number: u64) -> Origin {
    let (found, origin) = cache.get_or_build(&key(number), || Ok(cubin(number))).unwrap();
    assert!(found == cubin(number), "entry {number}, {origin:?}, is not what was built for it");
    origin
}

fn start(task: &str, folder: &Path, seed: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cache::task_of_a_child", "--nocapture"])
        .env(TASK, format!("{task} {seed} {}", folder.display()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

fn wait_for(sign: &Path) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !sign.exists() {
        assert!(Instant::now() < deadline, "no {} after a minute", sign.display());
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Not a test by itself: what the processes started above run.
#[test]
fn task_of_a_child() {
    let Ok(order) = std::env::var(TASK) else { return };
    let [task, seed, folder] = order.splitn(3, ' ').collect::<Vec<_>>().try_into().unwrap();
    let (seed, folder) = (seed.parse().unwrap(), PathBuf::from(folder));
    match task {
        "share" => share(seed, folder),
        "write" => write_for_ever(seed, folder),
        "read-only" => read_only(folder),
        "full" => full(seed, folder),
        other => panic!("no such task: {other}"),
    }
}

#[test]
fn thirty_two_processes_share_a_folder() {
    let folder = Folder::new("share");
    let children: Vec<Child> = (0..32).map(|seed| start("share", &folder.0, seed)).collect();
    File::create(folder.0.join("go")).unwrap();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let cache = DiskCache::open(folder.0.clone());
    for number in (0..8).chain(100..132) {
        assert_eq!(get(&cache, number), Origin::Disk, "entry {number}");
    }
    assert_eq!((cache.problem(), folder.files(".tmp")), (None, vec![]));
    drill::tried(32, "processes that share a kernel cache");
}

/// Eight entries that all processes want at once, and one that only this process has.
fn share(seed: u64, folder: PathBuf) {
    wait_for(&folder.join("go"));
    let cache = DiskCache::open(folder);
    let mut numbers = Numbers(seed);
    assert_eq!(get(&cache, 100 + seed), Origin::Built);
    for _ in 0..64 {
        get(&cache, numbers.below(8));
    }
    assert_eq!(get(&cache, 100 + seed), Origin::Disk);
    assert_eq!(cache.problem(), None);
}

#[test]
fn killed_writers_leave_no_bad_entry() {
    let folder = Folder::new("kill");
    let mut numbers = Numbers(7);
    let rounds = drill::times(60);
    for round in 0..rounds as u64 {
        let mut child = start("write", &folder.0, round);
        wait_for(&folder.0.join(format!("started-{round}")));
        std::thread::sleep(Duration::from_micros(numbers.below(30_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        let cache = DiskCache::open(folder.0.clone());
        for number in 0..16 {
            get(&cache, number);
        }
        assert_eq!(cache.problem(), None, "round {round}");
    }
    let left = folder.files(".tmp");
    assert!(!left.is_empty(), "no writer died in the middle: the test did not test");
    drill::tried(rounds, &format!("kills while a kernel was stored ({} in the middle)", left.len()));
    stale_files_are_removed(&folder, &left);
}

/// Writes the same sixteen entries until it is killed.
fn write_for_ever(seed: u64, folder: PathBuf) {
    File::create(folder.join(format!("started-{seed}"))).unwrap();
    let cache = DiskCache::open(folder);
    let mut numbers = Numbers(seed);
    loop {
        let number = numbers.below(16);
        let _ = fs::remove_file(cache.path(&key(number)));
        get(&cache, number);
    }
}

fn stale_files_are_removed(folder: &Folder, left: &[PathBuf]) {
    let foreign = folder.0.join("notes.tmp");
    File::create(&foreign).unwrap();
    let old = SystemTime::now() - Duration::from_secs(3600);
    for path in left[1..].iter().chain([&foreign]) {
        OpenOptions::new().write(true).open(path).unwrap().set_modified(old).unwrap();
    }
    DiskCache::open(folder.0.clone());
    let mut expected = vec![foreign, left[0].clone()];
    let mut remaining = folder.files(".tmp");
    expected.sort();
    remaining.sort();
    assert_eq!(remaining, expected, "only what is ours and old goes");
}

/// The bytes of a small entry (number 3: three functions), and the cache around it.
fn small_entry(folder: &Folder) -> (DiskCache, PathBuf, Vec<u8>) {
    let cache = DiskCache::open(folder.0.clone());
    assert_eq!(get(&cache, 3), Origin::Built);
    let path = cache.path(&key(3));
    let bytes = fs::read(&path).unwrap();
    (cache, path, bytes)
}

/// Puts bytes in place of entry 3: they must not be loaded, and a whole entry must be back afterwards.
fn replaced(folder: &Folder, path: &Path, bytes: &[u8], what: &str) {
    fs::write(path, bytes).unwrap();
    let cache = DiskCache::open(folder.0.clone());
    assert_eq!(get(&cache, 3), Origin::Built, "{what}");
    assert!(matches!(cache.problem(), Some(CudaError::Cache { action: "load", .. })), "{what}: {:?}", cache.problem());
    assert_eq!(get(&cache, 3), Origin::Disk, "{what}");
}

#[test]
fn flipped_bits_are_never_loaded() {
    let folder = Folder::new("flip");
    let (_, path, bytes) = small_entry(&folder);
    // Every bit of the header and of the first functions, then a sample that meets every bit of a byte.
    let dense = 8 * 160;
    for bit in (0..dense).chain((dense..8 * bytes.len()).step_by(1021)) {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        replaced(&folder, &path, &damaged, &format!("bit {bit}"));
    }
}

#[test]
fn truncated_and_grown_entries_are_never_loaded() {
    let folder = Folder::new("truncate");
    let (_, path, bytes) = small_entry(&folder);
    for length in (0..160).chain((160..bytes.len()).step_by(211)) {
        replaced(&folder, &path, &bytes[..length], &format!("{length} bytes"));
    }
    replaced(&folder, &path, &[&bytes[..], b"\0"].concat(), "one byte more");
    replaced(&folder, &path, &vec![0; bytes.len()], "zeros");
}

#[test]
fn foreign_things_in_place_of_an_entry_are_never_loaded() {
    let folder = Folder::new("foreign");
    let (cache, path, bytes) = small_entry(&folder);
    replaced(&folder, &path, b"DTRNKRNL", "a magic alone");
    replaced(&folder, &path, b"#!/bin/sh\necho not a kernel\n", "a script");
    get(&cache, 5);
    let other = fs::read(cache.path(&key(5))).unwrap();
    replaced(&folder, &path, &other, "an entry of another key");

    // A huge file that even begins like an entry: neither memory nor time may go into it.
    let mut file = File::create(&path).unwrap();
    file.write_all(&bytes).unwrap();
    file.set_len(1 << 36).unwrap();
    assert_eq!((get(&cache, 3), get(&cache, 3)), (Origin::Built, Origin::Disk));

    // A link to nowhere, an endless device, a pipe without a writer.
    for target in ["nowhere", "/dev/zero"] {
        fs::remove_file(&path).unwrap();
        symlink(target, &path).unwrap();
        assert_eq!((get(&cache, 3), get(&cache, 3)), (Origin::Built, Origin::Disk), "{target}");
    }
    fs::remove_file(&path).unwrap();
    let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the name ends with NUL and is alive during the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    assert_eq!((get(&cache, 3), get(&cache, 3)), (Origin::Built, Origin::Disk), "a pipe");

    // A folder cannot be replaced by a file: the kernel is built every time.
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!((get(&cache, 3), get(&cache, 3)), (Origin::Built, Origin::Built), "a folder");
    assert!(matches!(cache.problem(), Some(CudaError::Cache { action: "write", .. })), "{:?}", cache.problem());
    assert_eq!(folder.files(".tmp"), Vec::<PathBuf>::new());
}

#[test]
fn a_read_only_folder_is_read_and_the_rest_is_built() {
    let folder = Folder::new("read-only");
    get(&DiskCache::open(folder.0.clone()), 1);
    fs::set_permissions(&folder.0, Permissions::from_mode(0o500)).unwrap();
    if fs::metadata(&folder.0).unwrap().uid() == 0 {
        // Nothing is read-only to the system's user: the child becomes another one.
        for path in folder.files(".kernel").iter().chain([&folder.0]) {
            std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
    }
    assert!(start("read-only", &folder.0, 0).wait().unwrap().success());
    fs::set_permissions(&folder.0, Permissions::from_mode(0o700)).unwrap();
    assert_eq!((folder.files(".kernel").len(), folder.files(".tmp").len()), (1, 0));
}

fn read_only(folder: PathBuf) {
    // SAFETY: plain calls of the system; they change the rights of this process, which was started for nothing else.
    let user = unsafe {
        if libc::geteuid() == 0 {
            assert_eq!((libc::setgid(NOBODY), libc::setuid(NOBODY)), (0, 0));
        }
        libc::geteuid()
    };
    assert_ne!(user, 0);
    let cache = DiskCache::open(folder);
    assert_eq!((get(&cache, 1), cache.problem()), (Origin::Disk, None));
    assert_eq!((get(&cache, 2), get(&cache, 2)), (Origin::Built, Origin::Built));
    let problem = cache.problem().unwrap().to_string();
    assert!(problem.contains("could not write") && problem.contains("ermission denied"), "{problem}");
}

#[test]
fn a_full_disk_costs_only_time() {
    let folder = Folder::new("full");
    get(&DiskCache::open(folder.0.clone()), 1);
    for bytes in [0, 1, 100, 4096] {
        assert!(start("full", &folder.0, bytes).wait().unwrap().success(), "files of at most {bytes} bytes");
        assert_eq!((folder.files(".kernel").len(), folder.files(".tmp").len()), (1, 0));
    }
}

/// No file may have more than this many bytes: a write beyond them is an error, as on a full disk.
fn full(bytes: u64, folder: PathBuf) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: plain calls of the system; they limit this process, which was started for nothing else.
    unsafe {
        assert_ne!(libc::signal(libc::SIGXFSZ, libc::SIG_IGN), libc::SIG_ERR);
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &limit), 0);
    }
    let cache = DiskCache::open(folder);
    assert_eq!((get(&cache, 1), cache.problem()), (Origin::Disk, None));
    // Number 11 has more than 4096 bytes.
    assert_eq!((get(&cache, 11), get(&cache, 11)), (Origin::Built, Origin::Built));
    assert!(matches!(cache.problem(), Some(CudaError::Cache { action: "write", .. })), "{:?}", cache.problem());
}

#[test]
fn folders_that_others_may_write_to_are_not_used() {
    let folder = Folder::new("others");
    get(&DiskCache::open(folder.0.clone()), 1);
    // All, the group alone, others alone.
    for mode in [0o777, 0o720, 0o702] {
        fs::set_permissions(&folder.0, Permissions::from_mode(mode)).unwrap();
        let cache = DiskCache::open(folder.0.clone());
        assert_eq!((get(&cache, 1), get(&cache, 2), get(&cache, 2)), (Origin::Built, Origin::Built, Origin::Built));
        let problem = cache.problem().unwrap().to_string();
        assert!(problem.contains(&format!("got mode {mode:o}; run chmod 700 on it")), "{problem}");
        assert_eq!(folder.files(".kernel").len(), 1);
    }
}

/// Only root can give a folder away.
#[test]
fn folders_of_other_users_are_not_used() {
    let folder = Folder::new("foreign");
    get(&DiskCache::open(folder.0.clone()), 1);
    if fs::metadata(&folder.0).unwrap().uid() != 0 {
        return;
    }
    std::os::unix::fs::chown(&folder.0, Some(NOBODY), None).unwrap();
    let cache = DiskCache::open(folder.0.clone());
    assert_eq!((get(&cache, 1), get(&cache, 2)), (Origin::Built, Origin::Built));
    let problem = cache.problem().unwrap().to_string();
    assert!(problem.contains(&format!("got one of user {NOBODY}")), "{problem}");
}

#[test]
fn a_path_that_is_no_folder_costs_only_time() {
    let folder = Folder::new("file");
    let file = folder.0.join("file");
    File::create(&file).unwrap();
    for path in [file.clone(), file.join("below")] {
        let cache = DiskCache::open(path);
        assert_eq!((get(&cache, 1), get(&cache, 1)), (Origin::Built, Origin::Built));
        assert!(matches!(cache.problem(), Some(CudaError::Cache { action: "use", .. })));
    }
}

#[test]
fn folders_and_entries_are_made_for_one_user() {
    let folder = Folder::new("mode");
    let cache = DiskCache::open(folder.0.join("a/b"));
    get(&cache, 1);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let modes = (mode(&folder.0.join("a")), mode(cache.folder()), mode(&cache.path(&key(1))));
    assert_eq!(modes, (0o700, 0o700, 0o600));
}

#[test]
fn a_failed_build_leaves_nothing() {
    let folder = Folder::new("failed");
    let cache = DiskCache::open(folder.0.clone());
    assert_eq!(cache.get_or_build(&key(1), || Err(CudaError::NoDevice)), Err(CudaError::NoDevice));
    assert_eq!((folder.files(""), cache.problem()), (vec![], None));
    assert_eq!((get(&cache, 1), get(&cache, 1)), (Origin::Built, Origin::Disk));
}

#[test]
fn entries_beyond_the_limit_go_and_the_last_used_stay() {
    let folder = Folder::new("limit");
    let size = |numbers: std::ops::Range<u64>| numbers.map(|number| cubin(number).image.len() as u64).sum::<u64>();
    let cache = DiskCache::open(folder.0.clone());
    (0..40).for_each(|number| assert_eq!(get(&cache, number), Origin::Built));
    // As if they had been written a day apart, long ago; the first one is used again.
    let day = Duration::from_secs(24 * 60 * 60);
    for number in 0..40 {
        let file = OpenOptions::new().write(true).open(cache.path(&key(number))).unwrap();
        file.set_modified(SystemTime::now() - day * (50 - number as u32)).unwrap();
    }
    assert_eq!(get(&cache, 0), Origin::Disk);
    let most = size(0..40) / 2;
    let limited = DiskCache::with_limit(folder.0.clone(), most);
    let left: Vec<u64> = (0..40).filter(|&number| limited.path(&key(number)).exists()).collect();
    let bytes = |numbers: &[u64]| numbers.iter().map(|&number| cubin(number).image.len() as u64).sum::<u64>();
    assert!(bytes(&left) <= most / 4 * 3 && bytes(&left) > most / 2, "{left:?}");
    assert_eq!(left[0], 0, "it was used last");
    assert!(left[1..].windows(2).all(|pair| pair[0] + 1 == pair[1]) && left.ends_with(&[39]), "{left:?}");
    // What is written from now on stays below the limit too, but for a sixteenth and one entry.
    (100..200).for_each(|number| assert_eq!(get(&limited, number), Origin::Built));
    let all: u64 = folder.files(".kernel").iter().map(|path| fs::metadata(path).unwrap().len()).sum();
    assert!(all <= most + most / 16 + 1_000_000, "{all} of {most}");
    assert_eq!(limited.problem(), None);
}
