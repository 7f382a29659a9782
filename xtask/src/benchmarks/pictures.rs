//! Pictures of rows: bars as SVG, in the reader's light or dark colours.

use std::path::Path;

use anyhow::Result;

use super::gpu::Op;
use super::ladders;
use super::rows::{Rows, three};

/// All pictures: file and text.
pub fn all(root: &Path) -> Result<Vec<(String, String)>> {
    let attention = Rows::read(root, ladders::ATTENTION)?;
    let mut bars = Vec::new();
    for row in ladders::attention_rungs(&attention)? {
        bars.push(Bar::new(row.text("rung")?, row.number("us")?, "ours"));
    }
    let attention = Picture {
        title: "Attention from naive to shipped",
        about: "H200, bf16, causal, 8 x 12 heads x 1024 x 64; microseconds, logarithmic",
        groups: vec![(String::new(), bars)],
        scale: Scale::Logarithmic,
    };
    let matmul = Rows::read(root, "h200-matmul-ladder.csv")?;
    let mut bars = Vec::new();
    for row in matmul.of(&[("rows", "8192")]) {
        let (name, class) = match row.text("rung")? {
            "library" => ("cuBLASLt", "peer"),
            name => (name, "ours"),
        };
        bars.push(Bar::new(name, row.number("us")?, class));
    }
    let matmul = Picture {
        title: "A matmul from naive to shipped",
        about: "H200, bf16, 8192 rows, 768 to 3072; microseconds, logarithmic",
        groups: vec![(String::new(), bars)],
        scale: Scale::Logarithmic,
    };
    let ops = Op::all(&Rows::read(root, "h200.csv")?)?;
    let shown = ops.iter().filter(|op| op.shape == "65536x768" && op.direction == "forward");
    let groups = shown.map(|op| {
        let bars = [("torch", op.torch, "peer"), ("torch.compile", op.compiled, "other"), ("ours", op.ours, "ours")];
        (op.title(), bars.map(|(name, us, class)| Bar::new(name, us, class)).into())
    });
    let ops = Picture {
        title: "Ops of the catalogue beside PyTorch",
        about: "H200, bf16, 65536x768, as CUDA graphs; microseconds, shorter is faster",
        groups: groups.collect(),
        scale: Scale::Linear,
    };
    let named = [("attention-ladder", attention), ("matmul-ladder", matmul), ("ops", ops)];
    Ok(named.map(|(name, picture)| (format!("docs/pictures/{name}.svg"), picture.svg())).into())
}

/// Horizontal bars, in groups under a title each.
struct Picture {
    title: &'static str,
    /// what was measured, and the unit
    about: &'static str,
    groups: Vec<(String, Vec<Bar>)>,
    scale: Scale,
}

struct Bar {
    label: String,
    value: f64,
    /// whose it is, a class of the style
    class: &'static str,
}

#[derive(Clone, Copy, PartialEq)]
enum Scale {
    Linear,
    Logarithmic,
}

const STYLE: &str = "text{font:13px system-ui,sans-serif;fill:#1f2328}.title{font-size:16px;font-weight:600}.about,.value{fill:#59636e}\
    .group{font-weight:600}.paper{fill:#fff}.ours{fill:#0969da}.peer{fill:#8c959f}.other{fill:#c4a000}\
    @media(prefers-color-scheme:dark){text{fill:#e6edf3}.about,.value{fill:#9198a1}.paper{fill:#0d1117}\
    .ours{fill:#4493f8}.peer{fill:#6e7681}.other{fill:#d4b13a}}";

/// Widths and heights in pixels: the picture, its labels, what is left for the bars.
const WIDTH: f64 = 720.0;
const LABELS: f64 = 130.0;
const BARS: f64 = WIDTH - LABELS - 70.0;
const LINE: f64 = 22.0;

impl Bar {
    fn new(label: &str, value: f64, class: &'static str) -> Self {
        Self { label: label.into(), value, class }
    }
}

impl Picture {
    fn svg(&self) -> String {
        let values = || self.groups.iter().flat_map(|(_, bars)| bars).map(|bar| bar.value);
        let (least, most) = (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
        let width = |value: f64| match self.scale {
            Scale::Linear => value / most * BARS,
            // The shortest bar is still seen.
            Scale::Logarithmic => ((value / least).ln() / (most / least).ln() * 0.95 + 0.05) * BARS,
        };
        let mut body = String::new();
        let mut y = 58.0;
        for (title, bars) in &self.groups {
            if !title.is_empty() {
                body.push_str(&format!(
                    "<text class=\"group\" x=\"12\" y=\"{:.0}\">{}</text>\n",
                    y + 15.0,
                    escaped(title)
                ));
                y += LINE;
            }
            for bar in bars {
                let (long, text) = (width(bar.value), y + 15.0);
                body.push_str(&format!(
                    "<text x=\"{:.0}\" y=\"{text:.0}\" text-anchor=\"end\">{}</text><rect class=\"{}\" x=\"{LABELS:.0}\" y=\"{:.0}\" \
                     width=\"{long:.1}\" height=\"16\" rx=\"2\"/><text class=\"value\" x=\"{:.1}\" y=\"{text:.0}\">{}</text>\n",
                    LABELS - 8.0,
                    escaped(&bar.label),
                    bar.class,
                    y + 2.0,
                    LABELS + long + 6.0,
                    three(bar.value)
                ));
                y += LINE;
            }
        }
        let height = y + 12.0;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {height:.0}\" width=\"{WIDTH:.0}\" height=\"{height:.0}\" role=\"img\">\n\
             <title>{}</title>\n<style>{STYLE}</style>\n<rect class=\"paper\" width=\"{WIDTH:.0}\" height=\"{height:.0}\"/>\n\
             <text class=\"title\" x=\"12\" y=\"24\">{}</text>\n<text class=\"about\" x=\"12\" y=\"44\">{}</text>\n{body}</svg>\n",
            escaped(self.title),
            escaped(self.title),
            escaped(self.about)
        )
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_values() {
        let picture = |scale| {
            let bars = vec![Bar::new("a<b", 100.0, "peer"), Bar::new("c", 50.0, "ours"), Bar::new("d", 1.0, "ours")];
            Picture { title: "t", about: "u", groups: vec![("g".into(), bars)], scale }.svg()
        };
        let widths = |svg: &str| -> Vec<f64> {
            let bars = svg.split("<rect class=\"").skip(2).map(|rest| rest.split("width=\"").nth(1).unwrap());
            bars.map(|rest| rest.split('"').next().unwrap().parse().unwrap()).collect()
        };
        let linear = picture(Scale::Linear);
        assert!(linear.contains("a&lt;b"), "{linear}");
        assert_eq!(widths(&linear), [520.0, 260.0, 5.2]);
        let logarithmic = widths(&picture(Scale::Logarithmic));
        assert!(logarithmic[0] == 520.0 && logarithmic[2] == 26.0 && logarithmic[1] > 400.0, "{logarithmic:?}");
    }
}
