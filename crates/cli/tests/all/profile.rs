//! `deuteron profile` on a CPU, with counters or without.

use serde_json::Value;

use crate::support::{Folder, printed};

#[test]
fn both_plans_are_timed_and_what_is_not_counted_is_said() {
    let folder = Folder::new();
    let words = ["profile", "norm_act", "--rows", "512", "--cols", "768", "--device", "cpu", "--json"];
    let report: Value = serde_json::from_str(&printed(folder.run(&words))).unwrap();
    let names = |plan: usize| -> Vec<&str> {
        let kernels = report["plans"][plan]["kernels"].as_array().unwrap();
        kernels.iter().map(|kernel| kernel["name"].as_str().unwrap()).collect()
    };
    assert_eq!((report["plans"][0]["plan"].as_str(), names(0)), (Some("unfused"), vec!["layer_norm", "gelu"]));
    assert_eq!((report["plans"][1]["plan"].as_str(), names(1)), (Some("fused"), vec!["layer_norm + gelu"]));
    assert!(report["after_us"].as_f64().unwrap() > 0.0);
    let fused = &report["plans"][1]["kernels"][0];
    assert!(fused["measured_us"].as_f64().unwrap() > 0.0);
    assert_eq!(fused["compulsory_written"], 512 * 768 * 4);
    match report["by"].as_str().unwrap() {
        "perf" => assert!(fused["counters"]["instructions_per_cycle"].as_f64().unwrap() > 0.0),
        "clock" => {
            assert!(fused["counters"]["instructions_per_cycle"].is_null());
            assert!(report["notes"][0].as_str().unwrap().starts_with("no hardware counters"));
        }
        by => panic!("{by}"),
    }
}

#[test]
fn the_page_and_the_table_hold_the_profile() {
    let folder = Folder::new();
    let page = folder.path("page.html");
    let words = ["profile", "norm_act", "--rows", "512", "--cols", "768", "--device", "cpu", "--html", &page];
    let text = printed(folder.run(&words));
    for part in ["Before fusing", "After fusing", "layer_norm + gelu", "Without the profiler", "must move"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("\"profiled\":{\"by\":"), "the data block names the source");
}

#[test]
fn a_profiler_of_gpus_is_refused_on_a_cpu() {
    let output = Folder::new().run(&["profile", "norm_act", "--device", "cpu", "--by", "ncu"]);
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("--by is for a GPU; got cpu"), "{said}");
}

#[test]
fn the_watched_process_runs_one_plan_and_prints_nothing() {
    let words = ["profile", "norm_act", "--rows", "8", "--cols", "8", "--device", "cpu", "--once", "fused"];
    assert_eq!(printed(Folder::new().run(&words)), "");
    let help = printed(Folder::new().run(&["profile", "--help"]));
    assert!(!help.contains("--once"), "it is for the profiler alone");
}
