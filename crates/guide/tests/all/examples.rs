//! Every example runs.

use std::path::Path;

#[path = "../../../../examples/one_kernel.rs"]
mod one_kernel;
#[path = "../../../../examples/plan_for_gpu.rs"]
mod plan_for_gpu;
#[path = "../../../../examples/verify.rs"]
mod verify;

#[test]
fn all_run() {
    one_kernel::main().unwrap();
    plan_for_gpu::main().unwrap();
    verify::main().unwrap();
}

/// An example that nobody builds is found.
#[test]
fn all_are_programs_of_the_package() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let entries = std::fs::read_dir(root.join("../../examples")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    let rust: Vec<String> = names.filter(|name| name.ends_with(".rs")).collect();
    assert_eq!(rust.len(), 3);
    for name in rust {
        assert!(manifest.contains(&format!("path = \"../../examples/{name}\"")), "{name} is not in Cargo.toml");
    }
}
