//! The kernels that a device has compiled.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use deuteron_codegen::Source;

use crate::job::CompiledKernel;

/// Compiled kernels, each kept once.
#[derive(Default)]
pub(crate) struct Kept(Mutex<Vec<Arc<CompiledKernel>>>);

impl Kept {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether a source is compiled.
    pub fn has(&self, source: &Source) -> bool {
        self.lock().iter().any(|known| known.source == *source)
    }

    /// Keeps a kernel, unless another thread was faster.
    pub fn keep(&self, kernel: CompiledKernel) {
        let mut kernels = self.lock();
        if !kernels.iter().any(|known| known.source == kernel.source) {
            kernels.push(Arc::new(kernel));
        }
    }

    /// The kernels of sources. One that is not kept needs no compiler: it is made.
    pub fn of(&self, sources: Vec<Source>) -> Vec<Arc<CompiledKernel>> {
        let mut kernels = self.lock();
        let found = sources.into_iter().map(|source| match kernels.iter().find(|known| known.source == source) {
            Some(known) => known.clone(),
            None => {
                let kernel = Arc::new(CompiledKernel { source, module: None });
                kernels.push(kernel.clone());
                kernel
            }
        });
        found.collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<CompiledKernel>>> {
        // A panic while the list was held cannot leave it half-changed: pushing is the only change.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
