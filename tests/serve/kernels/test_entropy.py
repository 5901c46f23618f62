"""Entropy coding by compiled kernels, against the definition in Python integers."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manifoldkv.coding.tables import entropy_coded
from manifoldkv.core.errors import CodecError
from manifoldkv.plan.formats.entropy import EntropyCoded
from manifoldkv.serve.kernels.entropy import EntropyTables, SymbolReader, encode
from manifoldkv.serve.kernels.views import Array

FARTHEST = 2**30 - 1


def tables_of(scales: list[float], seed: int = 0) -> EntropyTables:
    samples = torch.randn(500, len(scales), generator=torch.Generator().manual_seed(seed))
    return EntropyTables.of([entropy_coded(samples * torch.tensor(scales))])


def decoded(tables: EntropyTables, coded: tuple[Array, Array, Array], parts: int = 1) -> Array:
    reader = SymbolReader(tables, *coded)
    sizes = [len(part) for part in np.array_split(np.arange(tables.latents), parts)]
    found = torch.cat([reader.read(size) for size in sizes])
    reader.end()
    return found.numpy()


def by_definition(symbols: Array, tables: EntropyTables) -> tuple[list[int], list[int], list[int]]:
    """States, words and distances of the asymmetric numeral system, in integers of any size."""
    cumulated, offsets, shifts, reaches = (array.tolist() for array in tables.arrays)
    states, words, past = [1 << 16] * symbols.shape[1], [], []

    def push(t: int, start: int, frequency: int, precision: int) -> None:
        if states[t] >= frequency << (32 - precision):
            words.insert(0, states[t] & 0xFFFF)
            states[t] >>= 16
        quotient, rest = divmod(states[t], frequency)
        states[t] = (quotient << precision) + rest + start

    for latent in reversed(range(len(symbols))):
        edges = cumulated[offsets[latent] : offsets[latent + 1]]
        for_tokens = list(enumerate(symbols[latent].tolist()))[::-1]
        indices = {}
        for t, symbol in for_tokens:
            reach = reaches[latent]
            if abs(symbol) >= reach:
                past.insert(0, abs(symbol) - reach)
            indices[t] = max(-reach, min(symbol, reach)) + reach
        if shifts[latent]:
            for t, index in indices.items():
                push(t, index % (1 << shifts[latent]), 1, shifts[latent])
        for t, index in indices.items():
            bucket = index >> shifts[latent]
            push(t, edges[bucket], edges[bucket + 1] - edges[bucket], 14)
    return states, words, past


@given(
    st.lists(st.floats(0.01, 300.0), min_size=1, max_size=5), st.integers(0, 40), st.integers(0, 99)
)
@settings(max_examples=40)
@example([300.0, 0.01], 0, 0)
def test_what_is_written_is_the_definition_and_is_read(
    scales: list[float], tokens: int, seed: int
) -> None:
    tables, random = tables_of(scales, seed), np.random.default_rng(seed)
    spread = np.array(scales)[:, None] * random.standard_t(1.5, (len(scales), tokens))
    symbols = np.round(spread).clip(-FARTHEST, FARTHEST).astype(np.int32)
    coded = encode(torch.from_numpy(symbols), tables)
    for part, expected in zip(coded, by_definition(symbols, tables), strict=True):
        assert part.tolist() == expected
    assert (decoded(tables, coded) == symbols).all()
    assert (decoded(tables, coded, parts=len(scales)) == symbols).all()


def test_words_take_the_entropy_of_the_tables() -> None:
    scales, tokens = [0.05, 0.3, 1.0, 4.0, 40.0, 300.0], 4096
    generator = torch.Generator().manual_seed(1)
    samples, other = (
        torch.randn(tokens, len(scales), generator=generator) * torch.tensor(scales)
        for _ in range(2)
    )
    quantizer = entropy_coded(samples)
    symbols = other.round().int().mT.contiguous()
    states, words, past = encode(symbols, EntropyTables.of([quantizer]))
    written = 16 * len(words) + np.log2(states).sum() - 16 * tokens
    bits = 0.0
    for row, table, reach in zip(
        symbols, quantizer.split_tables(), quantizer.reach.tolist(), strict=True
    ):
        bits -= float((table / table.sum()).log2()[row + reach].sum())
    assert len(past) == 0  # buckets smooth the tables of wide latents, which are of few samples
    assert 0.97 * bits < written < 1.003 * bits


@given(st.lists(st.integers(1, 1 << 24), min_size=3, max_size=41))
@settings(max_examples=40)
def test_frequencies_add_up_and_no_symbol_is_impossible(counts: list[int]) -> None:
    reach = (len(counts) - 1) // 2
    table = torch.tensor(counts[: 2 * reach + 1], dtype=torch.int32)
    quantizer = EntropyCoded(torch.ones(1), torch.tensor([reach], dtype=torch.int32), table)
    cumulated, offsets, shifts, _ = EntropyTables.of([quantizer]).arrays
    assert (cumulated[0], cumulated[-1], offsets[-1]) == (0, 1 << 14, len(cumulated))
    assert (np.diff(cumulated.astype(int)) > 0).all()
    assert len(cumulated) == (2 * reach >> shifts[0]) + 2


def test_the_longest_table_of_rare_symbols() -> None:
    reach = 1 << 12
    table = torch.ones(2 * reach + 1, dtype=torch.int32)
    table[reach] = 1 << 24
    quantizer = EntropyCoded(torch.ones(1), torch.tensor([reach], dtype=torch.int32), table)
    tables = EntropyTables.of([quantizer])
    symbols = torch.tensor([[0, reach, -reach, 17, FARTHEST, -FARTHEST]], dtype=torch.int32)
    assert (decoded(tables, encode(symbols, tables)) == symbols.numpy()).all()


@given(st.data())
@settings(max_examples=100)
def test_strangers_words_are_refused_or_read_within_bounds(data: st.DataObject) -> None:
    """Memory after the words is never read: symbols do not depend on it."""
    scales, tokens = [0.2, 30.0, 2.0], 9
    tables, random = tables_of(scales), np.random.default_rng(data.draw(st.integers(0, 10**6)))
    symbols = np.round(np.array(scales)[:, None] * random.normal(size=(3, tokens)) * 2)
    states, words, past = encode(torch.from_numpy(symbols.astype(np.int32)), tables)
    changed = [states.view(np.uint8).copy(), words.view(np.uint8).copy(), past.view(np.uint8)]
    if data.draw(st.booleans()):
        changed[1] = changed[1][: 2 * data.draw(st.integers(0, len(words)))].copy()
    for part in changed[:2]:
        for _ in range(data.draw(st.integers(0, 3)) if len(part) else 0):
            part[data.draw(st.integers(0, len(part) - 1))] ^= data.draw(st.integers(1, 255))
    read = changed[0].view(np.uint32), changed[1].view(np.uint16), changed[2].view(np.uint32)
    try:
        found = decoded(tables, read)
    except CodecError:
        return
    assert encode_again(found, tables) == [part.tolist() for part in read]


def encode_again(symbols: Array, tables: EntropyTables) -> list[list[int]]:
    """What is accepted is what an encoder writes."""
    return [part.tolist() for part in encode(torch.from_numpy(symbols), tables)]


def test_the_coder_writes_what_it_wrote_when_this_was_written() -> None:
    """Blobs outlive versions."""
    latents = torch.linspace(-3, 3, 400).sin()[:, None] * torch.tensor([0.4, 2.0, 9.0, 60.0])
    symbols = latents.repeat(1, 3).round().int().mT.contiguous()
    states, words, past = encode(symbols, EntropyTables.of(3 * [entropy_coded(latents)]))
    written = states.astype("<u4").tobytes() + words.astype("<u2").tobytes() + past.tobytes()
    assert (len(words), len(past), hashlib.sha256(written).hexdigest()[:16]) == GOLDEN


GOLDEN = (742, 0, "dcecd4a2ee339968")
