//! Measured configs: a table from kernels to launch shapes, in a text form that can be stored and frozen.
//!
//! A line an entry: `KEY policy=registers vector=8 threads=32 rows=8 chunks=3 parts=1 cluster=0 resident=0 stages=0 wide=0`.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::cuda::row_config::{Policy, RowConfig};

/// Measured configs, by the key of their kernel ([`crate::kernel::Variant::key`]).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Tuning {
    entries: BTreeMap<String, RowConfig>,
}

impl Tuning {
    /// The config of a kernel, if one was measured.
    pub fn get(&self, key: &str) -> Option<&RowConfig> {
        self.entries.get(key)
    }

    /// Keeps a config.
    pub fn insert(&mut self, key: &str, config: RowConfig) {
        self.entries.insert(key.to_string(), config);
    }

    /// Takes over all entries of another table; where both have one, the other's.
    pub fn merge(&mut self, newer: Tuning) {
        self.entries.extend(newer.entries);
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, config) in &self.entries {
            let RowConfig { vector, threads_per_row, rows_per_block, chunks, parts, .. } = config;
            let (cluster, wide) = (config.cluster as usize, config.wide as usize);
            let (policy, resident, stages) = (config.policy.name(), config.resident, config.stages);
            writeln!(
                f,
                "{key} policy={policy} vector={vector} threads={threads_per_row} rows={rows_per_block} chunks={chunks} \
                 parts={parts} cluster={cluster} resident={resident} stages={stages} wide={wide}"
            )?;
        }
        Ok(())
    }
}

/// A malformed line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the tuning file: {problem}; delete the line, or the file, and tune again")]
pub struct BadTuning {
    /// its number, from 1
    pub line: usize,
    /// what is wrong
    pub problem: String,
}

impl FromStr for Tuning {
    type Err = BadTuning;

    fn from_str(text: &str) -> Result<Self, BadTuning> {
        let mut tuning = Tuning::default();
        for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let bad = |problem: String| BadTuning { line: index + 1, problem };
            let (key, config) = entry(line).map_err(bad)?;
            tuning.insert(key, config);
        }
        Ok(tuning)
    }
}

fn entry(line: &str) -> Result<(&str, RowConfig), String> {
    let mut words = line.split_whitespace();
    let key = words.next().unwrap_or("");
    let fields: BTreeMap<&str, &str> = words.filter_map(|word| word.split_once('=')).collect();
    let field = |name: &str| fields.get(name).copied().ok_or_else(|| format!("expected {name}=..."));
    let number = |name: &str, most: usize| {
        let value: usize = field(name)?.parse().map_err(|_| format!("expected a number for {name}"))?;
        if value <= most { Ok(value) } else { Err(format!("expected {name} up to {most}, got {value}")) }
    };
    let positive = |name: &str, most: usize| match number(name, most)? {
        0 => Err(format!("expected {name} from 1 on")),
        value => Ok(value),
    };
    let policy = Policy::ALL.into_iter().find(|policy| Ok(policy.name()) == field("policy"));
    let config = RowConfig {
        policy: policy.ok_or("expected policy=flat, registers, shared or streamed")?,
        vector: positive("vector", 8)?,
        threads_per_row: positive("threads", 1024)?,
        rows_per_block: positive("rows", 1024)?,
        chunks: positive("chunks", 1 << 20)?,
        parts: positive("parts", 1 << 20)?,
        cluster: number("cluster", 1)? == 1,
        resident: number("resident", 32)?,
        stages: number("stages", 4)?,
        wide: number("wide", 1)? == 1,
        why: "measured".into(),
    };
    if config.threads() > 1024 || !config.vector.is_power_of_two() {
        return Err("expected at most 1024 threads per block and a vector of 1, 2, 4 or 8".into());
    }
    Ok((key, config))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_reads_back() {
        let text = "sm_90a-1-16 policy=registers vector=8 threads=32 rows=8 chunks=3 parts=1 cluster=0 resident=2 stages=0 wide=0\n";
        let tuning: Tuning = text.parse().unwrap();
        assert_eq!(tuning.to_string(), text);
        assert_eq!(tuning.len(), 1);
    }

    #[test]
    fn a_bad_line_says_what_is_wrong() {
        let error = "k policy=registers vector=3".parse::<Tuning>().unwrap_err();
        assert_eq!(error.line, 1);
        assert!(error.to_string().contains("threads"), "{error}");
        assert!("k policy=fast".parse::<Tuning>().is_err());
    }
}
