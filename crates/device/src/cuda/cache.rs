//! The disk cache of compiled kernels, addressed by a hash of their source and options.
//!
//! One file an entry, little-endian: magic (8 bytes), format (u32), key (32), length of the payload (u64), blake3 of all
//! the other bytes (32), payload (the usage of each entry function, then the cubin).
//!
//! - An entry is written under a temporary name, synced and renamed, so readers never see a partial entry.
//! - An entry that is incomplete, foreign, or not for its key is never loaded; it is compiled again and replaced.
//! - An unusable folder only costs time: kernels are compiled, and [`DiskCache::problem`] says why.
//! - A folder that other users may write to is not used, since an entry is code that runs on the GPU.
//! - Entries take at most a gigabyte; above that, the least recently used are removed until three quarters are left.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::error::CudaError;
use super::nvrtc::{Cubin, EntryUsage, Request};

const MAGIC: [u8; 8] = *b"DTRNKRNL";
const FORMAT: u32 = 1;
/// Magic, format, key, length, checksum.
const HEADER: usize = 8 + 4 + 32 + 8 + 32;
/// Maximum size of a payload. Our cubins are well below a megabyte.
const LARGEST: u64 = 1 << 28;
/// Far longer than any write takes, so that a temporary file of this age has no writer any more.
const STALE: Duration = Duration::from_secs(10 * 60);

/// Bytes of all entries together, at most: some 20,000 kernels.
const MOST: u64 = 1 << 30;
/// An entry that is loaded is marked as used if its last mark is older than this. Loading every kernel of a model writes nothing then.
const MARK_AFTER: Duration = Duration::from_secs(60 * 60);

/// A cache in one folder. Threads and processes may share it.
#[derive(Debug)]
pub struct DiskCache {
    folder: PathBuf,
    usable: bool,
    most: u64,
    /// Bytes written since the folder was last looked through.
    written: AtomicU64,
    problem: Mutex<Option<CudaError>>,
}

/// The hash of a kernel's source and options.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key([u8; 32]);

/// Where a kernel came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Read from an earlier build.
    Disk,
    /// Built now.
    Built,
}

impl Key {
    /// The key of a request with a compiler of this version. It does not include the name, which only changes messages.
    pub fn new(request: &Request<'_>, compiler: (u32, u32)) -> Key {
        let mut hasher = blake3::Hasher::new_derive_key("deuteron kernel cache, key, 1");
        let options = request.options();
        let version = format!("nvrtc {}.{}", compiler.0, compiler.1);
        let parts = options.iter().map(String::as_str).chain([version.as_str(), request.text]);
        // The length before each part keeps ("ab", "c") and ("a", "bc") apart.
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        Key(hasher.finalize().into())
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Key({self})")
    }
}

impl DiskCache {
    /// Opens a folder, creating it for this user only if necessary. Also removes temporary files of dead writers, and entries
    /// beyond a gigabyte.
    pub fn open(folder: PathBuf) -> DiskCache {
        DiskCache::with_limit(folder, MOST)
    }

    /// The same with this many bytes of entries at most.
    pub fn with_limit(folder: PathBuf, most: u64) -> DiskCache {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        let trusted = made.map_err(|error| error.to_string()).and_then(|()| trust(&folder));
        let problem = trusted.err().map(|problem| CudaError::Cache { action: "use", path: folder.clone(), problem });
        if problem.is_none() {
            remove_stale(&folder);
            remove_oldest(&folder, most);
        }
        let written = AtomicU64::new(0);
        DiskCache { folder, usable: problem.is_none(), most, written, problem: Mutex::new(problem) }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The file of an entry, whether it exists or not.
    pub fn path(&self, key: &Key) -> PathBuf {
        self.folder.join(format!("{key}.kernel"))
    }

    /// The latest problem, as text.
    pub fn problem(&self) -> Option<CudaError> {
        self.problem.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The kernel of a key: from disk if there is a valid entry, otherwise built and stored. Fails only if `build` does.
    pub fn get_or_build(
        &self,
        key: &Key,
        build: impl FnOnce() -> Result<Cubin, CudaError>,
    ) -> Result<(Cubin, Origin), CudaError> {
        if !self.usable {
            return Ok((build()?, Origin::Built));
        }
        let path = self.path(key);
        match read(&path, key) {
            Ok(Some(cubin)) => return Ok((cubin, Origin::Disk)),
            Ok(None) => {}
            Err(problem) => self.note("load", path.clone(), problem),
        }
        let cubin = build()?;
        if let Err(error) = self.write(&path, key, &cubin) {
            self.note("write", path, error.to_string());
        }
        Ok((cubin, Origin::Built))
    }

    fn write(&self, path: &Path, key: &Key, cubin: &Cubin) -> io::Result<()> {
        let temporary = self.folder.join(temporary_name(key));
        let bytes = encode(key, cubin);
        let written = write_synced(&temporary, &bytes).and_then(|()| fs::rename(&temporary, path));
        if written.is_err() {
            // May not exist; and where it cannot be removed, `open` will do it later.
            let _ = fs::remove_file(&temporary);
        }
        // Looking through the folder takes longer than writing an entry: only after a part of what it may hold.
        let size = bytes.len() as u64;
        if self.written.fetch_add(size, Ordering::Relaxed) + size > self.most / 16 {
            self.written.store(0, Ordering::Relaxed);
            remove_oldest(&self.folder, self.most);
        }
        written
    }

    fn note(&self, action: &'static str, path: PathBuf, problem: String) {
        let error = CudaError::Cache { action, path, problem };
        *self.problem.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }
}

/// Whether only this user (or the system's) can have put something into a folder.
fn trust(folder: &Path) -> Result<(), String> {
    let metadata = fs::metadata(folder).map_err(|error| error.to_string())?;
    // SAFETY: has no precondition and cannot fail.
    let user = unsafe { libc::geteuid() };
    if metadata.uid() != user && metadata.uid() != 0 {
        return Err(format!("expected a folder of user {user}, got one of user {}; choose another", metadata.uid()));
    }
    if metadata.mode() & 0o022 != 0 {
        let mode = metadata.mode() & 0o777;
        return Err(format!(
            "expected a folder that only its owner may write to, got mode {mode:o}; run chmod 700 on it"
        ));
    }
    Ok(())
}

/// Unique among the threads of a process by the count, among processes by number and time. The key in front tells
/// `remove_stale` that the file is ours.
fn temporary_name(key: &Key) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    format!("{key}.{}.{count}.{time:x}.tmp", std::process::id())
}

fn is_temporary(name: &str) -> bool {
    let key = name.split('.').next().unwrap_or_default();
    name.ends_with(".tmp") && key.len() == 64 && key.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn remove_stale(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_str().is_some_and(is_temporary);
        let age = || entry.metadata().ok()?.modified().ok()?.elapsed().ok();
        if ours && age().is_some_and(|age| age > STALE) {
            // Another process may have been faster; a file that stays is tried again at the next opening.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Removes entries if they have more than `most` bytes together: those that were used last longest ago, down to three quarters.
fn remove_oldest(folder: &Path, most: u64) {
    let Ok(listed) = fs::read_dir(folder) else { return };
    let of_file = |entry: fs::DirEntry| {
        let ours = entry.file_name().to_str().is_some_and(|name| name.ends_with(".kernel"));
        let metadata = entry.metadata().ok().filter(|metadata| ours && metadata.is_file())?;
        Some((metadata.modified().ok()?, metadata.len(), entry.path()))
    };
    let mut entries: Vec<(SystemTime, u64, PathBuf)> = listed.flatten().filter_map(of_file).collect();
    let mut total: u64 = entries.iter().map(|(_, size, _)| size).sum();
    if total <= most {
        return;
    }
    entries.sort();
    for (_, size, path) in entries {
        if total <= most / 4 * 3 {
            break;
        }
        // A reader that has it open reads on; one that comes later builds it again.
        if fs::remove_file(path).is_ok() {
            total -= size;
        }
    }
}

/// Marks an entry as used. If that fails, the entry is only removed earlier.
fn mark_used(file: &File) {
    let age = || file.metadata().ok()?.modified().ok()?.elapsed().ok();
    if age().is_some_and(|age| age > MARK_AFTER) {
        let _ = file.set_modified(SystemTime::now());
    }
}

fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    // Before the rename: a crash of the machine must not leave the name with half of the bytes.
    file.sync_all()
}

/// The kernel in a file, `None` if there is no file, or why the file is no entry of this key.
fn read(path: &Path, key: &Key) -> Result<Option<Cubin>, String> {
    // Without O_NONBLOCK, opening a pipe in its place would wait for its writer.
    let file = match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let bytes = read_whole(&file).map_err(|error| error.to_string())?;
    let cubin = decode(key, &bytes)?;
    mark_used(&file);
    Ok(Some(cubin))
}

/// The header first, and not more than an entry can have: a large file that is not ours is not read into memory.
fn read_whole(mut file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    (&mut file).take(HEADER as u64).read_to_end(&mut bytes)?;
    if bytes.starts_with(&MAGIC) {
        file.take(LARGEST).read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

fn encode(key: &Key, cubin: &Cubin) -> Vec<u8> {
    let payload = encode_payload(cubin);
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    bytes.extend(MAGIC);
    bytes.extend(FORMAT.to_le_bytes());
    bytes.extend(key.0);
    bytes.extend((payload.len() as u64).to_le_bytes());
    let checksum = checksum(&bytes, &payload);
    bytes.extend(checksum);
    bytes.extend(payload);
    bytes
}

/// Covers the header's fields as well, so that every bit of a file is checked.
fn checksum(fields: &[u8], payload: &[u8]) -> [u8; 32] {
    blake3::Hasher::new().update(fields).update(payload).finalize().into()
}

fn decode(key: &Key, bytes: &[u8]) -> Result<Cubin, &'static str> {
    let mut rest = Reader(bytes);
    if rest.take(8) != Some(&MAGIC) {
        return Err("not an entry of this cache");
    }
    if rest.u32() != Some(FORMAT) {
        return Err("an entry of another format");
    }
    if rest.take(32) != Some(&key.0) {
        return Err("an entry for another key");
    }
    let length = rest.u64();
    let stored = rest.take(32).ok_or("an entry that ends early")?;
    if length != Some(rest.0.len() as u64) {
        return Err("an entry of the wrong length");
    }
    if stored != checksum(&bytes[..HEADER - 32], rest.0) {
        return Err("an entry with a wrong checksum");
    }
    decode_payload(rest).ok_or("an entry whose payload does not parse")
}

fn encode_payload(cubin: &Cubin) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(cubin.image.len() + 64 * (cubin.entries.len() + 1));
    bytes.extend((cubin.entries.len() as u32).to_le_bytes());
    for entry in &cubin.entries {
        // Every field by name: a new one cannot be forgotten here.
        let EntryUsage { name, registers, spill_stores, spill_loads, stack, shared, constant, barriers } = entry;
        bytes.extend((name.len() as u32).to_le_bytes());
        bytes.extend(name.as_bytes());
        for number in [registers, spill_stores, spill_loads, stack, shared, barriers] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.push(u8::from(constant.is_some()));
        bytes.extend(constant.unwrap_or(0).to_le_bytes());
    }
    bytes.extend((cubin.image.len() as u64).to_le_bytes());
    bytes.extend(&cubin.image);
    bytes
}

fn decode_payload(mut rest: Reader<'_>) -> Option<Cubin> {
    let count = rest.u32()?;
    let mut entries = Vec::new();
    for _ in 0..count {
        let length = rest.u32()?;
        let name = std::str::from_utf8(rest.take(length as usize)?).ok()?.to_string();
        entries.push(EntryUsage {
            name,
            registers: rest.u32()?,
            spill_stores: rest.u32()?,
            spill_loads: rest.u32()?,
            stack: rest.u32()?,
            shared: rest.u32()?,
            barriers: rest.u32()?,
            constant: match (rest.take(1)?, rest.u32()?) {
                ([0], 0) => None,
                ([1], bytes) => Some(bytes),
                _ => return None,
            },
        });
    }
    let length = rest.u64()?;
    (length == rest.0.len() as u64).then(|| Cubin { image: rest.0.to_vec(), entries })
}

/// The bytes not yet read.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> (Key, Cubin) {
        let request = Request { name: "k", text: "text", arch: "sm_80", options: &[] };
        let entry =
            |name: &str, registers| EntryUsage { name: name.to_string(), registers, shared: 9, ..Default::default() };
        let cubin = Cubin { image: (0..=255).collect(), entries: vec![entry("forward", 40), entry("backward", 96)] };
        (Key::new(&request, (13, 0)), cubin)
    }

    #[test]
    fn an_entry_reads_as_it_was_written() {
        let (key, cubin) = sample();
        assert_eq!(decode(&key, &encode(&key, &cubin)), Ok(cubin));
        let empty = Cubin { image: vec![], entries: vec![] };
        assert_eq!(decode(&key, &encode(&key, &empty)), Ok(empty));
    }

    #[test]
    fn every_flipped_bit_is_seen() {
        let (key, cubin) = sample();
        let mut bytes = encode(&key, &cubin);
        for bit in 0..8 * bytes.len() {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&key, &bytes).is_err(), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(decode(&key, &bytes), Ok(cubin));
    }

    #[test]
    fn every_other_length_is_seen() {
        let (key, cubin) = sample();
        let bytes = encode(&key, &cubin);
        for length in 0..bytes.len() {
            assert!(decode(&key, &bytes[..length]).is_err(), "{length} bytes of {}", bytes.len());
        }
        assert_eq!(decode(&key, &[&bytes[..], &[0]].concat()), Err("an entry of the wrong length"));
    }

    #[test]
    fn an_entry_of_another_key_is_refused() {
        let (key, cubin) = sample();
        let other = Key::new(&Request { name: "k", text: "other", arch: "sm_80", options: &[] }, (13, 0));
        assert_eq!(decode(&other, &encode(&key, &cubin)), Err("an entry for another key"));
    }

    #[test]
    fn a_key_depends_on_everything_but_the_name() {
        let base = Request { name: "k", text: "text", arch: "sm_80", options: &["-a", "b"] };
        let key = Key::new(&base, (13, 0));
        assert_eq!(key, Key::new(&Request { name: "other", ..base }, (13, 0)));
        let others = [
            Key::new(&Request { text: "text ", ..base }, (13, 0)),
            Key::new(&Request { arch: "sm_90a", ..base }, (13, 0)),
            Key::new(&Request { options: &["-ab"], ..base }, (13, 0)),
            Key::new(&Request { options: &["b", "-a"], ..base }, (13, 0)),
            Key::new(&base, (13, 1)),
            Key::new(&base, (12, 0)),
        ];
        for (index, other) in others.iter().enumerate() {
            assert!(*other != key && !others[..index].contains(other), "case {index}");
        }
    }

    #[test]
    fn only_our_temporary_files_are_ours() {
        let (key, _) = sample();
        let name = temporary_name(&key);
        assert!(is_temporary(&name), "{name}");
        assert_ne!(name, temporary_name(&key));
        let others = [".kernel", "x.1.tmp", "0.1.tmp"].map(|end| format!("{key}{end}"));
        for name in others.iter().map(String::as_str).chain(["notes.tmp", "cafe.1.tmp", ".tmp"]) {
            assert!(!is_temporary(name), "{name}");
        }
    }
}
