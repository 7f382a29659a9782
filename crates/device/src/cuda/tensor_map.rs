//! Tensor maps, encoded for an address.

use cudarc::driver::sys;
use deuteron_codegen::cuda::{MAP_WORDS, TensorMap};

use super::context::Context;
use super::error::CudaError;

/// The words of a map of what lies at an address, to which its offset is added.
pub(crate) fn encode(context: &Context, map: &TensorMap, start: u64) -> Result<[u64; MAP_WORDS], CudaError> {
    let mut encoded = sys::CUtensorMap { opaque: [0; MAP_WORDS] };
    let address = (start + map.offset as u64) as *mut std::ffi::c_void;
    // SAFETY: the context proves that the driver is loaded, and the oldest we take (12.0) has this call. Arrays are as long as the
    // largest rank; nothing is read at the address.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut encoded,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            map.rank as u32,
            address,
            map.sizes.as_ptr(),
            map.strides.as_ptr(),
            map.tile.as_ptr(),
            [1; 5].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    context.check("cuTensorMapEncodeTiled", code)?;
    Ok(encoded.opaque)
}
