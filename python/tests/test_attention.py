"""Attention, norms and activations have torch's meaning of masks, alignment, scale, shared heads, norm kind and GELU."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Tuple

import pytest

torch = pytest.importorskip("torch")

import deuteron  # noqa: E402

F = torch.nn.functional
EPS = 2.0**-23
ours = deuteron.nn.functional.scaled_dot_product_attention
theirs = F.scaled_dot_product_attention


def bound(exact: Any, terms: int, dtype: Any) -> float:
    """Sums of so many terms of size one in f32, and operands and results that are rounded to their dtype."""
    return (8 * EPS * math.sqrt(terms) + 4 * torch.finfo(dtype).eps) * max(float(exact.abs().max()), 1.0)


def same(got: Any, exact: Any, terms: int = 64) -> None:
    assert got.shape == exact.shape
    assert float((got.double() - exact.double()).abs().max()) <= bound(exact, terms, got.dtype)


def heads(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape).to(dtype)


# Masks.


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (2, 1, 5, 7), (2, 4, 5, 7), (1, 4, 5, 7), (4, 5, 7)])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_truths_and_floats(shape: Tuple[int, ...], key_heads: int, kind: str) -> None:
    q, k, v = heads(2, 4, 5, 8), heads(2, key_heads, 7, 8), heads(2, key_heads, 7, 6)
    mask = torch.rand(shape) > 0.4 if kind == "bool" else torch.randn(shape)
    if kind == "bool":
        mask[..., 0] = True
    exact_mask = mask if kind == "bool" else mask.double()
    exact = theirs(q.double(), k.double(), v.double(), exact_mask, enable_gqa=True)
    same(deuteron.attention(q, k, v, mask=mask), exact)
    same(ours(q, k, v, mask, enable_gqa=True), exact)
    same(deuteron.nn.FusedAttention(causal=False)(q, k, v, mask), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_mask_of_truths_in_every_dtype_with_gradients(dtype: Any) -> None:
    data = [heads(2, 2, 5, 8, dtype=dtype) for _ in range(3)]
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[3, :3] = False
    mine, other = ([x.to(kind).clone().requires_grad_() for x in data] for kind in (dtype, torch.float64))
    got, exact = deuteron.attention(*mine, mask=mask), theirs(*other, mask)
    same(got, exact)
    got.double().square().sum().backward()
    exact.square().sum().backward()
    for one, two in zip(mine, other):
        same(one.grad, two.grad, 512)


def test_scores_and_softmax_take_truths() -> None:
    q, k = heads(2, 5, 8), heads(2, 7, 8)
    mask = torch.rand(5, 7) > 0.4
    mask[:, 2] = True
    scores = (q.double() @ k.double().mT) * 8**-0.5
    exact = scores.masked_fill(~mask, -math.inf).softmax(-1)
    same(deuteron.attention_scores(q, k, mask), exact)
    same(deuteron.softmax(scores.float(), mask=mask), exact)
    same(torch.from_numpy(deuteron.softmax(scores.float().numpy(), mask=mask.numpy())), exact)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8])
def test_masks_of_whole_numbers_are_refused(dtype: Any) -> None:
    q, mask = heads(1, 2, 5, 8), torch.ones(5, 5, dtype=dtype)
    calls: Dict[str, Callable[[Any], Any]] = {
        "attention": lambda mask: deuteron.attention(q, q, q, mask=mask),
        "attention_scores": lambda mask: deuteron.attention_scores(q, q, mask),
        "softmax": lambda mask: deuteron.softmax(q @ q.mT, mask=mask),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"^{name}: `mask`: expected truth values .true: attend. or floats"):
            call(mask)
        with pytest.raises(TypeError, match=f"^{name}: `mask`"):
            deuteron.fuse(lambda mask, q, call=call: call(mask))(mask.to(torch.int32), q) if dtype is torch.int32 else call(
                mask.numpy()
            )
    with pytest.raises(ValueError, match="expected a float mask"):
        text = "q = input f32[1,2,5,8]\nm = input bool[5,5]\ny = attention q q q m mask=additive\nout y\n"
        deuteron.Program(text)(q, torch.ones(5, 5, dtype=torch.bool))


def test_a_query_that_sees_no_key_gives_zeros() -> None:
    q = heads(1, 1, 3, 4)
    mask = torch.tensor([[True, True, True], [False] * 3, [True, False, False]])
    got = deuteron.attention(q, q, q, mask=mask)
    assert torch.equal(got[0, 0, 1], torch.zeros(4)) and torch.equal(got[0, 0, 2], q[0, 0, 0])


def test_masks_in_a_trace() -> None:
    q, mask = heads(1, 2, 5, 8), torch.ones(5, 5, dtype=torch.bool).tril()
    fused = deuteron.fuse(lambda q, mask: deuteron.attention(q, q, q, mask=mask))
    same(fused(q, mask), theirs(q.double(), q.double(), q.double(), is_causal=True))


# Alignment.


@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 7), (7, 3), (1, 6), (6, 1)])
@pytest.mark.parametrize("key_heads", [2, 1])
def test_causal_counts_from_the_first_as_torch_does(queries: int, keys: int, key_heads: int) -> None:
    q, k, v = heads(2, 2, queries, 8), heads(2, key_heads, keys, 8), heads(2, key_heads, keys, 8)
    exact = theirs(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
    same(deuteron.attention(q, k, v), exact)
    same(deuteron.attention(q, k, v, mask="causal"), exact)
    same(ours(q, k, v, is_causal=True, enable_gqa=True), exact)
    same(deuteron.nn.FusedAttention()(q, k, v), exact)
    arrays = [x.numpy() for x in (q, k, v)]
    same(torch.from_numpy(deuteron.attention(*arrays)), exact)
    same(deuteron.fuse(lambda q, k, v: deuteron.attention(q, k, v))(q, k, v), exact)
    triangle = torch.ones(queries, keys, dtype=torch.bool).tril()
    scores = ((q.double() @ k.double().repeat_interleave(2 // key_heads, 1).mT) * 8**-0.5).masked_fill(~triangle, -math.inf)
    if key_heads == 2:
        same(deuteron.attention_scores(q, k), scores.softmax(-1))
    same(deuteron.softmax(scores.float(), mask="causal"), scores.softmax(-1))


@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 7), (1, 6)])
def test_causal_from_the_end_is_an_option(queries: int, keys: int) -> None:
    q, k, v = heads(2, 2, queries, 8), heads(2, 2, keys, 8), heads(2, 2, keys, 8)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    exact = theirs(q.double(), k.double(), v.double(), seen)
    same(deuteron.attention(q, k, v, mask="causal_from_end"), exact)
    same(ours(q, k, v, is_causal=True, causal_from_end=True), exact)
    same(deuteron.nn.FusedAttention(from_end=True)(q, k, v), exact)


def test_gradients_of_keys_that_no_query_sees_are_zero() -> None:
    data = [heads(1, 2, 3, 8), heads(1, 2, 7, 8), heads(1, 2, 7, 8)]
    mine, other = ([x.to(kind).clone().requires_grad_() for x in data] for kind in (torch.float32, torch.float64))
    deuteron.attention(*mine).square().sum().backward()
    theirs(*other, is_causal=True).square().sum().backward()
    for one, two in zip(mine, other):
        same(one.grad, two.grad, 256)
    assert torch.equal(mine[1].grad[:, :, 3:], torch.zeros(1, 2, 4, 8))


# The signature of torch.


@pytest.mark.parametrize("scale", [None, 0.25, 1.0])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
def test_scale_and_leading_axes(scale: Any, lead: Tuple[int, ...]) -> None:
    q, k, v = heads(*lead, 5, 8), heads(*lead, 7, 8), heads(*lead, 7, 6)
    same(ours(q, k, v, scale=scale), theirs(q.double(), k.double(), v.double(), scale=scale))


@pytest.mark.parametrize("lead", [(4,), (2, 4), (3, 2, 4)])
def test_shared_heads(lead: Tuple[int, ...]) -> None:
    q, k, v = heads(*lead, 5, 8), heads(*lead[:-1], 2, 7, 8), heads(*lead[:-1], 2, 7, 8)
    same(ours(q, k, v, enable_gqa=True), theirs(q.double(), k.double(), v.double(), enable_gqa=True))
    with pytest.raises(ValueError, match="enable_gqa=True"):
        ours(q, k, v)


def test_keys_repeat_over_batches() -> None:
    q, k = heads(3, 2, 5, 8), heads(1, 1, 7, 8)
    same(ours(q, k, k), theirs(q.double(), k.double(), k.double()))


def test_what_torch_refuses_is_refused() -> None:
    q = heads(1, 2, 5, 8)
    with pytest.raises(ValueError, match="attn_mask or is_causal"):
        ours(q, q, q, torch.ones(5, 5, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match="causal_from_end only with is_causal"):
        ours(q, q, q, causal_from_end=True)


def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(1)
    q, v = torch.zeros(1, 64, 64, 8), torch.ones(1, 64, 64, 8)
    dropped = ours(q, q, v, dropout_p=0.25)
    # A mean of 64 x 64 sums of 64 terms that are 4/3 or 0.
    assert abs(float(dropped.mean()) - 1) <= 5 * math.sqrt(1 / 3 / 64**3) and not torch.equal(dropped, ours(q, q, v))


# Norms and activations.


@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_without_a_bias_is_no_rms_norm(bias: bool) -> None:
    x, r, norm = heads(6, 32), heads(6, 32), torch.nn.LayerNorm(32, bias=bias)
    torch.nn.init.normal_(norm.weight)
    exact = norm.double()((x + r).double()).float()
    norm.float()
    same(deuteron.add_norm(x, r, norm.weight, norm.bias)[0], exact)
    same(deuteron.layer_norm(x + r, norm.weight, norm.bias), exact)
    same(deuteron.norm_act(x + r, norm.weight, norm.bias, act="relu"), exact.relu())
    fused = deuteron.fuse(lambda x, r, w: deuteron.add_norm(x, r, w)[0])
    if not bias:
        same(fused(x, r, norm.weight), exact)
        y, _ = deuteron.add_norm(x, r, norm.weight)
        (gradient,) = torch.autograd.grad(y.square().sum(), norm.weight)
        (expected,) = torch.autograd.grad(norm(x + r).square().sum(), norm.weight)
        same(gradient, expected, 256)


def test_an_rms_norm_is_asked_for() -> None:
    x, r, w = heads(6, 32), heads(6, 32), heads(32)
    exact = F.rms_norm((x + r).double(), (32,), w.double(), 1e-5)
    same(deuteron.add_norm(x, r, w, norm="rms")[0], exact)
    same(deuteron.norm_act(x + r, w, act="silu", norm="rms"), F.silu(exact))


def test_the_usual_gelu_is_that_of_torch() -> None:
    x, w, b, zeros = heads(64, 32) * 3, torch.ones(32), torch.zeros(32), torch.zeros(64, 32)
    exact = F.gelu(x.double())
    assert not torch.allclose(exact, F.gelu(x.double(), approximate="tanh"), atol=1e-5)
    eye = torch.eye(32)
    for got in (deuteron.act(x), deuteron.add_act(x, zeros), deuteron.bias_act(x, b), deuteron.linear_act(x, eye, b)):
        same(got, exact)
    same(deuteron.geglu(x, torch.ones(64, 32)), exact)
    same(deuteron.norm_act(x, w, b), deuteron.nn.LayerNormGELU(32)(x))
    same(deuteron.act(x, act="gelu_tanh"), F.gelu(x.double(), approximate="tanh"))


# Work on scores.


def worked(q: Any, k: Any, v: Any, causal: bool = True, **options: Any) -> Any:
    """The formula in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    group, (m, n) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) / q.shape[-1] ** 0.5
    distance = torch.arange(n) - (torch.arange(m) + n - m).unsqueeze(1)
    if "soft_cap" in options:
        scores = options["soft_cap"] * torch.tanh(scores / options["soft_cap"])
    if "slopes" in options:
        scores = scores + options["slopes"].double().reshape(-1, 1, 1) * distance
    if "bias" in options:
        scores = scores + options["bias"].double()
    hidden = (distance > 0) if causal else torch.zeros(m, n, dtype=torch.bool)
    if "window" in options:
        hidden = hidden | (distance.abs() >= options["window"])
    if "documents" in options:
        documents = options["documents"].expand(q.shape[0], n).reshape(-1, 1, 1, n)
        hidden = hidden | (documents[..., n - m :].transpose(-1, -2) != documents)
    return torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v.repeat_interleave(group, 1)


SCORE_OPTIONS: Dict[str, Callable[[], Dict[str, Any]]] = {
    "soft_cap": lambda: {"soft_cap": 1.5},
    "window": lambda: {"window": 5},
    "slopes": lambda: {"slopes": torch.tensor([0.25, 0.125, 0.0625, 0.5])},
    "bias": lambda: {"bias": torch.randn(4, 1, 37)},
    "documents": lambda: {"documents": torch.arange(37) // 10},
    "all": lambda: {
        "soft_cap": 2.0,
        "window": 20,
        "slopes": torch.tensor([0.25, 0.125, 0.0625, 0.5]),
        "bias": torch.randn(2, 1, 21, 37),
        "documents": torch.stack([torch.arange(37) // 30, torch.arange(37) // 12]),
    },
}


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("name", SCORE_OPTIONS)
def test_work_on_scores_is_what_torch_computes(name: str, key_heads: int) -> None:
    torch.manual_seed(5)
    options = SCORE_OPTIONS[name]()
    for mask in ("causal_from_end", "full"):
        q, k, v = heads(2, 4, 21, 16), heads(2, key_heads, 37, 16), heads(2, key_heads, 37, 16)
        slope = torch.randn(2, 4, 21, 16)
        results = []
        for function in (
            lambda *x: deuteron.attention(*x, mask=mask, **options),
            lambda *x: worked(*x, causal=mask != "full", **options),
        ):
            own = [x.clone().requires_grad_() for x in (q, k, v)]
            y = function(*own)
            (y * slope).sum().backward()
            results.append([y.detach(), *(x.grad for x in own)])
        for got, expected in zip(*results):
            same(got, expected, 256)


def test_slopes_and_a_bias_are_learned() -> None:
    torch.manual_seed(6)
    q, k, v = (heads(1, 2, 9, 8) for _ in range(3))
    results = []
    for function in (deuteron.attention, worked):
        slopes = torch.tensor([0.5, 0.25], requires_grad=True)
        bias = torch.arange(81.0).reshape(9, 9).div(40).requires_grad_()
        function(q, k, v, slopes=slopes, bias=bias).square().sum().backward()
        results.append((slopes.grad, bias.grad))
    for got, expected in zip(*results):
        same(got, expected, 256)


def test_sequences_of_one_row_do_not_see_each_other() -> None:
    """As flash attention's `cu_seqlens` say it; one by one they give the same."""
    torch.manual_seed(7)
    q, k, v = (heads(1, 2, 150, 16) for _ in range(3))
    ends = torch.tensor([0, 70, 71, 150], dtype=torch.int32)
    got = deuteron.attention(q, k, v, cu_seqlens=ends)
    for first, end in zip(ends.tolist(), ends.tolist()[1:]):
        alone = deuteron.attention(*(x[:, :, first:end] for x in (q, k, v)))
        same(got[:, :, first:end], alone, 16)
    arrays = [x.numpy() for x in (q, k, v)]
    assert (deuteron.attention(*arrays, cu_seqlens=ends.numpy()) == got.numpy()).all()
    # Keys that nobody sees are not looked at.
    k[:, :, :64], v[:, :, :64] = math.nan, math.nan
    assert deuteron.attention(q, k, v, cu_seqlens=ends)[:, :, 128:].isfinite().all()


def test_a_mask_and_a_bias_are_added() -> None:
    torch.manual_seed(8)
    q, k, v = (heads(1, 2, 6, 8) for _ in range(3))
    mask, bias = torch.rand(6, 6) < 0.6, torch.randn(2, 6, 6)
    expected = worked(q, k, v, causal=False, bias=bias.masked_fill(~mask, -1e9))
    got = deuteron.attention(q, k, v, mask=mask, bias=bias)
    seen = mask.any(-1)
    same(got[:, :, seen], expected[:, :, seen], 64)


def test_mistakes_in_work_on_scores_are_told() -> None:
    q, k = heads(1, 2, 5, 8), heads(1, 2, 7, 8)
    for options, hint in [
        ({"window": 0}, "at least 1"),
        ({"window": 2.5}, "at least 1"),
        ({"soft_cap": -1.0}, "from 1e-30"),
        ({"documents": torch.zeros(3, dtype=torch.int32)}, "document for each key"),
        ({"slopes": torch.zeros(3)}, "slopes"),
        ({"bias": torch.zeros(4, 5, 5)}, "bias"),
        ({"documents": torch.zeros(5), "cu_seqlens": torch.tensor([0, 5])}, "got both"),
    ]:
        with pytest.raises(ValueError, match=hint):
            deuteron.attention(q, q, q, **options)
    with pytest.raises(ValueError, match="causal_from_end"):
        deuteron.attention(q, k, k, window=3)


# transformers.

SIZES: Dict[str, Any] = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128, intermediate_size=128)


def models(transformers: Any) -> Dict[str, Callable[[], Any]]:
    return {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)),
        "mistral": lambda: transformers.MistralForCausalLM(
            transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=5)
        ),
        "neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES)),
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
        "gemma2": lambda: transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(
                **SIZES, num_key_value_heads=2, head_dim=16, sliding_window=5, attn_logit_softcapping=0.5, query_pre_attn_scalar=4
            )
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128)
        ),
    }


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "neox", "bert", "gpt2"])
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
def test_models_of_transformers_take_our_attention(name: str, padding: bool) -> None:
    transformers = pytest.importorskip("transformers")
    deuteron.register_attention()
    model = models(transformers)[name]().eval()
    ids = torch.randint(0, 127, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padding:
        mask[0, :4] = 0
    seen = mask.bool()
    results = []
    # sdpa leaves the soft cap out.
    for implementation in ("eager" if name == "gemma2" else "sdpa", "deuteron"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(ids, attention_mask=mask).logits
        logits[seen].square().mean().backward()
        results.append((logits.detach()[seen], [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (expected, gradients), (got, mine) = results
    same(got, expected, 1024)
    assert len(mine) == len(gradients)
    for one, two in zip(mine, gradients):
        same(one, two, 4096)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_generation_with_our_attention(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    deuteron.register_attention()
    torch.manual_seed(2)
    model = models(transformers)[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    ids = torch.randint(0, 127, (2, 5), generator=torch.Generator().manual_seed(1))
    tokens = []
    for implementation in ("sdpa", "deuteron"):
        model.set_attn_implementation(implementation)
        tokens.append(model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=127, eos_token_id=None))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("name", ["s_aux", "sinks"])
def test_what_our_attention_does_not_compute_is_refused(name: str) -> None:
    pytest.importorskip("transformers")
    from deuteron._hf_attention import attention_forward

    q = heads(1, 2, 5, 8)
    with pytest.raises(ValueError, match=f"`{name}` is not supported"):
        attention_forward(torch.nn.Identity(), q, q, q, None, **{name: 1.0})


def test_a_bias_of_all_keys_is_cut_to_those_that_queries_see() -> None:
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    bias = torch.randn(3, 5)
    y = deuteron.attention(q, k, v, bias=bias)
    hidden = torch.full((3, 5), -torch.inf).triu(1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias + hidden)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-5)
    # A window that hides nothing is none.
    torch.testing.assert_close(deuteron.attention(q, k, v, "full", window=5), deuteron.attention(q, k, v, "full"), atol=0, rtol=0)


@pytest.mark.parametrize("queries", [3, 40])
@pytest.mark.parametrize("hidden", [-1e5, -1e8, -1e9, torch.finfo(torch.float32).min])
def test_gradients_of_rows_that_a_finite_mask_hides_are_those_of_the_formula(hidden: float, queries: int) -> None:
    """Padding on the left: the first rows see no key that is not masked, and are the mean of the values. torch's own kernel for CPUs makes gradients of
    such rows too large by the number of keys, so these are of its separate operations."""
    shapes = [(2, 2, queries, 16), (2, 2, 50, 16), (2, 2, 50, 16)]
    operands = [torch.randn(shape).mul(0.1).requires_grad_() for shape in shapes]
    mask = torch.zeros(2, 1, queries, 50)
    mask[0, :, : queries // 2 + 1] = hidden
    mask[1, :, :, :20] = hidden
    weight = torch.randn(shapes[0])
    q, k, v = operands
    expected = torch.autograd.grad(torch.softmax(q @ k.mT / 4 + mask, -1) @ v, operands, weight)
    found = torch.autograd.grad(deuteron.attention(*operands, mask=mask), operands, weight)
    for got, want in zip(found, expected):
        torch.testing.assert_close(got, want, rtol=1e-3 if hidden == -1e5 else 1e-5, atol=1e-5)
