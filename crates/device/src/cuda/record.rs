//! CUDA graphs: work captured once and replayed by one call.

use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Context;
use super::error::CudaError;
use super::stream::Stream;
use crate::device::Recorded;

/// An instantiated CUDA graph.
pub(crate) struct Recording {
    context: Arc<Context>,
    handle: sys::CUgraphExec,
    /// The graph it was instantiated from or last updated to.
    graph: Graph,
}

// SAFETY: the handles may be used from any thread, by one at a time: there is no `Sync`.
unsafe impl Send for Recording {}

/// The captured graph, before instantiation.
struct Graph {
    handle: sys::CUgraph,
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: given once by the end of a recording, destroyed once.
        let _ = unsafe { sys::cuGraphDestroy(self.handle) };
    }
}

impl Recording {
    /// Captures the work that `enqueue` puts on the stream; nothing else may be enqueued on it meanwhile. The context must be
    /// entered. `old` is updated in place if its shape allows that, which is faster than a new instance.
    pub fn new(
        context: &Arc<Context>,
        stream: &Stream,
        old: Option<Recording>,
        enqueue: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Recording, CudaError> {
        let graph = capture(context, stream, enqueue)?;
        if let Some(mut old) = old {
            let mut info = std::mem::MaybeUninit::<sys::CUgraphExecUpdateResultInfo>::zeroed();
            // SAFETY: both graphs live, and the old one is not replayed now: a run waits for its end. The driver fills in
            // `info`, which is not read.
            let code = unsafe { sys::cuGraphExecUpdate_v2(old.handle, graph.handle, info.as_mut_ptr()) };
            // Of another shape, or of one that this driver cannot change, the old one is dropped and a new one made. A context that is
            // lost shows there.
            if code == sys::CUresult::CUDA_SUCCESS {
                old.graph = graph;
                return Ok(old);
            }
        }
        let mut handle: sys::CUgraphExec = std::ptr::null_mut();
        // SAFETY: the graph lives; the pointer is to a handle of ours.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut handle, graph.handle, 0) };
        context.check("cuGraphInstantiate", code)?;
        let recording = Recording { context: context.clone(), handle, graph };
        // SAFETY: both live. Without it the first replay would carry the cost.
        context.check("cuGraphUpload", unsafe { sys::cuGraphUpload(recording.handle, stream.handle()) })?;
        Ok(recording)
    }

    /// Enqueues all of it.
    pub fn replay(&mut self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both live. The owner of the CUDA graph keeps the memory it points to.
        self.context.check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.handle, stream.handle()) })
    }

    /// The nodes that the driver finds in it.
    pub fn nodes(&self) -> Result<Recorded, CudaError> {
        let mut count = 0;
        // SAFETY: the graph lives; where no list is given, the driver tells the number of nodes alone.
        let code = unsafe { sys::cuGraphGetNodes(self.graph.handle, std::ptr::null_mut(), &mut count) };
        self.context.check("cuGraphGetNodes", code)?;
        let mut nodes: Vec<sys::CUgraphNode> = vec![std::ptr::null_mut(); count];
        // SAFETY: the graph lives; the list has room for `count` nodes.
        let code = unsafe { sys::cuGraphGetNodes(self.graph.handle, nodes.as_mut_ptr(), &mut count) };
        self.context.check("cuGraphGetNodes", code)?;
        let mut recorded = Recorded { kernels: 0, others: 0 };
        for &node in &nodes {
            // A number, as a newer driver may know kinds that the enumeration does not.
            let mut kind = 0u32;
            // SAFETY: a node of a graph that lives; the enumeration is stored as such a number.
            let code = unsafe { sys::cuGraphNodeGetType(node, (&raw mut kind).cast()) };
            self.context.check("cuGraphNodeGetType", code)?;
            match kind == sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL as u32 {
                true => recorded.kernels += 1,
                false => recorded.others += 1,
            }
        }
        Ok(recorded)
    }
}

/// Capture is thread-local: other libraries may continue in their threads.
fn capture(
    context: &Context,
    stream: &Stream,
    enqueue: impl FnOnce() -> Result<(), CudaError>,
) -> Result<Graph, CudaError> {
    let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the stream lives and is our own, so nothing else captures it.
    context.check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream.handle(), mode) })?;
    let enqueued = enqueue();
    let mut handle: sys::CUgraph = std::ptr::null_mut();
    // SAFETY: the recording was begun above, and ends here whatever came of it; the pointer is to a handle of ours.
    let code = unsafe { sys::cuStreamEndCapture(stream.handle(), &mut handle) };
    let graph = (!handle.is_null()).then_some(Graph { handle });
    // What went wrong inside says more than that the recording failed.
    enqueued?;
    context.check("cuStreamEndCapture", code)?;
    graph.ok_or(CudaError::Driver { call: "cuStreamEndCapture", code: 0, name: "no graph".to_string() })
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made once, destroyed once; the driver keeps it until a replay that is under way has ended.
            let _ = unsafe { sys::cuGraphExecDestroy(self.handle) };
        }
    }
}
