//! What tests need beside a CPU: NVRTC, which is installed for them, and a GPU, which is there or not.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use crate::{fetch, files};

/// Where NVRTC is installed, as a Python environment of its own.
const ENVIRONMENT: &str = "target/nvrtc";

/// Its package. PyTorch brings another version.
const NVRTC: &str = "nvidia-cuda-nvrtc==13.4.92";

/// The Python environment with NVRTC, installed if it is not there yet.
pub fn nvrtc(root: &Path) -> Result<PathBuf> {
    let folder = root.join(ENVIRONMENT);
    if !has_nvrtc(&folder) {
        fetch::environment(&folder, &[])?;
        fetch::pip(&folder.join("bin").join("python"), &[NVRTC], None, fetch::SHORT)?;
        ensure!(has_nvrtc(&folder), "the package holds no libnvrtc");
    }
    Ok(folder)
}

fn has_nvrtc(folder: &Path) -> bool {
    let inside = |folder: &Path| files::entries(folder).unwrap_or_default();
    let packages = inside(&folder.join("lib")).into_iter().map(|python| python.join("site-packages/nvidia"));
    let mut libraries = packages.flat_map(|nvidia| inside(&nvidia)).flat_map(|package| inside(&package.join("lib")));
    libraries.any(|file| file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc.so")))
}

/// Whether the kernel's driver for a GPU is loaded.
pub fn has_gpu() -> bool {
    ["/dev/nvidia0", "/dev/dxg"].iter().any(|device| Path::new(device).exists())
}

/// Tests of the workspace by what they need.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Needs {
    pub gpu: usize,
    pub nvrtc: usize,
}

/// Counts the tests that open a GPU, and those that call NVRTC without one: what a test needs is read from its text.
pub fn needs(root: &Path) -> Result<Needs> {
    let mut needs = Needs::default();
    for path in files::below(&root.join("crates"))?.iter().filter(|path| files::has_extension(path, &["rs"])) {
        let found = needs_of(&fs::read_to_string(path)?);
        needs.gpu += found.gpu;
        needs.nvrtc += found.nvrtc;
    }
    Ok(needs)
}

/// The tests of one file. A test ends at the brace that stands below its attribute.
fn needs_of(text: &str) -> Needs {
    let mut needs = Needs::default();
    for (start, attribute) in text.match_indices("#[test]") {
        let line = text[..start].rfind('\n').map_or(0, |end| end + 1);
        let indent = &text[line..start];
        if !indent.trim().is_empty() {
            continue;
        }
        let rest = &text[start + attribute.len()..];
        let body = rest.split(&format!("\n{indent}}}")).next().unwrap_or(rest);
        let opens = |words: &[&str]| words.iter().any(|word| body.contains(word));
        if opens(&["= gpu(", "on_gpu(", "= guarded_gpu(", "= hopper(", "= Gpu::new("]) {
            needs.gpu += 1;
        } else if opens(&["= compiler("]) {
            needs.nvrtc += 1;
        }
    }
    needs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_counted_by_what_they_open() {
        let test = |body: &str| format!("    #[test]\n    fn name() {{\n        {body}\n    }}\n");
        let opened = test("let Some(engine) = gpu() else { return };");
        let compiled = test("let Some(compiler) = compiler() else { return };");
        let helper = "    fn helper() {\n        let engine = gpu();\n    }\n";
        let text = [test("assert!(true);"), helper.to_string(), opened.clone(), compiled, opened].concat();
        assert_eq!(needs_of(&text), Needs { gpu: 2, nvrtc: 1 });
        assert_eq!(needs_of(&text.replace("    #[test]", "    // #[test]")), Needs::default());
    }

    #[test]
    fn the_tests_of_this_repository_are_found() {
        let found = needs(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap();
        assert!(found.gpu > 20 && found.nvrtc > 5, "{found:?}");
    }
}
