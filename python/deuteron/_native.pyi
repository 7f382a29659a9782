"""The engine, written in Rust."""

from typing import Any, Callable, Sequence, final

__all__ = [
    "__version__",
    "Program",
    "SeedBatches",
    "Array",
    "analyze",
    "analysis_html",
    "analysis_text",
    "doctor",
    "empty_cache",
    "get_num_threads",
    "main",
    "memory_stats",
    "set_num_threads",
    "_forked",
]

__version__: str

@final
class SeedBatches:
    """Seeds on GPUs, drawn in batches, as each would take a kernel of its own. The generator of torch says which comes next."""

    def __new__(cls, draw: Callable[[int, int, int, int], Sequence[Any]]) -> SeedBatches:
        """`draw` draws a batch: device, seed, offset and count to tensors."""

    def next_seed(self, like: Any) -> Any:
        """The next seed beside a tensor; None where torch must draw it itself."""

    def next_seed_at(self, ordinal: int, stream: int, generator: Any) -> Any:
        """The next seed of a generator, on a GPU and for a stream."""

@final
class Program:
    """What runs as fused kernels: an op of the catalogue with its attributes, or a graph in text form.

    Safe to share between threads. Kernels are compiled at the first call with operands of some shapes, and kept.
    """

    def __new__(cls, text: str, states: Sequence[str] = ..., updates: Sequence[tuple[str, str]] = ...) -> Program:
        """`text` is `"norm_act norm=layer act=gelu eps=1e-05"`, say, or a graph. `states` are inputs of a graph that one
        `append` reads: it writes to them in place. `updates` are other inputs that are states, each with the output that is its
        new value, of the same dtype and shape; the call writes it in place and does not return it. Each state must be writable,
        C-contiguous and in memory of its own: a `ValueError` otherwise."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def operands(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def differentiable(self) -> bool: ...
    def types(
        self, operands: Sequence[tuple[str, Sequence[int]]], saving: bool = False
    ) -> tuple[list[tuple[str, tuple[int, ...]]], list[int]]:
        """Dtype and shape of each output, for operands of these dtypes (`"f32"`, `"bf16"`, ...) and shapes; with `saving`, of
        all that `forward_whole` hands out, and which of that `backward` takes again."""

    def graph(
        self, operands: Sequence[tuple[str, Sequence[int]]]
    ) -> tuple[str, dict[str, tuple[str, tuple[int, ...]]]]:
        """Its graph for operands of these types in text form, and dtype and shape of each value in it."""

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        """Runs it as the library of its operands would have it done: with gradients, under autocast and by a compiler's rules
        where they are tensors of torch. Results are of the kind of the first operand, on its device."""

    def only(self, *operands: Any) -> Any:
        """The same of a program with one result, which comes alone."""

    def forward(self, operands: Sequence[Any]) -> list[Any]:
        """Runs it on memory as it is, and nothing else."""

    def forward_saving(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """Runs it for a gradient: its outputs, and what `backward` takes again."""

    def forward_whole(self, operands: Sequence[Any]) -> list[Any]:
        """The same: its outputs, then what else `backward` takes, each once."""

    def backward(
        self,
        operands: Sequence[Any],
        saved: Sequence[Any],
        gradients: Sequence[Any | None],
        wanted: Sequence[bool],
    ) -> list[Any | None]:
        """Gradients of the operands that are wanted, from those of the outputs; none where one is not wanted or does not
        depend on them. `saved` is what `forward_saving` gave for it."""

    def explain(self, operands: Sequence[tuple[str, Sequence[int]]], device: str = "auto") -> str:
        """The plan: what shares a kernel, and why not more does."""

    def kernels(self, operands: Sequence[tuple[str, Sequence[int]]], device: str = "auto") -> str:
        """The generated kernels."""

@final
class Array:
    """An array on the CPU, the result of a call on objects that came by DLPack. Takes part in DLPack itself."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    def __dlpack__(self, **_options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

def analyze(graph: str, device: str = "auto", backward: bool = False) -> str:
    """What to fuse, as JSON; runs nothing."""

def analysis_html(analysis: str) -> str:
    """The page of an analysis."""

def analysis_text(analysis: str) -> str:
    """An analysis as the command prints it."""

def doctor() -> str:
    """Devices and libraries, as JSON."""

def empty_cache() -> None:
    """Frees workspaces that no run has now."""

def memory_stats() -> dict[str, dict[str, int]]:
    """The memory of each device that was used, by its name."""

def set_num_threads(threads: int) -> None:
    """At most so many threads on the CPU from now on."""

def get_num_threads() -> int:
    """The number of threads that a call on the CPU uses now."""

def main(arguments: Sequence[str]) -> int:
    """The command `deuteron`; gives its exit code."""

def _forked() -> None:
    """Forgets what the process had that this one was forked from."""
