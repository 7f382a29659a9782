//! Runs: they learn, they stop and go on with the same bits, and they say what is wrong.

use std::path::{Path, PathBuf};

use deuteron::Engine;
use deuteron_gpt2::{Checkpoint, Config, Tokenizer, Weights};
use deuteron_testkit::Scratch;
use deuteron_train::{
    Cadence, Corpus, Ended, Error, Line, MemoryUse, Precision, RunFolder, RunOptions, Settings, Validation, Watch,
    fresh_weights, run, sized,
};

use crate::support::settings;

/// Stops before the step after this one.
#[derive(Default)]
struct Watching {
    stop_after: Option<u64>,
    step: u64,
    lines: Vec<Line>,
    samples: Vec<String>,
    saved: Vec<PathBuf>,
}

impl Watch for Watching {
    fn started(&mut self, step: u64, _: MemoryUse) {
        self.step = step;
    }

    fn stepped(&mut self, line: &Line) {
        self.step = line.step;
        self.lines.push(*line);
    }

    fn sampled(&mut self, _: u64, text: &str) {
        self.samples.push(text.to_string());
    }

    fn saved(&mut self, folder: &Path) {
        self.saved.push(folder.to_path_buf());
    }

    fn is_stopped(&mut self) -> bool {
        self.stop_after.is_some_and(|stop| self.step >= stop)
    }
}

const CADENCE: Cadence = Cadence {
    until: None,
    evaluate_every: 0,
    evaluate_batches: 4,
    save_every: 0,
    keep: 2,
    sample_every: 0,
    sample_tokens: 8,
    prompt: String::new(),
};

fn model() -> Config {
    sized(1, 2, 16, 12, 257)
}

fn corpus() -> Corpus {
    let text = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. ".repeat(20);
    let tokens = Tokenizer::byte_level().encode(&text);
    Corpus::new(tokens.clone(), tokens[..200].to_vec())
}

struct Case<'a> {
    out: &'a Path,
    resume: bool,
    settings: &'a Settings,
    cadence: Cadence,
}

fn train(case: &Case<'_>, watching: &mut Watching) -> Result<Ended, Error> {
    let options = RunOptions {
        out: case.out,
        resume: case.resume,
        config: model(),
        settings: case.settings,
        corpus: &corpus(),
        tokenizer: &Tokenizer::byte_level(),
        cadence: case.cadence.clone(),
    };
    run(&Engine::cpu(), &options, |engine| fresh_weights(engine, &model(), case.settings.seed), watching)
}

fn bytes(folder: &Path) -> [Vec<u8>; 2] {
    ["model.safetensors", "optimizer.safetensors"].map(|name| std::fs::read(folder.join(name)).unwrap())
}

#[test]
fn a_run_that_stops_and_goes_on_has_the_bits_of_one_that_does_not() {
    let cases = [
        (settings(), CADENCE),
        (Settings { precision: Precision::Bf16, dropout: 0.1, accumulate: 2, ..settings() }, CADENCE),
        (
            Settings { optimizer: "lion".to_string(), dropout: 0.1, learning_rate: 1e-3, ..settings() },
            // What happens between steps changes nothing.
            Cadence { evaluate_every: 3, save_every: 2, sample_every: 3, keep: 1, ..CADENCE },
        ),
    ];
    for (settings, cadence) in cases {
        let (whole, parts) = (Scratch::make(), Scratch::make());
        let mut case = Case { out: whole.as_ref(), resume: false, settings: &settings, cadence: CADENCE };
        let expected = train(&case, &mut Watching::default()).unwrap();
        assert!(expected.is_finished && expected.step == 8);
        (case.out, case.cadence) = (parts.as_ref(), cadence);
        let mut lines = Vec::new();
        for stop in [3, 8] {
            let mut watching = Watching { stop_after: Some(stop), ..Watching::default() };
            let ended = train(&case, &mut watching).unwrap();
            assert_eq!((ended.step, ended.is_finished), (stop, stop == 8));
            lines.extend(watching.lines);
            case.resume = true;
        }
        let got = RunFolder::open(parts.as_ref()).unwrap().checkpoint(8);
        assert!(bytes(&got) == bytes(&expected.checkpoint), "{settings:?}");
        let losses = |path: &Path| {
            let text = std::fs::read_to_string(path.join("log.csv")).unwrap();
            text.lines().map(|line| line.split(',').nth(2).unwrap().to_string()).collect::<Vec<String>>()
        };
        assert_eq!(losses(parts.as_ref()), losses(whole.as_ref()));
        assert_eq!(lines.len(), 8, "no step was taken twice");
    }
}

#[test]
fn loss_falls_and_what_is_written_can_be_read() {
    let folder = Scratch::make();
    let settings = Settings { steps: 120, batch: 8, learning_rate: 1e-2, warmup: 10, ..settings() };
    let cadence = Cadence { evaluate_every: 60, sample_every: 60, save_every: 50, ..CADENCE };
    let mut watching = Watching::default();
    let out: &Path = folder.as_ref();
    let ended = train(&Case { out, resume: false, settings: &settings, cadence }, &mut watching).unwrap();
    let (first, last) = (watching.lines[0].loss, ended.last.unwrap().loss);
    assert!((first - (257f64).ln()).abs() < 0.2, "an untrained model knows nothing: {first}");
    assert!(last < 0.5 * first, "{first} {last}");
    let validation: Vec<f64> = watching.lines.iter().filter_map(|line| line.validation_loss).collect();
    assert!(validation.len() == 2 && validation[1] < validation[0], "{validation:?}");
    assert_eq!(ended.validation_loss, Some(validation[1]));
    assert_eq!(watching.samples.len(), 2);
    // Checkpoints of steps 50, 100 and 120, of which two stay.
    assert_eq!(RunFolder::open(out).unwrap().checkpoints().unwrap(), [100, 120]);
    let svg = std::fs::read_to_string(out.join("curve.svg")).unwrap();
    assert!(svg.contains("training loss") && svg.contains("validation loss"));
    let checkpoint = Checkpoint::open(&ended.checkpoint).unwrap();
    assert_eq!(*checkpoint.config(), model());
    let tokenizer = Tokenizer::open(&ended.checkpoint, checkpoint.config()).unwrap();
    let mut gpt2 = deuteron_gpt2::Gpt2::new(&Engine::cpu(), &checkpoint, Weights::F32).unwrap();
    let logits = gpt2.logits(&[tokenizer.encode("the qui")]).unwrap().remove(0);
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
    assert_eq!(tokenizer.decode(&[best as u32]).unwrap(), "c");
}

#[test]
fn a_loss_that_is_no_number_names_its_step() {
    let folder = Scratch::make();
    let out: &Path = folder.as_ref();
    let settings = Settings {
        optimizer: "sgd".to_string(),
        learning_rate: 1e30,
        least_learning_rate: 0.0,
        warmup: 0,
        clip: None,
        ..settings()
    };
    let cadence = Cadence { save_every: 1, ..CADENCE };
    let mut watching = Watching::default();
    let error = train(&Case { out, resume: false, settings: &settings, cadence }, &mut watching).unwrap_err();
    let Error::NotFinite { step, .. } = error else { panic!("{error}") };
    assert_eq!(step, watching.lines.len() as u64 + 1);
    let text = error.to_string();
    assert!(text.starts_with(&format!("step {step}: the ")) && text.contains("--learning-rate"), "{text}");
    // What was saved is from before.
    assert!(!RunFolder::open(out).unwrap().checkpoints().unwrap().contains(&step));
}

#[test]
fn what_cannot_go_on_says_why() {
    let folder = Scratch::make();
    let out: &Path = folder.as_ref();
    let settings = Settings { steps: 2, ..settings() };
    let mut case = Case { out, resume: true, settings: &settings, cadence: CADENCE };
    let words = |case: &Case<'_>| train(case, &mut Watching::default()).unwrap_err().to_string();
    assert!(words(&case).contains("no checkpoint"));
    case.resume = false;
    train(&case, &mut Watching { stop_after: Some(1), ..Watching::default() }).unwrap();
    assert!(words(&case).contains("stopped at step 1; continue it with --resume"));
    case.resume = true;
    let other = Settings { learning_rate: 2e-3, ..settings.clone() };
    case.settings = &other;
    let text = words(&case);
    assert!(text.contains("--learning-rate 0.003, but 0.002 is given"), "{text}");
    case.settings = &settings;
    let held = RunFolder::open(out).unwrap();
    assert!(words(&case).contains("another process is training"));
    drop(held);
    // What a killed process left behind is no checkpoint.
    std::fs::create_dir(out.join(".checkpoint-2")).unwrap();
    let damaged = out.join("checkpoint-1").join("optimizer.safetensors");
    let whole = std::fs::read(&damaged).unwrap();
    std::fs::write(&damaged, &whole[..whole.len() - 4]).unwrap();
    assert!(words(&case).contains("optimizer.safetensors"));
    assert!(!out.join(".checkpoint-2").exists());
    std::fs::write(&damaged, whole).unwrap();
    let progress = out.join("checkpoint-1").join("training.json");
    let whole = std::fs::read_to_string(&progress).unwrap();
    std::fs::write(&progress, &whole[..whole.len() / 2]).unwrap();
    assert!(words(&case).contains("does not describe the state of a run"));
    std::fs::write(&progress, whole).unwrap();
    assert!(train(&case, &mut Watching::default()).unwrap().is_finished);
}

#[test]
fn files_become_tokens() {
    let folder = Scratch::make();
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(folder.join(name), bytes).unwrap();
        folder.join(name)
    };
    let tokenizer = Tokenizer::byte_level();
    let files = [write("a.txt", b"ab"), write("b.bin", &[7, 0, 0, 1])];
    let read = |files: &[PathBuf], validation: Validation| Corpus::read(files, &validation, &tokenizer, 257);
    let whole = read(&files, Validation::Share(0.0)).unwrap();
    assert_eq!(whole.train(), [97, 98, 256, 7, 256]);
    let split = read(&files, Validation::Share(0.4)).unwrap();
    assert_eq!((split.train(), split.validation()), (&[97, 98, 256][..], &[7, 256][..]));
    assert_ne!(whole.digest(), split.digest());
    let apart = read(&files[..1], Validation::Files(files[1..].to_vec())).unwrap();
    assert_eq!((apart.train(), apart.validation()), (&[97, 98, 256][..], &[7, 256][..]));
    let wide = Corpus::read(&files[1..], &Validation::Share(0.0), &tokenizer, 1 << 25).unwrap();
    assert_eq!(wide.train(), [0x0100_0007]);
    let words = |file: PathBuf| read(&[file], Validation::Share(0.0)).unwrap_err().to_string();
    assert!(words(write("odd.bin", &[1, 0, 2])).contains("has 3 bytes"));
    assert!(words(write("far.bin", &[1, 0, 1, 1])).contains("token 257 at 1 is not in the vocabulary of 257"));
    assert!(words(write("latin.txt", &[0xe9, 0x20])).contains("not UTF-8"));
    assert!(words(folder.join("absent.txt")).contains("cannot read"));
    assert!(read(&[], Validation::Share(0.0)).unwrap_err().to_string().contains("no files"));
    assert!(read(&files, Validation::Share(1.0)).unwrap_err().to_string().contains("below 1"));
}

#[test]
fn a_limit_of_memory_is_kept_or_refused() {
    let folders: [Scratch; 3] = std::array::from_fn(|_| Scratch::make());
    let with = |folder: &Scratch, memory: Option<u64>| {
        let settings = Settings { steps: 2, batch: 32, precision: Precision::Bf16, memory, ..settings() };
        let case = Case { out: folder.as_ref(), resume: false, settings: &settings, cadence: CADENCE };
        train(&case, &mut Watching::default())
    };
    // In f32 a weight and two moments, in bf16 what forward reads.
    let weights = (4 * 3 + 2) * model().parameters() as u64;
    let unlimited = with(&folders[0], None).unwrap();
    assert_eq!((unlimited.memory.states, unlimited.memory.otherwise), (weights, None));
    // A byte less than what evaluation, counted with a limit, and the fastest step take.
    let ample = with(&folders[1], Some(u64::MAX / 2)).unwrap().memory;
    assert!(ample.otherwise.is_none() && ample.sessions > unlimited.memory.sessions);
    let tight = with(&folders[2], Some(ample.all() - 1)).unwrap();
    assert_eq!(tight.memory.otherwise, Some(ample.sessions));
    assert!(tight.memory.sessions < ample.sessions, "{:?} {ample:?}", tight.memory);
    let [fast, small] = [&unlimited, &tight].map(|ended| ended.last.unwrap().loss);
    assert!((fast - small).abs() < 1e-5, "{fast} {small}");
    let error = with(&Scratch::make(), Some(tight.memory.all() - 1)).unwrap_err();
    assert!(matches!(error, Error::Memory { least, .. } if least == tight.memory));
    let said = error.to_string();
    assert!(said.contains("--memory is") && said.contains("--accumulate"), "{said}");
}
