//! One story: flags, sheets, plans, pages and documents that agree with each other.

use std::path::{Path, PathBuf};

use deuteron::Bytes;
use deuteron::report::{Analysis, KernelSheet, change_of_bytes, parse};

use crate::support::{Folder, printed};

fn analyzed(folder: &Folder, arguments: &[&str]) -> Analysis {
    parse(&printed(folder.run(&[&["analyze"][..], arguments, &["--json"][..]].concat()))).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A command must end with 2 and say this.
fn refused(folder: &Folder, arguments: &[&str], message: &str) {
    let output = folder.run(arguments);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
    assert!(said.contains(message), "{arguments:?} should say `{message}`, said:\n{said}");
}

fn model() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../onnx/tests/models/gpt2_dynamo_20.onnx");
    path.to_str().unwrap().to_string()
}

#[test]
fn a_flag_that_does_nothing_is_an_error() {
    let folder = Folder::new();
    let file = folder.write("graph.txt", "x = input f32[64,64] ; y = relu x ; out y");
    let onnx = model();
    let cases: [(&[&str], &str); 14] = [
        (&["analyze", &onnx, "--rows", "8"], "--rows does nothing for the ONNX file"),
        (&["analyze", &onnx, "--experts", "8"], "--experts does nothing for the ONNX file"),
        (&["analyze", &file, "--dtype", "bogus"], "--dtype does nothing for a graph in text form"),
        (&["fuse", &file, "--batch", "2"], "--batch does nothing"),
        (&["analyze", &file, "--seq", "16"], "--seq does nothing"),
        (&["kernel", &file, "--cols", "16"], "--cols does nothing"),
        (
            &["analyze", "gpt2-block", "--rows", "16"],
            "--rows does nothing for the model `gpt2-block`; it takes --batch",
        ),
        (&["analyze", "gpt2", "--choices", "2"], "--choices does nothing"),
        (
            &["analyze", "norm_act", "--batch", "2"],
            "--batch does nothing for the op `norm_act`; it takes --rows, --cols, --dtype",
        ),
        (&["analyze", "norm_act", "--seq", "2"], "--seq does nothing"),
        (&["analyze", "norm_act", "--experts", "2"], "--experts does nothing"),
        (&["analyze", "norm_act", "--dim", "a=1"], "--dim does nothing"),
        (&["analyze", "norm_act", "--keep-all"], "--keep-all is for graphs with gradients"),
        (&["fuse", "norm_act", "--device", "cpu", "--tuning", "none"], "--tuning is for kernels of a GPU"),
    ];
    cases.iter().for_each(|(arguments, message)| refused(&folder, arguments, message));
    // What an op does take is no error.
    let kernels = |words: &[&str]| analyzed(&folder, words).before.len();
    assert!(kernels(&["attention", "--seq", "64", "--rows", "128"]) > 0);
    assert!(kernels(&["moe weighted=true", "--experts", "4", "--choices", "2"]) > 0);
}

#[test]
fn nothing_has_no_size() {
    let folder = Folder::new();
    for (flag, graph) in [
        ("rows", "act"),
        ("cols", "act"),
        ("batch", "gpt2"),
        ("experts", "moe"),
        ("choices", "moe weighted=true"),
        ("seq", "attention"),
    ] {
        let flag = format!("--{flag}");
        refused(&folder, &["analyze", graph, &flag, "0"], &format!("{flag} must be at least 1, got 0"));
    }
    let empty = folder.write("empty.txt", "x = input f32[0,64] ; y = relu x ; z = gelu y ; out z");
    for output in [folder.run(&["analyze", &empty]), folder.run(&["fuse", &empty, "--no-learn"])] {
        let said = printed(output);
        assert!(!said.contains("NaN") && !said.contains("100 % fewer"), "{said}");
    }
}

#[test]
fn names_of_other_tools_are_understood_and_the_nearest_name_is_proposed() {
    let folder = Folder::new();
    let usual = analyzed(&folder, &["norm_act", "--device", "h200", "--dtype", "f16"]);
    let other = analyzed(&folder, &["norm_act", "--device", "H200", "--dtype", "fp16"]);
    assert_eq!((usual.plans, usual.before), (other.plans, other.before));
    let upper = folder.path("MODEL.ONNX");
    std::fs::copy(model(), &upper).unwrap();
    assert!(!analyzed(&folder, &[&upper]).ops.is_empty());
    refused(&folder, &["analyze", "norm_atc"], "did you mean `norm_act`?");
    refused(&folder, &["analyze", "gpt3"], "did you mean `gpt2`?");
    refused(&folder, &["analyze", "norm_act eps"], "norm_act");
}

#[test]
fn short_runs_teach_nothing_and_what_is_learnt_is_forgotten_on_demand() {
    let folder = Folder::new();
    let times = |analysis: &Analysis| analysis.after.iter().map(|kernel| kernel.cost.us).collect::<Vec<_>>();
    let words = ["norm_act", "--rows", "65536"];
    let before = analyzed(&folder, &words);
    assert_eq!(before.machine.basis, "guessed");
    for _ in 0..6 {
        let said = printed(folder.run(&["fuse", "act", "--rows", "1", "--cols", "8", "--device", "cpu"]));
        assert!(!said.contains("now follow"), "{said}");
    }
    let after = analyzed(&folder, &words);
    assert_eq!(
        (times(&after), &after.machine),
        (times(&before), &before.machine),
        "six runs of 8 elements change nothing"
    );
    // A number that was learnt says so, in the file, in the analysis and in the headline; forgetting removes it.
    let place = learnt_file(&folder);
    let number = "correct_row = { value = 1.25, origin = \"learnt: 4 row kernels of 1.2 GB, by `fuse act`\" }";
    std::fs::create_dir_all(place.parent().unwrap()).unwrap();
    std::fs::write(&place, format!("name = \"cpu\"\n[numbers]\n{number}\n")).unwrap();
    let learnt = analyzed(&folder, &words);
    assert_eq!(learnt.machine.basis, "learnt");
    assert!(times(&learnt)[0] > 1.1 * times(&before)[0]);
    assert!(printed(folder.run(&["analyze", "act"])).contains("numbers corrected by what `fuse` measured here"));
    assert!(printed(folder.run(&["doctor", "--forget", "--device", "cpu"])).contains("is removed"));
    assert!(printed(folder.run(&["doctor", "--forget", "--device", "cpu"])).contains("Nothing was learnt"));
    assert_eq!(times(&analyzed(&folder, &words)), times(&before));
}

/// Where the CPU's file of learnt numbers is: the command names it where it cannot be used.
fn learnt_file(folder: &Folder) -> PathBuf {
    let settings = folder.0.join("settings/deuteron/learnt");
    let output = folder.run(&["fuse", "act", "--rows", "1", "--cols", "8", "--device", "cpu"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    // The lock is made before anything is learnt: `.NAME.lock` beside the file NAME.
    let found = std::fs::read_dir(&settings).unwrap().find_map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        Some(settings.join(name.strip_prefix('.')?.strip_suffix(".lock")?))
    });
    found.unwrap()
}

/// Microseconds, launches and bytes of all kernels of a list.
fn totals(kernels: &[KernelSheet]) -> (f64, usize, u64) {
    let count = |kernel: &KernelSheet| kernel.launches.len();
    (
        kernels.iter().map(|kernel| kernel.cost.us * count(kernel) as f64).sum(),
        kernels.iter().map(count).sum(),
        kernels.iter().map(|kernel| (kernel.cost.read + kernel.cost.written) * count(kernel) as u64).sum(),
    )
}

#[test]
fn headline_timeline_and_savings_are_one_set_of_numbers() {
    let folder = Folder::new();
    for words in [
        &["gpt2-block", "--device", "h200", "--dtype", "bf16", "--backward"][..],
        &["gpt2", "--device", "h200", "--dtype", "bf16"],
        &["gpt2-block", "--seq", "128"],
    ] {
        let analysis = analyzed(&folder, words);
        let before = analysis.plans.before();
        for (plan, kernels) in [(before, &analysis.before), (&analysis.plans.chosen, &analysis.after)] {
            let (us, launches, bytes) = totals(kernels);
            assert!((us - plan.us).abs() < 1e-6 * plan.us, "{words:?}: {us} and {}", plan.us);
            assert_eq!((launches, bytes), (plan.kernels, plan.bytes), "{words:?}");
        }
        let (from, to) = (before.kernels, analysis.plans.chosen.kernels);
        let texts = [
            format!("{from} kernels into {to}"),
            format!("{from} kernels become {to}"),
            format!("{to} kernels as before"),
        ];
        assert!(texts.iter().any(|text| analysis.verdict.contains(text)), "{}", analysis.verdict);
        let saved = before.us - analysis.plans.chosen.us;
        let gains = analysis.after.iter().map(|kernel| kernel.gain_us.unwrap() * kernel.launches.len() as f64);
        let gains: f64 = gains.sum();
        assert!((gains - saved).abs() < 1e-3 + 1e-6 * saved.abs(), "{words:?}: {gains} of {saved}");
        let is_recomputed = analysis.recompute.as_ref().is_some_and(|sheet| !sheet.again.is_empty());
        assert_eq!(analysis.plans.recomputed.is_some(), is_recomputed, "{words:?}");
    }
}

#[test]
fn a_sheet_says_what_the_plan_does() {
    let folder = Folder::new();
    for words in [
        &["gpt2-block", "--device", "h200"][..],
        &["gpt2-block", "--device", "h200", "--conceivable"],
        &["gpt2", "--device", "h200", "--batch", "8", "--dtype", "bf16"],
        &["gpt2-block"],
    ] {
        let analysis = analyzed(&folder, words);
        for one in &analysis.candidates {
            assert_eq!(one.chosen, one.reason.code == "OK", "{words:?}: {:?} {:?}", one.ops, one.reason);
            let offers_time = one.reason.text.contains("forced, it would take");
            assert!(!offers_time, "{words:?}: {:?}", one.reason);
        }
        if !words.contains(&"--conceivable") {
            assert!(analysis.after.iter().all(|kernel| kernel.realizable), "{words:?}: the plan is what runs");
        }
    }
    // Forbidding is said, with what it costs.
    let words = ["gpt2-block", "--device", "h200", "--batch", "8", "--dtype", "bf16", "--forbid", "linear,gelu"];
    let analysis = analyzed(&folder, &words);
    let forbidden = analysis.candidates.iter().find(|one| one.ops == ["linear", "gelu"]).unwrap();
    assert_eq!((forbidden.reason.code.as_str(), forbidden.forceable), ("E-PLAN-015", false));
    assert!((forbidden.worth_us.unwrap() - analysis.pins[0].price_us).abs() < 1e-6, "{forbidden:?}");
    // The greedy plan is planned under the pin too: it is no faster than the optimal plan.
    let greedy = analysis.plans.greedy.as_ref().unwrap();
    assert!(
        analysis.optimal && greedy.us >= analysis.plans.chosen.us,
        "{} and {}",
        greedy.us,
        analysis.plans.chosen.us
    );
    refused(&folder, &["analyze", "gpt2-block", "--forbid", "gelu,nothing"], "cannot forbid gelu + nothing");
}

#[test]
fn the_headline_says_what_the_plan_does() {
    let folder = Folder::new();
    for words in [
        &["bert-block", "--device", "h200", "--seq", "128"][..],
        &["t5-block", "--device", "h200"],
        &["vit-block", "--device", "h200"],
        &["gpt2-block", "--device", "h200", "--batch", "8", "--dtype", "bf16"],
        &["gpt2-block", "--device", "h200", "--seq", "1", "--dtype", "bf16"],
    ] {
        let page = folder.path("page.html");
        let analysis = analyzed(&folder, &[words, &["--html", &page]].concat());
        let (plans, verdict) = (&analysis.plans, &analysis.verdict);
        let regroups = analysis
            .ops
            .iter()
            .any(|one| analysis.ops.iter().any(|other| (one.before == other.before) != (one.after == other.after)));
        assert_eq!(!regroups, verdict.contains("Nothing to fuse"), "{words:?}: {verdict}");
        let splits = analysis
            .ops
            .iter()
            .any(|one| analysis.ops.iter().any(|other| one.before == other.before && one.after != other.after));
        let headline = verdict.split(". ").next().unwrap();
        assert_eq!(splits, headline.contains(" in parts"), "{words:?}: {verdict}");
        assert_eq!(
            plans.eager.us < 0.99 * plans.unfused.us,
            verdict.contains("Compared with the eager plan"),
            "{words:?}: {verdict}"
        );
        assert!(!verdict.contains(" 0 % "), "{words:?}: {verdict}");
        // What got worse is not painted as a gain.
        let html = std::fs::read_to_string(&page).unwrap();
        assert_eq!(plans.chosen.bytes > plans.before().bytes, html.contains("<dd class=\"loss\">"), "{words:?}");
    }
}

#[test]
fn what_a_sheet_offers_to_force_can_be_forced() {
    let folder = Folder::new();
    for words in [
        &["gpt2-block", "--device", "h200", "--batch", "8", "--dtype", "bf16"][..],
        &["bert-block", "--device", "h200", "--seq", "128"],
    ] {
        let analysis = analyzed(&folder, words);
        let mut seen: Vec<&[String]> = Vec::new();
        for one in &analysis.candidates {
            if seen.contains(&one.ops.as_slice()) {
                continue;
            }
            seen.push(&one.ops);
            let names = one.ops.join(",");
            for (flag, works) in [("--force", one.forceable), ("--forbid", one.kind != "view")] {
                let output = folder.run(&[&["analyze"][..], words, &[flag, &names]].concat());
                assert_eq!(output.status.success(), works, "{words:?} {flag} {names}: {}", text(&output.stderr));
            }
            assert!(one.forceable || !one.reason.hint.contains("--force"), "{:?}: {:?}", one.ops, one.reason);
        }
        assert!(analysis.candidates.iter().any(|one| one.ops.len() > 3 && one.forceable), "{words:?}");
        assert!(analysis.candidates.iter().any(|one| one.kind == "view"), "{words:?}");
    }
}

#[test]
fn a_refusal_that_measurements_decide_has_a_price_and_no_empty_advice() {
    let folder = Folder::new();
    let words = ["gpt2-block", "--device", "h200", "--batch", "8", "--dtype", "bf16"];
    let analysis = analyzed(&folder, &words);
    let slower: Vec<_> = analysis.candidates.iter().filter(|one| one.reason.code == "E-PLAN-017").collect();
    assert!(!slower.is_empty());
    for one in slower {
        assert!(one.reason.text.contains("one kernel is predicted at"), "{:?}", one.reason);
        assert!(!one.reason.hint.contains("size named"), "{:?}", one.reason);
    }
    // What the last section names, the section of refusals lists.
    let said = printed(folder.run(&[&["analyze"][..], &words].concat()));
    let (before, next) = said.split_once("What to do next").unwrap();
    let (_, refused) = before.split_once("Refused, and why").unwrap();
    for line in next.lines().filter(|line| line.contains(" stays apart (")) {
        let (ops, rest) = line.trim().split_once(" stays apart (").unwrap();
        let code = rest.split(')').next().unwrap();
        assert!(refused.contains(&format!("{code} {ops}:")), "{line} is not in\n{refused}");
    }
}

#[test]
fn small_words_are_true() {
    let folder = Folder::new();
    let said = printed(folder.run(&["analyze", "bert-block", "--device", "h200", "--seq", "128"]));
    assert!(!said.contains("-0.0 us"), "{said}");
    assert!(said.contains("naive: one kernel per primitive"), "{said}");
    let linear = said.lines().find(|line| line.contains("matrix") && line.contains("128x3072x768")).unwrap();
    assert!(!linear.contains("176"), "the registers of a library's kernel are not known: {linear}");
    refused(&folder, &["analyze", "norm_act", "--device", "bogus"], "expected cpu, cuda, cuda:N, a100");
    refused(&folder, &["check", "--cases", "0"], "must be at least 1, got 0");
    let typo = folder.write("typo.txt", "x = input f32[8,8] ; y = geluu x ; out y");
    refused(&folder, &["analyze", &typo], "unknown operation `geluu`; did you mean `gelu`?");
    let output = folder.run(&["analyze", "norm_act", "--expect", "nowhere.txt"]);
    assert!(!text(&output.stderr).contains("os error"), "{}", text(&output.stderr));
    let wrong = folder.run(&["guide", "check", "2.3", "nan"]);
    assert!(text(&wrong.stdout).contains("expected a finite number, got `nan`"), "{}", text(&wrong.stdout));
    let loss = analyzed(&folder, &["linear_cross_entropy", "--device", "h200", "--rows", "8192", "--dtype", "bf16"]);
    assert!(loss.after.iter().any(|kernel| kernel.size.starts_with("8192x")), "{:?}", loss.after[0].size);
}

#[test]
fn the_score_sheet_is_where_people_look() {
    let folder = Folder::new();
    let said = printed(folder.run(&["analyze", "norm_act", "--device", "h200", "--rows", "8192", "--dtype", "bf16"]));
    let said = said.replace('\n', " ");
    for word in ["0.4 x bandwidth (more than 30 %", "0.2 x launch", "0.1 x maintainability", "FUSE from 0.6", "0.85"] {
        assert!(said.contains(word), "{word} is missing in\n{said}");
    }
    let analysis = analyzed(&folder, &["gpt2-block", "--device", "h200", "--dtype", "bf16"]);
    let scoring = &analysis.scoring;
    let weights: Vec<f64> = scoring.criteria.iter().map(|one| one.weight).collect();
    assert_eq!((scoring.fuse_from, weights.as_slice()), (0.6, &[0.4, 0.2, 0.2, 0.1, 0.1][..]));
    for one in &analysis.candidates {
        let sum: f64 = one.criteria.list().iter().zip(&weights).map(|(score, weight)| score * weight).sum();
        assert!((sum - one.score).abs() < 1e-9, "{:?}", one.ops);
        assert_eq!(one.passes.bandwidth, one.values.bandwidth_saving > scoring.criteria[0].threshold);
        assert_eq!(one.passes.launch, one.values.launch_saving > scoring.criteria[1].threshold);
    }
    let launch: Vec<f64> = analysis.candidates.iter().map(|one| one.criteria.launch).collect();
    assert!(launch.contains(&1.0) && launch.iter().any(|&score| score < 0.9), "it tells fusions apart: {launch:?}");
    let own =
        "fuse_from = 0.9\n[weights]\nbandwidth = 1\nlaunch = 0\nregisters = 0\ncomplexity = 0\nmaintainability = 0\n";
    let own = folder.write("weights.toml", own);
    let analysis = analyzed(&folder, &["norm_act", "--device", "h200", "--weights", &own]);
    let one = &analysis.candidates[0];
    assert_eq!((one.score, one.verdict.as_str()), (one.criteria.bandwidth, "DO NOT FUSE"));
    let bad = folder.write("bad.toml", "[weights]\nbandwidth = 1\n");
    refused(&folder, &["analyze", "norm_act", "--weights", &bad], "bad.toml");
}

#[test]
fn norm_and_linear_of_few_rows_are_fused_without_being_asked_for() {
    let folder = Folder::new();
    let code = |seq: &str| {
        let words = ["gpt2-block", "--device", "h200", "--dtype", "bf16", "--seq", seq];
        let analysis = analyzed(&folder, &words);
        let one = analysis.candidates.iter().find(|one| one.ops == ["layer_norm", "linear"]).unwrap();
        (one.chosen, one.reason.code.clone())
    };
    assert_eq!(code("1"), (true, "OK".to_string()));
    assert!(!code("1024").0);
}

#[test]
fn fuse_lists_what_separate_kernels_cost() {
    let folder = Folder::new();
    let words = ["fuse", "attention", "--rows", "256", "--seq", "256", "--cols", "64", "--device", "cpu", "--no-learn"];
    let said = printed(folder.run(&words));
    for word in
        ["eager: attention in parts", "unfused: a kernel per call", "Fused against unfused", "Fused against eager"]
    {
        assert!(said.contains(word), "{word} is missing in\n{said}");
    }
    // The last line is for a reader who knows nothing of plans.
    let last = said.trim_end().lines().last().unwrap();
    assert!(last.starts_with("In short: ") && last.contains("verified against a calculation in double"), "{last}");
    // A graph without attention has no attention in parts.
    let said = printed(folder.run(&["fuse", "norm_act", "--rows", "64", "--device", "cpu", "--no-learn"]));
    assert!(said.contains("eager: as unfused") && !said.contains("attention"), "{said}");
    let report: serde_json::Value =
        serde_json::from_str(&printed(folder.run(&[&words[..], &["--json"]].concat()))).unwrap();
    assert!(report["eager"]["kernels"].as_u64() > report["unfused"]["kernels"].as_u64(), "{report}");
    assert!(report["eager"]["ms"].as_f64() > Some(0.0) && report["speedup_over_eager"].as_f64() > Some(0.0));
}

#[test]
fn a_kernel_is_printed_as_it_runs_with_its_tensors() {
    let folder = Folder::new();
    let words =
        ["kernel", "attention_block", "--rows", "64", "--seq", "32", "--cols", "64", "--dtype", "bf16", "--json"];
    let kernels: serde_json::Value = serde_json::from_str(&printed(folder.run(&words))).unwrap();
    assert_eq!(kernels.as_array().unwrap().len(), 1, "the op runs one kernel");
    let help = printed(folder.run(&["kernel", "--help"]));
    assert!(help.contains("greedy") && help.contains("--full"), "{help}");
    let said = printed(folder.run(&["kernel", "norm_act"]));
    for line in [
        "// kernel 0 of 1: layer_norm + gelu",
        "// argument 0 reads x: f32[1024,768]",
        "// argument 3 writes y: f32[1024,768]",
    ] {
        assert!(said.contains(line), "{line} is missing in\n{said}");
    }
    refused(&folder, &["kernel", "norm_act", "--only", "1"], "expected a number from 0 to 0, got 1");
    let output = folder.run_with_nvrtc(&["kernel", "norm_act", "--device", "sm_90a", "--dtype", "bf16"]);
    if output.status.code() == Some(2) {
        // Without NVRTC the answer is where it was looked for.
        assert!(text(&output.stderr).contains("nvidia-cuda-nvrtc"), "{}", text(&output.stderr));
        return;
    }
    let short = text(&output.stdout);
    let full =
        text(&folder.run_with_nvrtc(&["kernel", "norm_act", "--device", "sm_90a", "--dtype", "bf16", "--full"]).stdout);
    assert!(short.lines().count() < 150 && short.contains("// ... philox.cuh of the device-side library"), "{short}");
    assert!(
        short.contains("// launch row<<<") && short.contains("--full prints the whole translation unit"),
        "{short}"
    );
    assert!(full.lines().count() > 700);
    compiles(&full);
}

/// What is printed is a translation unit.
fn compiles(text: &str) {
    let environments = std::env::var_os("DEUTERON_NVRTC_ENV").map(PathBuf::from).into_iter().collect();
    let search = deuteron::cuda::Search { cuda_home: None, environments };
    let compiler = deuteron::cuda::compiler(&search).unwrap();
    let request = deuteron::cuda::Request { name: "printed", text, arch: "sm_90a", options: &[] };
    compiler.compile(&request).unwrap();
}

#[test]
fn the_numbers_of_the_readme_are_those_of_the_binary() {
    let readme = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md")).unwrap();
    let example = readme.lines().find(|line| line.starts_with("deuteron analyze gpt2 --device")).unwrap();
    let folder = Folder::new();
    let mut words: Vec<&str> = example.split_whitespace().skip(1).take_while(|&word| word != "--html").collect();
    let picture = folder.path("drawn.svg");
    words.extend(["--svg", &picture]);
    let said = printed(folder.run(&words));
    let shown =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/gpt2-h200-roofline.svg"))
            .unwrap();
    let drawn = std::fs::read_to_string(&picture).unwrap();
    assert!(shown == drawn, "docs/gpt2-h200-roofline.svg is not what `deuteron {}` draws", words.join(" "));
    let quoted: Vec<&str> = readme.lines().filter_map(|line| line.strip_prefix("> ")).collect();
    let quoted = quoted.join(" ");
    let said = said.replace('\n', " ");
    for sentence in quoted.split_inclusive(". ").map(str::trim).filter(|sentence| !sentence.is_empty()) {
        let sentence = sentence.trim_end_matches('.');
        assert!(said.contains(sentence), "the README says `{sentence}`, the binary:\n{said}");
    }
    assert!(quoted.contains("kernels into"), "{quoted}");
}

/// A reader who knows what to do gets one place to go.
#[test]
fn the_readme_is_two_sentences_and_one_link_per_purpose() {
    let readme = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md")).unwrap();
    let intro = readme.split("\n\n").nth(1).unwrap().replace('\n', " ");
    assert_eq!(intro.trim_end_matches('.').split(". ").count(), 2, "{intro}");
    let rows = readme.split("| you want to | do |\n|---|---|\n").nth(1).unwrap();
    let rows: Vec<&str> = rows.lines().take_while(|line| line.starts_with('|')).collect();
    assert!(rows.len() >= 8, "{rows:?}");
    for row in rows {
        assert_eq!(row.matches("](").count(), 1, "{row}");
    }
}

/// A line without what differs from run to run or from graph to graph: numbers, units, and widths of columns.
fn skeleton(line: &str) -> String {
    let masked = line.split_whitespace().map(|word| {
        let bare = word.trim_end_matches([',', '.', ':', ')']);
        match bare {
            // Dots that stand for anything.
            "" => "..",
            "ns" | "us" | "ms" | "s" | "B" | "KB" | "MB" | "GB" => "unit",
            word if word.contains(|c: char| c.is_ascii_digit()) => "#",
            _ => word,
        }
    });
    let mut words = masked.collect::<Vec<_>>().join(" ");
    while words.contains("\u{2500}\u{2500}") || words.contains("\u{2550}\u{2550}") {
        words = words.replace("\u{2500}\u{2500}", "\u{2500}").replace("\u{2550}\u{2550}", "\u{2550}");
    }
    words
}

/// Whether a line is one that a document shows, in which `..` stands for anything.
fn is_shown(line: &str, shown: &str) -> bool {
    let (line, shown) = (skeleton(line), skeleton(shown));
    let parts: Vec<&str> = shown.split("..").map(str::trim).collect();
    let (first, last) = (parts[0], parts[parts.len() - 1]);
    let mut rest = line.as_str();
    let in_order = parts.iter().all(|part| match rest.find(part) {
        Some(at) => {
            rest = &rest[at + part.len()..];
            true
        }
        None => false,
    });
    in_order && line.starts_with(first) && line.ends_with(last) && (parts.len() > 1 || line == shown)
}

/// Number of kernels and bytes of a plan in a table of `fuse`.
fn plan_in<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let rows = text.lines().map(|line| line.split(['\u{2502}', '\u{2506}']).map(str::trim).collect::<Vec<_>>());
    let row = rows.into_iter().find(|cells| cells.get(1).is_some_and(|cell| cell.split(':').next() == Some(name)));
    row.unwrap_or_else(|| panic!("no plan `{name}` in\n{text}"))[2..4].to_vec()
}

/// Running all of GPT-2 takes too long for a test: a block shows which lines there are, an analysis how many kernels.
#[test]
fn the_readme_shows_what_its_first_command_prints() {
    let readme = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md")).unwrap();
    assert!(readme.lines().count() <= 120, "the README has {} lines", readme.lines().count());
    let first = readme.split("```console\n").nth(1).unwrap().lines().next().unwrap();
    assert!(first.starts_with("cargo run --release -- fuse gpt2 "), "{first}");
    let shown = readme.split("```text\n").nth(1).unwrap().split("```").next().unwrap();
    let folder = Folder::new();
    let run = printed(folder.run(&["fuse", "gpt2-block", "--seq", "8", "--no-learn", "--device", "cpu"]));
    let printed = run.replace("gpt2-block", "gpt2").replace("(output y)", "(output logits)");
    let mut lines = printed.lines();
    for line in shown.lines().filter(|line| *line != "...") {
        assert!(
            lines.any(|printed| is_shown(printed, line)),
            "the README shows `{line}`, which the binary does not print, or not there:\n{printed}"
        );
    }
    let plans = analyzed(&folder, &["gpt2", "--device", "cpu"]).plans;
    let is_like = shown.lines().next().unwrap() == printed.lines().next().unwrap();
    // Which kernels are fused depends on the CPU.
    let fused = ("fused", &plans.chosen, is_like);
    for (name, plan, counts) in [("eager", &plans.eager, true), ("unfused", &plans.unfused, true), fused] {
        let expected = [plan.kernels.to_string(), Bytes(plan.bytes).to_string()];
        assert!(!counts || plan_in(shown, name) == expected, "{name}: {expected:?} in\n{shown}");
    }
    for (name, plan) in [("unfused", &plans.unfused), ("eager", &plans.eager)] {
        let saved = change_of_bytes(plan.bytes, plans.chosen.bytes);
        let sentence = format!("Fused against {name}: {saved} moved");
        assert!(!is_like || shown.contains(&sentence), "`{sentence}` in\n{shown}");
    }
    assert!(shown.lines().any(|line| line.starts_with("In short: ")), "{shown}");
}

#[test]
fn the_text_form_has_a_page_whose_graphs_can_be_read() {
    let folder = Folder::new();
    let page = printed(folder.run(&["explain", "text"]));
    let graphs: Vec<&str> = page.split("```text\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(graphs.len() >= 4, "{page}");
    for (index, graph) in graphs.iter().enumerate() {
        let file = folder.write(&format!("graph{index}.txt"), graph);
        assert!(!analyzed(&folder, &[&file]).after.is_empty());
    }
    // Every operation of the table is one that the parser knows.
    for word in ["sub", "neg", "row_max", "column_sum", "swiglu", "attention_scores", "linear_cross_entropy", "gather"]
    {
        let file = folder.write("word.txt", &format!("x = input f32[8,8] ; y = {word} x nothing ; out y"));
        let said = text(&folder.run(&["analyze", &file]).stderr);
        assert!(!said.contains("unknown operation"), "{word}: {said}");
    }
}

#[test]
fn a_graph_that_moves_no_bytes_saves_none() {
    let folder = Folder::new();
    let graph = folder.write("empty.txt", "x = input f32[0,8]\ny = gelu x\nz = relu y\nout z\n");
    for device in ["cpu", "h200"] {
        let analysis = parse(&printed(folder.run(&["analyze", &graph, "--device", device, "--json"]))).unwrap();
        let fusion = &analysis.candidates[0];
        assert_eq!((fusion.values.bytes_apart, fusion.values.bandwidth_saving), (0, 0.0));
        assert_eq!((fusion.values.dram_saving, fusion.criteria.bandwidth), (0.0, 0.0));
        assert!(!fusion.passes.bandwidth);
    }
}
