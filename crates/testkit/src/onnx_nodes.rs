//! The backend node tests of the `onnx` Python package: one small model per test, with inputs and the results that they must
//! give. The package is installed below `target/`; its data are not ours to store.

use std::path::{Path, PathBuf};

use deuteron_onnx::{Imported, Options, TensorData, import, read_tensor};

/// A test: a model, and sets of inputs and results.
#[derive(Debug)]
pub struct NodeTest {
    /// Its folder's name.
    pub name: String,
    /// The model's file.
    pub model: Vec<u8>,
    folder: PathBuf,
}

/// Inputs and results of one run.
#[derive(Debug)]
pub struct Data {
    /// By name, in the order of the model's inputs.
    pub inputs: Vec<(String, TensorData)>,
    /// In the order of the model's outputs.
    pub outputs: Vec<TensorData>,
}

/// Where the package is installed.
pub fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/onnx")
}

/// All tests in order of their names; `None` where the package is not installed.
pub fn tests() -> Option<Vec<NodeTest>> {
    let root = package().join("onnx/backend/test/data/node");
    let folders = std::fs::read_dir(root).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut tests: Vec<NodeTest> = folders
        .filter_map(|folder| {
            let name = folder.file_name()?.to_str()?.to_string();
            Some(NodeTest { name, model: std::fs::read(folder.join("model.onnx")).ok()?, folder })
        })
        .collect();
    tests.sort_by(|a, b| a.name.cmp(&b.name));
    Some(tests).filter(|tests| !tests.is_empty())
}

impl NodeTest {
    /// Its data, or why they cannot be read.
    pub fn data(&self) -> Result<Vec<Data>, String> {
        let mut sets = Vec::new();
        for set in 0.. {
            let folder = self.folder.join(format!("test_data_set_{set}"));
            if !folder.is_dir() {
                break;
            }
            let read = |kind: &str| -> Result<Vec<(String, TensorData)>, String> {
                let paths = (0..).map(|index| folder.join(format!("{kind}_{index}.pb")));
                let files = paths.map_while(|path| std::fs::read(path).ok());
                files.map(|file| read_tensor(&file).map_err(|error| error.to_string())).collect()
            };
            let outputs = read("output")?.into_iter().map(|(_, data)| data).collect();
            sets.push(Data { inputs: read("input")?, outputs });
        }
        Ok(sets)
    }

    /// The graph that runs it, or why there is none.
    pub fn import(&self, data: &Data) -> Result<Imported, String> {
        let mut options = Options::default();
        for (name, value) in &data.inputs {
            options = options.with_value(name, value.clone());
        }
        let imported = import(&self.model, &options).map_err(|error| error.to_string())?;
        match imported.opaque.first() {
            Some(opaque) => Err(format!("{}: {}", opaque.op_type, opaque.why)),
            None => Ok(imported),
        }
    }
}
