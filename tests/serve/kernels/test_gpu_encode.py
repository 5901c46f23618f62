"""The laws of the trellis search on a GPU: that of the CPU's search, or nearly its error."""

import pytest
import torch
from torch import Tensor

from manifoldkv.plan.formats.scales import NAN_SHORT
from manifoldkv.plan.formats.trellis import TrellisCoded, codebooks, relative_steps
from manifoldkv.serve.kernels.views import flat_view

triton = pytest.importorskip("triton")
from manifoldkv.serve.kernels.triton import encode as gpu_encode  # noqa: E402

WIDTHS = {
    "mixed": [8, 3.5, 3, 2.5, 2, 2, 1.5, 1.5, 1.5, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5],
    "narrow": [0.5] * 15,
    "one": [4.0],
}


def quantizer_of(bits: list[float]) -> TrellisCoded:
    """A quantizer with two latents more, which are not stored."""
    stored = torch.tensor(bits)
    deviation = torch.linspace(2, 0.3, len(bits) + 2)
    step = deviation.clone()
    step[: len(bits)] *= relative_steps(stored, codebooks())
    gain = torch.full_like(deviation, 1.05)
    return TrellisCoded(torch.cat([stored, torch.zeros(2)]), step, deviation, gain)


def latents_of(quantizer: TrellisCoded, batch: int, tokens: int) -> Tensor:
    """Gaussian latents of tokens of different scales, some of them outliers."""
    generator = torch.Generator().manual_seed(0)
    shape = batch, tokens, quantizer.stored
    scales = torch.randn(batch, tokens, 1, generator=generator).exp()
    x = torch.randn(shape, generator=generator) * scales * quantizer.deviation[: quantizer.stored]
    x[0, 0, 0] *= 40
    x[-1, -1] *= 1e-7
    return x


class Encoded:
    """Streams and reconstructions of latents by the Triton kernels and by the CPU's."""

    def __init__(self, quantizer: TrellisCoded, x: Tensor, device: torch.device) -> None:
        tables = gpu_encode.EncoderTables.of(quantizer, device)
        batch, tokens, _ = x.shape
        room = torch.full((batch, 1, quantizer.stream_bytes, 16), 7, dtype=torch.uint8)
        self.buffer = room.to(device)
        codes = self.buffer[..., 2 : 2 + tokens]
        gpu_encode.encode(x.to(device), tables, codes[:, 0])
        found = gpu_encode.read(codes, tables.latents, tables.numbers[2], torch.float32)
        self.codes, self.found = codes[:, 0].cpu(), found.mT.cpu()
        self.expected_codes = torch.empty(batch, quantizer.stream_bytes, tokens, dtype=torch.uint8)
        self.expected = quantizer.encode(x, flat_view(self.expected_codes))

    @property
    def scales(self) -> Tensor:
        return self.codes[:, -1] & 15


@pytest.mark.parametrize("widths", WIDTHS)
def test_a_whole_search_finds_the_bits_of_the_cpu(
    widths: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_encode, "MANY_TOKENS", 1)
    monkeypatch.setattr(gpu_encode, "HELD_BYTES", 4000)  # several parts
    quantizer = quantizer_of(WIDTHS[widths])
    encoded = Encoded(quantizer, latents_of(quantizer, 2, 3), device)
    assert torch.equal(encoded.codes, encoded.expected_codes)
    torch.testing.assert_close(encoded.found, encoded.expected)
    beyond = torch.cat([encoded.buffer[..., :2], encoded.buffer[..., 5:]], dim=-1)
    assert bool((beyond == 7).all())


def test_a_search_in_windows_has_nearly_the_least_error(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_encode, "WINDOW", 16)
    monkeypatch.setattr(gpu_encode, "FOLLOWING", 24)
    quantizer = quantizer_of([2.0] * 10 + [1.5] * 10 + [0.5] * 20)
    x = latents_of(quantizer, 1, 4)
    encoded = Encoded(quantizer, x, device)
    assert torch.equal(encoded.scales, encoded.expected_codes[:, -1] & 15)
    scales = quantizer.deviation[: quantizer.stored] * encoded.expected.norm(dim=-1, keepdim=True)
    least = ((encoded.expected - x) / scales).square().sum()
    assert least <= ((encoded.found - x) / scales).square().sum() * (1 + 1e-5)
    assert ((encoded.found - x) / scales).square().sum() <= 1.1 * least


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_token_that_is_not_a_number_stays_alone(device: torch.device) -> None:
    quantizer = quantizer_of(WIDTHS["narrow"])
    x = latents_of(quantizer, 1, 3)
    x[0, 1, 4] = torch.nan
    encoded = Encoded(quantizer, x, device)
    assert encoded.scales[0, 1] == NAN_SHORT
    assert torch.equal(encoded.found.isfinite().all(dim=-1), torch.tensor([[True, False, True]]))
