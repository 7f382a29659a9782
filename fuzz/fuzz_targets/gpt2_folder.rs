#![no_main]

use std::sync::LazyLock;

#[path = "../../crates/gpt2/tests/all/fuzz/body.rs"]
mod body;

static FOLDERS: LazyLock<body::Folders> = LazyLock::new(|| {
    body::Folders::new(std::env::temp_dir().join(format!("deuteron-fuzz-{}", std::process::id())))
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    FOLDERS.open(data);
});
