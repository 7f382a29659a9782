//! Matmuls through cuBLASLt, each planned once.
//!
//! A plan is everything that the library needs besides addresses: descriptors, and the algorithm that its heuristic chooses for the
//! sizes, strides, types, epilogue and alignments. Plans are kept for as long as the library is.
//!
//! - Numerics: sums are f32, of f32 operands too (no TF32). Bias, GELU and residual are applied to the sums, which are
//!   rounded once, when they are stored.
//! - Bits: an algorithm may split the inner axis only if its parts are added up by a step of their own, in f32. So the same
//!   problem gives the same bits on every run.
//! - For matmuls that the library does not support, `prepare` returns `None`: then our kernel that comes with the call runs.

mod mapping;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::cublaslt::{result, sys as lt};
use cudarc::driver::sys;
use deuteron_codegen::{LibraryCall, LibraryEpilogue, MatmulShape, Operand};
use deuteron_graph::Dtype;

use super::error::CudaError;
use super::library::{self, CublasLt, Search};
use mapping::{Calls, Matrix, Problem, calls};

/// Maximum workspace of an algorithm: what the library's manual recommends for Hopper. Other GPUs need less.
const WORKSPACE: usize = 32 << 20;

/// Alignment of operand buffers, as the library's widest loads need it.
const ALIGNMENT: usize = 16;

/// The loaded library, and every planned matmul.
pub(crate) struct Library {
    handle: Arc<Handle>,
    plans: Mutex<HashMap<Key, Option<Arc<Plan>>>>,
}

/// Everything that a plan depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    kernel: LibraryCall,
    problem: Problem,
    /// Bytes that the addresses of a, b, what is added, and c are multiples of.
    alignment: [usize; 4],
}

/// One product, ready to be launched many times.
pub(crate) struct Prepared {
    kernel: LibraryCall,
    /// First elements of the arguments.
    offsets: Vec<usize>,
    /// The library's arguments; none if there is nothing to write.
    plan: Option<Arc<Plan>>,
    /// First elements of a, b and c in each call, from the offsets on.
    starts: Vec<[usize; 3]>,
}

impl Library {
    /// Loads the library. The context must be entered.
    pub fn new(search: &Search) -> Result<Library, CudaError> {
        let library = library::cublaslt(search)?;
        let raw = result::create_handle().map_err(|error| CudaError::cublas("cublasLtCreate", error))?;
        Ok(Library { handle: Arc::new(Handle { raw, _library: library }), plans: Mutex::default() })
    }

    /// Plans a matmul, or finds its plan; `None` if the library does not support it. `offsets` are the first elements
    /// of the arguments, as [`LibraryCall::operands`] lists them, from addresses that are multiples of 16 bytes.
    pub fn prepare(
        &self,
        kernel: &LibraryCall,
        shape: &MatmulShape,
        offsets: &[usize],
    ) -> Result<Option<Prepared>, CudaError> {
        let expected = kernel.operands().len();
        if offsets.len() != expected {
            let (expected, got) = (format!("{expected} arguments"), offsets.len().to_string());
            return Err(CudaError::Unsupported { what: "a matrix product".into(), expected, got });
        }
        let prepared = |plan, starts| Prepared { kernel: *kernel, offsets: offsets.to_vec(), plan, starts };
        if shape.m == 0 || shape.n == 0 || shape.batch.iter().any(|axis| axis[0] == 0) {
            return Ok(Some(prepared(None, Vec::new())));
        }
        // The library's GELU is good to eleven bits: enough for bf16 alone.
        if kernel.epilogue.has_gelu() && kernel.dtype != Dtype::Bf16 {
            return Ok(None);
        }
        // The heuristic knows the alignment of all other operands, and assumes that a bias is aligned: a kernel that
        // loads it 16 bytes at a time would lose the context.
        let bias = kernel.operands().iter().position(|&operand| operand == Operand::Bias);
        if bias.is_some_and(|bias| !(offsets[bias] * kernel.dtype.bytes()).is_multiple_of(ALIGNMENT)) {
            return Ok(None);
        }
        let (Some(_), Some(Calls { problem, starts })) = (storage(kernel.dtype), calls(shape)) else { return Ok(None) };
        let key = Key { kernel: *kernel, problem, alignment: alignment(kernel, offsets, &starts) };
        Ok(self.plan(key)?.map(|plan| prepared(Some(plan), starts)))
    }

    fn plan(&self, key: Key) -> Result<Option<Arc<Plan>>, CudaError> {
        let mut plans = locked(&self.plans);
        if let Some(known) = plans.get(&key) {
            return Ok(known.clone());
        }
        let plan = Plan::new(self.handle.clone(), &key)?.map(Arc::new);
        plans.insert(key, plan.clone());
        Ok(plan)
    }
}

impl Prepared {
    /// Bytes of scratch memory, from an address that is a multiple of 256.
    pub fn workspace(&self) -> usize {
        self.plan.as_ref().map_or(0, |plan| plan.workspace)
    }

    /// Enqueues the product. `addresses` are those of the arguments' buffers, before the offsets. The library loads a kernel
    /// when it is first launched, so the first launch should not be captured.
    ///
    /// # Safety
    /// The context is entered and the stream lives in it. Every address is valid for what the product reads and writes
    /// there, and `workspace` for [`Prepared::workspace`] bytes that nothing else uses before the product is done.
    pub unsafe fn launch(&self, stream: sys::CUstream, addresses: &[u64], workspace: u64) -> Result<(), CudaError> {
        let Some(plan) = &self.plan else { return Ok(()) };
        let element = self.kernel.dtype.bytes();
        let operands = self.kernel.operands();
        let misplaced = addresses.iter().find(|address| !address.is_multiple_of(ALIGNMENT as u64));
        if addresses.len() != operands.len() || misplaced.is_some() {
            return Err(CudaError::Unsupported {
                what: "a matrix product".into(),
                expected: format!("{} addresses that are multiples of {ALIGNMENT}", operands.len()),
                got: format!("{addresses:x?}"),
            });
        }
        let address = |wanted: Operand| {
            let position = operands.iter().position(|&operand| operand == wanted);
            position.map(|position| addresses[position] + (self.offsets[position] * element) as u64)
        };
        let [a, b, c] = [Operand::A, Operand::B, Operand::C].map(|operand| address(operand).unwrap_or(0));
        let residual = address(Operand::Residual).unwrap_or(c);
        let descriptor = locked(&plan.descriptor);
        if let Some(bias) = address(Operand::Bias) {
            descriptor.set(lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        for start in &self.starts {
            let [in_a, in_b, in_c] = start.map(|elements| (elements * element) as u64);
            let call = Call { a: a + in_a, b: b + in_b, residual: residual + in_c, c: c + in_c };
            // SAFETY: the caller's: the addresses reach as far as the sizes that the plan was made for.
            unsafe { plan.call(&descriptor, &call, workspace, stream)? };
        }
        Ok(())
    }
}

/// Addresses of one call of the library.
struct Call {
    a: u64,
    b: u64,
    residual: u64,
    c: u64,
}

/// The library's arguments besides addresses.
struct Plan {
    handle: Arc<Handle>,
    /// Holds the address of the bias while it is launched.
    descriptor: Mutex<Descriptor>,
    first: Layout,
    second: Layout,
    result: Layout,
    algorithm: lt::cublasLtMatmulAlgo_t,
    workspace: usize,
    /// The factor of C: 1 for a residual, otherwise 0.
    beta: f32,
}

impl Plan {
    /// Asks the heuristic; `None` where it knows no algorithm.
    fn new(handle: Arc<Handle>, key: &Key) -> Result<Option<Plan>, CudaError> {
        use lt::cublasLtMatmulDescAttributes_t::{
            CUBLASLT_MATMUL_DESC_BIAS_POINTER, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_MATMUL_DESC_TRANSA,
            CUBLASLT_MATMUL_DESC_TRANSB,
        };
        let Some(storage) = storage(key.kernel.dtype) else { return Ok(None) };
        let Problem { first, second, result: made, batch } = key.problem;
        let descriptor = Descriptor::new()?;
        descriptor.set(CUBLASLT_MATMUL_DESC_TRANSA, &operation(first.transposed))?;
        descriptor.set(CUBLASLT_MATMUL_DESC_TRANSB, &operation(second.transposed))?;
        descriptor.set(CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue(key.kernel.epilogue))?;
        let [a, b, added, stored] = key.alignment;
        if key.kernel.epilogue.has_bias() {
            // Whether there is one may matter to the heuristic; it never looks behind it.
            descriptor.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, &(ALIGNMENT as u64))?;
        }
        let layout = |matrix: &Matrix| Layout::new(storage, matrix, batch);
        let (first, second, made) = (layout(&first)?, layout(&second)?, layout(&made)?);
        let preference = Preference::new([b, a, added, stored])?;
        // SAFETY: handle, descriptor, layouts and preference live until the end of this function.
        let found = unsafe {
            result::get_matmul_algo_heuristic(handle.raw, descriptor.0, first.0, second.0, made.0, made.0, preference.0)
        };
        let found = match found {
            Ok(found) => found,
            Err(error) if error.0 == lt::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => return Ok(None),
            Err(error) => return Err(CudaError::cublas("cublasLtMatmulAlgoGetHeuristic", error)),
        };
        Ok(Some(Plan {
            handle,
            descriptor: Mutex::new(descriptor),
            first,
            second,
            result: made,
            algorithm: found.algo,
            workspace: found.workspaceSize,
            beta: if key.kernel.epilogue.has_residual() { 1.0 } else { 0.0 },
        }))
    }

    /// # Safety
    /// As for [`Prepared::launch`], for the matrices of one call.
    unsafe fn call(
        &self,
        descriptor: &Descriptor,
        call: &Call,
        workspace: u64,
        stream: sys::CUstream,
    ) -> Result<(), CudaError> {
        let alpha = 1.0f32;
        let (alpha, beta): (*const f32, *const f32) = (&alpha, &self.beta);
        // SAFETY: handle, descriptor and layouts are those of the plan and live; the factors are f32, as the descriptor
        // says, and are read before the call returns; the addresses are the caller's.
        let done = unsafe {
            result::matmul(
                self.handle.raw,
                descriptor.0,
                alpha.cast(),
                beta.cast(),
                call.b as *const c_void,
                self.first.0,
                call.a as *const c_void,
                self.second.0,
                call.residual as *const c_void,
                self.result.0,
                call.c as *mut c_void,
                self.result.0,
                &self.algorithm,
                workspace as *mut c_void,
                self.workspace,
                stream.cast(),
            )
        };
        done.map_err(|error| CudaError::cublas("cublasLtMatmul", error))
    }
}

/// The library's context, and the proof that it is loaded.
struct Handle {
    raw: lt::cublasLtHandle_t,
    _library: CublasLt,
}

// SAFETY: the library's calls may be made from any thread, and several at once, with one handle.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; every plan that uses it holds it.
        let _ = unsafe { result::destroy_handle(self.raw) };
    }
}

/// What is computed: sums and factors in f32.
struct Descriptor(lt::cublasLtMatmulDesc_t);

// SAFETY: memory of the host that belongs to this value alone.
unsafe impl Send for Descriptor {}

impl Descriptor {
    fn new() -> Result<Descriptor, CudaError> {
        let (sums, factors) = (lt::cublasComputeType_t::CUBLAS_COMPUTE_32F, lt::cudaDataType::CUDA_R_32F);
        let created = result::create_matmul_desc(sums, factors);
        created.map(Descriptor).map_err(|error| CudaError::cublas("cublasLtMatmulDescCreate", error))
    }

    fn set<T>(&self, attribute: lt::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), CudaError> {
        let value: *const T = value;
        // SAFETY: the descriptor lives; the library copies as many bytes as the value has, and refuses a wrong number.
        let done = unsafe { result::set_matmul_desc_attribute(self.0, attribute, value.cast(), size_of::<T>()) };
        done.map_err(|error| CudaError::cublas("cublasLtMatmulDescSetAttribute", error))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// The layout of a matrix.
struct Layout(lt::cublasLtMatrixLayout_t);

// SAFETY: memory of the host that belongs to this value alone and is not changed after `new`.
unsafe impl Send for Layout {}
// SAFETY: as above.
unsafe impl Sync for Layout {}

impl Layout {
    fn new(storage: lt::cudaDataType, matrix: &Matrix, batch: usize) -> Result<Layout, CudaError> {
        use lt::cublasLtMatrixLayoutAttribute_t::{
            CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
        };
        let (rows, cols, leading) = (matrix.rows as u64, matrix.cols as u64, matrix.leading as i64);
        let created = result::create_matrix_layout(storage, rows, cols, leading);
        let layout = created.map(Layout).map_err(|error| CudaError::cublas("cublasLtMatrixLayoutCreate", error))?;
        if batch > 1 {
            layout.set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &(batch as i32))?;
            layout.set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &(matrix.stride as i64))?;
        }
        Ok(layout)
    }

    fn set<T>(&self, attribute: lt::cublasLtMatrixLayoutAttribute_t, value: &T) -> Result<(), CudaError> {
        let value: *const T = value;
        // SAFETY: the layout lives; the library copies as many bytes as the value has, and refuses a wrong number.
        let done = unsafe { result::set_matrix_layout_attribute(self.0, attribute, value.cast(), size_of::<T>()) };
        done.map_err(|error| CudaError::cublas("cublasLtMatrixLayoutSetAttribute", error))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// Constraints for the heuristic.
struct Preference(lt::cublasLtMatmulPreference_t);

impl Preference {
    /// `alignment` is that of the library's A, B, C and D.
    fn new(alignment: [usize; 4]) -> Result<Preference, CudaError> {
        use lt::cublasLtMatmulPreferenceAttributes_t::{
            CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        };
        let created = result::create_matmul_pref();
        let preference =
            created.map(Preference).map_err(|error| CudaError::cublas("cublasLtMatmulPreferenceCreate", error))?;
        preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE)?;
        // Unsplit, so that the order of a sum is fixed. A test that missed elements with split sums had a race of its own, so
        // whether they are sound is not known.
        let unsplit = lt::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32;
        preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &unsplit)?;
        let attributes = [
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        for (attribute, bytes) in attributes.into_iter().zip(alignment) {
            preference.set(attribute, &(bytes as u32))?;
        }
        Ok(preference)
    }

    fn set<T>(&self, attribute: lt::cublasLtMatmulPreferenceAttributes_t, value: &T) -> Result<(), CudaError> {
        let value: *const T = value;
        // SAFETY: the preference lives; the library copies as many bytes as the value has, and refuses a wrong number.
        let done = unsafe { result::set_matmul_pref_attribute(self.0, attribute, value.cast(), size_of::<T>()) };
        done.map_err(|error| CudaError::cublas("cublasLtMatmulPreferenceSetAttribute", error))
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

fn storage(dtype: Dtype) -> Option<lt::cudaDataType> {
    match dtype {
        Dtype::F32 => Some(lt::cudaDataType::CUDA_R_32F),
        Dtype::F16 => Some(lt::cudaDataType::CUDA_R_16F),
        Dtype::Bf16 => Some(lt::cudaDataType::CUDA_R_16BF),
        _ => None,
    }
}

/// `CUBLAS_OP_T` or `CUBLAS_OP_N`, a C enum that the bindings leave out.
fn operation(transposed: bool) -> i32 {
    i32::from(transposed)
}

/// A residual is no epilogue of the library's: it is the C of `alpha A B + beta C`.
fn epilogue(epilogue: LibraryEpilogue) -> lt::cublasLtEpilogue_t {
    match epilogue {
        LibraryEpilogue::None | LibraryEpilogue::Residual => lt::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
        LibraryEpilogue::Bias | LibraryEpilogue::BiasResidual => lt::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
        LibraryEpilogue::Gelu => lt::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU,
        LibraryEpilogue::BiasGelu => lt::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_BIAS,
    }
}

/// Bytes, up to 16, that the addresses of a, b, what is added, and c are multiples of in every call.
fn alignment(kernel: &LibraryCall, offsets: &[usize], starts: &[[usize; 3]]) -> [usize; 4] {
    let element = kernel.dtype.bytes();
    // All offsets and starts of an operand in one number: its lowest bit is the lowest of any.
    let bits = |wanted: Operand, start: usize| {
        let position = kernel.operands().iter().position(|&operand| operand == wanted);
        position.map(|position| starts.iter().fold(offsets[position], |bits, starts| bits | starts[start]))
    };
    let (a, b, c) = (bits(Operand::A, 0), bits(Operand::B, 1), bits(Operand::C, 2));
    let added = bits(Operand::Residual, 2).or(c);
    [a, b, added, c].map(|bits| 1 << ((bits.unwrap_or(0) * element) | ALIGNMENT).trailing_zeros())
}

/// Tables and descriptors stay valid after a panic elsewhere.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
