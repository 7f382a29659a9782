//! `cargo xtask sbom`: what a release is built from, as CycloneDX.
//!
//! Every package that `Cargo.lock` pins and some target needs, with version, licence and the digest of its archive. Same lock file,
//! same bytes.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{printed, program, root};

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

/// One package, as cargo describes it.
#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
}

#[derive(Deserialize)]
struct Lock {
    package: Vec<Locked>,
}

#[derive(Deserialize)]
struct Locked {
    name: String,
    version: String,
    checksum: Option<String>,
}

/// Writes `target/deuteron.cdx.json`.
pub fn run() -> Result<()> {
    let root = root()?;
    let listed =
        printed(Command::new(program()).current_dir(&root).args(["metadata", "--format-version", "1", "--locked"]))?;
    let lock = fs::read_to_string(root.join("Cargo.lock"))?;
    let bill = bill(&listed, &lock)?;
    let path = root.join("target").join("deuteron.cdx.json");
    fs::create_dir_all(root.join("target"))?;
    fs::write(&path, format!("{bill:#}\n")).with_context(|| path.display().to_string())?;
    println!("{}: {} packages", path.display(), bill["components"].as_array().map_or(0, Vec::len));
    Ok(())
}

fn bill(metadata: &str, lock: &str) -> Result<Value> {
    let metadata: Metadata = serde_json::from_str(metadata).context("cargo metadata gave no packages")?;
    let lock: Lock = toml::from_str(lock).context("Cargo.lock")?;
    let digests: BTreeMap<(String, String), Option<String>> =
        lock.package.into_iter().map(|locked| ((locked.name, locked.version), locked.checksum)).collect();
    let mut components = BTreeMap::new();
    for Package { name, version, license, source } in metadata.packages {
        let digest = digests.get(&(name.clone(), version.clone())).cloned().flatten();
        ensure!(source.is_none() || digest.is_some(), "{name} {version} has no digest in Cargo.lock");
        // An old way of writing "or".
        let license = license.map(|license| license.replace('/', " OR "));
        let mut component = json!({
            "type": "library",
            "name": name,
            "version": version,
            "licenses": [{ "expression": license.context(format!("{name} names no licence"))? }],
        });
        if let Some(digest) = digest {
            component["purl"] = json!(format!("pkg:cargo/{name}@{version}"));
            component["hashes"] = json!([{ "alg": "SHA-256", "content": digest }]);
        }
        components.insert((name, version), component);
    }
    ensure!(!components.is_empty(), "no packages");
    let components: Vec<Value> = components.into_values().collect();
    Ok(json!({ "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": components }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_listed_with_licence_and_digest() {
        let metadata = r#"{"packages": [
            {"name": "b", "version": "2.0.0", "license": "MIT", "source": "registry"},
            {"name": "a", "version": "0.1.0", "license": "MIT OR Apache-2.0", "source": null}]}"#;
        let lock = "[[package]]\nname = \"b\"\nversion = \"2.0.0\"\nchecksum = \"00ff\"\n";
        let found = bill(metadata, lock).unwrap();
        let names: Vec<&Value> = found["components"].as_array().unwrap().iter().map(|part| &part["name"]).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(found["components"][1]["hashes"][0]["content"], "00ff");
        assert_eq!(found["components"][1]["purl"], "pkg:cargo/b@2.0.0");
        assert!(bill(metadata, "package = []").is_err(), "a package of a registry without a digest");
    }
}
