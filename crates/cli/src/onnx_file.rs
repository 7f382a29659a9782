//! ONNX files: import as a graph, inputs, and the results to compare with.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use deuteron::fuse::{Agreement, agreement};
use deuteron::onnx::{Imported, OpaqueOp, Options, TensorData, import_file};
use deuteron::{Engine, Graph, Tensor};

use crate::arrays;

/// Inputs of an ONNX file, and the results to compare with.
#[derive(Args)]
pub struct DataArguments {
    /// Inputs for an ONNX file: an .npz file, or a folder with input_0.pb, input_1.pb, ..; without it they are random, from --seed
    #[arg(long, value_name = "FILE")]
    inputs: Option<PathBuf>,
    /// Results that an ONNX file must give on these inputs: an .npz file, or a folder of output_0.pb, output_1.pb, ..
    #[arg(long, value_name = "FILE", requires = "inputs")]
    outputs: Option<PathBuf>,
    /// Compare with another program on the same inputs: onnxruntime, imported by python3 or the interpreter in DEUTERON_PYTHON
    #[arg(long, value_name = "PROGRAM")]
    against: Option<String>,
}

impl DataArguments {
    /// Values of inputs by name, and in order where they have no names.
    pub fn inputs(&self) -> Result<Vec<(String, TensorData)>> {
        self.inputs.as_deref().map_or(Ok(Vec::new()), |path| arrays::read(path, "input"))
    }

    /// Refuses these flags for a graph that is not an ONNX file.
    pub fn refuse_for(&self, graph: &str) -> Result<()> {
        let flags = [
            ("inputs", self.inputs.is_some()),
            ("outputs", self.outputs.is_some()),
            ("against", self.against.is_some()),
        ];
        match flags.into_iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => bail!("--{flag} is for .onnx files; `{graph}` is not one"),
            None => Ok(()),
        }
    }
}

/// An imported file.
pub struct OnnxFile {
    pub imported: Imported,
    path: PathBuf,
    inputs: Vec<(String, TensorData)>,
    is_converted: bool,
}

impl OnnxFile {
    pub fn load(path: &Path, mut options: Options, inputs: Vec<(String, TensorData)>) -> Result<Self> {
        for (name, value) in &inputs {
            options = options.with_value(name, value.clone());
        }
        let is_converted = options.dtype.is_some();
        let imported = import_file(path, &options)?;
        Ok(OnnxFile { imported, path: path.to_path_buf(), inputs, is_converted })
    }

    /// Notes on the import for the user.
    pub fn notes(&self) -> Vec<String> {
        let imported = &self.imported;
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        imported.recognised.iter().for_each(|found| *counts.entry(found.what).or_default() += 1);
        let mut notes = Vec::new();
        if !counts.is_empty() {
            let counts: Vec<String> = counts.iter().map(|(what, count)| format!("{count} {what}")).collect();
            notes.push(format!("Recognised in the ONNX file: {}.", counts.join(", ")));
        }
        notes.extend(imported.near_misses.iter().map(|near| near.to_string()));
        // Opaque operators of one kind and reason are listed once.
        let mut described: Vec<(&OpaqueOp, usize)> = Vec::new();
        for opaque in &imported.opaque {
            let is_same = |own: &OpaqueOp| own.op_type == opaque.op_type && own.why == opaque.why;
            match described.iter_mut().find(|(own, _)| is_same(own)) {
                Some((_, count)) => *count += 1,
                None => described.push((opaque, 1)),
            }
        }
        for (OpaqueOp { name, op_type, why, .. }, count) in described {
            let others = if count > 1 { format!(" and {} more", count - 1) } else { String::new() };
            notes.push(format!("`{name}`{others} ({op_type}) is only described: {why}"));
        }
        notes.extend(imported.notes.iter().cloned());
        notes
    }

    /// The tensors that `graph` runs on: the file's own weights, the inputs that were given, and the rest as made from the
    /// seed.
    pub fn tensors(&self, graph: &Graph, made: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let file = std::fs::read(&self.path).with_context(|| format!("cannot read {}", self.path.display()))?;
        let mut tensors = Vec::new();
        for (&id, made) in graph.inputs().iter().zip(made) {
            let label = graph.label(id);
            let dtype = graph.node(id).dtype;
            let data = if self.imported.weights.iter().any(|weight| weight.name == label) {
                Some(self.imported.weight(&label, &file)?)
            } else {
                let port = self.imported.inputs.iter().find(|port| port.name == label);
                let original = port.map(|port| &port.original);
                let given = self.inputs.iter().find(|(name, _)| Some(name) == original).map(|(_, data)| data.clone());
                given.or_else(|| port?.assumed.clone())
            };
            tensors.push(match data {
                Some(data) if data.dtype == dtype => Tensor::from_bytes(dtype, data.shape, &data.bytes)?,
                Some(data) => {
                    let data = TensorData::of_values(dtype, data.shape.clone(), data.values().into_iter());
                    Tensor::from_bytes(dtype, data.shape, &data.bytes)?
                }
                None => self.within_type(&label, made)?,
            });
        }
        Ok(tensors)
    }

    /// Random values that the file's type of an input does not hold, wrapped into it as ONNX Runtime is given them.
    fn within_type(&self, label: &str, made: Tensor) -> Result<Tensor> {
        let port = self.imported.inputs.iter().find(|port| port.name == label);
        let Some((least, most)) = port.and_then(|port| port.range) else { return Ok(made) };
        let (dtype, shape) = (made.dtype(), made.shape().clone());
        let values =
            made.to_array()?.values.into_iter().map(|value| least + (value - least).rem_euclid(most - least + 1.0));
        let data = TensorData::of_values(dtype, shape, values);
        Ok(Tensor::from_bytes(dtype, data.shape, &data.bytes)?)
    }

    /// Compares the results with given ones, or with those of another program.
    pub fn check(
        &self,
        engine: &Engine,
        graph: &Graph,
        tensors: &[Tensor],
        data: &DataArguments,
    ) -> Result<Vec<(String, Agreement)>> {
        let mut checks = Vec::new();
        let outputs: Vec<String> = graph.outputs().iter().map(|output| output.name.clone()).collect();
        if let Some(path) = &data.outputs {
            let given = arrays::read(path, "output")?;
            let ordered = in_order(given, &outputs).with_context(|| path.display().to_string())?;
            let what = format!("the results in {}", path.display());
            checks.push((what, agreement(engine, graph, tensors, &ordered)?));
        }
        if let Some(program) = &data.against {
            ensure!(program == "onnxruntime", "--against: expected onnxruntime, got `{program}`");
            ensure!(!self.is_converted, "--against runs the file as it is, in its own types; leave out --dtype");
            let given = self.other_results(graph, tensors)?;
            ensure!(
                given.len() == outputs.len(),
                "onnxruntime gave {} results, expected {}",
                given.len(),
                outputs.len()
            );
            checks.push(("onnxruntime".to_string(), agreement(engine, graph, tensors, &given)?));
        }
        Ok(checks)
    }

    /// What ONNX Runtime gives for the inputs of the file.
    fn other_results(&self, graph: &Graph, tensors: &[Tensor]) -> Result<Vec<TensorData>> {
        let folder = std::env::temp_dir().join(format!("deuteron-against-{}", std::process::id()));
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let result = self.other_results_in(&folder, graph, tensors);
        let _ = std::fs::remove_dir_all(&folder);
        result
    }

    fn other_results_in(&self, folder: &Path, graph: &Graph, tensors: &[Tensor]) -> Result<Vec<TensorData>> {
        let mut command = Command::new(std::env::var_os("DEUTERON_PYTHON").unwrap_or("python3".into()));
        command.args(["-c", SCRIPT]).arg(&self.path).arg(folder);
        for (index, port) in self.imported.inputs.iter().enumerate() {
            let position = graph.inputs().iter().position(|&id| graph.label(id) == port.name);
            let position = position.with_context(|| format!("the graph has no input `{}`", port.name))?;
            let tensor = &tensors[position];
            let data = TensorData { dtype: tensor.dtype(), shape: tensor.shape().clone(), bytes: tensor.to_bytes()? };
            arrays::write_npy(&folder.join(format!("input_{index}.npy")), &data)?;
            command.arg(&port.original);
        }
        let output = command.output().context("python3 cannot be started, which --against needs")?;
        if !output.status.success() {
            let error = String::from_utf8_lossy(&output.stderr);
            let last = error.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
            if last.contains("No module named") {
                bail!(
                    "--against onnxruntime: {last}; install it with `pip install onnxruntime numpy`, or name an interpreter \
                       that has it in DEUTERON_PYTHON"
                );
            }
            bail!("onnxruntime cannot run {}: {last}", self.path.display());
        }
        let count: usize = String::from_utf8_lossy(&output.stdout).trim().parse().context("the number of results")?;
        (0..count).map(|index| arrays::read_npy(&folder.join(format!("output_{index}.npy")))).collect()
    }
}

/// Loads the inputs in the types that the file states, runs it and stores the results.
const SCRIPT: &str = "
import sys
import numpy, onnxruntime
path, folder, names = sys.argv[1], sys.argv[2], sys.argv[3:]
options = onnxruntime.SessionOptions()
options.log_severity_level = 3
session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
types = {'float': 'float32', 'double': 'float64', 'float16': 'float16'}
types = {port.name: port.type[len('tensor('):-1] for port in session.get_inputs()}, types
values = {}
for index, name in enumerate(names):
    own = types[0].get(name)
    if own is not None:
        values[name] = numpy.load(f'{folder}/input_{index}.npy').astype(types[1].get(own, own))
results = session.run(None, values)
for index, result in enumerate(results):
    numpy.save(f'{folder}/output_{index}.npy', numpy.asarray(result))
print(len(results))
";

/// Given tensors in the order of names; where they have other names, in their own order.
fn in_order(given: Vec<(String, TensorData)>, names: &[String]) -> Result<Vec<TensorData>> {
    ensure!(given.len() == names.len(), "expected {} results ({}), got {}", names.len(), names.join(", "), given.len());
    let find = |name: &String| given.iter().find(|(own, _)| own == name).map(|(_, data)| data.clone());
    match names.iter().map(find).collect::<Option<Vec<_>>>() {
        Some(ordered) => Ok(ordered),
        None => Ok(given.into_iter().map(|(_, data)| data).collect()),
    }
}
