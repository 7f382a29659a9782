//! Images sampled at computed places, against the definition.

use crate::support::evaluated_at;
use crate::support::writer::{I64, Size, Value, Writer};
use deuteron_onnx::{Options, import};

/// Numbers that differ.
fn numbers(count: usize, seed: f64) -> Vec<f64> {
    (0..count).map(|index| f64::from(((index as f64 + seed) * 0.73).sin() as f32)).collect()
}

/// Turns a position back at the borders until it is within.
fn reflected(mut x: f64, (least, most): (f64, f64)) -> f64 {
    if most <= least {
        return 0.0;
    }
    while x < least || x > most {
        x = if x < least { 2.0 * least - x } else { 2.0 * most - x };
    }
    x
}

#[derive(Clone, Copy)]
struct Rule<'a> {
    mode: &'a str,
    padding: &'a str,
    is_aligned: bool,
}

impl Rule<'_> {
    fn borders(self, size: usize) -> (f64, f64) {
        if self.is_aligned { (0.0, size as f64 - 1.0) } else { (-0.5, size as f64 - 0.5) }
    }

    /// The element at a whole position, on one axis; none where it counts nothing.
    fn within(self, position: f64, size: usize) -> Option<usize> {
        let most = size as f64 - 1.0;
        match self.padding {
            "zeros" => (0.0..=most).contains(&position).then_some(position as usize),
            "border" => Some(position.clamp(0.0, most) as usize),
            _ => Some(reflected(position, self.borders(size)).floor().clamp(0.0, most) as usize),
        }
    }

    /// Positions on one axis and how much each counts.
    fn taps(self, at: f64, size: usize) -> Vec<(Option<usize>, f64)> {
        let span = if self.is_aligned { size as f64 - 1.0 } else { size as f64 };
        let mut at = (at + 1.0) / 2.0 * span - if self.is_aligned { 0.0 } else { 0.5 };
        if self.mode == "nearest" {
            at = at.round_ties_even();
        }
        let (least, most) = self.borders(size);
        if at < least || at > most {
            match self.padding {
                "border" => at = at.clamp(0.0, size as f64 - 1.0),
                "reflection" => at = reflected(at, (least, most)),
                _ => {}
            }
        }
        let (base, share) = (at.floor(), at - at.floor());
        let cubic = |distance: f64| {
            let (a, d) = (-0.75, distance.abs());
            if d <= 1.0 {
                (a + 2.0) * d.powi(3) - (a + 3.0) * d.powi(2) + 1.0
            } else {
                a * d.powi(3) - 5.0 * a * d.powi(2) + 8.0 * a * d - 4.0 * a
            }
        };
        let weights: Vec<(f64, f64)> = match self.mode {
            "nearest" => vec![(at, 1.0)],
            "linear" => vec![(base, 1.0 - share), (base + 1.0, share)],
            _ => (-1..=2).map(|i| (base + f64::from(i), cubic(share - f64::from(i)))).collect(),
        };
        weights.into_iter().map(|(position, weight)| (self.within(position, size), weight)).collect()
    }
}

/// The sum over all combinations of taps, of one channel.
fn sampled(image: &[f64], sizes: &[usize], taps: &[Vec<(Option<usize>, f64)>]) -> f64 {
    let Some((first, rest)) = taps.split_first() else { return image[0] };
    let inner: usize = sizes[1..].iter().product();
    let parts = first.iter().filter_map(|&(position, weight)| Some((position?, weight)));
    parts.map(|(at, weight)| weight * sampled(&image[at * inner..][..inner], &sizes[1..], rest)).sum()
}

#[test]
fn grids_name_places_of_images() {
    let images: [(&[usize], &[usize]); 4] =
        [(&[5], &[7]), (&[4, 7], &[3, 5]), (&[1, 6], &[2, 2]), (&[3, 2, 4], &[2, 3, 2])];
    for (sizes, places) in images {
        let (batch, channels, axes) = (2, 3, sizes.len());
        let (pixels, count): (usize, usize) = (sizes.iter().product(), places.iter().product());
        let x = numbers(batch * channels * pixels, 0.5);
        // Within, at and beyond the borders.
        let grid: Vec<f64> = numbers(batch * count * axes, 3.5).iter().map(|at| f64::from((at * 1.9) as f32)).collect();
        for mode in ["nearest", "linear", "cubic"] {
            for padding in ["zeros", "border", "reflection"] {
                for is_aligned in [false, true] {
                    let attributes = [
                        ("mode", Value::Text(mode)),
                        ("padding_mode", Value::Text(padding)),
                        ("align_corners", Value::Int(is_aligned.into())),
                    ];
                    let writer = Writer::default()
                        .input("x", &[&[batch, channels], sizes].concat())
                        .input("grid", &[&[batch], places, &[axes]].concat())
                        .call("GridSample", &["x", "grid"], &["y"], &attributes)
                        .output("y");
                    let rule = Rule { mode, padding, is_aligned };
                    let (shape, got) = evaluated_at(writer, 22, &[("x", &x), ("grid", &grid)]).remove(0);
                    assert_eq!(shape, [&[batch, channels], places].concat());
                    for (index, got) in got.into_iter().enumerate() {
                        let (image, place) = (index / count, index % count);
                        let line = (image / channels * count + place) * axes;
                        let taps: Vec<_> =
                            (0..axes).map(|axis| rule.taps(grid[line + axes - 1 - axis], sizes[axis])).collect();
                        let expected = sampled(&x[image * pixels..][..pixels], sizes, &taps);
                        let what = format!("{mode} {padding} {is_aligned} of {sizes:?}, element {index}");
                        assert!((got - expected).abs() < 1e-9, "{what} is {got}, expected {expected}");
                    }
                }
            }
        }
    }
}

#[test]
fn grids_of_nothing_and_of_what_is_no_number() {
    let writer = |places: usize| {
        Writer::default()
            .input("x", &[1, 2, 3, 3])
            .input("grid", &[1, places, 1, 2])
            .call("GridSample", &["x", "grid"], &["y"], &[("mode", Value::Text("nearest"))])
            .output("y")
    };
    let x = numbers(18, 0.0);
    assert_eq!(evaluated_at(writer(0), 22, &[("x", &x), ("grid", &[])])[0], (vec![1, 2, 0, 1], vec![]));
    let got = &evaluated_at(writer(1), 22, &[("x", &x), ("grid", &[f64::NAN, 0.0])])[0].1;
    assert_eq!(*got, [0.0, 0.0]);
    let three = Writer::default()
        .input("x", &[1, 2, 3, 3])
        .input("grid", &[1, 4, 1, 3])
        .node("GridSample", &["x", "grid"], "y")
        .output("y");
    let error = import(&three.finish_at(22), &Options::default()).unwrap_err().to_string();
    assert!(error.contains("a grid [n, .., axes] expected"), "{error}");
}

#[test]
fn regions_are_divided_into_bins() {
    let (batch, channels, height, width) = (2, 3, 7, 9);
    let x = numbers(batch * channels * height * width, 0.5);
    let regions = [0.5, 1.0, 6.25, 5.5, -3.0, -2.0, 4.0, 3.0, 5.0, 4.0, 20.0, 12.0, 2.0, 2.0, 2.25, 2.5];
    let regions = regions.map(|x: f64| f64::from(x as f32));
    let images = [1.0, 0.0, 1.0, 1.0];
    let (rows, cols, samples, scale) = (3, 2, 2, 0.75);
    for (mode, transformation) in [("avg", "half_pixel"), ("avg", "output_half_pixel"), ("max", "half_pixel")] {
        let attributes = [
            ("mode", Value::Text(mode)),
            ("coordinate_transformation_mode", Value::Text(transformation)),
            ("output_height", Value::Int(rows as i64)),
            ("output_width", Value::Int(cols as i64)),
            ("sampling_ratio", Value::Int(samples as i64)),
            ("spatial_scale", Value::Float(scale as f32)),
        ];
        let writer = Writer::default()
            .input("x", &[batch, channels, height, width])
            .input("regions", &[4, 4])
            .typed_input("images", I64, &[Size::Is(4)])
            .call("RoiAlign", &["x", "regions", "images"], &["y"], &attributes)
            .output("y");
        let given: [(&str, &[f64]); 3] = [("x", &x), ("regions", &regions), ("images", &images)];
        let (shape, got) = evaluated_at(writer, 22, &given).remove(0);
        assert_eq!(shape, [4, channels, rows, cols]);
        let shift = if transformation == "half_pixel" { 0.5 } else { 0.0 };
        for (index, got) in got.into_iter().enumerate() {
            let (region, channel) = (index / (channels * rows * cols), index / (rows * cols) % channels);
            let (row, col) = (index / cols % rows, index % cols);
            let end = |corner: usize| regions[region * 4 + corner] * scale - shift;
            let least = if shift == 0.0 { 1.0 } else { f64::NEG_INFINITY };
            let (long, wide) = ((end(3) - end(1)).max(least), (end(2) - end(0)).max(least));
            let image = &x[(images[region] as usize * channels + channel) * height * width..][..height * width];
            let mut values = Vec::new();
            for sample in 0..samples * samples {
                let share = |bin: usize, sample: usize| bin as f64 + (sample as f64 + 0.5) / samples as f64;
                let y = end(1) + share(row, sample / samples) * long / rows as f64;
                let x = end(0) + share(col, sample % samples) * wide / cols as f64;
                if y < -1.0 || y > height as f64 || x < -1.0 || x > width as f64 {
                    values.push([0.0; 4]);
                    continue;
                }
                let (y, x) = (y.clamp(0.0, height as f64 - 1.0), x.clamp(0.0, width as f64 - 1.0));
                let (top, left) = (y as usize, x as usize);
                let (bottom, right) = ((top + 1).min(height - 1), (left + 1).min(width - 1));
                let (down, across) = (y - top as f64, x - left as f64);
                let at = |row: usize, col: usize| image[row * width + col];
                values.push([
                    (1.0 - down) * (1.0 - across) * at(top, left),
                    (1.0 - down) * across * at(top, right),
                    down * (1.0 - across) * at(bottom, left),
                    down * across * at(bottom, right),
                ]);
            }
            let expected = match mode {
                "avg" => values.iter().flatten().sum::<f64>() / values.len() as f64,
                _ => values.iter().flatten().copied().fold(f64::NEG_INFINITY, f64::max),
            };
            let what = format!("{mode} {transformation}, element {index}");
            assert!((got - expected).abs() < 1e-6, "{what} is {got}, expected {expected}");
        }
    }
}
