//! Kernels for a GPU on the emulator, ladders, and exercises of the guide.

use crate::support::{Folder, printed};

fn refused(words: &[&str]) -> String {
    let output = Folder::new().run(words);
    assert_eq!(output.status.code(), Some(2), "{words:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn has_compiler() -> bool {
    let name = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let found = std::process::Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        // Not by a macro, whose lines are shown of tests that fail alone.
        let _ = std::io::Write::write_all(&mut std::io::stderr(), b"skipped: no C++ compiler\n");
    }
    found
}

#[test]
fn a_generated_kernel_is_verified() {
    if !has_compiler() {
        return;
    }
    let words = ["kernel", "norm_act", "--rows", "3", "--cols", "129", "--dtype", "f16", "--emulate"];
    // Where nothing can be kept, every command compiles the machine.
    let folder = Folder::new();
    let file = folder.write("file", "");
    let text = printed(folder.command(&words).env("XDG_CACHE_HOME", file).output().unwrap());
    assert!(text.starts_with("kernel 0 of 1: layer_norm + gelu, launched as row<<<1, 128>>>"), "{text}");
    assert!(text.contains("under 3 orders of its threads, with equal bits.\nVerified against f64"), "{text}");
}

/// A bound that is off by one writes the fourth byte after 771 elements, which no page ends.
#[test]
fn a_byte_beyond_a_result_is_found() {
    if !has_compiler() {
        return;
    }
    let folder = Folder::new();
    let text = printed(folder.run(&["ladder", "add_act", "--show", "l2_scalar"]));
    assert!(text.contains("i >= p.count"), "{text}");
    let path = folder.write("mine.cu", &text.replace("i >= p.count", "i > p.count"));
    let words = ["kernel", "add_act", "--rows", "1", "--cols", "771", "--emulate", "--rung", "l2_scalar"];
    let output = folder.run(&[&words[..], &["--source", &path, "--schedules", "1"]].concat());
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("argument 2 has 3084 bytes, and byte 3084 was written"), "{said}");
}

/// Lines are printed once, though the kernel runs under three orders of its threads, and also where it then makes a mistake.
#[test]
fn a_kernel_prints() {
    if !has_compiler() {
        return;
    }
    let folder = Folder::new();
    let text = printed(folder.run(&["ladder", "add_act", "--show", "l2_scalar"]));
    let bound = "if (i >= p.count) return;";
    let printing = format!("{bound}\n    if (i >= 769) printf(\"element %lld of %d\\n\", i, (int)p.count);");
    let path = folder.write("mine.cu", &text.replace(bound, &printing));
    let words = ["kernel", "add_act", "--rows", "1", "--cols", "771", "--emulate", "--rung", "l2_scalar"];
    let said = printed(folder.run(&[&words[..], &["--source", &path]].concat()));
    for element in [769, 770] {
        assert_eq!(said.matches(&format!("\n  printf: element {element} of 771\n")).count(), 1, "{said}");
    }
    assert!(said.contains("under 3 orders of its threads, with equal bits.\nVerified against f64"), "{said}");
    let wrong = folder.write("wrong.cu", &text.replace(bound, &printing.replacen(">=", ">", 1)));
    let output = folder.run(&[&words[..], &["--source", &wrong]].concat());
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("\nprintf: element 770 of 771\n") && said.contains("byte 3084 was"), "{said}");
}

/// As it is printed: with the device-side library or with comments in its place, all of a rung or its own part.
#[test]
fn printed_sources_are_taken_as_they_are() {
    if !has_compiler() {
        return;
    }
    let folder = Folder::new();
    let size = ["--rows", "8", "--cols", "768", "--dtype", "bf16"];
    let shown = |words: &[&str]| folder.write("shown.cu", &printed(folder.run(words)));
    let verified = |path: &str, rung: &[&str]| {
        let words = ["kernel", "softmax", "--emulate", "--schedules", "1", "--source", path];
        let said = printed(folder.run(&[&words[..], &size, rung].concat()));
        assert!(said.contains("Verified against f64"), "{said}");
    };
    for full in [&[][..], &["--full"]] {
        let kernel = ["kernel", "softmax", "--device", "sm_90a", "--no-compile"];
        verified(&shown(&[&kernel[..], &size, full].concat()), &[]);
        let rung = ["ladder", "softmax", "--show", "l6_row_in_registers"];
        verified(&shown(&[&rung[..], full].concat()), &["--rung", "l6_row_in_registers"]);
    }
    let heads = ["--rows", "64", "--seq", "64", "--cols", "64", "--dtype", "bf16"];
    let words = ["kernel", "attention", "--device", "sm_90a", "--no-compile"];
    let path = shown(&[&words[..], &heads].concat());
    let words = ["kernel", "attention", "--emulate", "--schedules", "1", "--rung", "l6_warpgroups", "--source", &path];
    let said = printed(folder.run(&[&words[..], &heads].concat()));
    assert!(said.contains("Verified against f64"), "{said}");
}

/// Eight rows of 64 columns, each read three times by a thread of its own: 8 sectors each time, of which 4 bytes each are used.
#[test]
fn accesses_are_counted() {
    if !has_compiler() {
        return;
    }
    let size = ["kernel", "softmax", "--rows", "8", "--cols", "64", "--schedules", "1", "--emulate", "--accesses"];
    let text = printed(Folder::new().run(&[&size[..], &["--rung", "l2_thread_a_row"]].concat()));
    let reads = "\n  global reads: 192 by warps, 1536 sectors of 32 bytes, 12.5 % of their bytes used\n";
    let writes = "\n  global writes: 64 by warps, 512 sectors of 32 bytes, 12.5 % of their bytes used\n";
    assert!(text.contains(reads) && text.contains(writes) && !text.contains("shared"), "{text}");
}

#[test]
fn words_of_the_emulator_are_checked() {
    let rung = refused(&["kernel", "add_act", "--rung", "l2_scalar"]);
    assert!(rung.contains("--emulate"), "{rung}");
    let device = refused(&["kernel", "add_act", "--emulate", "--device", "cpu"]);
    assert!(device.contains("cannot be used with"), "{device}");
    let compiled = refused(&["kernel", "add_act", "--no-compile", "--device", "cpu"]);
    assert!(
        compiled.contains("expected --device with an instruction set or a profile of a GPU, got cpu"),
        "{compiled}"
    );
    let unknown = refused(&["ladder", "add_act", "--show", "l9"]);
    assert!(unknown.contains("expected one of l1_two_launches, l2_scalar, l3_vector, l4_in_flight"), "{unknown}");
    let none = refused(&["ladder", "swiglu"]);
    let names = "expected one of add_act, norm_act, softmax, attention, attention_add_norm, matmul";
    assert!(none.contains(names), "{none}");
    let accesses = refused(&["kernel", "softmax", "--accesses"]);
    assert!(accesses.contains("--emulate"), "{accesses}");
}

/// Each shipped kernel is the one that is named: by its launch and by an instruction of it.
#[test]
fn every_rung_is_printed() {
    let show = |op: &str, rung: &str| printed(Folder::new().run(&["ladder", op, "--show", rung]));
    for ladder in deuteron::ladder::Ladder::ALL {
        for rung in ladder.rungs() {
            let text = show(ladder.op(), rung.name);
            assert!(text.starts_with(&format!("// {}: {}\n", rung.name, rung.about)), "{text}");
            assert!(text.contains("extern \"C\" __global__"), "{} {}: {text}", ladder.op(), rung.name);
        }
    }
    for (op, rung, words) in [
        ("attention", "l5_pipelined", ["// launch attention_", "// argument 0 reads q: bf16[1,12,1024,64]"]),
        ("attention", "l6_warpgroups", ["// launch attention_hopper<<<", "wgmma"]),
        ("attention_add_norm", "l5_one_launch", ["// launch attention_rows_hopper<<<", "wgmma"]),
        ("matmul", "l5_pipelined", ["// launch matmul", "// argument 1 reads w: bf16[768,3072]"]),
        ("matmul", "l6_warpgroups", ["// launch matmul", "wgmma"]),
        ("matmul", "l7_persistent", ["// launch matmul", "wgmma"]),
    ] {
        let text = show(op, rung);
        for words in words {
            assert!(text.contains(words), "{op} {rung} without {words}: {text}");
        }
    }
    assert_ne!(show("matmul", "l6_warpgroups"), show("matmul", "l7_persistent"));
    let full = printed(Folder::new().run(&["ladder", "softmax", "--show", "l5_online", "--full"]));
    assert!(
        full.contains("struct Parameters")
            && full.contains("// launch row<<<")
            && full.contains("constexpr int COLS = 768"),
        "{full}"
    );
}

#[test]
fn rungs_of_a_cpu_are_listed_and_printed() {
    let list = printed(Folder::new().run(&["ladder", "matmul", "--cpu"]));
    assert!(list.contains("l1_scalar") && list.contains("`deuteron ladder matmul --cpu --show RUNG`"), "{list}");
    let loops = printed(Folder::new().run(&["ladder", "matmul", "--cpu", "--show", "l1_scalar"]));
    assert!(loops.contains("for l in 0..p.k") && loops.contains("gelu"), "{loops}");
    let fused = printed(Folder::new().run(&["ladder", "softmax", "--cpu", "--show", "fused"]));
    assert!(fused.contains("// kernel 0 of 1: softmax") && fused.contains("tile program"), "{fused}");
    let unknown = refused(&["ladder", "softmax", "--cpu", "--show", "l9"]);
    assert!(unknown.contains("has no rung `l9`; expected one of scalar, "), "{unknown}");
}

/// Rungs of rows access 16 bytes at once, so rows must be multiples of that.
#[test]
fn a_rung_refuses_rows_that_it_is_not_written_for() {
    if !has_compiler() {
        return;
    }
    for (op, rung) in [("softmax", "l5_online"), ("norm_act", "l5_vectors")] {
        let said = refused(&["kernel", op, "--rows", "3", "--cols", "771", "--emulate", "--rung", rung]);
        assert!(said.contains(&format!("the rung `{rung}` does not support `{op}`")), "{said}");
        assert!(said.contains("a multiple of 8 columns, at most 4096"), "{said}");
    }
}

#[test]
fn a_rung_of_a_matmul_is_emulated() {
    let size = ["kernel", "matmul", "--rows", "8", "--cols", "16"];
    let text = printed(Folder::new().run(&[&size[..], &["--text"]].concat()));
    assert!(text.contains("w = input f32[16,64]") && text.starts_with("graph matmul\n"), "{text}");
    if !has_compiler() {
        return;
    }
    let emulated = ["--dtype", "bf16", "--emulate", "--schedules", "1", "--rung", "l2_tiled"];
    let text = printed(Folder::new().run(&[&size[..], &emulated].concat()));
    assert!(text.contains("launched as matmul<<<1, 256>>>") && text.contains("Verified against f64"), "{text}");
    let f32 = refused(&[&size[..], &["--emulate", "--rung", "l2_tiled"]].concat());
    assert!(f32.contains("those of matmul are in f16 and bf16"), "{f32}");
}

#[test]
fn sources_are_printed_without_a_compiler() {
    let words = ["kernel", "norm_act", "--device", "sm_90a", "--no-compile"];
    let text = printed(Folder::new().run(&words));
    assert!(text.contains("extern \"C\" __global__") && !text.contains("registers"), "{text}");
}

#[test]
fn answers_are_checked() {
    let list = printed(Folder::new().run(&["guide", "list"]));
    assert!(list.contains("1.1") && list.contains("4.2"), "{list}");
    let right = printed(Folder::new().run(&["guide", "check", "2.3", "32"]));
    assert!(right.starts_with("2.3 right"), "{right}");
    assert_eq!(Folder::new().run(&["guide", "check", "2.3", "31"]).status.code(), Some(1));
    let unknown = refused(&["guide", "check", "9.9", "1"]);
    assert!(unknown.contains("expected 1.1 to 4.2"), "{unknown}");
    let missing = refused(&["guide", "check", "1.3", "nothing.txt"]);
    assert!(missing.contains("exercise 1.3 takes a file: a graph in text form"), "{missing}");
}
