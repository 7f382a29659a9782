//! `deuteron doctor`: the devices of this machine, and the planner's numbers for it.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use clap::Args;
use deuteron::calibrate::{CaseRow, TimeErrors, Validation, calibrate, validate};
use deuteron::cuda;
use deuteron::doctor::{CudaReport, DoctorReport, doctor};
use deuteron::{Basis, Bytes, Engine, Machine};

use crate::Outcome;
use crate::device::DeviceArguments;
use crate::{device, machine_file, show};

/// Arguments of the command.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    device: DeviceArguments,
    /// Measure kernels for a minute, fit the planner's machine numbers to them, and store the result for this user
    #[arg(long, conflicts_with = "validate")]
    calibrate: bool,
    /// Forget what `deuteron fuse` has learnt about the device, but keep a calibration
    #[arg(long, conflicts_with_all = ["calibrate", "validate", "json"])]
    forget: bool,
    /// Measure kernels that calibration does not use, and compare them with the planner's predictions
    #[arg(long)]
    validate: bool,
    /// Print {version, device, instruction_sets, copy, cuda} as JSON; with --validate {device, drift, plans, kernels,
    /// decisions, cases}
    #[arg(long, conflicts_with = "calibrate")]
    json: bool,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let engine = arguments.device.engine()?;
    if arguments.forget {
        return run_forget(&engine);
    }
    match (arguments.calibrate, arguments.validate) {
        (true, _) => run_calibrate(&engine),
        (false, true) => run_validate(&engine, arguments.json),
        (false, false) => run_doctor(&engine, arguments.json),
    }
}

fn run_doctor(engine: &Engine, json: bool) -> Result<Outcome> {
    let sizes = [256 << 10, 4 << 20, 32 << 20, 1 << 30];
    let report = show::spinning("measuring copies", || report(engine, &sizes, &[]))?;
    if json {
        show::json(&report)?;
        return Ok(Outcome::Good);
    }
    outln!("deuteron {}", report.version);
    outln!("device            {}", report.device);
    outln!("instruction sets  {}", report.instruction_sets.join(", "));
    print_cuda(&report.cuda);
    outln!("planner           {}", planner_numbers(&engine.device().machine().name));
    let lines = report.copy.iter().map(|row| {
        vec![
            Bytes(row.bytes as u64).to_string(),
            format!("{:.1}", row.ordinary_gbps),
            format!("{:.1}", row.streaming_gbps),
            format!("{:.1}", row.copy_gbps),
        ]
    });
    let header = ["copy of", "ordinary GB/s", "streaming GB/s", "copy GB/s"];
    outln!("{}", show::table(&header, lines.collect(), 1));
    outln!("Read and written bytes both counted, medians. \"copy\" is the faster of the two.");
    Ok(Outcome::Good)
}

/// The report on this machine, with copies of `bytes` bytes.
pub fn report(engine: &Engine, sizes: &[usize], packages: &[PathBuf]) -> Result<DoctorReport> {
    let mut search = device::search(packages);
    if cuda::compiler(&search).is_err() {
        search.environments.extend(device::python_packages());
    }
    Ok(doctor(engine, sizes, &search, device::kernel_cache().as_deref())?)
}

fn print_cuda(cuda: &CudaReport) {
    for gpu in &cuda.gpus {
        outln!(
            "gpu {}             {}, compute capability {} ({}), {} multiprocessors, {} ({} free), driver for CUDA {}",
            gpu.ordinal,
            gpu.name,
            gpu.compute_capability,
            gpu.arch,
            gpu.processors,
            Bytes(gpu.memory_bytes as u64),
            Bytes(gpu.free_bytes as u64),
            gpu.driver
        );
    }
    if let Some(problem) = &cuda.problem {
        outln!("gpu               none: {problem}");
    }
    for library in &cuda.libraries {
        let found = match (&library.path, &library.version, &library.problem) {
            (Some(path), Some(version), _) => format!("{version}, {}", path.display()),
            (_, _, Some(problem)) => problem.replace('\n', "\n                  "),
            _ => String::new(),
        };
        outln!("{:<17} {found}", library.name);
    }
    match &cuda.cache {
        Some(cache) => {
            outln!("kernel cache      {}: {} kernels, {}", cache.folder.display(), cache.entries, Bytes(cache.bytes))
        }
        None => outln!("kernel cache      none: neither XDG_CACHE_HOME nor HOME is an absolute path"),
    }
}

/// Where the planner's numbers come from.
fn planner_numbers(name: &str) -> String {
    let stored = machine_file::load(name);
    let basis = stored.as_ref().map(Machine::basis);
    let path = match basis {
        Some(Basis::Learnt) => machine_file::learnt_path(name),
        Some(_) => machine_file::path(name),
        None => None,
    };
    match (path, basis) {
        (Some(path), Some(Basis::Learnt)) => {
            format!("numbers corrected by what `fuse` measured here, {}; --forget undoes that", path.display())
        }
        (Some(path), Some(_)) => format!("numbers of {}", path.display()),
        _ => "numbers of the profile that ships; `deuteron doctor --calibrate` measures this machine's".to_string(),
    }
}

fn run_calibrate(engine: &Engine) -> Result<Outcome> {
    let found = show::counted("measuring kernels", |progress| calibrate(engine, &today(), progress))?;
    let numbers: std::collections::BTreeMap<_, _> = found.machine.numbers().collect();
    let lines = found.changes().map(|(quantity, before, after)| {
        let origin = numbers.get(&quantity).map_or("", |number| number.origin.as_str());
        let (before, after) = (format!("{before:.3}"), format!("{after:.3}"));
        vec![quantity.name().to_string(), before, after, quantity.about().to_string(), origin.to_string()]
    });
    outln!("{}", show::table(&["number", "before", "after", "what", "origin"], lines.collect(), 5));
    outln!("{}", describe("Predicted against measured time of the kernels that the fit used", &found.errors));
    outln!("Stored in {}.", machine_file::store(&found.machine)?.display());
    Ok(Outcome::Good)
}

fn run_forget(engine: &Engine) -> Result<Outcome> {
    let name = &engine.device().machine().name;
    match machine_file::forget(name)? {
        Some(path) => outln!("Forgotten what was learnt about {name}: {} is removed.", path.display()),
        None => outln!("Nothing was learnt about {name}."),
    }
    Ok(Outcome::Good)
}

fn run_validate(engine: &Engine, json: bool) -> Result<Outcome> {
    let validation = show::counted("measuring kernels", |progress| validate(engine, progress))?;
    show::report(&validation, json, show_validation)?;
    Ok(Outcome::Good)
}

fn show_validation(validation: &Validation) {
    let drifts = validation.cases.iter().any(|case| case.drift != 1.0);
    if drifts {
        outln!(
            "A reference kernel takes {:.2} times as long as at calibration; predictions are scaled by that.",
            validation.drift
        );
    }
    outln!("{}", describe("Predicted against measured time of the catalogue's plans", &validation.plans));
    if drifts {
        outln!("{}", describe("The same without that scaling", &validation.plans_without_drift));
    }
    outln!("{}", describe("The same per kernel", &validation.kernels));
    let decisions = &validation.decisions;
    outln!(
        "Fuse or not: {} right of {} ({:.1} %); fusing loses in {} of {} ({:.0} %); {} ties within 5 % are left out.",
        decisions.right,
        decisions.cases - decisions.ties,
        100.0 * decisions.right_share(),
        decisions.losing,
        decisions.cases,
        100.0 * decisions.losing_share(),
        decisions.ties
    );
    let wrong: Vec<&CaseRow> = validation.cases.iter().filter(|case| !case.is_right()).collect();
    if !wrong.is_empty() {
        outln!("Wrong decisions:\n{}", case_table(wrong));
    }
    let mut worst: Vec<&CaseRow> = validation.cases.iter().filter(|case| case.catalog).collect();
    worst.sort_by(|a, b| b.worst_error().abs().total_cmp(&a.worst_error().abs()));
    worst.truncate(8);
    outln!("Farthest off:\n{}", case_table(worst));
}

fn case_table(cases: Vec<&CaseRow>) -> String {
    let lines = cases.into_iter().map(|case| {
        let times = [case.unfused_us, case.unfused_predicted_us, case.fused_us, case.fused_predicted_us];
        let name = show::shorten(&case.name, 48);
        std::iter::once(name).chain(times.map(|us| show::milliseconds(us / 1e3))).collect()
    });
    show::table(&["graph", "unfused", "predicted", "fused", "predicted"], lines.collect(), 1)
}

fn describe(what: &str, errors: &TimeErrors) -> String {
    let (median, tenth) = (100.0 * errors.median, 100.0 * errors.ninetieth_percentile);
    format!("{what}: {} cases, off by {median:.1} % (median), {tenth:.1} % (90th percentile).", errors.count)
}

/// The date in UTC, year-month-day.
pub(crate) fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    date_of(seconds / 86_400)
}

/// The date `days` days after 1970-01-01, counted in years that begin in March, so that leap days come last.
fn date_of(days: u64) -> String {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date_of(0), "1970-01-01");
        assert_eq!(date_of(11_016), "2000-02-29");
        assert_eq!(date_of(20_772), "2026-11-15");
    }
}
