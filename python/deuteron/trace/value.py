"""The value: a placeholder for a tensor in a traced function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Iterator, NamedTuple, NoReturn, Optional, Sequence, Tuple, Union

from deuteron.trace.graph import FLOATS, Node, Number, Trace, dtype_name, elements, type_text

Operand = Union["Value", Number]


class Unsupported(TypeError, AttributeError):
    """A value has no such attribute, because the text form has no such operation."""


class Extremes(NamedTuple):
    """The largest or smallest values along an axis, and where they are."""

    values: Value
    indices: Value


Method = Callable[["Value"], "Value"]
Operator = Callable[["Value", Any], "Value"]


def _arithmetic(op: str) -> Tuple[Operator, Operator]:
    """An operator with the value on its left, and with the value on its right."""
    return (lambda x, other: elementwise.arithmetic(op, x, other), lambda x, other: elementwise.arithmetic(op, other, x))


def _comparison(op: str) -> Operator:
    return lambda x, other: elementwise.compare(op, x, other)


def _logical(op: str) -> Operator:
    return lambda x, other: elementwise.logical(op, x, other)


def _elementwise(name: str) -> Method:
    """A method that is a function of the same name, too."""
    return lambda x: getattr(elementwise, name)(x)


def _cast(word: str) -> Method:
    return lambda x: elementwise.cast(x, word)


def _no_numbers(what: str, instead: str) -> Callable[..., NoReturn]:
    def refused(*_arguments: Any, **_keywords: Any) -> NoReturn:
        raise TypeError(f"{what}: a traced value has no numbers; {instead}")

    return refused


def _in_place(what: str, instead: str) -> Callable[..., NoReturn]:
    def refused(*_arguments: Any) -> NoReturn:
        raise TypeError(f"{what}: a traced value cannot be changed in place; {instead}")

    return refused


class Value:
    """A tensor in a traced function: a dtype and a shape, without numbers."""

    __slots__ = ("_trace", "_node", "_index")
    __array_priority__ = 1000

    def __init__(self, trace: Trace, node: Node, index: int = 0) -> None:
        self._trace = trace
        self._node = node
        self._index = index

    # What it is.

    @property
    def shape(self) -> Tuple[int, ...]:
        """Sizes of all axes."""
        return self._node.types[self._index][1]

    @property
    def dtype(self) -> Any:
        """As the operands of the function have it: a dtype of torch or NumPy, or else a word such as `"f32"`."""
        return framework_dtype(self._trace, self._word, self._is_long)

    @property
    def _is_long(self) -> bool:
        return self._node.is_long_of(self._index)

    @property
    def _word(self) -> str:
        return self._node.types[self._index][0]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, dim: Optional[int] = None) -> Any:
        """The sizes of all axes, or of one."""
        return self.shape if dim is None else self.shape[emit.axis_of(self, dim, "size")]

    def numel(self) -> int:
        """Number of elements."""
        return elements(self.shape)

    def is_floating_point(self) -> bool:
        """Whether the dtype is a float."""
        return self._word in FLOATS

    def __repr__(self) -> str:
        return f"Value({type_text(self._word, self.shape)})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len: expected a value with an axis, got a scalar")
        return self.shape[0]

    def __iter__(self) -> Iterator[Value]:
        return iter(self.unbind(0))

    __hash__ = object.__hash__

    # What it cannot be.

    __bool__ = _no_numbers("bool(value), `if value` and `while value`", "deuteron.trace.where chooses element by element")
    __float__ = _no_numbers("float(value)", "use the value itself")
    __int__ = _no_numbers("int(value)", "use the value itself, or pass a number as an argument")
    __index__ = _no_numbers("an index from a value", "`table[value]` picks rows")
    __array__ = _no_numbers("conversion to an array", "use functions that take values")
    item = _no_numbers("item()", "return the value, and query the result")
    tolist = _no_numbers("tolist()", "return the value, and query the result")
    numpy = _no_numbers("numpy()", "return the value, and query the result")
    __setitem__ = _in_place("value[..] = ..", "deuteron.trace.where or cat make a new value")
    __iadd__ = _in_place("+=", "write `x = x + y`")
    __isub__ = _in_place("-=", "write `x = x - y`")
    __imul__ = _in_place("*=", "write `x = x * y`")
    __itruediv__ = _in_place("/=", "write `x = x / y`")

    if not TYPE_CHECKING:
        # Hidden from checkers of types, for which every name would be there.

        def __getattr__(self, name: str) -> Any:
            if self._trace.framework == "torch" and not name.startswith("_"):
                from deuteron.trace.tables import torch_method

                found = torch_method(name, self)
                if found is not None:
                    return found
            raise Unsupported(f"{name}: a traced value has no such attribute; deuteron.trace lists the supported functions")

    # Arithmetic.

    __add__, __radd__ = _arithmetic("add")
    __sub__, __rsub__ = _arithmetic("sub")
    __mul__, __rmul__ = _arithmetic("mul")
    __truediv__, __rtruediv__ = _arithmetic("div")

    def __matmul__(self, other: Any) -> Value:
        return named.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Value:
        return named.matmul(other, self)

    def __pow__(self, exponent: Any) -> Value:
        return elementwise.power(self, exponent)

    def __rpow__(self, base: Any) -> Value:
        return elementwise.power(base, self)

    def __neg__(self) -> Value:
        return elementwise.unary("neg", self)

    def __pos__(self) -> Value:
        return self

    __abs__ = _elementwise("abs")
    __lt__, __le__ = _comparison("lt"), _comparison("le")
    __gt__, __ge__ = _comparison("gt"), _comparison("ge")
    __eq__ = _comparison("eq")  # type: ignore[assignment]
    __ne__ = _comparison("ne")  # type: ignore[assignment]
    __and__, __or__, __xor__ = _logical("and"), _logical("or"), _logical("xor")

    def __invert__(self) -> Value:
        return elementwise.logical("not", self)

    # Methods that are functions, too.

    exp, log = _elementwise("exp"), _elementwise("log")
    sqrt, rsqrt, reciprocal = _elementwise("sqrt"), _elementwise("rsqrt"), _elementwise("reciprocal")
    tanh, erf, sigmoid = _elementwise("tanh"), _elementwise("erf"), _elementwise("sigmoid")
    abs, round, log1p = _elementwise("abs"), _elementwise("round"), _elementwise("log1p")

    def square(self) -> Value:
        """`x * x`."""
        return elementwise.power(self, 2)

    def pow(self, exponent: Operand) -> Value:
        """`x ** exponent`."""
        return elementwise.power(self, exponent)

    def relu(self) -> Value:
        """`max(x, 0)`."""
        return named.relu(self)

    def neg(self) -> Value:
        """`-x`."""
        return -self

    def clamp(self, min: Optional[Operand] = None, max: Optional[Operand] = None) -> Value:
        """`x` limited to the range from `min` to `max`."""
        return elementwise.clamp(self, min, max)

    def softmax(self, dim: int = -1, dtype: Any = None) -> Value:
        """The softmax along `dim`."""
        return rows.softmax(self, dim, dtype)

    def matmul(self, other: Any) -> Value:
        """The matrix product with `other`."""
        return named.matmul(self, other)

    def where(self, condition: Any, other: Any) -> Value:
        """Itself where the condition holds, else the other."""
        return elementwise.where(condition, self, other)

    def masked_fill(self, mask: Any, value: Operand) -> Value:
        """`value` where `mask` is true, `x` elsewhere."""
        return elementwise.where(mask, value, self)

    def sum(self, dim: Any = None, keepdim: bool = False, dtype: Any = None, **others: Any) -> Value:
        """The sum over `dim`, or over all axes."""
        return rows.sum(self, *emit.numpy_words(dim, keepdim, others), dtype=dtype)

    def mean(self, dim: Any = None, keepdim: bool = False, dtype: Any = None, **others: Any) -> Value:
        """The mean over `dim`, or over all axes."""
        return rows.mean(self, *emit.numpy_words(dim, keepdim, others), dtype=dtype)

    def var(self, dim: Any = None, correction: Optional[Number] = None, keepdim: bool = False, **others: Any) -> Value:
        """The variance over `dim`, or over all axes."""
        dim, keepdim = emit.numpy_words(dim, keepdim, others, also=("ddof", "unbiased"))
        return rows.var(self, dim, emit.correction_of(self, correction, others), keepdim)

    def std(self, dim: Any = None, correction: Optional[Number] = None, keepdim: bool = False, **others: Any) -> Value:
        """The standard deviation over `dim`, or over all axes."""
        dim, keepdim = emit.numpy_words(dim, keepdim, others, also=("ddof", "unbiased"))
        return rows.std(self, dim, emit.correction_of(self, correction, others), keepdim)

    def max(self, dim: Any = None, keepdim: bool = False, **others: Any) -> Any:
        """All of it, or along an axis: with torch the pair `(values, indices)`, with NumPy the values."""
        dim, keepdim = emit.numpy_words(dim, keepdim, others)
        if isinstance(dim, Value):
            return elementwise.maximum(self, dim)
        if dim is None or self._trace.framework == "numpy":
            return rows.amax(self, dim, keepdim)
        return Extremes(*rows.largest(self, dim, keepdim))

    def min(self, dim: Any = None, keepdim: bool = False, **others: Any) -> Any:
        """All of it, or along an axis: with torch the pair `(values, indices)`, with NumPy the values."""
        dim, keepdim = emit.numpy_words(dim, keepdim, others)
        if isinstance(dim, Value):
            return elementwise.minimum(self, dim)
        if dim is None or self._trace.framework == "numpy":
            return rows.amin(self, dim, keepdim)
        values, indices = rows.largest(-self, dim, keepdim)
        return Extremes(-values, indices)

    def amax(self, dim: Any = None, keepdim: bool = False) -> Value:
        """The largest element over `dim`."""
        return rows.amax(self, dim, keepdim)

    def amin(self, dim: Any = None, keepdim: bool = False) -> Value:
        """The smallest element over `dim`."""
        return rows.amin(self, dim, keepdim)

    def argmax(self, dim: Optional[int] = None, keepdim: bool = False, **others: Any) -> Value:
        """The index of the largest element along `dim`."""
        return rows.argmax(self, *emit.numpy_words(dim, keepdim, others))

    # Dtypes.

    @property
    def device(self) -> Any:
        """That of the operands."""
        if self._trace.device is None:
            raise Unsupported("device: a traced value has one only with torch tensors")
        return self._trace.device

    def to(self, *words: Any, **others: Any) -> Value:
        """To a dtype, or to that of another value. A device must be that of the operands."""
        target = others.pop("dtype", None)
        for word in words:
            if isinstance(word, Value):
                target = word.dtype
            elif not emit.is_device(self, word):
                target = word
        emit.same_device(self, others, "to")
        return self if target is None else elementwise.converted(self, target)

    def astype(self, dtype: Any) -> Value:
        """A copy in another dtype."""
        return elementwise.converted(self, dtype)

    def type_as(self, other: Value) -> Value:
        """A copy in the dtype of `other`."""
        return elementwise.converted(self, other.dtype)

    float, half, bfloat16, bool = _cast("f32"), _cast("f16"), _cast("bf16"), _cast("bool")

    # Views.

    def reshape(self, *shape: Any) -> Value:
        """The same elements in another shape; one size may be -1."""
        return views.reshape(self, emit.sizes_of(shape))

    def view(self, *shape: Any) -> Value:
        """The same elements in another shape; one size may be -1."""
        return views.reshape(self, emit.sizes_of(shape))

    def reshape_as(self, other: Value) -> Value:
        """The same elements in the shape of `other`."""
        return views.reshape(self, other.shape)

    view_as = reshape_as

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Value:
        """The axes from `start_dim` to `end_dim` as one."""
        start, end = emit.axis_of(self, start_dim, "flatten"), emit.axis_of(self, end_dim, "flatten")
        return views.reshape(self, (*self.shape[:start], elements(self.shape[start : end + 1]), *self.shape[end + 1 :]))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Value:
        """The axis `dim` as several, of these sizes."""
        axis = emit.axis_of(self, dim, "unflatten")
        apart = emit.full_shape(self.shape[axis], sizes, "unflatten")
        return views.reshape(self, (*self.shape[:axis], *apart, *self.shape[axis + 1 :]))

    def ravel(self) -> Value:
        """All axes as one."""
        return views.reshape(self, [-1])

    def new_full(self, size: Any, fill_value: Number, dtype: Any = None, **others: Any) -> Value:
        """`fill_value` in this shape, in the dtype of `x` unless one is given."""
        emit.same_device(self, others, "new_full")
        sizes = (size,) if isinstance(size, int) else tuple(size)
        return elementwise.full(sizes, fill_value, self.dtype if dtype is None else dtype, like=self)

    def new_zeros(self, *size: Any, dtype: Any = None, **others: Any) -> Value:
        """Zeros of this shape, in the dtype of `x` unless one is given."""
        return self.new_full(emit.sizes_of(size), 0.0, dtype, **others)

    def new_ones(self, *size: Any, dtype: Any = None, **others: Any) -> Value:
        """Ones of this shape, in the dtype of `x` unless one is given."""
        return self.new_full(emit.sizes_of(size), 1.0, dtype, **others)

    def unsqueeze(self, dim: int) -> Value:
        """A view with an axis of size 1 at `dim`."""
        axis = dim if dim >= 0 else dim + self.ndim + 1
        if not 0 <= axis <= self.ndim:
            raise ValueError(f"unsqueeze: expected an axis from {-self.ndim - 1} to {self.ndim}, got {dim}")
        return views.reshape(self, (*self.shape[:axis], 1, *self.shape[axis:]))

    def squeeze(self, dim: Any = None) -> Value:
        """A view without axes of size 1: all, or those named."""
        if isinstance(dim, (tuple, list)) and not dim:
            return self
        axes = range(self.ndim) if dim is None else emit.axes_of(self, dim, "squeeze")
        return views.reshape(self, [size for axis, size in enumerate(self.shape) if size != 1 or axis not in axes])

    def transpose(self, *axes: Any) -> Value:
        """Two axes swapped; with none all turned round, and with all of them, or a tuple, permuted, as NumPy has it."""
        order = emit.sizes_of(axes)
        if len(order) == 2 and not isinstance(axes[0], (tuple, list)):
            first, second = (emit.axis_of(self, axis, "transpose") for axis in order)
            swapped = list(range(self.ndim))
            swapped[first], swapped[second] = second, first
            return views.permute(self, swapped)
        return views.permute(self, order or range(self.ndim)[::-1])

    swapaxes = transpose

    def permute(self, *axes: Any) -> Value:
        """A view with the axes in this order."""
        return views.permute(self, emit.sizes_of(axes))

    def t(self) -> Value:
        """The transpose of a matrix; a vector stays as it is."""
        return views.permute(self, range(self.ndim)[::-1])

    @property
    def T(self) -> Value:
        """A view with all axes in reverse order."""
        return self.t()

    @property
    def mT(self) -> Value:
        """A view with the last two axes swapped."""
        return self.transpose(-2, -1)

    def expand(self, *shape: Any) -> Value:
        """A view that repeats axes of size 1."""
        sizes = emit.sizes_of(shape)
        missing = len(sizes) - self.ndim
        known = [self.shape[i - missing] if size == -1 and i >= missing else size for i, size in enumerate(sizes)]
        return views.broadcast(self, known)

    def expand_as(self, other: Value) -> Value:
        """A view that repeats axes of size 1 to the shape of `other`."""
        return views.broadcast(self, other.shape)

    broadcast_to = expand

    def narrow(self, dim: int, start: int, length: int) -> Value:
        """A view of `length` elements from `start` along `dim`."""
        return views.cut(self, emit.axis_of(self, dim, "narrow"), start, length)

    def select(self, dim: int, index: int) -> Value:
        """A view of element `index` along `dim`, without that axis."""
        axis = emit.axis_of(self, dim, "select")
        return self[(slice(None),) * axis + (index,)]

    def split(self, split_size: Union[int, Sequence[int]], dim: int = 0) -> Tuple[Value, ...]:
        """Views along `dim` of this size or of these sizes."""
        axis = emit.axis_of(self, dim, "split")
        if isinstance(split_size, int):
            whole = self.shape[axis]
            sizes = [min(split_size, whole - start) for start in range(0, whole, max(split_size, 1))]
        else:
            sizes = list(split_size)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(views.cut(self, axis, start, size) for start, size in zip(starts, sizes))

    def chunk(self, chunks: int, dim: int = 0) -> Tuple[Value, ...]:
        """Views along `dim`: this number of equal parts."""
        return self.split(-(-self.shape[emit.axis_of(self, dim, "chunk")] // chunks), dim)

    def unbind(self, dim: int = 0) -> Tuple[Value, ...]:
        """A view of each element along `dim`."""
        axis = emit.axis_of(self, dim, "unbind")
        return tuple(self.select(axis, index) for index in range(self.shape[axis]))

    def contiguous(self) -> Value:
        """Itself; an operand may lie otherwise, so of one it is a copy."""
        return views.copy(self) if self._node.op == "input" else self

    def clone(self) -> Value:
        """A copy."""
        return views.copy(self)

    def copy(self) -> Value:
        """A copy."""
        return views.copy(self)

    def detach(self) -> Value:
        """The same value, without a gradient."""
        return elementwise.stop_gradient(self)

    def __getitem__(self, index: Any) -> Value:
        return views.item(self, index)

    # Functions of torch and NumPy.

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        from deuteron.trace.tables import torch_call

        return torch_call(function, arguments, keywords or {})

    def __array_ufunc__(self, function: Any, method: str, *arguments: Any, **keywords: Any) -> Any:
        from deuteron.trace.tables import numpy_ufunc

        return numpy_ufunc(function, method, arguments, keywords)

    def __array_function__(self, function: Any, _types: Any, arguments: Any, keywords: Any) -> Any:
        from deuteron.trace.tables import numpy_call

        return numpy_call(function, arguments, keywords)



def framework_dtype(trace: Trace, word: str, is_long: bool = False) -> Any:
    """A dtype as torch or NumPy has it, where the trace is of their tensors."""
    name = "float64" if trace.doubles and word in FLOATS else "int64" if is_long else dtype_name(word)
    if trace.framework == "torch":
        import torch

        return getattr(torch, name)
    if trace.framework == "numpy" and word not in ("bf16", "f8e4m3"):
        import numpy

        return numpy.dtype(name)
    return word


# The functions need the class above, and its methods need them.
from deuteron.trace import elementwise, emit, named, rows, views  # noqa: E402
