"""Laws of quantizers and their stores."""

from __future__ import annotations

import json
from typing import ClassVar

import torch
from torch import Tensor

from manifoldkv.plan.formats.quantizer import Quantizer
from manifoldkv.plan.formats.quantizers import quantizer_from
from manifoldkv.serve.cache.storage import Store
from manifoldkv.serve.cache.stores import store_for


class QuantizerConformance:
    """Laws of `quantizer`, on latents of `groups` head groups and `features`."""

    quantizer: Quantizer
    features: ClassVar[int] = 12
    groups: ClassVar[int] = 1
    tokens: ClassVar[int] = 23

    def latents(self, tokens: int | None = None) -> Tensor:
        """Return random latents (2, groups, tokens, features) of falling magnitude."""
        generator = torch.Generator().manual_seed(0)
        shape = 2, self.groups, self.tokens if tokens is None else tokens, self.features
        return torch.randn(shape, generator=generator) * torch.logspace(1, -1, self.features)

    def store(self) -> Store:
        cpu = torch.device("cpu")
        return store_for(self.quantizer, self.features, torch.float32, cpu)

    def filled(self, latents: Tensor, piece: int) -> Store:
        store = self.store()
        for part in latents.split(piece, dim=2):
            store.append(part)
        return store

    def test_a_store_reads_the_reconstruction(self) -> None:
        if not self.quantizer.attended:
            return
        latents = self.latents()
        expected = self.quantizer.reconstruct(latents)
        for piece in (1, 5, self.tokens):
            store = self.filled(latents, piece)
            assert len(store) == self.tokens
            for size in (1, 7, 64):
                torch.testing.assert_close(read(store, size), expected, rtol=1e-5, atol=1e-6)

    def test_a_store_takes_the_bytes_of_the_quantizer(self) -> None:
        if not self.quantizer.attended:
            return
        for tokens in (1, 7, self.tokens):
            store = self.filled(self.latents(tokens), tokens)
            expected = self.quantizer.nbytes(tokens, self.features, torch.float32.itemsize)
            assert store.nbytes == 2 * self.groups * expected

    def test_bytes_per_token_are_those_of_a_long_text(self) -> None:
        tokens = 1 << 14
        few = self.quantizer.nbytes(tokens, self.features, 2)
        many = self.quantizer.nbytes(2 * tokens, self.features, 2)
        per_token = self.quantizer.bytes_per_token(self.features, 2)
        assert abs((many - few) / tokens - per_token) <= 1e-3 * per_token

    def test_sequences_are_selected(self) -> None:
        if not self.quantizer.attended:
            return
        store = self.filled(self.latents(), 5)
        before = read(store)
        store.select(torch.tensor([1, 0, 1]))
        assert torch.equal(read(store), before[[1, 0, 1]])
        store.clear()
        assert len(store) == store.nbytes == 0

    def test_a_crop_is_undone_by_the_same_tokens(self) -> None:
        if not self.quantizer.attended:
            return
        latents = self.latents()
        store = self.filled(latents, 5)
        before = read(store)
        for count in (1, 4):
            store.drop_last(count)
            store.append(latents[:, :, self.tokens - count :])
            assert torch.equal(read(store), before)

    def test_the_oldest_tokens_leave(self) -> None:
        if not self.quantizer.attended:
            return
        store = self.filled(self.latents(), 5)
        before = read(store)
        store.drop_first(3)
        assert torch.equal(read(store), before[:, :, 3:])

    def test_described_and_read_it_is_the_same(self) -> None:
        described = json.loads(json.dumps(self.quantizer.describe()))
        tensors = dict(self.quantizer.tensors())
        loaded = quantizer_from(described, tensors)
        assert loaded == self.quantizer
        assert hash(loaded) == hash(self.quantizer)
        assert not tensors

    def test_rounding_has_the_gradient_of_the_identity(self) -> None:
        latents = self.latents().requires_grad_()
        self.quantizer.reconstruct(latents).square().sum().backward()
        assert latents.grad is not None
        assert bool(latents.grad.isfinite().all())
        assert bool(latents.grad.any())


def read(store: Store, size: int = 64) -> Tensor:
    """Return all latents of a store, read in tiles of at most `size` tokens."""
    return torch.cat([tile for _, _, tile in store.tiles(0, size)], dim=2)
