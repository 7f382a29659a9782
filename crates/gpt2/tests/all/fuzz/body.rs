//! The fuzz body: a model's folder of which one file is the input. cargo-fuzz drives it too, from `fuzz/`.

use std::path::PathBuf;

use deuteron_gpt2::{Checkpoint, Tokenizer};

/// The files of a small model that is in order, each after the number of its kind.
pub const SEEDS: [(&str, &[u8]); 6] = [
    ("config.json", include_bytes!("../../../../../fuzz/seeds/gpt2_folder/config.json")),
    ("model.safetensors", include_bytes!("../../../../../fuzz/seeds/gpt2_folder/model.safetensors")),
    (
        "model.safetensors.index.json",
        include_bytes!("../../../../../fuzz/seeds/gpt2_folder/model.safetensors.index.json"),
    ),
    ("tokenizer.json", include_bytes!("../../../../../fuzz/seeds/gpt2_folder/tokenizer.json")),
    ("vocab.json", include_bytes!("../../../../../fuzz/seeds/gpt2_folder/vocab.json")),
    ("merges.txt", include_bytes!("../../../../../fuzz/seeds/gpt2_folder/merges.txt")),
];

/// Folders for inputs, one for each kind of file.
pub struct Folders(PathBuf);

impl Folders {
    /// Beneath a folder that is made.
    pub fn new(root: PathBuf) -> Folders {
        for (kind, (replaced, _)) in SEEDS.iter().enumerate() {
            let folder = root.join(kind.to_string());
            std::fs::create_dir_all(&folder).expect("a folder to write to");
            // The older form counts only where the newer is not, in both cases.
            let without: &[&str] = match *replaced {
                "model.safetensors.index.json" => &["model.safetensors"],
                "vocab.json" | "merges.txt" => &["tokenizer.json"],
                _ => &["model.safetensors.index.json"],
            };
            for (name, bytes) in SEEDS.iter().filter(|(name, _)| !without.contains(name)) {
                std::fs::write(folder.join(name), &bytes[1..]).expect("a file to write");
            }
            std::fs::write(folder.join("shard.safetensors"), &SEEDS[1].1[1..]).expect("a file to write");
        }
        Folders(root)
    }

    /// Whatever the file, opening answers; and what it accepts holds what it promises. Whether it was accepted.
    pub fn open(&self, data: &[u8]) -> bool {
        let Some((kind, bytes)) = data.split_first() else { return false };
        let kind = usize::from(*kind) % SEEDS.len();
        let folder = self.0.join(kind.to_string());
        let file = folder.join(SEEDS[kind].0);
        // Some file systems wait for the disk when a file is cut and written again, not when it is new.
        let _ = std::fs::remove_file(&file);
        std::fs::write(&file, bytes).expect("a file to write");
        let Ok(checkpoint) = Checkpoint::open(&folder) else { return false };
        let config = checkpoint.config();
        config.check().expect("accepted sizes are in range");
        for (name, shape) in config.weights() {
            let weight = checkpoint.weight(&name).expect("every weight is there");
            assert_eq!(weight.shape, &shape, "{name}");
            assert_eq!(weight.bytes.len(), shape.elements() * weight.dtype.bytes(), "{name}");
        }
        let Ok(tokenizer) = Tokenizer::open(&folder, config) else { return false };
        let text = "It's a text, 123 \u{1f600}<|endoftext|>\n";
        let ids = tokenizer.encode(text);
        assert!(ids.iter().all(|&id| (id as usize) < config.vocabulary));
        assert_eq!(tokenizer.decode(&ids).as_deref(), Ok(text), "text comes back");
        true
    }
}
