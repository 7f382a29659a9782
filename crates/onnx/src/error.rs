//! Errors of importing a model.

use std::path::PathBuf;

use deuteron_graph::GraphError;
use deuteron_graph::memory::OutOfMemory;

/// An invalid reference to external data.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExternalProblem {
    /// Bytes were imported without saying where the model lies.
    #[error("the model's folder is not known; import it from its file, or set the folder in the options")]
    NoFolder,
    /// The path is empty or absolute.
    #[error("the path is absolute or empty; expected one relative to the model's folder")]
    NotRelative,
    /// The path has a component `..`.
    #[error("the path leaves the model's folder; expected one beneath it, without `..`")]
    LeavesFolder,
    /// A component of the path is a symbolic link.
    #[error("`{}` is a symbolic link; put the file itself there", .0.display())]
    Symlink(PathBuf),
    /// There is no such file, or it cannot be read.
    #[error("`{}` cannot be read: {why}", .path.display())]
    Unreadable {
        /// the file
        path: PathBuf,
        /// the system's reason
        why: String,
    },
    /// The path is a folder or a device.
    #[error("`{}` is not a regular file", .0.display())]
    NotAFile(PathBuf),
    /// The file ends before the tensor does.
    #[error("the file has {got} bytes, the tensor ends at byte {expected}; copy the file again")]
    TooShort {
        /// where the tensor ends
        expected: u64,
        /// the file's length
        got: u64,
    },
    /// Offset or length is no number.
    #[error("{key} is `{value}`; expected a number of bytes")]
    NotANumber {
        /// `offset` or `length`
        key: &'static str,
        /// what was written
        value: String,
    },
}

/// Why a model was not imported. Messages say what was expected, what was found, and what to do.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum OnnxError {
    /// The bytes are not a protobuf message of ONNX's schema.
    #[error("byte {offset}: {problem}; the file is damaged, or is no ONNX model")]
    Wire {
        /// where in the file
        offset: usize,
        /// what was expected and what came
        problem: String,
    },
    /// A limit that keeps hostile files from exhausting memory or stack.
    #[error("{what}: more than {limit}; no known model comes near, so the file is refused")]
    Limit {
        /// what was counted
        what: &'static str,
        /// the most that is allowed
        limit: usize,
    },
    /// There is no graph in it.
    #[error("the file holds no graph; expected an ONNX ModelProto (weights alone are not enough)")]
    NoGraph,
    /// An unsupported opset.
    #[error("opset {got}: expected 7 or later; convert it with onnx.version_converter.convert_version(model, 17)")]
    Opset {
        /// the version that the file states
        got: i64,
    },
    /// A size of a dimension that the file does not have.
    #[error("the file has no dimension `{name}`; {}, or INPUT.AXIS such as x.0", known_dims(.known))]
    UnknownDim {
        /// the name that was given
        name: String,
        /// the names that the inputs have
        known: Vec<String>,
    },
    /// A batch or sequence where no dimension counts it.
    #[error("no input has an open dimension that counts the {what}, so {flag} changes nothing; {}", known_dims(.known))]
    UnusedSize {
        /// `batch` or `sequence`
        what: &'static str,
        /// how it is given
        flag: &'static str,
        /// the names that the inputs have
        known: Vec<String>,
    },
    /// A batch that the file does not work with.
    #[error("the file is written for a batch of {fixed} and cannot take {asked}: {why}")]
    FixedBatch {
        /// the file's
        fixed: i64,
        /// the requested batch
        asked: usize,
        /// what went wrong
        why: String,
    },
    /// Values of an input that the file does not have.
    #[error("the file has no input `{name}`; its inputs are {}", .inputs.join(", "))]
    UnknownInput {
        /// the name that was given
        name: String,
        /// the names that the file has
        inputs: Vec<String>,
    },
    /// Values of another shape than the input's.
    #[error("input `{input}`: expected values of shape {expected}, got {got}")]
    GivenShape {
        /// the input
        input: String,
        /// its shape in the file
        expected: String,
        /// the shape of the values
        got: String,
    },
    /// An invalid size.
    #[error("`{value}` has size {got} on axis {axis}; expected a size of at least 0")]
    BadDim {
        /// the tensor
        value: String,
        /// its axis
        axis: usize,
        /// what the file says
        got: i64,
    },
    /// An element type without a counterpart.
    #[error("`{value}` holds {}; expected a tensor of floats, integers or bools{}", elements(*.got), instead_of(*.got))]
    ElementType {
        /// the tensor
        value: String,
        /// ONNX's number for the type
        got: i64,
    },
    /// An input that is no tensor.
    #[error("input `{0}` is not a tensor with a shape; sequences, maps and shapeless tensors cannot be imported")]
    NotATensor(String),
    /// A node with inconsistent operands or attributes.
    #[error("{op} at `{node}`: {problem}")]
    Node {
        /// the node's name
        node: String,
        /// its operator
        op: String,
        /// what was expected and what came
        problem: String,
    },
    /// An unknown operator without a stated result shape.
    #[error(
        "{op} at `{node}`: {why}, and the file does not state the shape of its result `{value}`, so it cannot be analysed as an opaque \
         operation either; {}",
        unsupported(.op)
    )]
    UnknownShape {
        /// the node's name
        node: String,
        /// its operator
        op: String,
        /// the result
        value: String,
        /// why it could not be imported as what it is
        why: String,
    },
    /// An undefined value.
    #[error("`{reader}` reads `{value}`, which no node before it gives; nodes have to be in order of computation")]
    Undefined {
        /// the node, or output, that asks for it
        reader: String,
        /// the name
        value: String,
    },
    /// A tensor whose data does not fit its shape.
    #[error("tensor `{tensor}`: expected {expected} bytes of data, got {got}")]
    TensorLength {
        /// its name
        tensor: String,
        /// from shape and type
        expected: u64,
        /// what is there
        got: u64,
    },
    /// A tensor in a form that is not read.
    #[error("tensor `{tensor}`: {problem}")]
    Tensor {
        /// its name
        tensor: String,
        /// what was expected
        problem: String,
    },
    /// External data that is refused or missing.
    #[error("tensor `{tensor}`, external data `{location}`: {problem}")]
    External {
        /// the tensor
        tensor: String,
        /// the path in the file
        location: String,
        /// what is wrong
        #[source]
        problem: ExternalProblem,
    },
    /// No weight of this name.
    #[error("the model has no weight `{0}`; the names are those of the graph's weight inputs")]
    UnknownWeight(String),
    /// The model's file cannot be read.
    #[error("`{}` cannot be read: {why}", .path.display())]
    Unreadable {
        /// the file
        path: PathBuf,
        /// the system's reason
        why: String,
    },
    /// Not enough memory for constants or the values of a weight.
    #[error("could not allocate {bytes} bytes for values of the model")]
    OutOfMemory {
        /// how much was asked for
        bytes: usize,
    },
    /// The graph refused a tensor.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

/// What to do about an operator that is not supported.
fn unsupported(op: &str) -> &'static str {
    match op {
        "If" | "Loop" | "Scan" => {
            "control flow that depends on the input is not supported: export the model without it, or cut the model before and \
             after it with onnx.utils.extract_model"
        }
        "Cast" | "CastLike" => {
            "this type is not supported: cast to a float, integer or bool type, or cut the model before it with \
             onnx.utils.extract_model"
        }
        _ => {
            "state that shape in the graph's value_info to analyse it so (onnx.shape_inference.infer_shapes knows the shapes of most \
             operators of ONNX), or cut the model before and after it with onnx.utils.extract_model"
        }
    }
}

/// Elements that no dtype is for, in words.
fn elements(number: i64) -> String {
    match number {
        0 => "elements of no type".to_string(),
        8 => "strings".to_string(),
        14 | 15 => "complex numbers".to_string(),
        _ => format!("elements of ONNX type {number}, which is not known"),
    }
}

/// What to do about them.
fn instead_of(number: i64) -> &'static str {
    match number {
        8 => ": cut the model behind its tokenizer with onnx.utils.extract_model",
        14 | 15 => ": pass real and imaginary parts as two tensors",
        _ => "",
    }
}

fn known_dims(names: &[String]) -> String {
    match names.is_empty() {
        true => "the file names no dimension; give INPUT.AXIS=SIZE".to_string(),
        false => format!("its open dimensions are {}", names.join(", ")),
    }
}

impl From<OutOfMemory> for OnnxError {
    fn from(OutOfMemory { bytes }: OutOfMemory) -> OnnxError {
        OnnxError::OutOfMemory { bytes }
    }
}
