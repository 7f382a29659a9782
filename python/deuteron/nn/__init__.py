"""Modules of the fused operations, with the parameters of the torch modules that they replace.

Each computes the formula of its docstring in one or a few kernels, with gradients. Weights of linear layers are
`[out, in]` as in `torch.nn.Linear`, so state dicts are compatible. `from_torch` builds a module from those that it replaces, and
shares their parameters. Under autocast matmuls and attention take its dtype, as torch's do; norms keep the dtype of their rows, where torch's give float32.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple, TypeVar, Union

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise ImportError("deuteron.nn needs torch: pip install torch") from error

from .. import functions
from . import functional as functional
from .._operands import Activation
from .._torch import rms_epsilon
from .._types import Mask

Module = TypeVar("Module", bound=nn.Module)

__all__ = [
    "AddLayerNorm",
    "BiasDropoutAdd",
    "DropoutAddLayerNorm",
    "EmbeddingNorm",
    "FFN",
    "FusedAttention",
    "FusedAttentionBlock",
    "GEGLU",
    "LayerNormGELU",
    "LinearCrossEntropy",
    "QKVProjection",
    "RMSNormSiLU",
    "SwiGLU",
]


class LayerNormGELU(nn.LayerNorm):
    """`gelu(layer_norm(x))`, in place of `LayerNorm` and `GELU`. State dict: `weight`, `bias`, as of `LayerNorm`.

    `approximate` is that of `torch.nn.GELU`: `"none"` or `"tanh"`.

    >>> import torch, deuteron
    >>> layer = deuteron.nn.LayerNormGELU(16)
    >>> layer(torch.randn(4, 16)).shape
    torch.Size([4, 16])
    """

    def __init__(
        self, normalized_shape: int, eps: float = 1e-5, approximate: str = "none", device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(_features(normalized_shape), eps, device=device, dtype=dtype)
        self.act = _gelu(approximate)
        self.approximate = approximate

    @classmethod
    def from_torch(cls, norm: nn.LayerNorm, gelu: Optional[nn.GELU] = None) -> LayerNormGELU:
        """From a layer norm and the GELU after it."""
        _check_norm(norm)
        approximate = gelu.approximate if gelu is not None else "none"
        module = cls(norm.normalized_shape[0], norm.eps, approximate, device="meta")
        return _sharing(module, weight=norm.weight, bias=norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = functions.norm_act(x, self.weight, self.bias, act=self.act, eps=self.eps)
        return y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, approximate={self.approximate!r}"


class RMSNormSiLU(nn.RMSNorm):
    """`silu(rms_norm(x))` over `x [.., features]`, in place of `RMSNorm` and `SiLU`. State dict: `weight`, as of `RMSNorm`.

    >>> import torch, deuteron
    >>> norm = torch.nn.RMSNorm(16)
    >>> layer = deuteron.nn.RMSNormSiLU.from_torch(norm)
    >>> x = torch.randn(4, 16)
    >>> bool(torch.allclose(layer(x), torch.nn.functional.silu(norm(x)), atol=1e-5))
    True
    """

    def __init__(
        self, normalized_shape: int, eps: Optional[float] = None, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(_features(normalized_shape), eps, device=device, dtype=dtype)

    @classmethod
    def from_torch(cls, norm: nn.RMSNorm) -> RMSNormSiLU:
        """From an RMS norm and the SiLU after it."""
        if len(norm.normalized_shape) != 1 or norm.weight is None:
            raise ValueError("expected a norm over one axis with a weight")
        return _sharing(cls(norm.normalized_shape[0], norm.eps, device="meta"), weight=norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        # Torch takes the epsilon of the dtype where none is given.
        eps = rms_epsilon(x.dtype) if self.eps is None else self.eps
        y: Tensor = functions.norm_act(x, self.weight, act="silu", eps=eps, norm="rms")
        return y


class AddLayerNorm(nn.LayerNorm):
    """`s = x + residual`, `y = layer_norm(s)` over `x, residual [.., features]`; returns `y` and `s`.

    State dict: `weight`, `bias`, as of `LayerNorm`.

    >>> import torch, deuteron
    >>> layer = deuteron.nn.AddLayerNorm(16)
    >>> x, residual = torch.randn(4, 16), torch.randn(4, 16)
    >>> y, s = layer(x, residual)
    >>> bool(torch.equal(s, x + residual)), tuple(y.shape)
    (True, (4, 16))
    """

    def __init__(self, normalized_shape: int, eps: float = 1e-5, device: Any = None, dtype: Any = None) -> None:
        super().__init__(_features(normalized_shape), eps, device=device, dtype=dtype)

    @classmethod
    def from_torch(cls, norm: nn.LayerNorm) -> AddLayerNorm:
        """From the layer norm after an addition."""
        _check_norm(norm)
        module = cls(norm.normalized_shape[0], norm.eps, device="meta")
        return _sharing(module, weight=norm.weight, bias=norm.bias)

    def forward(self, x: Tensor, residual: Tensor) -> Tuple[Tensor, Tensor]:  # type: ignore[override]
        y, s = functions.add_norm(x, residual, self.weight, self.bias, eps=self.eps)
        return y, s


class BiasDropoutAdd(nn.Module):
    """`residual + dropout(x + bias)` over `x, residual [.., features]`; nothing is dropped in `eval`.

    State dict: `bias`, that of the linear layer before it.

    >>> import torch, deuteron
    >>> layer = deuteron.nn.BiasDropoutAdd(2, p=0.5).eval()
    >>> layer(torch.ones(1, 2), torch.full((1, 2), 2.0))
    tensor([[3., 3.]], grad_fn=...)
    """

    def __init__(self, features: int, p: float = 0.1, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.p = _probability(p)
        self.bias = nn.Parameter(torch.zeros(features, device=device, dtype=dtype))

    @classmethod
    def from_torch(cls, linear: nn.Linear, dropout: nn.Dropout) -> BiasDropoutAdd:
        """From the bias of a linear layer, which is then called without it, and the dropout after it."""
        if linear.bias is None:
            raise ValueError("expected a linear layer with a bias")
        return _sharing(cls(linear.out_features, dropout.p, device="meta"), bias=linear.bias)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = functions.bias_dropout_add(x, self.bias, residual, p=self.p, training=self.training)
        return y

    def extra_repr(self) -> str:
        return f"{self.bias.shape[0]}, p={self.p}"


class DropoutAddLayerNorm(nn.LayerNorm):
    """`s = residual + dropout(x)`, `y = layer_norm(s)` over `x, residual [.., features]`; returns `y` and `s`. Nothing is dropped in `eval`.

    State dict: `weight`, `bias`, as of `LayerNorm`.

    >>> import torch, deuteron
    >>> layer = deuteron.nn.DropoutAddLayerNorm(8, p=0.5)
    >>> y, s = layer(torch.ones(1, 8), torch.zeros(1, 8))
    >>> sorted(set(s.flatten().tolist())) in ([0.0], [0.0, 2.0], [2.0])      # dropped, or scaled by 1 / (1 - p)
    True
    """

    def __init__(
        self, normalized_shape: int, p: float = 0.1, eps: float = 1e-5, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(_features(normalized_shape), eps, device=device, dtype=dtype)
        self.p = _probability(p)

    @classmethod
    def from_torch(cls, dropout: nn.Dropout, norm: nn.LayerNorm) -> DropoutAddLayerNorm:
        """From a dropout, and the layer norm after the following addition."""
        _check_norm(norm)
        module = cls(norm.normalized_shape[0], dropout.p, norm.eps, device="meta")
        return _sharing(module, weight=norm.weight, bias=norm.bias)

    def forward(self, x: Tensor, residual: Tensor) -> Tuple[Tensor, Tensor]:  # type: ignore[override]
        if not self.training or self.p == 0.0:
            y, s = functions.add_norm(x, residual, self.weight, self.bias, eps=self.eps)
            return y, s
        no_bias = x.new_zeros(x.shape[-1])
        y, s = functions.dropout_add_norm(x, no_bias, residual, self.weight, self.bias, p=self.p, eps=self.eps)
        return y, s

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"


class SwiGLU(nn.Module):
    """`silu(x) * gate` over `x, gate [.., features]`, or over the halves of one tensor `[.., 2 * features]`. It has no parameters.

    >>> import torch, deuteron
    >>> x, gate = torch.randn(4, 8), torch.randn(4, 8)
    >>> both = torch.cat([x, gate], dim=-1)
    >>> layer = deuteron.nn.SwiGLU()
    >>> bool(torch.equal(layer(x, gate), layer(both)))
    True
    """

    def forward(self, x: Tensor, gate: Optional[Tensor] = None) -> Tensor:
        y: Tensor = functions.swiglu(x, gate)
        return y


class GEGLU(nn.Module):
    """`gelu(x) * gate` over `x, gate [.., features]`, or over the halves of one tensor `[.., 2 * features]`. It has no parameters.

    `approximate` is that of `torch.nn.GELU`: `"none"` or `"tanh"`.

    >>> import torch, deuteron
    >>> layer = deuteron.nn.GEGLU(approximate="tanh")
    >>> tuple(layer(torch.randn(4, 16)).shape)
    (4, 8)
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.act = _gelu(approximate)
        self.approximate = approximate

    def forward(self, x: Tensor, gate: Optional[Tensor] = None) -> Tensor:
        y: Tensor = functions.geglu(x, gate, act=self.act)
        return y

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class QKVProjection(nn.Linear):
    """Queries, keys and values of `x [batch, sequence, in]` in one product.

    Each is `[batch, heads, sequence, features]`, and a view of the product.
    State dict: `weight`, `bias`, as of the `Linear` whose rows are the heads of queries, then of keys, then of values.

    >>> import torch, deuteron
    >>> layer = deuteron.nn.QKVProjection(16, num_heads=4, num_key_heads=2)
    >>> q, k, v = layer(torch.randn(2, 5, 16))
    >>> tuple(q.shape), tuple(k.shape), tuple(v.shape)
    ((2, 4, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_key_heads: Optional[int] = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        key_heads = num_heads if num_key_heads is None else num_key_heads
        if num_heads < 1 or embed_dim % num_heads or key_heads < 1 or num_heads % key_heads:
            raise ValueError(f"expected heads that divide {embed_dim}, and key heads that divide those")
        features = embed_dim // num_heads
        super().__init__(embed_dim, (num_heads + 2 * key_heads) * features, device=device, dtype=dtype)
        self.num_heads, self.num_key_heads = num_heads, key_heads

    @classmethod
    def from_torch(cls, linear: nn.Linear, num_heads: int, num_key_heads: Optional[int] = None) -> QKVProjection:
        """From one linear layer for all three."""
        if linear.bias is None:
            raise ValueError("expected a linear layer with a bias")
        module = cls(linear.in_features, num_heads, num_key_heads, device="meta")
        if module.weight.shape != linear.weight.shape:
            raise ValueError(f"expected a weight {list(module.weight.shape)}, got {list(linear.weight.shape)}")
        return _sharing(module, weight=linear.weight, bias=linear.bias)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v = functions.qkv(x, self.weight.t(), self.bias, self.num_heads, self.num_key_heads)
        return q, k, v

    def extra_repr(self) -> str:
        return f"{self.in_features}, num_heads={self.num_heads}, num_key_heads={self.num_key_heads}"


class FusedAttention(nn.Module):
    """`dropout(softmax(scale q k^T + mask)) v` over `[batch, heads, sequence, features]`; the scale is `1 / sqrt(features)` by default.

    It has no parameters. Keys and values may have fewer heads, each shared by several query heads. A mask is of truth
    values (true: attend) or of floats that are added to the scores; with a mask, `causal` must be off. Causal is as in torch:
    query `i` sees the keys up to `i`; with `from_end` the last query sees all keys.

    >>> import torch, deuteron
    >>> layer = deuteron.nn.FusedAttention(causal=True)
    >>> q, k, v = (torch.randn(2, 4, 5, 16) for _ in range(3))
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> bool(torch.allclose(layer(q, k, v), expected, atol=1e-5))
    True
    """

    def __init__(
        self, causal: bool = True, p: float = 0.0, scale: Optional[float] = None, from_end: bool = False
    ) -> None:
        super().__init__()
        if from_end and not causal:
            raise ValueError("FusedAttention: expected from_end only where attention is causal")
        self.causal, self.from_end = causal, from_end
        self.p = _probability(p)
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        if mask is not None and self.causal:
            raise ValueError("FusedAttention: expected no mask where attention is causal")
        seen: Mask[Tensor] = mask
        if mask is None:
            seen = ("causal_from_end" if self.from_end else "causal") if self.causal else "full"
        y: Tensor = functions.attention(q, k, v, mask=seen, p=self.p, training=self.training, scale=self.scale)
        return y

    def extra_repr(self) -> str:
        return f"causal={self.causal}, p={self.p}, scale={self.scale}, from_end={self.from_end}"


class FusedAttentionBlock(nn.Module):
    """`s = residual + attention(x) W + b`, `y = layer_norm(s)`; returns `y` and `s`.

    This is the attention sublayer and the norm after it. `x` and `residual` are `[batch, sequence, embed_dim]`.
    State dict: `in_proj_weight`, `in_proj_bias`, `out_proj.weight` and `out_proj.bias` as of `MultiheadAttention`, then
    `norm.weight` and `norm.bias`.

    >>> import torch, deuteron
    >>> layer = deuteron.nn.FusedAttentionBlock(16, num_heads=4)
    >>> y, s = layer(torch.randn(2, 5, 16))
    >>> tuple(y.shape), tuple(s.shape)
    ((2, 5, 16), (2, 5, 16))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        causal: bool = True,
        eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"expected heads that divide {embed_dim}, got {num_heads}")
        self.embed_dim, self.num_heads, self.causal = embed_dim, num_heads, causal
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, device=device, dtype=dtype))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim, device=device, dtype=dtype))
        self.out_proj = nn.Linear(embed_dim, embed_dim, device=device, dtype=dtype)
        self.norm = nn.LayerNorm(embed_dim, eps, device=device, dtype=dtype)
        # As `MultiheadAttention` begins.
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    @classmethod
    def from_torch(
        cls, attention: nn.MultiheadAttention, norm: nn.LayerNorm, causal: bool = True
    ) -> FusedAttentionBlock:
        """From an attention without dropout, and the norm after the following addition."""
        _check_norm(norm)
        plain = attention.in_proj_weight is not None and attention.in_proj_bias is not None
        if not plain or attention.bias_k is not None or attention.add_zero_attn or attention.dropout:
            raise ValueError("expected attention of one size, with biases, without dropout, added keys and zeros")
        module = cls(attention.embed_dim, attention.num_heads, causal, norm.eps, device="meta")
        _sharing(module.out_proj, weight=attention.out_proj.weight, bias=attention.out_proj.bias)
        _sharing(module.norm, weight=norm.weight, bias=norm.bias)
        return _sharing(module, in_proj_weight=attention.in_proj_weight, in_proj_bias=attention.in_proj_bias)

    def forward(self, x: Tensor, residual: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        """`residual` is `x` if there is none."""
        q, k, v = functions.qkv(x, self.in_proj_weight.t(), self.in_proj_bias, self.num_heads, self.num_heads)
        y, s = functions.attention_block(
            q,
            k,
            v,
            self.out_proj.weight.t(),
            self.out_proj.bias,
            x if residual is None else residual,
            self.norm.weight,
            self.norm.bias,
            mask="causal" if self.causal else "full",
            eps=self.norm.eps,
        )
        return y, s

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, causal={self.causal}"


class FFN(nn.Module):
    """`x + act(layer_norm(x) W1 + b1) W2 + b2` over `x [.., embed_dim]`: the feed-forward sublayer.

    `act` is `gelu` (by `erf`, as torch's), `gelu_tanh`, `silu` or `relu`.
    State dict: `norm`, `linear1` and `linear2`, each with `weight` and `bias`, as of `LayerNorm` and `Linear`.

    >>> import torch, deuteron
    >>> layer = deuteron.nn.FFN(16, hidden_dim=32, act="gelu_tanh")
    >>> tuple(layer(torch.randn(2, 5, 16)).shape)
    (2, 5, 16)
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: Optional[int] = None,
        act: Activation = "gelu",
        eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        hidden = 4 * embed_dim if hidden_dim is None else hidden_dim
        if act not in ("gelu", "gelu_tanh", "silu", "relu"):
            raise ValueError(f"expected gelu, gelu_tanh, silu or relu, got {act!r}")
        self.act = act
        self.norm = nn.LayerNorm(embed_dim, eps, device=device, dtype=dtype)
        self.linear1 = nn.Linear(embed_dim, hidden, device=device, dtype=dtype)
        self.linear2 = nn.Linear(hidden, embed_dim, device=device, dtype=dtype)

    @classmethod
    def from_torch(cls, norm: nn.LayerNorm, linear1: nn.Linear, act: nn.Module, linear2: nn.Linear) -> FFN:
        """From the four modules of a feed-forward sublayer whose input is added to its result."""
        _check_norm(norm)
        if linear1.bias is None or linear2.bias is None:
            raise ValueError("expected linear layers with biases")
        module = cls(linear1.in_features, linear1.out_features, _activation(act), norm.eps, device="meta")
        module.norm, module.linear1, module.linear2 = norm, linear1, linear2
        return module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = functions.ffn(
            x,
            self.linear1.weight.t(),
            self.linear1.bias,
            self.linear2.weight.t(),
            self.linear2.bias,
            w=self.norm.weight,
            b=self.norm.bias,
            act=self.act,
            eps=self.norm.eps,
        )
        return y

    def extra_repr(self) -> str:
        return f"act={self.act!r}"


class EmbeddingNorm(nn.Module):
    """`s = wte[tokens] + wpe[position]`, `y = layer_norm(s)`; returns `y` and `s`, both `[.., positions, embedding_dim]`.

    `tokens [.., positions]` are integers; positions count from 0 along the last axis.
    State dict: `wte.weight`, `wpe.weight`, as of `Embedding`, then `norm.weight` and `norm.bias`.

    >>> import torch, deuteron
    >>> layer = deuteron.nn.EmbeddingNorm(num_embeddings=100, num_positions=8, embedding_dim=16)
    >>> y, s = layer(torch.tensor([[3, 1, 4]]))
    >>> tuple(y.shape), tuple(s.shape)
    ((1, 3, 16), (1, 3, 16))
    """

    def __init__(
        self,
        num_embeddings: int,
        num_positions: int,
        embedding_dim: int,
        eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(num_embeddings, embedding_dim, device=device, dtype=dtype)
        self.wpe = nn.Embedding(num_positions, embedding_dim, device=device, dtype=dtype)
        self.norm = nn.LayerNorm(embedding_dim, eps, device=device, dtype=dtype)

    @classmethod
    def from_torch(cls, wte: nn.Embedding, wpe: nn.Embedding, norm: nn.LayerNorm) -> EmbeddingNorm:
        """From two embeddings and the norm of their sum."""
        _check_norm(norm)
        if any(e.padding_idx is not None or e.max_norm is not None or e.sparse for e in (wte, wpe)):
            raise ValueError("expected embeddings without padding, largest norm and sparse gradients")
        module = cls(wte.num_embeddings, wpe.num_embeddings, wte.embedding_dim, norm.eps, device="meta")
        module.wte, module.wpe, module.norm = wte, wpe, norm
        return module

    def forward(self, tokens: Tensor) -> Tuple[Tensor, Tensor]:
        tokens = tokens.to(torch.int32)
        weights = (self.wte.weight, self.wpe.weight, self.norm.weight, self.norm.bias)
        y, s = functions.embed_norm(tokens, *weights, eps=self.norm.eps)
        return y, s


class LinearCrossEntropy(nn.Module):
    """The mean cross entropy of `x W^T`, without storing all logits.

    It replaces a head `Linear(bias=False)` and `CrossEntropyLoss`. `x` is `[.., in]`, `targets` `[..]`. Rows whose
    target is `ignore_index` are left out. `label_smoothing` and `z_loss` are those of `deuteron.linear_cross_entropy`.
    State dict: `weight`, as of `Linear`.

    >>> import torch, deuteron
    >>> head = torch.nn.Linear(16, 100, bias=False)
    >>> layer = deuteron.nn.LinearCrossEntropy.from_torch(head)
    >>> x, targets = torch.randn(2, 5, 16), torch.randint(0, 100, (2, 5))
    >>> expected = torch.nn.functional.cross_entropy(head(x).reshape(-1, 100), targets.reshape(-1))
    >>> bool(torch.allclose(layer(x, targets), expected, atol=1e-5))
    True
    """

    def __init__(
        self,
        in_features: int,
        classes: int,
        ignore_index: Optional[int] = None,
        device: Any = None,
        dtype: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.weight = nn.Parameter(torch.empty(classes, in_features, device=device, dtype=dtype))
        # As `Linear` begins.
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    @classmethod
    def from_torch(
        cls, linear: nn.Linear, ignore_index: Optional[int] = None, label_smoothing: float = 0.0, z_loss: float = 0.0
    ) -> LinearCrossEntropy:
        """From the head that computes logits."""
        if linear.bias is not None:
            raise ValueError("expected a linear layer without a bias")
        options: Any = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        module = cls(linear.in_features, linear.out_features, ignore_index, device="meta", **options)
        return _sharing(module, weight=linear.weight)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        words: Any = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        loss: Tensor = functions.linear_cross_entropy(x, self.weight, targets.to(torch.int32), **words)
        return loss

    def extra_repr(self) -> str:
        classes, features = self.weight.shape
        return f"{features}, {classes}, ignore_index={self.ignore_index}"


def _features(size: Any) -> int:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    if len(sizes) != 1:
        raise ValueError(f"expected one axis to norm over, got {sizes}")
    return int(sizes[0])


def _probability(p: float) -> float:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"expected a probability in [0, 1), got {p}")
    return float(p)


def _gelu(approximate: str) -> Activation:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"expected approximate 'none' or 'tanh', got {approximate!r}")
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def _activation(module: nn.Module) -> Activation:
    if isinstance(module, nn.GELU):
        return _gelu(module.approximate)
    if isinstance(module, (nn.SiLU, nn.ReLU)):
        return "silu" if isinstance(module, nn.SiLU) else "relu"
    raise ValueError(f"expected GELU, SiLU or ReLU, got {type(module).__name__}")


def _check_norm(norm: nn.LayerNorm) -> None:
    if len(norm.normalized_shape) != 1 or norm.weight is None or norm.bias is None:
        raise ValueError("expected a norm over one axis, with weight and bias")


def _sharing(module: Module, **parameters: Tensor) -> Module:
    """The module with parameters of others as its own."""
    for name, parameter in parameters.items():
        setattr(module, name, parameter)
    return module
