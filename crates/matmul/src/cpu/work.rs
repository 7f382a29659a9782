//! The work of a matmul on the CPU, with its prologue and epilogue.

use deuteron_codegen::cpu::count::{Counter, with_epilogue};
use deuteron_codegen::cpu::program::TileProgram;
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_graph::Dtype;
use deuteron_plan::{Class, LANES, Work};

use super::STRIP_ROWS;
use super::row_work::SideBindings;
use crate::kernel::{Matmul, MatmulLaunch, Role};

/// Rows or columns of one block of a matmul, as its price counts them: the machine's numbers were fitted to matmuls that were
/// cut so. The kernels cut by threads and caches, which a price does not know.
const MATMUL_BLOCK: usize = 256;

/// Matmuls with what stands around them: every worker makes the first operand for itself, and the tile program of the epilogue runs
/// once over the result, whose sums it finds in cache.
pub fn work(kernel: &Matmul<TileProgram>, launch: &MatmulLaunch) -> Work {
    let shape = &launch.shape;
    let mut work = matmul_work(kernel, shape);
    if let Some(epilogue) = &kernel.epilogue {
        let rows = shape.m * shape.batches();
        let args = SideBindings::new(kernel, launch, Role::Epilogue).arguments(&epilogue.body);
        if epilogue.body.needs_whole_rows() {
            // Accumulators that wait for the rest of their row are copied. Strips of rows share the epilogue: with few rows, one worker runs it.
            work.add(Class::Move, 2.0 * (rows * epilogue.body.cols.div_ceil(LANES)) as f64);
            let (least, strips) = (STRIP_ROWS.0, rows.div_ceil(STRIP_ROWS.0).max(1));
            let shared = Work {
                chunks: strips as f64,
                last_chunk: (rows - (strips - 1) * least) as f64 / least as f64,
                ..Work::default()
            };
            work.next = Some(Box::new(with_epilogue(shared, &epilogue.body, &args, rows)));
        } else {
            work = with_epilogue(work, &epilogue.body, &args, rows);
        }
    }
    if let Some(prologue) = &kernel.prologue {
        let args = SideBindings::new(kernel, launch, Role::Prologue).arguments(&prologue.body);
        let before = Counter { program: &prologue.body, args: &args, rows: shape.m, cols: shape.k }.work();
        work.each = Some(Box::new(Work { chunks: 1.0, streams: false, stream_from: 0.0, ..before }));
    }
    work
}

fn matmul_work(kernel: &Matmul<TileProgram>, shape: &MatmulShape) -> Work {
    let &MatmulShape { m, n, k, .. } = shape;
    let (dtype, rights) = (kernel.left, kernel.rights);
    let batch = shape.batches();
    let side = m.max(n);
    let blocks = side.div_ceil(MATMUL_BLOCK);
    let last = side - blocks.saturating_sub(1) * MATMUL_BLOCK;
    let mut work = Work {
        chunks: (batch * blocks).max(1) as f64,
        last_chunk: if batch == 1 { last as f64 / MATMUL_BLOCK.min(side).max(1) as f64 } else { 1.0 },
        products: (batch * blocks * rights) as f64,
        matrix_flops: 2.0 * (m * n * k * batch * rights) as f64,
        // Kernels hold whole vectors of a row of the result.
        padded_flops: 2.0 * (m * n.next_multiple_of(LANES) * k * batch * rights) as f64,
        matrix_bits: 8 * dtype.bytes() as u32,
        matrix_rows: m,
        ..Work::default()
    };
    // The operand along the blocks is packed once, the other one for each block.
    let (times_left, times_right) = if n > m { (blocks, 1) } else { (1, blocks) };
    work.packed = (batch * (m * k * times_left + rights * (k * n * times_right + m * n))) as f64;
    // A first operand that lies transposed is packed element by element, and so is any that is widened first.
    let a = if shape.a.1 == 1 { 0 } else { m * k * times_left };
    work.copied = (batch * a) as f64;
    // Bytes are multiplied as they are.
    if !matches!(dtype, Dtype::F32 | Dtype::I8) {
        work.add(Class::Convert, work.packed / LANES as f64);
        let b = if shape.b.1 == 1 { 0 } else { k * n * times_right };
        work.copied += (batch * rights * b) as f64;
    }
    work
}
