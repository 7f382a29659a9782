//! The metrics requested from Nsight Compute, and the parser of its table.

use deuteron_report::CounterSheet;

/// Arguments of `ncu` before the profiled command. The table goes to `log`; each launch starts with cold caches, and the clocks
/// are not changed.
pub fn arguments(log: &str, metrics: &[&str]) -> Vec<String> {
    let words = ["--clock-control", "none", "--cache-control", "all", "--print-units", "base", "--csv", "--log-file"];
    let words = words.into_iter().map(str::to_string);
    words.chain([log.to_string(), "--metrics".to_string(), metrics.join(",")]).collect()
}

const TIME: &str = "gpu__time_duration.sum";
const READ: &str = "dram__bytes_read.sum";
const WRITTEN: &str = "dram__bytes_write.sum";
const HITS: &str = "lts__t_sector_hit_rate.pct";
const OCCUPANCY: &str = "sm__warps_active.avg.pct_of_peak_sustained_active";
const REGISTERS: &str = "launch__registers_per_thread";
const SHARED: &str = "launch__shared_mem_per_block";
const TENSOR: &str = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active";
const ISSUE: &str = "sm__inst_issued.avg.pct_of_peak_sustained_active";

/// The requested metrics. Not every GPU and version has all of them: see [`unknown`].
pub const METRICS: [&str; 9] = [TIME, READ, WRITTEN, HITS, OCCUPANCY, REGISTERS, SHARED, TENSOR, ISSUE];

/// The metrics that `ncu` reports as unknown.
pub fn unknown<'m>(said: &str, metrics: &[&'m str]) -> Vec<&'m str> {
    // Versions word it differently; all name the metric in a line of their own.
    let complaints = || said.lines().filter(|line| line.starts_with("==ERROR==") || line.starts_with("==WARNING=="));
    metrics.iter().copied().filter(|metric| complaints().any(|line| line.contains(metric))).collect()
}

/// Why a table could not be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum NcuError {
    /// It holds no table.
    #[error("ncu wrote no table of metrics: {0}")]
    NoTable(String),
    /// A column is missing.
    #[error("the table of ncu has no column `{0}`; expected the output of `ncu --csv`")]
    NoColumn(&'static str),
    /// A value that is not a number.
    #[error("ncu gives {metric} as `{value}`; expected a number")]
    Value {
        /// of which metric
        metric: String,
        /// what it says
        value: String,
    },
    /// A unit that is not known.
    #[error("ncu gives {metric} in `{unit}`; expected one of ns, us, ms, s, byte, Kbyte, Mbyte, Gbyte, %")]
    Unit {
        /// of which metric
        metric: String,
        /// what it says
        unit: String,
    },
    /// The launches are not those of the plan.
    #[error("`{expected}` is not among the launches that ncu saw after launch {after}; it saw {seen}")]
    Launches {
        /// the function that should come next
        expected: String,
        /// how many launches were found before
        after: usize,
        /// all that was seen
        seen: String,
    },
}

/// One launch that was seen.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// name of the function, without its arguments
    pub function: String,
    /// what was counted
    pub counters: CounterSheet,
}

/// Reads the table that `ncu --csv` writes: one line per launch and metric.
pub fn parse(text: &str) -> Result<Vec<Launch>, NcuError> {
    let mut lines = text.lines().skip_while(|line| !line.contains("\"Metric Name\""));
    let Some(header) = lines.next() else {
        let tail: Vec<&str> = text.lines().rev().filter(|line| !line.trim().is_empty()).take(3).collect();
        return Err(NcuError::NoTable(tail.into_iter().rev().collect::<Vec<_>>().join("; ")));
    };
    let header = cells(header);
    let column = |name: &'static str| header.iter().position(|cell| cell == name).ok_or(NcuError::NoColumn(name));
    let (id, kernel) = (column("ID")?, column("Kernel Name")?);
    let [metric, unit, value] = [column("Metric Name")?, column("Metric Unit")?, column("Metric Value")?];
    let mut launches: Vec<(String, Launch)> = Vec::new();
    for line in lines.filter(|line| line.starts_with('"')) {
        let row = cells(line);
        let cell = |at: usize| row.get(at).map_or("", String::as_str);
        if launches.last().is_none_or(|(last, _)| last != cell(id)) {
            let launch = Launch { function: function_of(cell(kernel)), counters: CounterSheet::default() };
            launches.push((cell(id).to_string(), launch));
        }
        if let Some((_, launch)) = launches.last_mut() {
            note(&mut launch.counters, cell(metric), cell(unit), cell(value))?;
        }
    }
    Ok(launches.into_iter().map(|(_, launch)| launch).collect())
}

/// Stores one value in its field. Metrics that were not requested or are not available are ignored.
fn note(counters: &mut CounterSheet, metric: &str, unit: &str, value: &str) -> Result<(), NcuError> {
    let (slot, percent) = match metric {
        TIME => (&mut counters.us, false),
        READ => (&mut counters.read, false),
        WRITTEN => (&mut counters.written, false),
        HITS => (&mut counters.cache_hits, true),
        OCCUPANCY => (&mut counters.occupancy, true),
        REGISTERS => (&mut counters.registers, false),
        SHARED => (&mut counters.shared, false),
        TENSOR => (&mut counters.tensor, true),
        ISSUE => (&mut counters.issue, true),
        _ => return Ok(()),
    };
    if matches!(value, "n/a" | "") {
        return Ok(());
    }
    let number: f64 = value
        .replace(',', "")
        .parse()
        .map_err(|_| NcuError::Value { metric: metric.to_string(), value: value.to_string() })?;
    let scale = scale(unit).ok_or_else(|| NcuError::Unit { metric: metric.to_string(), unit: unit.to_string() })?;
    *slot = Some(number * if percent { 0.01 } else { scale });
    Ok(())
}

/// Times become microseconds, sizes bytes. Some versions of `ncu` scale and abbreviate units, some do not.
fn scale(unit: &str) -> Option<f64> {
    // `byte/block` and `register/thread` are bytes and registers.
    Some(match unit.split('/').next().unwrap_or_default() {
        "ns" | "nsecond" => 1e-3,
        "us" | "usecond" => 1.0,
        "ms" | "msecond" => 1e3,
        "s" | "second" => 1e6,
        "Kbyte" => 1e3,
        "Mbyte" => 1e6,
        "Gbyte" => 1e9,
        "byte" | "register" | "%" | "" => 1.0,
        _ => return None,
    })
}

/// The cells of a line in which every cell is quoted, and a quote within is doubled.
fn cells(line: &str) -> Vec<String> {
    let mut cells = vec![String::new()];
    let mut quoted = false;
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        let last = cells.len() - 1;
        match letter {
            '"' if quoted && letters.peek() == Some(&'"') => {
                letters.next();
                cells[last].push('"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => cells.push(String::new()),
            _ => cells[last].push(letter),
        }
    }
    cells
}

/// A name without arguments and template: `ncu` shows them of functions whose names are mangled.
fn function_of(kernel: &str) -> String {
    let name = kernel.strip_prefix("void ").unwrap_or(kernel);
    name.split(['(', '<']).next().unwrap_or_default().trim().to_string()
}

/// What each kernel of a plan did. `entries` are the functions that it launches, in order. A kernel without any is a library's: its
/// launches are those up to the next kernel of ours. Where several library calls follow each other they have one launch each, or it is
/// not known which launch is whose.
pub(super) fn matched(launches: &[Launch], entries: &[Vec<String>]) -> Result<Vec<CounterSheet>, NcuError> {
    let mut at = 0;
    let mut sheets: Vec<CounterSheet> = Vec::with_capacity(entries.len());
    let mut library_calls = 0;
    for functions in entries {
        let Some(first) = functions.first() else {
            library_calls += 1;
            continue;
        };
        let start = position(launches, at, first)?;
        sheets.extend(shared(&launches[at..start], library_calls));
        (at, library_calls) = (start, 0);
        let mut own = Vec::with_capacity(functions.len());
        for function in functions {
            at = position(launches, at, function)?;
            own.push(launches[at].clone());
            at += 1;
        }
        sheets.push(together(&own));
    }
    sheets.extend(shared(launches.get(at..).unwrap_or_default(), library_calls));
    Ok(sheets)
}

/// The launches between two kernels of ours, as those of this many library calls.
fn shared(launches: &[Launch], calls: usize) -> Vec<CounterSheet> {
    match calls {
        0 => Vec::new(),
        1 => vec![together(launches)],
        _ if calls == launches.len() => launches.iter().map(|launch| together(std::slice::from_ref(launch))).collect(),
        _ => vec![CounterSheet::default(); calls],
    }
}

fn position(launches: &[Launch], from: usize, function: &str) -> Result<usize, NcuError> {
    let rest = launches.get(from..).unwrap_or_default();
    let found = rest.iter().position(|launch| launch.function == function);
    found.map(|offset| from + offset).ok_or_else(|| NcuError::Launches {
        expected: function.to_string(),
        after: from,
        seen: launches.iter().map(|launch| launch.function.as_str()).collect::<Vec<_>>().join(", "),
    })
}

/// Several launches as one: times and bytes added, shares weighted by time, the most registers.
fn together(launches: &[Launch]) -> CounterSheet {
    let known = |number: fn(&CounterSheet) -> Option<f64>| -> Vec<f64> {
        launches.iter().filter_map(|launch| number(&launch.counters)).collect()
    };
    let sum = |number| {
        let known = known(number);
        (!known.is_empty()).then(|| known.iter().sum())
    };
    let most = |number| known(number).into_iter().reduce(f64::max);
    let weighted = |number: fn(&CounterSheet) -> Option<f64>| {
        let pairs = launches.iter().filter_map(|launch| Some((number(&launch.counters)?, launch.counters.us?)));
        let (total, time) = pairs.fold((0.0, 0.0), |(total, time), (value, us)| (total + value * us, time + us));
        (time > 0.0).then(|| total / time)
    };
    CounterSheet {
        us: sum(|one| one.us),
        read: sum(|one| one.read),
        written: sum(|one| one.written),
        missed: None,
        cache_hits: weighted(|one| one.cache_hits),
        occupancy: weighted(|one| one.occupancy),
        registers: most(|one| one.registers),
        shared: most(|one| one.shared),
        tensor: weighted(|one| one.tensor),
        issue: weighted(|one| one.issue),
        instructions_per_cycle: None,
    }
}

#[cfg(test)]
mod tests;
