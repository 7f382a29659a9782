//! Windows that move over an image or a signal: convolutions and pools. A window's positions are rows picked from a table
//! of positions, so a convolution is a gather and a matmul; where windows lie side by side the gather is a view.

use deuteron_graph::{BinaryOp, Shape, UnaryOp};

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::element::Element;
use crate::ir::{Id, Kind, Reduction};
use crate::limits::MAX_PATCH_ELEMENTS;

/// Where a window is along each axis, and how many places it takes.
struct Window {
    from: Vec<usize>,
    kernel: Vec<usize>,
    strides: Vec<i64>,
    dilations: Vec<i64>,
    /// At the begin of each axis, then at the end of each.
    pads: Vec<i64>,
    to: Vec<usize>,
}

impl Window {
    /// The position that a place of the window reads on one axis; outside of the axis, it reads padding.
    fn position(&self, axis: usize, place: usize, offset: usize) -> i64 {
        place as i64 * self.strides[axis] + offset as i64 * self.dilations[axis] - self.pads[axis]
    }

    fn places(&self) -> usize {
        self.to.iter().fold(1, |product, &size| product.saturating_mul(size))
    }

    fn offsets(&self) -> usize {
        self.kernel.iter().fold(1, |product, &size| product.saturating_mul(size))
    }

    /// For every place of the window and every offset within it, the position on each axis.
    fn walk<T>(&self, mut each: impl FnMut(&[i64]) -> T) -> Vec<T> {
        let (axes, mut found) = (self.from.len(), Vec::with_capacity(self.places() * self.offsets()));
        let (mut place, mut offset, mut at) = (vec![0; axes], vec![0; axes], vec![0; axes]);
        for _ in 0..self.places() {
            for _ in 0..self.offsets() {
                (0..axes).for_each(|axis| at[axis] = self.position(axis, place[axis], offset[axis]));
                found.push(each(&at));
                advance(&mut offset, &self.kernel);
            }
            advance(&mut place, &self.to);
        }
        found
    }

    /// The flat position of which strides make this one, `None` if there is none.
    fn before_strides(&self, at: &[i64], strides: &[i64]) -> Option<usize> {
        at.iter().zip(strides).zip(&self.from).try_fold(0, |flat, ((&at, &stride), &size)| {
            let (at, stride) = (usize::try_from(at).ok()?, usize::try_from(stride).ok()?);
            (at.is_multiple_of(stride) && at / stride < size).then(|| flat * size + at / stride)
        })
    }

    /// The same as positions of a flat table, `None` for padding.
    fn table(&self) -> Vec<Option<usize>> {
        self.walk(|at| {
            at.iter()
                .zip(&self.from)
                .try_fold(0, |flat, (&at, &size)| Some(flat * size + usize::try_from(at).ok().filter(|&at| at < size)?))
        })
    }
}

/// The next index in row-major order; after the last, the first.
fn advance(index: &mut [usize], sizes: &[usize]) {
    for axis in (0..index.len()).rev() {
        index[axis] += 1;
        if index[axis] < sizes[axis] {
            return;
        }
        index[axis] = 0;
    }
}

impl<'a> Translator<'a, '_> {
    pub(super) fn window(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.op {
            "Conv" => self.convolution(call, call.input(0)?, call.input(1)?, call.optional(2)),
            "FusedConv" => self.fused_convolution(call),
            "ConvInteger" => self.integer_convolution(call),
            "QLinearConv" => Ok(vec![self.quantized_convolution(call)?]),
            "ConvTranspose" => self.transposed_convolution(call),
            "MaxPool" | "AveragePool" | "LpPool" => self.pool(call),
            "LRN" => Ok(vec![self.local_response(call)?]),
            "Col2Im" => self.image_of_columns(call),
            op => {
                let x = call.input(0)?;
                let axes: Vec<usize> = (2..self.ir.shape(x).rank()).collect();
                Ok(vec![match op {
                    "GlobalAveragePool" => self.ir.reduce(Reduction::Mean, x, axes, true)?,
                    "GlobalMaxPool" => self.ir.reduce(Reduction::Max, x, axes, true)?,
                    _ => {
                        let each = self.powers(x, call.int("p", 2))?;
                        let sum = self.ir.reduce(Reduction::Sum, each, axes, true)?;
                        self.root(sum, call.int("p", 2))?
                    }
                }])
            }
        }
    }

    /// Numbers per axis, of which each is at least `least`.
    fn per_axis(call: &Call, name: &str, otherwise: i64, count: usize, least: i64) -> Result<Vec<i64>, Problem> {
        let values = call.ints(name).map_or_else(|| vec![otherwise; count], <[i64]>::to_vec);
        let fits = values.len() == count && values.iter().all(|value| (least..=i64::from(i32::MAX)).contains(value));
        if fits { Ok(values) } else { Err(Problem::Refused(format!("{count} {name} of at least {least} expected"))) }
    }

    /// The window of a convolution or pool.
    fn window_of(&self, call: &Call, x: Id, kernel: &[usize]) -> Result<Window, Problem> {
        let shape = self.ir.shape(x).clone();
        let axes = shape.rank() - 2;
        let from = shape[2..].to_vec();
        let strides = Self::per_axis(call, "strides", 1, axes, 1)?;
        let dilations = Self::per_axis(call, "dilations", 1, axes, 1)?;
        let mut pads = Self::per_axis(call, "pads", 0, 2 * axes, 0)?;
        let mode = call.word("auto_pad", &["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])?;
        let ceil = call.int("ceil_mode", 0) != 0;
        let mut to = Vec::new();
        for axis in 0..axes {
            let (size, stride) = (from[axis] as i64, strides[axis]);
            let reach = dilations[axis].saturating_mul(kernel[axis] as i64 - 1).saturating_add(1);
            let misfit = || format!("a window within {shape} expected, got {kernel:?}");
            if kernel[axis] == 0 {
                return Err(Problem::Refused(misfit()));
            }
            if mode.starts_with("SAME") {
                let count = (size + stride - 1) / stride;
                let total = ((count - 1) * stride).saturating_add(reach).saturating_sub(size).max(0);
                let (less, more) = (total / 2, total - total / 2);
                (pads[axis], pads[axis + axes]) = if mode == "SAME_UPPER" { (less, more) } else { (more, less) };
                to.push(usize::try_from(count).map_err(|_| misfit())?);
                continue;
            }
            if mode == "VALID" {
                (pads[axis], pads[axis + axes]) = (0, 0);
            }
            let free = size + pads[axis] + pads[axis + axes] - reach;
            if free < 0 {
                return Err(Problem::Refused(misfit()));
            }
            let mut count = free / stride + 1;
            // A last window that hangs over counts if it begins within the axis or the padding before it.
            if ceil && free % stride != 0 && count * stride < size + pads[axis] {
                count += 1;
            }
            to.push(usize::try_from(count).map_err(|_| misfit())?);
        }
        Ok(Window { from, kernel: kernel.to_vec(), strides, dilations, pads, to })
    }

    /// Rows `[places * offsets, n, c]` of `x [n, c, ..]`, picked by a table of flat positions.
    fn picked_rows(&mut self, x: Id, table: &[Option<usize>], fill: f64) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        let positions: usize = shape[2..].iter().product();
        let flat = self.ir.reshape(x, vec![shape[0], shape[1], positions])?;
        let mut rows = self.ir.push(Kind::Transpose(vec![2, 0, 1]), &[flat])?;
        if table.len() == positions && table.iter().enumerate().all(|(index, &at)| at == Some(index)) {
            return Ok(rows);
        }
        if table.contains(&None) {
            let border = Constant::filled(Shape::from([1, shape[0], shape[1]]), fill);
            let border = self.ir.known(border, self.ir.element(x));
            rows = self.ir.push(Kind::Concat { axis: 0 }, &[rows, border])?;
        }
        self.reserve(table.len())?;
        let indices = table.iter().map(|at| at.unwrap_or(positions) as f64).collect();
        let indices = self.ir.known(Constant::dense([table.len()].into(), indices, false), Element::I64);
        let count = self.ir.shape(rows)[0];
        let flat = self.ir.reshape(rows, vec![count, shape[0] * shape[1]])?;
        let picked = self.ir.push(Kind::Gather, &[flat, indices])?;
        Ok(self.ir.reshape(picked, vec![table.len(), shape[0], shape[1]])?)
    }

    /// Whether this many patches are written out.
    fn fits(&self, x: Id, window: &Window) -> bool {
        let each = self.ir.shape(x)[0].saturating_mul(self.ir.shape(x)[1]);
        let patches = each.saturating_mul(window.places()).saturating_mul(window.offsets());
        (1..=MAX_PATCH_ELEMENTS).contains(&patches)
    }

    pub(super) fn convolution(&mut self, call: &Call, x: Id, weight: Id, bias: Option<Id>) -> Results {
        let (from, kernel) = (self.ir.shape(x).clone(), self.ir.shape(weight).clone());
        let group = usize::try_from(call.int("group", 1)).unwrap_or(0);
        let fits = from.rank() >= 3
            && kernel.rank() == from.rank()
            && group > 0
            && from[1] == kernel[1].saturating_mul(group)
            && kernel[0].is_multiple_of(group);
        if !fits {
            let got = format!("got {from} and {kernel}, in {group} groups");
            return Err(Problem::Refused(format!("x [n, c, ..] and w [o, c / groups, ..] expected, {got}")));
        }
        Self::check_kernel_shape(call, &kernel[2..])?;
        let window = self.window_of(call, x, &kernel[2..])?;
        if !self.fits(x, &window) {
            let shape = Shape::new([&[from[0], kernel[0]], &window.to[..]].concat());
            return self.described_convolution(call, x, shape, &kernel);
        }
        let is_side_by_side = group == 1
            && window.pads.iter().all(|&pad| pad == 0)
            && window.dilations.iter().all(|&dilation| dilation == 1)
            && (0..window.from.len()).all(|axis| window.strides[axis] as usize == kernel[axis + 2])
            && 2 + 2 * window.from.len() <= deuteron_graph::MAX_RANK;
        if is_side_by_side {
            return Ok(vec![self.patches(x, weight, bias, &window.to)?]);
        }
        let rows = self.picked_rows(x, &window.table(), 0.0)?;
        let terms = kernel[1] * window.offsets();
        let matrix = self.ir.reshape(weight, vec![group, kernel[0] / group, terms])?;
        let matrix = self.ir.push(Kind::Transpose(vec![0, 2, 1]), &[matrix])?;
        Ok(vec![self.convolved(rows, matrix, bias, from[0], &window.to)?])
    }

    /// Rows `[places * offsets, n, c]` times `[groups, c / groups * offsets, o / groups]`, with a bias: `[n, o, ..]`.
    fn convolved(&mut self, rows: Id, matrix: Id, bias: Option<Id>, batch: usize, to: &[usize]) -> Result<Id, Problem> {
        let [group, terms, outputs] = self.ir.shape(matrix)[..] else {
            return Err(Problem::Refused("a matrix of each group expected".to_string()));
        };
        let channels = self.ir.shape(rows)[2] / group;
        let places: usize = to.iter().product();
        let offsets = self.ir.shape(rows)[0] / places;
        let split = self.ir.reshape(rows, vec![places, offsets, batch, group, channels])?;
        let ordered = self.ir.push(Kind::Transpose(vec![3, 2, 0, 4, 1]), &[split])?;
        let mut left = self.ir.reshape(ordered, vec![group, batch * places, terms])?;
        let mut right = matrix;
        if group == 1 {
            left = self.ir.reshape(left, vec![batch * places, terms])?;
            right = self.ir.reshape(right, vec![terms, outputs])?;
        }
        let product = self.ir.push(Kind::Matmul { transpose_a: false, transpose_b: false }, &[left, right])?;
        let split = self.ir.reshape(product, vec![group, batch, places, outputs])?;
        let ordered = self.ir.push(Kind::Transpose(vec![1, 2, 0, 3]), &[split])?;
        let mut result = self.ir.reshape(ordered, vec![batch, places, group * outputs])?;
        if let Some(bias) = bias {
            result = self.ir.binary(BinaryOp::Add, result, bias)?;
        }
        let first = self.ir.push(Kind::Transpose(vec![0, 2, 1]), &[result])?;
        Ok(self.ir.reshape(first, [&[batch, group * outputs], to].concat())?)
    }

    /// Patches side by side are a view.
    fn patches(&mut self, mut x: Id, weight: Id, bias: Option<Id>, spatial: &[usize]) -> Result<Id, Problem> {
        let kernel = self.ir.shape(weight).clone();
        let axes = spatial.len();
        for (axis, &count) in spatial.iter().enumerate() {
            let length = count.saturating_mul(kernel[axis + 2]);
            x = self.ir.push(Kind::Slice { axis: axis + 2, start: 0, length }, &[x])?;
        }
        let (batch, channels) = (self.ir.shape(x)[0], kernel[1]);
        let mut dims = vec![batch, channels];
        spatial.iter().zip(&kernel[2..]).for_each(|(&count, &size)| dims.extend([count, size]));
        let split = self.ir.reshape(x, dims)?;
        // [n, c, h, kh, w, kw] -> [n, h, w, c, kh, kw]
        let counts = (0..axes).map(|axis| 2 + 2 * axis);
        let sizes = (0..axes).map(|axis| 3 + 2 * axis);
        let permutation = [0].into_iter().chain(counts).chain([1]).chain(sizes).collect();
        let ordered = self.ir.push(Kind::Transpose(permutation), &[split])?;
        let (patches, terms): (usize, usize) = (spatial.iter().product(), kernel[1..].iter().product());
        let rows = self.ir.reshape(ordered, vec![batch, patches, terms])?;
        let matrix = self.ir.reshape(weight, vec![kernel[0], terms])?;
        let mut result = self.ir.push(Kind::Matmul { transpose_a: false, transpose_b: true }, &[rows, matrix])?;
        if let Some(bias) = bias {
            result = self.ir.binary(BinaryOp::Add, result, bias)?;
        }
        let channels_first = self.ir.push(Kind::Transpose(vec![0, 2, 1]), &[result])?;
        let dims = [batch, kernel[0]].into_iter().chain(spatial.iter().copied()).collect();
        Ok(self.ir.reshape(channels_first, dims)?)
    }

    /// `kernel_shape` repeats what the weights say.
    fn check_kernel_shape(call: &Call, kernel: &[usize]) -> Result<(), Problem> {
        let fits =
            |given: &[i64]| given.iter().map(|&size| usize::try_from(size).ok()).eq(kernel.iter().map(|&k| Some(k)));
        match call.ints("kernel_shape") {
            Some(given) if !fits(given) => Err(Problem::Refused(format!(
                "a kernel_shape of {kernel:?} expected, as the weights have, got {given:?}"
            ))),
            _ => Ok(()),
        }
    }

    fn described_convolution(&mut self, call: &Call, x: Id, shape: Shape, kernel: &Shape) -> Results {
        let terms = kernel[1..].iter().map(|&size| size as u64).fold(2, u64::saturating_mul);
        let Some(elements) = shape.checked_elements() else {
            return Err(Problem::Refused(format!("a result of at most 2^48 elements expected, got {shape}")));
        };
        let why = "it has too many patches for a matmul".to_string();
        let results = vec![(self.ir.element(x), shape)];
        Ok(self.opaque(call, why, terms.saturating_mul(elements as u64), false, results))
    }

    /// Each place of the result is a window over the operand with gaps between its elements.
    fn transposed_convolution(&mut self, call: &Call) -> Results {
        let (x, weight) = (call.input(0)?, call.input(1)?);
        let (from, kernel) = (self.ir.shape(x).clone(), self.ir.shape(weight).clone());
        let group = usize::try_from(call.int("group", 1)).unwrap_or(0);
        let fits = from.rank() >= 3
            && kernel.rank() == from.rank()
            && group > 0
            && from[1] == kernel[0]
            && kernel[0].is_multiple_of(group);
        if !fits {
            let got = format!("got {from} and {kernel}, in {group} groups");
            return Err(Problem::Refused(format!("x [n, c, ..] and w [c, o / groups, ..] expected, {got}")));
        }
        Self::check_kernel_shape(call, &kernel[2..])?;
        let axes = from.rank() - 2;
        let strides = Self::per_axis(call, "strides", 1, axes, 1)?;
        let dilations = Self::per_axis(call, "dilations", 1, axes, 1)?;
        let extra = Self::per_axis(call, "output_padding", 0, axes, 0)?;
        let mut pads = Self::per_axis(call, "pads", 0, 2 * axes, 0)?;
        let asked = call.ints("output_shape").map(<[i64]>::to_vec);
        let mode = call.word("auto_pad", &["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])?;
        let mut to = Vec::new();
        for axis in 0..axes {
            let reach = dilations[axis].saturating_mul(kernel[axis + 2] as i64 - 1).saturating_add(1);
            let full = strides[axis].saturating_mul(from[axis + 2] as i64 - 1).saturating_add(reach);
            let full = full.saturating_add(extra[axis]);
            let wanted = match &asked {
                // The spatial sizes alone, or all of them.
                Some(sizes) => sizes.get(sizes.len().saturating_sub(axes) + axis).copied(),
                None if mode.starts_with("SAME") => Some(strides[axis].saturating_mul(from[axis + 2] as i64)),
                None => None,
            };
            if let Some(wanted) = wanted {
                let total = full.saturating_sub(wanted).max(0);
                let (less, more) = (total / 2, total - total / 2);
                // Named upper, the larger half is cut at the end, else at the begin.
                (pads[axis], pads[axis + axes]) = if mode == "SAME_UPPER" { (less, more) } else { (more, less) };
            }
            let size = wanted.unwrap_or(full - pads[axis] - pads[axis + axes]);
            let size = usize::try_from(size).ok().filter(|&size| size > 0);
            to.push(size.ok_or_else(|| format!("a result of at least 1 expected on axis {axis}, from {from}"))?);
        }
        let window = Window {
            from: from[2..].to_vec(),
            kernel: kernel[2..].to_vec(),
            strides: vec![1; axes],
            dilations: dilations.iter().map(|dilation| -dilation).collect(),
            pads: pads[..axes].iter().map(|pad| -pad).collect(),
            to,
        };
        if !self.fits(x, &window) {
            let shape = Shape::new([&[from[0], kernel[1].saturating_mul(group)], &window.to[..]].concat());
            return self.described_convolution(call, x, shape, &kernel);
        }
        let table = window.walk(|at| window.before_strides(at, &strides));
        let rows = self.picked_rows(x, &table, 0.0)?;
        let split = self.ir.reshape(weight, vec![group, kernel[0] / group, kernel[1], window.offsets()])?;
        let ordered = self.ir.push(Kind::Transpose(vec![0, 1, 3, 2]), &[split])?;
        let matrix = self.ir.reshape(ordered, vec![group, kernel[0] / group * window.offsets(), kernel[1]])?;
        Ok(vec![self.convolved(rows, matrix, call.optional(2), from[0], &window.to)?])
    }

    /// `Col2Im`: columns `[n, c * offsets, places]` that overlap are added up. Each place of the image is a sum over the offsets of
    /// a block, of each the one column that covers it there.
    fn image_of_columns(&mut self, call: &Call) -> Results {
        let x = call.input(0)?;
        let from = self.ir.shape(x).clone();
        let (image, block) = (self.integers(call.input(1)?, "image")?, self.integers(call.input(2)?, "block")?);
        let sizes = |given: &[i64]| -> Vec<usize> {
            given.iter().filter_map(|&size| usize::try_from(size).ok().filter(|&size| size > 0)).collect()
        };
        let (to, kernel) = (sizes(&image), sizes(&block));
        let axes = image.len();
        let offsets = kernel.iter().fold(1usize, |product, &size| product.saturating_mul(size));
        let misfit = || {
            Problem::Refused(format!(
                "columns [n, c * block, places] of an image expected, got {from}, image {image:?} and block {block:?}"
            ))
        };
        if to.len() != axes || kernel.len() != axes || axes == 0 || from.rank() != 3 || !from[1].is_multiple_of(offsets)
        {
            return Err(misfit());
        }
        let strides = Self::per_axis(call, "strides", 1, axes, 1)?;
        let dilations = Self::per_axis(call, "dilations", 1, axes, 1)?;
        let pads = Self::per_axis(call, "pads", 0, 2 * axes, 0)?;
        let mut columns = Vec::with_capacity(axes);
        for axis in 0..axes {
            let reach = dilations[axis].saturating_mul(kernel[axis] as i64 - 1).saturating_add(1);
            let free = (to[axis] as i64).saturating_add(pads[axis] + pads[axis + axes]).saturating_sub(reach);
            columns.push(usize::try_from(free).map_err(|_| misfit())? / strides[axis] as usize + 1);
        }
        if columns.iter().try_fold(1usize, |product, &size| product.checked_mul(size)) != Some(from[2]) {
            return Err(misfit());
        }
        let window = Window {
            from: columns,
            kernel,
            strides: vec![1; axes],
            dilations: dilations.iter().map(|dilation| -dilation).collect(),
            pads: pads[..axes].iter().map(|pad| -pad).collect(),
            to,
        };
        let channels = from[1] / offsets;
        let split = self.ir.reshape(x, vec![from[0], channels, offsets.saturating_mul(from[2])])?;
        if !self.fits(split, &window) {
            let shape = Shape::new([&[from[0], channels], &window.to[..]].concat());
            let Some(elements) = shape.checked_elements() else {
                return Err(Problem::Refused(format!("a result of at most 2^48 elements expected, got {shape}")));
            };
            let flops = (elements as u64).saturating_mul(offsets as u64);
            let why = "it has too many windows".to_string();
            return Ok(self.opaque(call, why, flops, false, vec![(self.ir.element(x), shape)]));
        }
        let mut offset = 0;
        let table = window.walk(|at| {
            let own = offset;
            offset = (offset + 1) % offsets;
            Some(own * from[2] + window.before_strides(at, &strides)?)
        });
        let rows = self.picked_rows(split, &table, 0.0)?;
        let split = self.ir.reshape(rows, vec![window.places(), offsets, from[0], channels])?;
        let sums = self.ir.reduce(Reduction::Sum, split, vec![1], false)?;
        let first = self.ir.push(Kind::Transpose(vec![1, 2, 0]), &[sums])?;
        Ok(vec![self.ir.reshape(first, [&[from[0], channels], &window.to[..]].concat())?])
    }

    fn pool(&mut self, call: &Call) -> Results {
        let x = call.input(0)?;
        let shape = self.ir.shape(x).clone();
        let kernel = call.ints("kernel_shape").unwrap_or_default();
        let kernel: Vec<usize> = kernel.iter().filter_map(|&size| usize::try_from(size).ok()).collect();
        if shape.rank() < 3 || kernel.len() != shape.rank() - 2 {
            return Err(Problem::Refused(format!(
                "a kernel_shape for x [n, c, ..] expected, got {shape} and {kernel:?}"
            )));
        }
        let by_columns = call.int("storage_order", 0) != 0;
        let window = self.window_of(call, x, &kernel)?;
        let result = Shape::new([&shape[..2], &window.to[..]].concat());
        if !self.fits(x, &window) {
            let flops = (result.elements() as u64).saturating_mul(window.offsets() as u64);
            let why = "it has too many windows".to_string();
            return Ok(self.opaque(call, why, flops, false, vec![(self.ir.element(x), result)]));
        }
        let is_max = call.node.op == "MaxPool";
        let least = self.ir.element(x).range().map_or(f64::NEG_INFINITY, |(least, _)| least);
        let fill = if is_max { least } else { 0.0 };
        let p = call.int("p", 2);
        let each = if call.node.op == "LpPool" { self.powers(x, p)? } else { x };
        let rows = self.picked_rows(each, &window.table(), fill)?;
        let split = self.ir.reshape(rows, vec![window.places(), window.offsets(), shape[0], shape[1]])?;
        let op = if is_max { Reduction::Max } else { Reduction::Sum };
        let mut pooled = self.ir.reduce(op, split, vec![1], false)?;
        match call.node.op {
            "AveragePool" => {
                let counts = Self::counts(&window, call.int("count_include_pad", 0) != 0);
                let counts = Constant::dense([window.places(), 1, 1].into(), counts, false);
                let counts = self.ir.known(counts, self.ir.element(x));
                pooled = self.ir.binary(BinaryOp::Div, pooled, counts)?;
            }
            "LpPool" => pooled = self.root(pooled, p)?,
            _ => {}
        }
        let first = self.ir.push(Kind::Transpose(vec![1, 2, 0]), &[pooled])?;
        let mut results = vec![self.ir.reshape(first, result.to_vec())?];
        if is_max && call.wants(1) {
            results.push(self.largest_places(split, &window, &shape, by_columns)?);
        }
        Ok(results)
    }

    /// The flat positions, in the whole of `x [n, c, ..]`, of the first largest of rows `[places, offsets, n, c]`.
    fn largest_places(&mut self, rows: Id, window: &Window, x: &Shape, by_columns: bool) -> Result<Id, Problem> {
        let (places, offsets, positions) = (window.places(), window.offsets(), x[2..].iter().product::<usize>());
        let place = self.ir.reduce(Reduction::ArgMax, rows, vec![1], false)?;
        // Columns first: the strides of the axes in the other order.
        let strides = if by_columns {
            let sizes = x[2..].iter().scan(1, |stride, &size| Some(std::mem::replace(stride, *stride * size)));
            sizes.collect()
        } else {
            Shape::from(&x[2..]).strides()
        };
        self.reserve(places.saturating_mul(offsets))?;
        let table = window.walk(|at| {
            // Padding is never the largest, unless all is.
            let flat = at.iter().zip(&strides).map(|(&at, &stride)| at.max(0) as f64 * stride as f64);
            flat.sum::<f64>().min(positions as f64 - 1.0)
        });
        let table = self.ir.known(Constant::dense([places * offsets, 1].into(), table, false), Element::I64);
        let starts = (0..places).map(|place| (place * offsets) as f64).collect();
        let starts = self.ir.known(Constant::dense([places, 1, 1].into(), starts, false), Element::I64);
        let index = self.ir.binary(BinaryOp::Add, place, starts)?;
        let found = self.ir.push(Kind::Gather, &[table, index])?;
        let found = self.ir.reshape(found, vec![places, x[0], x[1]])?;
        let images = (0..x[0] * x[1]).map(|image| (image * positions) as f64).collect();
        let images = self.ir.known(Constant::dense([1, x[0], x[1]].into(), images, false), Element::I64);
        let found = self.ir.binary(BinaryOp::Add, found, images)?;
        let first = self.ir.push(Kind::Transpose(vec![1, 2, 0]), &[found])?;
        Ok(self.ir.reshape(first, [&x[..2], &window.to[..]].concat())?)
    }

    /// How many elements each place of an average counts.
    fn counts(window: &Window, with_pads: bool) -> Vec<f64> {
        let axes = window.from.len();
        let counted = window.walk(|at| {
            let within = |axis: usize| {
                let (before, after) = if with_pads { (window.pads[axis], window.pads[axis + axes]) } else { (0, 0) };
                (-before..window.from[axis] as i64 + after).contains(&at[axis])
            };
            f64::from((0..axes).all(within))
        });
        counted.chunks(window.offsets()).map(|place| place.iter().sum::<f64>().max(1.0)).collect()
    }

    fn powers(&mut self, x: Id, p: i64) -> Result<Id, Problem> {
        let size = self.ir.unary(UnaryOp::Abs, x)?;
        Ok(if p == 1 { size } else { self.ir.push(Kind::Power(p as f64), &[size])? })
    }

    fn root(&mut self, x: Id, p: i64) -> Result<Id, Problem> {
        Ok(match p {
            1 => x,
            2 => self.ir.unary(UnaryOp::Sqrt, x)?,
            p => self.ir.push(Kind::Power(1.0 / p as f64), &[x])?,
        })
    }

    /// `x / (bias + alpha / size * sum of squares of neighbouring channels)^beta`
    fn local_response(&mut self, call: &Call) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let channels = self.ir.shape(x).get(1).copied().unwrap_or(0);
        if channels == 0 {
            let got = self.ir.shape(x);
            return Err(Problem::Refused(format!("channels on the second axis expected, got {got}")));
        }
        let size = usize::try_from(call.int("size", 0)).ok().filter(|&size| size > 0);
        let size = size.ok_or_else(|| "a size of at least 1 expected".to_string())?;
        let square = self.ir.binary(BinaryOp::Mul, x, x)?;
        self.reserve(channels.saturating_mul(channels))?;
        let (before, after) = ((size - 1) / 2, size / 2);
        let is_near = |to: usize, from: usize| from + before >= to && from <= to + after;
        let matrix = (0..channels).flat_map(|to| (0..channels).map(move |from| f64::from(is_near(to, from)))).collect();
        let sums = self.ir.linear_map(square, 1, channels, matrix)?;
        let scaled = self.ir.scale(sums, call.float("alpha", 1e-4) / size as f64)?;
        let shifted = self.ir.offset(scaled, call.float("bias", 1.0))?;
        let power = self.ir.push(Kind::Power(call.float("beta", 0.75)), &[shifted])?;
        Ok(self.ir.binary(BinaryOp::Div, x, power)?)
    }
}
