//! Kernels of other devices.

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::{LibraryCall, LibraryEpilogue, LibraryMatmul, MatmulShape};
use deuteron_device::{Cpu, Device, DeviceError};
use deuteron_graph::Dtype;
use deuteron_matmul::library;

use super::{argument, job};

#[test]
fn a_matmul_of_a_library_is_one_for_another_device() {
    let cpu = Cpu::with(1, Isa::detect());
    for epilogue in LibraryEpilogue::ALL {
        let call = LibraryCall { dtype: Dtype::F32, epilogue };
        let shape = MatmulShape { m: 1, n: 1, k: 1, batch: vec![], a: (1, 1), b: (1, 1), c: (1, 1) };
        let args = call.operands().iter().map(|_| argument(false)).collect();
        let kernel = library::kernel(&LibraryMatmul { call, shape, args });
        let loaded = cpu.load(job(&cpu, kernel, vec![], 0, &[]));
        assert!(matches!(loaded, Err(DeviceError::ForeignKernel { step: 0 })), "{epilogue:?}");
    }
}
