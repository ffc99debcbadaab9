"""`method="newton"` leaves PyTorch: exported to ONNX and run by another program, it keeps the bound."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import wellcond as wc


class Conditioned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return wc.conditioned_tokens(x, method="newton")


@pytest.mark.slow
def test_d13_newton_in_onnx_is_the_correction(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime and onnxscript (pip)")
    pytest.importorskip("onnxscript", reason="needs onnxscript (pip)")
    file = tmp_path / "conditioned.onnx"
    torch.onnx.export(Conditioned().eval(), (torch.randn(2, 17, 16),), file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for seed in range(3):
        x = torch.randn(2, 17, 16, generator=torch.Generator().manual_seed(seed))
        x[1] = x[1, :9].repeat(2, 1)[:17]  # nine distinct rows of seventeen
        y = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
        assert torch.allclose(y, wc.conditioned_tokens(x, method="svd"), atol=2e-4)
        spectrum = wc.spectrum(y)
        assert spectrum.rank.tolist() == [16, 9]
        assert (spectrum.kappa_pinv <= 2.002).all()
