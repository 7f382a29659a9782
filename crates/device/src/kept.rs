//! Compiled kernels of a device, and kernels that need no compiler.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

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

/// Kernels of a device without a compiler. Sessions share them as long as one of them is there; then nothing is kept, because to make
/// one again costs nothing.
#[derive(Default)]
pub(crate) struct InUse(Mutex<Vec<Weak<CompiledKernel>>>);

impl InUse {
    /// How many there are.
    pub fn live(&self) -> usize {
        self.lock().iter().filter(|kernel| kernel.strong_count() > 0).count()
    }

    /// The kernels of sources: those that are in use, or new ones.
    pub fn of(&self, sources: Vec<Source>) -> Vec<Arc<CompiledKernel>> {
        let mut kernels = self.lock();
        let mut live: Vec<Arc<CompiledKernel>> = kernels.iter().filter_map(Weak::upgrade).collect();
        let found = sources.into_iter().map(|source| match live.iter().find(|known| known.source == source) {
            Some(known) => known.clone(),
            None => {
                let kernel = Arc::new(CompiledKernel { source, module: None });
                live.push(kernel.clone());
                kernel
            }
        });
        let found = found.collect();
        *kernels = live.iter().map(Arc::downgrade).collect();
        found
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<CompiledKernel>>> {
        // A panic while the list was held cannot leave it half-changed: it is replaced as a whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use deuteron_codegen::cpu::task::CpuSource;

    use super::*;

    #[test]
    fn a_kernel_is_shared_while_it_is_in_use() {
        let source = |name: &str| Source::Cpu(CpuSource::described(name.to_string(), name.to_string()));
        let kernels = InUse::default();
        let first = kernels.of(vec![source("a"), source("b"), source("a")]);
        assert!(Arc::ptr_eq(&first[0], &first[2]) && !Arc::ptr_eq(&first[0], &first[1]));
        let second = kernels.of(vec![source("b")]);
        assert!(Arc::ptr_eq(&first[1], &second[0]));
        assert_eq!(kernels.live(), 2);
        drop(first);
        assert_eq!(kernels.live(), 1, "nothing is kept for nobody");
        kernels.of(vec![source("c")]);
        assert_eq!(kernels.lock().len(), 2, "what is gone is forgotten");
    }
}
