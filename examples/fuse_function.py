"""A function of your own as fused kernels, with its gradient.

python examples/fuse_function.py
"""

import torch

import deuteron


@deuteron.fuse
def gated(x, g, w):
    return deuteron.rms_norm(x, w) * torch.sigmoid(g)


x = torch.randn(16, 64, requires_grad=True)
g = torch.randn(16, 64, requires_grad=True)
w = torch.ones(64)
y = gated(x, g, w)
y.sum().backward()
expected = torch.nn.functional.rms_norm(x, (64,), w) * torch.sigmoid(g)
print("largest difference from PyTorch:", (y - expected).abs().max().item())
assert torch.allclose(y, expected, atol=1e-4)
assert x.grad is not None and g.grad is not None
