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
    let text = printed(Folder::new().run(&words));
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
    let text = printed(folder.run(&["ladder", "add_act", "--show", "l1_scalar"]));
    assert!(text.contains("i >= p.count"), "{text}");
    let path = folder.write("mine.cu", &text.replace("i >= p.count", "i > p.count"));
    let words = ["kernel", "add_act", "--rows", "1", "--cols", "771", "--emulate", "--rung", "l1_scalar"];
    let output = folder.run(&[&words[..], &["--source", &path, "--schedules", "1"]].concat());
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("argument 2 has 3084 bytes, and byte 3084 was written"), "{said}");
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
    let rung = refused(&["kernel", "add_act", "--rung", "l1_scalar"]);
    assert!(rung.contains("--emulate"), "{rung}");
    let device = refused(&["kernel", "add_act", "--emulate", "--device", "cpu"]);
    assert!(device.contains("cannot be used with"), "{device}");
    let compiled = refused(&["kernel", "add_act", "--no-compile", "--device", "cpu"]);
    assert!(
        compiled.contains("expected --device with an instruction set or a profile of a GPU, got cpu"),
        "{compiled}"
    );
    let unknown = refused(&["ladder", "add_act", "--show", "l9"]);
    assert!(unknown.contains("expected one of l1_scalar, l2_vector, l3_in_flight"), "{unknown}");
    let none = refused(&["ladder", "swiglu"]);
    let names = "expected one of add_act, norm_act, softmax, attention, attention_add_norm, matmul";
    assert!(none.contains(names), "{none}");
    let accesses = refused(&["kernel", "softmax", "--accesses"]);
    assert!(accesses.contains("--emulate"), "{accesses}");
    let shipped = refused(&["ladder", "attention", "--show", "l6_warpgroups"]);
    assert!(shipped.contains("deuteron kernel attention --device sm_90a"), "{shipped}");
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
