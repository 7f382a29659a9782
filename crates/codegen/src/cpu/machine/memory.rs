//! Memory for generated code: never writable and executable at the same time (W^X).

use std::fmt;

use memmap2::{Mmap, MmapMut};

use super::frame::Context;

/// Code of a function that takes a context.
pub struct Executable(Mmap);

impl Executable {
    /// Copies code to its own pages, if the system provides them.
    pub fn new(code: &[u8]) -> std::io::Result<Executable> {
        let mut pages = MmapMut::map_anon(code.len())?;
        pages.copy_from_slice(code);
        Ok(Executable(pages.make_exec()?))
    }

    /// Runs it.
    ///
    /// # Safety
    /// The code is a function of a pointer to a context by the System V convention, this CPU has its instructions, and all that it
    /// reads and writes for this context may be read and written.
    pub unsafe fn run(&self, context: &Context) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller promises that a function of this type starts there; the pages live as long as `self`, and can be executed.
        unsafe {
            let function: extern "sysv64" fn(*const Context) = std::mem::transmute(self.0.as_ptr());
            function(context);
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("code is only made where an x86-64 instruction set was found, for {context:?}");
    }
}

impl fmt::Debug for Executable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of machine code", self.0.len())
    }
}
