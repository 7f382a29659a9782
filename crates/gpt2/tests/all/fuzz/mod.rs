//! A bounded run of the fuzz body. `DEUTERON_FUZZ_SECONDS=300 cargo test -p deuteron-gpt2 --test all fuzz -- --nocapture` runs longer.

mod body;

use std::time::{Duration, Instant};

use body::{Folders, SEEDS};
use deuteron_testkit::Scratch;
use deuteron_testkit::fuzz::{mutate, mutate_bytes};

#[test]
fn mutated_files_are_answered() {
    let seconds = std::env::var("DEUTERON_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3);
    let root = Scratch::make();
    let folders = Folders::new(root.to_path_buf());
    for (name, seed) in SEEDS {
        assert!(folders.open(seed), "{name} as it is");
    }
    let corpus: Vec<Vec<u8>> = SEEDS.iter().map(|(_, bytes)| bytes.to_vec()).collect();
    let (start, mut inputs, mut accepted) = (Instant::now(), 0u64, 0u64);
    while start.elapsed() < Duration::from_secs(seconds) {
        let kind = inputs as usize % corpus.len();
        let mut data = if (inputs / 6).is_multiple_of(2) {
            mutate_bytes(&corpus[kind..=kind], inputs)
        } else {
            let text = String::from_utf8_lossy(&corpus[kind]);
            mutate(&[&text], inputs)
        };
        if data.is_empty() {
            data.push(0);
        }
        data[0] = kind as u8;
        let guard = Seed(inputs);
        accepted += u64::from(folders.open(&data));
        std::mem::forget(guard);
        inputs += 1;
    }
    println!("fuzz gpt2_folder: {inputs} inputs, {accepted} accepted, 0 panics, {seconds} s");
}

/// Says which input panicked while the panic unwinds.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        eprintln!("input {} panicked", self.0);
    }
}
