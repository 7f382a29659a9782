//! Tensors in files: NumPy's .npz and .npy, and ONNX's .pb.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use deuteron::onnx::{TensorData, read_tensor};
use deuteron::{Dtype, Shape};

/// All tensors of an .npz file by name, or those of a folder of .pb files in order.
pub fn read(path: &Path, kind: &str) -> Result<Vec<(String, TensorData)>> {
    let whole = || path.display().to_string();
    if path.is_dir() {
        let files = (0..).map(|index| path.join(format!("{kind}_{index}.pb")));
        let mut tensors = Vec::new();
        for file in files.take_while(|file| file.is_file()) {
            let bytes = std::fs::read(&file).with_context(|| file.display().to_string())?;
            tensors.push(read_tensor(&bytes).with_context(|| file.display().to_string())?);
        }
        ensure!(!tensors.is_empty(), "{}: expected files {kind}_0.pb, {kind}_1.pb, ..", path.display());
        return Ok(tensors);
    }
    let bytes = std::fs::read(path).with_context(whole)?;
    let entries = entries(&bytes).with_context(whole)?;
    entries
        .into_iter()
        .map(|(name, bytes)| Ok((name.clone(), npy(bytes).with_context(|| format!("{}: {name}", path.display()))?)))
        .collect()
}

/// A tensor from an .npy file.
pub fn read_npy(path: &Path) -> Result<TensorData> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    npy(&bytes).with_context(|| path.display().to_string())
}

/// Writes a tensor as an .npy file. NumPy has no 16-bit brain floats, so those are widened.
pub fn write_npy(path: &Path, data: &TensorData) -> Result<()> {
    let (descr, bytes) = match data.dtype {
        Dtype::F32 => ("<f4", data.bytes.clone()),
        Dtype::F16 => ("<f2", data.bytes.clone()),
        Dtype::I32 => ("<i4", data.bytes.clone()),
        Dtype::I8 => ("|i1", data.bytes.clone()),
        Dtype::Bool => ("|b1", data.bytes.clone()),
        Dtype::Bf16 | Dtype::F8e4m3 => {
            ("<f4", data.values().iter().flat_map(|&value| (value as f32).to_le_bytes()).collect())
        }
    };
    let sizes: String = data.shape.iter().map(|size| format!("{size},")).collect();
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({sizes}), }}");
    // Magic, version and length take 10 bytes; the data begin at a multiple of 64.
    let padding = (64 - (10 + header.len() + 1) % 64) % 64;
    let length = (header.len() + padding + 1) as u16;
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend(length.to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(std::iter::repeat_n(b' ', padding));
    file.push(b'\n');
    file.extend(bytes);
    std::fs::write(path, file).with_context(|| path.display().to_string())
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Result<u64> {
    let field = bytes.get(at..at + N).context("the file ends too early")?;
    let mut wide = [0; 8];
    wide[..N].copy_from_slice(field);
    Ok(u64::from_le_bytes(wide))
}

/// The uncompressed members of a zip file, by the directory at its end.
fn entries(file: &[u8]) -> Result<Vec<(String, &[u8])>> {
    let least = file.len().saturating_sub(22 + 65_535);
    let end = (least..file.len().saturating_sub(21)).rev().find(|&at| file[at..].starts_with(b"PK\x05\x06"));
    let end = end.context("expected an .npz file, as numpy.savez writes it")?;
    let count = number::<2>(file, end + 10)?;
    let mut at = number::<4>(file, end + 16)? as usize;
    let mut found = Vec::new();
    for _ in 0..count {
        ensure!(file.get(at..at.saturating_add(4)) == Some(b"PK\x01\x02"), "the directory of the .npz file is damaged");
        let (method, size) = (number::<2>(file, at + 10)?, number::<4>(file, at + 20)?);
        let [name, extra, comment] = [28, 30, 32].map(|offset| number::<2>(file, at + offset));
        let (name, extra, comment) = (name? as usize, extra? as usize, comment? as usize);
        let local = number::<4>(file, at + 42)? as usize;
        let label = file.get(at + 46..at + 46 + name).context("the file ends too early")?;
        let label = String::from_utf8_lossy(label).trim_end_matches(".npy").to_string();
        ensure!(method == 0, "`{label}` is compressed; save it with numpy.savez, not savez_compressed");
        ensure!(size < u64::from(u32::MAX), "`{label}` is larger than 4 GB");
        let start = local + 30 + number::<2>(file, local + 26)? as usize + number::<2>(file, local + 28)? as usize;
        let data = start.checked_add(size as usize).and_then(|end| file.get(start..end));
        found.push((label, data.context("the file ends too early")?));
        at += 46 + name + extra + comment;
    }
    Ok(found)
}

/// A tensor from the bytes of an .npy file.
fn npy(file: &[u8]) -> Result<TensorData> {
    ensure!(file.starts_with(b"\x93NUMPY"), "expected an array in NumPy's format");
    let (start, length): (usize, usize) = match file.get(6) {
        Some(1) => (10, number::<2>(file, 8)? as usize),
        _ => (12, number::<4>(file, 8)? as usize),
    };
    let header = start.checked_add(length).and_then(|end| file.get(start..end)).context("the file ends too early")?;
    let header = String::from_utf8_lossy(header);
    let field = |name: &str| header.split(name).nth(1).map(|rest| rest.trim_start_matches(['\'', ':', ' ']));
    ensure!(field("fortran_order").is_some_and(|rest| rest.starts_with("False")), "expected an array in C order");
    let descr: String = field("descr").unwrap_or_default().chars().take_while(|&c| c != '\'').collect();
    let sizes = field("'shape'").and_then(|rest| rest.trim_start_matches('(').split(')').next()).unwrap_or_default();
    let sizes = sizes.split(',').map(str::trim).filter(|size| !size.is_empty());
    let sizes = sizes.map(|size| size.parse::<usize>().context("a size of the shape")).collect::<Result<Vec<_>>>()?;
    let shape = Shape::new(sizes);
    let elements = shape.checked_elements().context("expected a shape that can be counted")?;
    let (dtype, width): (Dtype, usize) = match descr.trim_start_matches(['<', '|', '=']) {
        "f4" => (Dtype::F32, 4),
        "f8" => (Dtype::F32, 8),
        "f2" => (Dtype::F16, 2),
        "i8" | "u8" => (Dtype::I32, 8),
        "i4" | "u4" => (Dtype::I32, 4),
        "i2" | "u2" => (Dtype::I32, 2),
        "i1" | "u1" => (Dtype::I8, 1),
        "b1" => (Dtype::Bool, 1),
        _ => bail!("expected floats, integers or truth values, got the NumPy type `{descr}`"),
    };
    let data = &file[start + length..];
    ensure!(
        Some(data.len()) == elements.checked_mul(width),
        "expected {elements} elements of {width} bytes, got {} bytes",
        data.len()
    );
    let kind = descr.trim_start_matches(['<', '|', '=']).as_bytes()[0];
    let value = |bytes: &[u8]| {
        let mut wide = [0; 8];
        wide[..width].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(wide);
        match (kind, width) {
            (b'f', 8) => f64::from_bits(bits),
            (b'i', _) => ((bits << (64 - 8 * width)) as i64 >> (64 - 8 * width)) as f64,
            _ => bits as f64,
        }
    };
    if matches!((dtype, width), (Dtype::F32, 4) | (Dtype::F16, _) | (Dtype::Bool, _) | (Dtype::I8, _)) {
        return Ok(TensorData { dtype, shape, bytes: data.to_vec() });
    }
    let values: Vec<f64> = data.chunks_exact(width).map(value).collect();
    let fits = |value: f64| (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&value);
    if let (Dtype::I32, Some(value)) = (dtype, values.iter().find(|&&value| !fits(value))) {
        bail!("expected integers that i32 holds, got {value}");
    }
    Ok(TensorData::of_values(dtype, shape, values.into_iter()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_are_written_and_read_back() {
        let folder = std::env::temp_dir().join(format!("deuteron-arrays-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("x.npy");
        for (dtype, shape) in
            [(Dtype::F32, vec![2, 3]), (Dtype::F16, vec![6]), (Dtype::I32, vec![3, 2, 1]), (Dtype::Bool, vec![6])]
        {
            let data = TensorData::of_values(dtype, Shape::new(shape), [0.0, 1.0, 1.0, 0.0, 1.0, 0.0].into_iter());
            write_npy(&path, &data).unwrap();
            assert_eq!(read_npy(&path).unwrap(), data);
        }
        std::fs::write(&path, b"\x93NUMPY\x01\x00\xff\xff").unwrap();
        assert!(read_npy(&path).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn what_is_no_archive_is_told() {
        assert!(entries(b"PK").unwrap_err().to_string().contains("numpy.savez"));
        let mut end = b"PK\x05\x06".to_vec();
        end.extend([0; 18]);
        assert_eq!(entries(&end).unwrap(), []);
        end[10] = 1;
        assert!(entries(&end).is_err());
    }
}
