//! Hardware counters of the threads of this process, by Linux' `perf_event_open`.
//!
//! Only user code of this process is counted, which `perf_event_paranoid` allows up to 2. A virtual machine often has no such
//! counters, and a container often forbids the call: [`Counters::open`] says which.

use std::fs::File;
use std::io::{self, Read};

/// The counters, summed over all threads.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Reading {
    /// cycles of the cores
    pub cycles: f64,
    /// instructions that retired
    pub instructions: f64,
    /// accesses to the last-level cache
    pub references: f64,
    /// those that missed it
    pub misses: f64,
}

impl Reading {
    /// The counts since an earlier reading.
    pub fn since(&self, earlier: &Reading) -> Reading {
        Reading {
            cycles: self.cycles - earlier.cycles,
            instructions: self.instructions - earlier.instructions,
            references: self.references - earlier.references,
            misses: self.misses - earlier.misses,
        }
    }

    /// Both together.
    pub fn plus(&self, other: &Reading) -> Reading {
        Reading {
            cycles: self.cycles + other.cycles,
            instructions: self.instructions + other.instructions,
            references: self.references + other.references,
            misses: self.misses + other.misses,
        }
    }
}

/// Why there are no counters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CountersError {
    /// The kernel does not allow it.
    #[error(
        "counting is not allowed here (perf_event_paranoid is {paranoid}; expected 2 or less, and a container that lets \
         perf_event_open pass)"
    )]
    NotAllowed {
        /// the setting of the system, or `unknown`
        paranoid: String,
    },
    /// The CPU, or the virtual machine, has none.
    #[error("this CPU offers no hardware counters; virtual machines often hide them")]
    NoCounters,
    /// No such system call.
    #[error("hardware counters are read by perf_event_open, which only Linux has")]
    OtherSystem,
    /// Something else.
    #[error("perf_event_open: {0}")]
    Failed(String),
}

/// Counters of every thread that the process had when they were opened.
#[derive(Debug)]
pub struct Counters {
    /// of each thread, one file per event
    threads: Vec<[File; 4]>,
}

/// Cycles, instructions, accesses to the last-level cache and misses of it, as `PERF_TYPE_HARDWARE` numbers them.
const EVENTS: [u64; 4] = [0, 1, 2, 3];

impl Counters {
    /// Starts counting in all current threads.
    pub fn open() -> Result<Counters, CountersError> {
        let failed = |error: io::Error| CountersError::Failed(error.to_string());
        let mut threads = Vec::new();
        for entry in thread_ids()? {
            let mut files = Vec::with_capacity(EVENTS.len());
            for event in EVENTS {
                files.push(open(event, entry)?);
            }
            threads.extend(<[File; 4]>::try_from(files).ok());
        }
        let counters = Counters { threads };
        // Some virtual machines open counters that never count.
        let reading = counters.read().map_err(failed)?;
        if reading.instructions == 0.0 { Err(CountersError::NoCounters) } else { Ok(counters) }
    }

    /// What was counted until now.
    pub fn read(&self) -> io::Result<Reading> {
        let mut sums = [0.0; EVENTS.len()];
        for files in &self.threads {
            for (sum, file) in sums.iter_mut().zip(files) {
                *sum += value(file)?;
            }
        }
        let [cycles, instructions, references, misses] = sums;
        Ok(Reading { cycles, instructions, references, misses })
    }
}

/// A counter's value, scaled up where it had to share its register with others.
fn value(mut file: &File) -> io::Result<f64> {
    let mut words = [0u8; 24];
    file.read_exact(&mut words)?;
    let word = |index: usize| {
        let bytes = words[8 * index..8 * index + 8].try_into().unwrap_or([0; 8]);
        u64::from_ne_bytes(bytes) as f64
    };
    Ok(scaled(word(0), word(1), word(2)))
}

fn scaled(count: f64, enabled: f64, running: f64) -> f64 {
    if running > 0.0 { count * (enabled / running) } else { 0.0 }
}

#[cfg(target_os = "linux")]
fn thread_ids() -> Result<Vec<i32>, CountersError> {
    let tasks = std::fs::read_dir("/proc/self/task").map_err(|error| CountersError::Failed(error.to_string()))?;
    Ok(tasks.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

#[cfg(not(target_os = "linux"))]
fn thread_ids() -> Result<Vec<i32>, CountersError> {
    Err(CountersError::OtherSystem)
}

#[cfg(not(target_os = "linux"))]
fn open(_: u64, _: i32) -> Result<File, CountersError> {
    Err(CountersError::OtherSystem)
}

/// Opens one counter of one thread.
#[cfg(target_os = "linux")]
fn open(event: u64, thread: i32) -> Result<File, CountersError> {
    use std::os::fd::FromRawFd;

    let attributes = Attributes { size: size_of::<Attributes>() as u32, config: event, ..Attributes::default() };
    let (any_processor, no_group, close_on_exec) = (-1, -1, 8);
    // SAFETY: the kernel reads `size` bytes of the attributes, which live until it returns; the other arguments are numbers.
    let file = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            thread,
            any_processor as libc::c_int,
            no_group as libc::c_int,
            close_on_exec as libc::c_ulong,
        )
    };
    if file < 0 {
        return Err(refusal(&io::Error::last_os_error()));
    }
    // SAFETY: the kernel has just created this descriptor for us, and nothing else owns it.
    Ok(unsafe { File::from_raw_fd(file as i32) })
}

/// `perf_event_attr` as far as its first published version goes.
#[cfg(target_os = "linux")]
#[repr(C)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    breakpoint_address: u64,
}

#[cfg(target_os = "linux")]
impl Default for Attributes {
    /// A hardware counter of user code that starts at once and reports its running time.
    fn default() -> Self {
        const TIME_ENABLED: u64 = 1;
        const TIME_RUNNING: u64 = 2;
        const EXCLUDE_KERNEL: u64 = 1 << 5;
        const EXCLUDE_HYPERVISOR: u64 = 1 << 6;
        Attributes {
            kind: 0,
            size: 0,
            config: 0,
            sample_period: 0,
            sample_type: 0,
            read_format: TIME_ENABLED | TIME_RUNNING,
            flags: EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR,
            wakeup_events: 0,
            breakpoint_type: 0,
            breakpoint_address: 0,
        }
    }
}

/// The meaning of an error of the operating system.
#[cfg(target_os = "linux")]
fn refusal(error: &io::Error) -> CountersError {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            let paranoid = std::fs::read_to_string("/proc/sys/kernel/perf_event_paranoid");
            let paranoid = paranoid.map_or_else(|_| "unknown".to_string(), |text| text.trim().to_string());
            CountersError::NotAllowed { paranoid }
        }
        Some(libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP) => CountersError::NoCounters,
        // Kernels without the call, and containers that deny it this way.
        Some(libc::ENOSYS) => CountersError::NotAllowed { paranoid: "unknown".to_string() },
        _ => CountersError::Failed(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_that_shared_its_register_is_scaled_up() {
        assert_eq!(scaled(30.0, 100.0, 100.0), 30.0);
        assert_eq!(scaled(30.0, 100.0, 50.0), 60.0);
        assert_eq!(scaled(30.0, 100.0, 0.0), 0.0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_attributes_have_the_size_of_the_first_published_version() {
        assert_eq!(size_of::<Attributes>(), 64);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_refusal_says_what_is_missing() {
        let of = |code: i32| refusal(&io::Error::from_raw_os_error(code));
        assert_eq!(of(libc::ENOENT), CountersError::NoCounters);
        assert!(of(libc::EACCES).to_string().contains("not allowed"));
        assert!(matches!(of(libc::EMFILE), CountersError::Failed(_)));
    }

    /// Where there are counters they count; where there are none the reason is one of the known ones.
    #[test]
    fn work_is_counted_or_refused_with_a_reason() {
        match Counters::open() {
            Ok(counters) => {
                let before = counters.read().unwrap();
                let sum: u64 =
                    std::hint::black_box((0..100_000u64).fold(0, |sum, next| sum ^ std::hint::black_box(next)));
                let counted = counters.read().unwrap().since(&before);
                assert!(counted.instructions > 100_000.0, "{counted:?} for {sum}");
            }
            Err(CountersError::Failed(problem)) => panic!("{problem}"),
            Err(_) => {}
        }
    }
}
