//! Fuzz bodies: plain functions, driven by cargo-fuzz where a nightly toolchain exists and by a bounded loop in the tests.

use deuteron_graph::Graph;
use deuteron_onnx::{Imported, OnnxError, Options, import};
use deuteron_reference::Generator;

/// Whatever the bytes, the parser answers, with whether it accepts them; and what it accepts is well-formed and prints to what parses to the same.
pub fn text_graph(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let Ok(graph) = text.parse::<Graph>() else { return false };
    graph.verify().expect("an accepted graph is well-formed");
    let printed = graph.to_string();
    let again: Graph = printed.parse().unwrap_or_else(|error| panic!("printed text is refused: {error}\n{printed}"));
    assert_eq!(again, graph, "printing and parsing are inverse\n{printed}");
    true
}

/// Whatever the bytes, the import answers; and what it accepts is well-formed, prints to what parses to the same, and has
/// the data of every weight. Little may be folded, so that an input takes well under a millisecond.
pub fn onnx(data: &[u8]) -> Result<Imported, OnnxError> {
    let options = Options { fold_work: 1 << 14, ..Options::default() };
    let imported = import(data, &options)?;
    imported.graph.verify().expect("an imported graph is well-formed");
    let printed = imported.graph.to_string();
    let again: Graph = printed.parse().unwrap_or_else(|error| panic!("printed text is refused: {error}\n{printed}"));
    assert_eq!(again, imported.graph, "printing and parsing are inverse\n{printed}");
    for weight in &imported.weights {
        let values = weight.read(data).expect("a weight that was located can be read");
        assert_eq!(values.bytes.len(), weight.shape.elements() * weight.dtype.bytes(), "bytes of {}", weight.name);
    }
    Ok(imported)
}

/// A mutation of one of the corpus's files: bytes and bits changed, pieces cut, doubled and spliced, numbers made large.
pub fn mutate_bytes(corpus: &[Vec<u8>], seed: u64) -> Vec<u8> {
    let mut random = Generator::new(seed);
    let mut data = corpus[random.below(corpus.len())].clone();
    for _ in 0..1 + random.below(4) {
        let at = random.below(data.len().max(1)).min(data.len());
        let end = (at + random.below(32)).min(data.len());
        match random.below(7) {
            0 if at < data.len() => data[at] = random.below(256) as u8,
            1 if at < data.len() => data[at] ^= 1 << random.below(8),
            2 => drop(data.drain(at..end)),
            3 => {
                let piece = data[at..end].to_vec();
                data.splice(at..at, piece);
            }
            4 => {
                let other = &corpus[random.below(corpus.len())];
                let from = random.below(other.len());
                let to = (from + random.below(64)).min(other.len());
                data.splice(at..end, other[from..to].iter().copied());
            }
            5 => {
                // Varints: 0, 1, 127, 2^31, 2^63 - 1 and -1, which is ten bytes.
                const LARGEST: [u8; 9] = [255, 255, 255, 255, 255, 255, 255, 255, 127];
                const MINUS_ONE: [u8; 10] = [255, 255, 255, 255, 255, 255, 255, 255, 255, 1];
                let numbers: [&[u8]; 6] = [&[0], &[1], &[127], &[128, 128, 128, 128, 8], &LARGEST, &MINUS_ONE];
                let end = (at + 1).min(data.len());
                data.splice(at..end, numbers[random.below(numbers.len())].iter().copied());
            }
            _ => data.truncate(end),
        }
    }
    data
}

/// A mutation of one of the corpus's texts: bytes changed, cut, doubled, spliced from another text, numbers made large.
pub fn mutate(corpus: &[impl AsRef<str>], seed: u64) -> Vec<u8> {
    let mut random = Generator::new(seed);
    let mut data = corpus[random.below(corpus.len())].as_ref().as_bytes().to_vec();
    for _ in 0..1 + random.below(6) {
        let at = random.below(data.len().max(1)).min(data.len());
        let end = (at + random.below(24)).min(data.len());
        match random.below(7) {
            0 if !data.is_empty() => {
                let position = at.min(data.len() - 1);
                data[position] = random.below(256) as u8;
            }
            1 => drop(data.drain(at..end)),
            2 => {
                let piece = data[at..end].to_vec();
                data.splice(at..at, piece);
            }
            3 => {
                let other = corpus[random.below(corpus.len())].as_ref().as_bytes();
                let from = random.below(other.len());
                let to = (from + random.below(40)).min(other.len());
                data.splice(at..end, other[from..to].iter().copied());
            }
            4 => {
                let numbers: [&str; 8] = ["0", "1", "-1", "4294967296", "18446744073709551615", "1e308", "inf", "0.5"];
                data.splice(at..at, numbers[random.below(numbers.len())].bytes());
            }
            5 => {
                let words: [&str; 8] = [" = ", " ; ", "[", "]", "%3", "{", "}", "\n"];
                data.splice(at..at, words[random.below(words.len())].bytes());
            }
            _ => data.truncate(end),
        }
    }
    data
}
