//! One launch of a kernel.

use std::ops::Range;

use cudarc::driver::sys::{self, CUlaunchAttributeID_enum as Id};
use deuteron_codegen::cuda;

use super::module::Function;

/// One launch of a function.
pub(crate) struct Grid {
    pub function: Function,
    pub blocks: [u32; 3],
    pub threads: u32,
    pub cluster: u32,
    pub shared: u32,
    /// whether it waits for earlier grids by itself
    pub waits: bool,
    /// its parameter, in the words
    pub words: Range<usize>,
}

impl Grid {
    /// A launch described by code generation, of a loaded function, with its parameter in these words.
    pub fn new(function: Function, grid: &cuda::Grid, words: Range<usize>) -> Grid {
        let cuda::Grid { blocks, threads, cluster, shared, waits, .. } = *grid;
        Grid { function, blocks, threads, cluster, shared, waits, words }
    }

    /// Enqueues it; if it is `early`, it may start before the one before it on the stream has ended.
    ///
    /// # Safety
    /// The stream lives and is of the function's context; `words` are the program's with every address filled in, each
    /// valid for what the kernel reads and writes there. An early launch waits by itself, and so does the kernel before it; otherwise work that
    /// the latter has not waited for could still be running.
    pub unsafe fn launch(&self, words: &[u64], stream: sys::CUstream, early: bool) -> sys::CUresult {
        let parameter = &words[self.words.start..];
        let mut parameters = [parameter.as_ptr().cast::<std::ffi::c_void>().cast_mut()];
        let [x, y, z] = self.blocks;
        if self.cluster <= 1 && !early {
            let none = std::ptr::null_mut();
            let parameters = parameters.as_mut_ptr();
            // SAFETY: the caller's; the driver copies the parameter before it returns, and at least a longest one follows.
            return unsafe {
                sys::cuLaunchKernel(self.function.0, x, y, z, self.threads, 1, 1, self.shared, stream, parameters, none)
            };
        }
        let mut attributes =
            [cluster_attribute(self.cluster), attribute(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)];
        attributes[1].value.programmaticStreamSerializationAllowed = 1;
        // A grid without clusters does not mention them.
        let used = &mut attributes[usize::from(self.cluster <= 1)..1 + usize::from(early)];
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared,
            hStream: stream,
            attrs: used.as_mut_ptr(),
            numAttrs: used.len() as u32,
        };
        // SAFETY: as above; the attributes outlive the call.
        unsafe { sys::cuLaunchKernelEx(&config, self.function.0, parameters.as_mut_ptr(), std::ptr::null_mut()) }
    }
}

/// That the grid has clusters of so many blocks.
pub(super) fn cluster_attribute(blocks: u32) -> sys::CUlaunchAttribute {
    let mut attribute = attribute(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
    attribute.value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: blocks, y: 1, z: 1 };
    attribute
}

/// An attribute without its value.
fn attribute(id: Id) -> sys::CUlaunchAttribute {
    // SAFETY: all zeros is a value of this plain structure of numbers.
    let zeros: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
    sys::CUlaunchAttribute { id, ..zeros }
}
