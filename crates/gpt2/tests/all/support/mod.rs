//! Fixtures and what is expected of them, scratch folders and hand-made safetensors.

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// A folder of fixtures. Where this was built is not where it must run: then they are looked for below the present folder.
pub fn fixture(name: &str) -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let folder = if built.is_dir() { built } else { PathBuf::from("crates/gpt2/tests/fixtures") };
    folder.join(name)
}

/// A folder of files.
pub struct Scratch(pub deuteron_testkit::Scratch);

impl Scratch {
    pub fn new() -> Scratch {
        Scratch(deuteron_testkit::Scratch::make())
    }

    /// A copy of a fixture's files.
    pub fn copy_of(name: &str) -> Scratch {
        let scratch = Scratch::new();
        for entry in std::fs::read_dir(fixture(name)).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, scratch.0.join(path.file_name().unwrap())).unwrap();
        }
        scratch
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.0.join(name)).unwrap()
    }

    /// Changes a text file; what is replaced must be there.
    pub fn replace(&self, name: &str, from: &str, to: &str) {
        let text = String::from_utf8(self.read(name)).unwrap();
        assert!(text.contains(from), "`{from}` is not in {name}");
        self.write(name, text.replace(from, to));
    }
}

/// A tensor for [`safetensors`]: name, dtype, shape, bytes.
pub struct Tensor {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn zeros(name: &str, dtype: &'static str, width: usize, shape: &[usize]) -> Tensor {
        let bytes = vec![0; shape.iter().product::<usize>() * width];
        Tensor { name: name.to_string(), dtype, shape: shape.to_vec(), bytes }
    }
}

/// A well-formed file.
pub fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let (mut header, mut data) = (String::from("{\"__metadata__\":{\"format\":\"pt\"}"), Vec::new());
    for Tensor { name, dtype, shape, bytes } in tensors {
        let end = data.len() + bytes.len();
        header.push_str(&format!(
            ",\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{},{end}]}}",
            data.len()
        ));
        data.extend_from_slice(bytes);
    }
    header.push('}');
    with_header(&header, &data)
}

/// A file of any header and data.
pub fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// A prompt and what the transformers library chose to follow it.
#[derive(Deserialize)]
pub struct Case {
    pub prompt: Vec<usize>,
    pub greedy: Vec<usize>,
}

/// What the transformers library computed.
#[derive(Deserialize)]
pub struct Expected {
    /// between the two likeliest tokens, at least
    pub margin: f64,
    pub cases: Vec<Case>,
    /// of every position of every prompt
    #[serde(skip)]
    pub logits: Vec<Vec<f32>>,
}

impl Expected {
    pub fn read(folder: &Path) -> Expected {
        let mut expected: Expected =
            serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
        let bytes = std::fs::read(folder.join("logits.bin")).unwrap();
        let values: Vec<f32> = bytes.as_chunks().0.iter().map(|&value| f32::from_le_bytes(value)).collect();
        let rows: usize = expected.cases.iter().map(|case| case.prompt.len()).sum();
        let mut rest = &values[..];
        for case in &expected.cases {
            let (logits, after) = rest.split_at(case.prompt.len() * values.len() / rows);
            expected.logits.push(logits.to_vec());
            rest = after;
        }
        expected
    }
}

/// What the transformers library made of a fixture.
pub struct Library {
    pub prompts: Vec<Vec<u32>>,
    pub greedy: Vec<Vec<u32>>,
    /// after the last token of each prompt
    pub logits: Vec<Vec<f32>>,
    pub margin: f64,
}

impl Library {
    pub fn read(name: &str, vocabulary: usize) -> Library {
        let Expected { margin, cases, logits } = Expected::read(&fixture(name));
        let ids = |tokens: &[usize]| tokens.iter().map(|&token| token as u32).collect::<Vec<u32>>();
        Library {
            prompts: cases.iter().map(|case| ids(&case.prompt)).collect(),
            greedy: cases.iter().map(|case| ids(&case.greedy)).collect(),
            logits: logits.iter().map(|rows| rows[rows.len() - vocabulary..].to_vec()).collect(),
            margin,
        }
    }
}
