//! A table as `ncu --csv` writes it: our kernels, a library's matmul of two launches between, values that are not there.

use super::*;

const SAMPLE: &str = include_str!("sample.csv");

fn names(list: &[&[&str]]) -> Vec<Vec<String>> {
    list.iter().map(|names| names.iter().map(|name| name.to_string()).collect()).collect()
}

#[test]
fn launches_are_read_with_their_units() {
    let launches = parse(SAMPLE).unwrap();
    let functions: Vec<&str> = launches.iter().map(|launch| launch.function.as_str()).collect();
    assert_eq!(functions, ["layer_norm_rows", "cutlass::Kernel2", "splitKreduce_kernel", "gelu_rows"]);
    let first = &launches[0].counters;
    assert_eq!((first.read, first.written), (Some(100_671_232.0), Some(73_400_320.0)));
    assert!((first.us.unwrap() - 52.48).abs() < 1e-9);
    assert_eq!((first.registers, first.shared), (Some(40.0), Some(1024.0)));
    assert!((first.cache_hits.unwrap() - 0.5025).abs() < 1e-9);
    assert!((first.issue.unwrap() - 0.315).abs() < 1e-9);
    assert!((first.occupancy.unwrap() - 0.884).abs() < 1e-9);
    assert_eq!(first.tensor, Some(0.0));
    assert_eq!(launches[1].counters.occupancy, None, "n/a");
    assert_eq!(launches[2].counters.read, Some(1.5e6));
    assert_eq!(launches[3].counters.read, None, "not in the table");
}

#[test]
fn launches_between_ours_are_the_library_s() {
    let launches = parse(SAMPLE).unwrap();
    let sheets = matched(&launches, &names(&[&["layer_norm_rows"], &[], &["gelu_rows"]])).unwrap();
    assert_eq!(sheets.len(), 3);
    assert_eq!((sheets[1].us, sheets[1].read), (Some(40.0), Some(27_714_400.0)), "both launches added");
    assert_eq!(sheets[1].registers, Some(168.0), "the most");
    assert!((sheets[1].tensor.unwrap() - 0.54).abs() < 1e-9, "weighted by time");
    assert_eq!(sheets[2].us, Some(41.0));
}

#[test]
fn library_calls_in_a_row_have_a_launch_each_or_are_unknown() {
    let launches = parse(SAMPLE).unwrap();
    let two = matched(&launches, &names(&[&["layer_norm_rows"], &[], &[], &["gelu_rows"]])).unwrap();
    assert_eq!((two[1].us, two[2].us), (Some(30.0), Some(10.0)));
    let three = matched(&launches, &names(&[&["layer_norm_rows"], &[], &[], &[], &["gelu_rows"]])).unwrap();
    assert_eq!((three[1].us, three[3].us, three[4].us), (None, None, Some(41.0)));
    let last = matched(&launches[..2], &names(&[&["layer_norm_rows"], &[]])).unwrap();
    assert_eq!(last[1].us, Some(30.0), "at the end");
}

#[test]
fn a_kernel_of_two_launches_is_their_sum() {
    let launches = parse(SAMPLE).unwrap();
    let sheets = matched(&launches, &names(&[&["layer_norm_rows", "gelu_rows"]])).unwrap();
    assert!((sheets[0].us.unwrap() - 93.48).abs() < 1e-9);
}

#[test]
fn tables_that_cannot_be_used_say_why() {
    let denied =
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters";
    let Err(NcuError::NoTable(why)) = parse(denied) else { panic!() };
    assert!(why.contains("does not have permission"), "{why}");
    let no_unit = SAMPLE.replace("\"Metric Unit\"", "\"Other\"");
    assert_eq!(parse(&no_unit), Err(NcuError::NoColumn("Metric Unit")));
    let odd = SAMPLE.replace("\"ns\",\"52,480\"", "\"fortnight\",\"1\"");
    assert!(matches!(parse(&odd), Err(NcuError::Unit { unit, .. }) if unit == "fortnight"));
    let words = SAMPLE.replace("52,480", "soon");
    assert!(matches!(parse(&words), Err(NcuError::Value { value, .. }) if value == "soon"));
    let missing = matched(&parse(SAMPLE).unwrap(), &names(&[&["gelu_rows"], &["layer_norm_rows"]]));
    assert!(matches!(missing, Err(NcuError::Launches { expected, after: 4, .. }) if expected == "layer_norm_rows"));
}

#[test]
fn a_metric_that_a_version_does_not_know_is_named() {
    let said = format!("==PROF== ok\n==ERROR== Failed to find metric {TENSOR}\n");
    assert_eq!(unknown(&said, &METRICS), [TENSOR]);
    assert_eq!(unknown(&format!("==WARNING== Metric {ISSUE} not found\n"), &METRICS), [ISSUE]);
    assert_eq!(unknown(SAMPLE, &METRICS), Vec::<&str>::new(), "lines of the table are no complaints");
    assert_eq!(unknown("==ERROR== The user does not have permission", &METRICS), Vec::<&str>::new());
}
