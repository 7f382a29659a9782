//! Trouble around a command: output that cannot be written, settings that cannot be read, inputs at the edge. A gate that failed
//! stays failed, and a bad hint costs only what it was a hint for.

use std::fs::File;
use std::process::{Command, Output, Stdio};

use crate::support::{Folder, printed};

const GRAPH: &str = "x = input f32[4,64] ; y = gelu x ; out y";

/// The command with a standard output that has no room, as on a full disk.
fn on_a_full_disk(mut command: Command) -> Output {
    command.stdout(File::options().write(true).open("/dev/full").unwrap()).output().unwrap()
}

/// The command with a standard output that nobody reads.
fn without_a_reader(mut command: Command) -> Output {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    command.stdout(Stdio::from(writer)).output().unwrap()
}

fn error_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).to_string()
}

#[test]
fn output_that_is_lost_is_an_error_and_a_reader_who_leaves_is_none() {
    let folder = Folder::new();
    let graph = folder.write("graph.txt", GRAPH);
    let small = ["--rows", "3", "--cols", "64", "--device", "cpu"];
    let bench = [&["bench", "add_act", "--once"][..], &small].concat();
    let fuse = [&["fuse", "add_act", "--no-learn"][..], &small].concat();
    let commands: [&[&str]; 15] = [
        &["ops"],
        &["ops", "--json"],
        &["kernel", &graph],
        &["kernel", &graph, "--text"],
        &["kernel", &graph, "--json"],
        &["analyze", &graph],
        &["doctor", "--device", "cpu"],
        &["explain"],
        &["explain", "E-PLAN-004"],
        &["explain", "--schema"],
        &["check", "--cases", "1", "--device", "cpu"],
        &bench,
        &fuse,
        &["--help"],
        &["--version"],
    ];
    for words in commands {
        let output = on_a_full_disk(folder.command(words));
        let text = error_text(&output);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {text}");
        assert!(text.contains("output is lost") && !text.contains("panicked"), "{words:?}: {text}");
        let output = without_a_reader(folder.command(words));
        assert_eq!(output.status.code(), Some(0), "{words:?}: {}", error_text(&output));
        assert_eq!(error_text(&output), "", "{words:?}");
    }
}

#[test]
fn a_gate_that_failed_stays_failed_whatever_becomes_of_its_output() {
    let folder = Folder::new();
    let bad = folder.write("bad.txt", "not fused: layer_norm, gelu\n");
    let words = ["analyze", "norm_act", "--expect", &bad];
    assert_eq!(folder.run(&words).status.code(), Some(1));
    let (full, closed) = (on_a_full_disk(folder.command(&words)), without_a_reader(folder.command(&words)));
    for output in [&full, &closed] {
        assert_eq!(output.status.code(), Some(1), "{}", error_text(output));
        assert!(error_text(output).contains("line 1: expected"), "{}", error_text(output));
    }
    assert!(error_text(&full).contains("output is lost") && !error_text(&closed).contains("output is lost"));
    // Nor does a standard error that cannot be written change how a command ends.
    let full = || File::options().write(true).open("/dev/full").unwrap();
    assert_eq!(folder.command(&words).stdout(full()).stderr(full()).status().unwrap().code(), Some(1));
    assert_eq!(folder.command(&["explain", "E-PLAN-999"]).stderr(full()).status().unwrap().code(), Some(2));
}

#[test]
fn generated_text_that_is_lost_is_an_error() {
    let folder = Folder::new();
    for extra in [&[][..], &["again"][..], &["--json"][..]] {
        let words = [&["generate", "--model", "synthetic", "--device", "cpu", "hi", "--max-tokens", "2"][..], extra];
        let output = on_a_full_disk(folder.command(&words.concat()));
        assert_eq!(output.status.code(), Some(2), "{extra:?}: {}", error_text(&output));
        assert!(error_text(&output).contains("output is lost"), "{extra:?}: {}", error_text(&output));
    }
}

#[test]
fn a_machine_file_that_cannot_be_used_is_ignored_with_one_note() {
    let tiny =
        deuteron::Machine::cpu().to_string().replace("processors = { value = 2.0", "processors = { value = 1e-9");
    assert!(tiny.contains("1e-9"));
    let contents: [&[u8]; 5] = [b"name = 3", b"\xff\xfe\x00", b"", tiny.as_bytes(), &[b'x'; 2 << 20]];
    for content in contents {
        let folder = Folder::new();
        let graph = folder.write("graph.txt", GRAPH);
        let place = folder.0.join("settings/deuteron/machines");
        std::fs::create_dir_all(&place).unwrap();
        let place = place.join("cpu.toml");
        std::fs::write(&place, content).unwrap();
        is_ignored(&folder, &graph);
        assert_eq!(std::fs::read(&place).unwrap(), content, "only calibration replaces it");
        std::fs::remove_file(&place).unwrap();
        // Not readable by anyone, whoever runs this.
        std::fs::create_dir(&place).unwrap();
        is_ignored(&folder, &graph);
    }
}

/// Commands work beside a bad `cpu.toml`, and name it once.
fn is_ignored(folder: &Folder, graph: &str) {
    let commands: [&[&str]; 3] =
        [&["analyze", graph], &["kernel", graph], &["bench", "add_act", "--once", "--rows", "3", "--cols", "64"]];
    for words in commands {
        let output = folder.run(&[words, &["--device", "cpu"]].concat());
        let text = error_text(&output);
        assert!(output.status.success() && !output.stdout.is_empty(), "{words:?}: {text}");
        assert_eq!(text.matches("note: ignored").count(), 1, "{words:?}: {text}");
        assert!(text.contains("cpu.toml") && text.contains("doctor --calibrate"), "{words:?}: {text}");
    }
}

#[test]
fn fuse_leaves_a_bad_machine_file_alone() {
    let folder = Folder::new();
    let place = folder.0.join("settings/deuteron/machines");
    std::fs::create_dir_all(&place).unwrap();
    std::fs::write(place.join("cpu.toml"), "corrupt").unwrap();
    let words = ["fuse", "add_act", "--rows", "64", "--cols", "64", "--device", "cpu"];
    let output = folder.run(&words);
    assert!(output.status.success() && error_text(&output).contains("note: ignored"), "{}", error_text(&output));
    assert_eq!(std::fs::read_to_string(place.join("cpu.toml")).unwrap(), "corrupt", "only calibration replaces it");
}

#[test]
fn a_home_that_is_no_folder_stops_no_command() {
    let folder = Folder::new();
    let graph = folder.write("graph.txt", GRAPH);
    let commands: [&[&str]; 4] = [
        &["analyze", &graph],
        &["kernel", &graph],
        &["fuse", &graph, "--device", "cpu"],
        &["bench", "add_act", "--once", "--rows", "3", "--cols", "64", "--device", "cpu"],
    ];
    for words in commands {
        let mut command = folder.command(words);
        command.env_remove("XDG_CONFIG_HOME").env_remove("XDG_CACHE_HOME").env("HOME", "/dev/null");
        let output = command.output().unwrap();
        assert!(!error_text(&output).contains("ignored"), "{words:?}: {}", error_text(&output));
        assert!(!printed(output).is_empty());
    }
}

#[test]
fn inputs_at_the_edge_are_refused_or_planned() {
    let folder = Folder::new();
    let opaque = "x = input f32[8,64] ; y = opaque x f32[8,64] name=thing flops=10 elementwise ; z = gelu y ; out z";
    let opaque = folder.write("opaque.txt", opaque);
    for plan in ["naive", "eager", "unfused", "fused"] {
        let refused = folder.run(&["kernel", &opaque, "--plan", plan]);
        assert_eq!(refused.status.code(), Some(2), "{plan}: {}", error_text(&refused));
        assert!(error_text(&refused).contains("`thing` is opaque"), "{plan}: {}", error_text(&refused));
    }
    let empty = "x = input f32[128,64] ; h, m, r = layer_norm x s[64] t[64] ; y = linear h w[64,0] b[0] ; out y";
    let empty = folder.write("empty.txt", empty);
    for device in deuteron::Machine::PROFILES {
        let text = printed(folder.run(&["analyze", &empty, "--device", device]));
        assert!(!text.contains("NaN") && !text.contains("inf"), "{device}: {text}");
    }
    for (profile, number) in [("cpu", "processors"), ("h200", "processors"), ("h200", "tile_rows")] {
        let text = format!(
            "name = \"x\"\nbased_on = \"{profile}\"\n[numbers]\n{number} = {{ value = 0.5, origin = \"a test\" }}\n"
        );
        let refused = folder.run(&["analyze", "norm_act", "--device", &folder.write("machine.toml", &text)]);
        assert_eq!(refused.status.code(), Some(2), "{}", error_text(&refused));
        let wanted = format!("`{number}` must be a whole number from 1");
        assert!(error_text(&refused).contains(&wanted), "{}", error_text(&refused));
    }
}

#[test]
fn memory_that_runs_out_is_an_error() {
    let folder = Folder::new();
    let huge = "x = input f32[1,1] ; y = broadcast x [1000000,100000] ; z = exp y ; out z";
    let huge = folder.write("huge.txt", huge);
    let commands: [(&[&str], &str); 3] = [
        (&["fuse", &huge, "--device", "cpu"], "4000000"),
        (&["fuse", "gpt2-block", "--device", "cpu"], "600000"),
        (&["generate", "hi", "--model", "synthetic", "--max-tokens", "2", "--device", "cpu"], "800000"),
    ];
    for (words, kilobytes) in commands {
        let command = folder.command(words);
        let mut limited = Command::new("sh");
        limited.args(["-c", "ulimit -v \"$0\" && exec \"$@\"", kilobytes]).arg(command.get_program());
        limited.args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => limited.env(name, value),
                None => limited.env_remove(name),
            };
        }
        let output = limited.output().unwrap();
        let text = error_text(&output);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {text}");
        assert!(text.contains("bytes") && !text.contains("panicked"), "{words:?}: {text}");
    }
}

#[test]
fn a_table_of_errors_grows_by_a_row_per_dtype() {
    let folder = Folder::new();
    let table = folder.write("bounds.csv", "");
    for runs in 1..=2 {
        let words = ["check", "--cases", "3", "--device", "cpu", "--csv", &table];
        assert!(folder.command(&words).output().unwrap().status.success());
        let text = std::fs::read_to_string(&table).unwrap();
        let columns: Vec<usize> = text.lines().map(|line| line.split(',').count()).collect();
        assert!(columns.iter().all(|&count| count == columns[0]), "{text}");
        assert_eq!(text.matches("date").count(), 1);
        assert_eq!(text.lines().filter(|line| line.contains(",f32,")).count(), runs, "{text}");
    }
}
