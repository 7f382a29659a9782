"""What checkers of types know of operands: a call gives results of the kind of its operands, and takes nothing but tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

from ._operands import MaskWord

if TYPE_CHECKING:
    from typing import Protocol, TypeVar

    import numpy
    import torch

    from ._native import Array
    from .trace.value import Value

    class SupportsDLPack(Protocol):
        """An array of another library, on the CPU. Results beside it are of `deuteron.Array`, which is one too."""

        def __dlpack__(self) -> Any: ...
        def __dlpack_device__(self) -> Any: ...

    Tensor = TypeVar("Tensor", "torch.Tensor", "numpy.ndarray[Any, Any]", Array, Value, SupportsDLPack)
    Mask = Union[None, MaskWord, Tensor]
else:
    Tensor = Any
    Mask = Union[None, MaskWord, Any]
