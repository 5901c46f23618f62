"""Attention over a compressed cache, without full keys or values of all tokens.

Keys stored after rotation: queries are projected and scored against latents. Keys stored before
rotation: latents are up-projected and rotated one tile of tokens at a time. Values: attention
weights mix latents, and the mixtures are up-projected, once per query.

With many queries, those of a prompt, that would repeat the same products: keys and values of the
layer are reconstructed while its attention lasts, for torch's kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from manifoldkv.models.interface import AttentionSettings
from manifoldkv.models.rotary import Angles
from manifoldkv.plan.predictor import PredictorContext
from manifoldkv.serve.cache.backend import AttentionBackend, Seen, joined, tile_tokens
from manifoldkv.serve.cache.layers import CompressedLayer
from manifoldkv.serve.cache.storage import split_tiles

SCORES_AT_A_TIME = 1 << 24
"""Scores held at a time; longer prompts are attended to in blocks of queries."""
MANY_QUERIES = 32
"""Smallest number of queries of a call for which keys and values are reconstructed."""
MASKED_AT_A_TIME = 1 << 26
"""Elements of the mask that is built at a time for such queries."""
QUERIES_AT_A_TIME = 256
"""Queries of a kernel call on a CPU, whose kernel computes masked scores too."""


class CachedAttention:
    """Attention of one layer over its compressed cache.

    Parameters
    ----------
    backend : AttentionBackend
        Of the layer.
    exact_prefill : bool
        Whether tokens of the same call attend to each other's uncompressed keys and values.
    """

    def __init__(self, backend: AttentionBackend, exact_prefill: bool) -> None:
        self._backend = backend
        self._exact_prefill = exact_prefill

    def store(
        self, layer: CompressedLayer, keys: Tensor, values: Tensor, context: PredictorContext
    ) -> None:
        """Store new tokens; parameters as in `AttentionBackend.store`."""
        self._backend.store(layer, keys, values, context)

    def attend(
        self,
        layers: Sequence[CompressedLayer],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        settings: AttentionSettings,
        angles: Angles | None,
        context: PredictorContext,
    ) -> Tensor:
        """Store new tokens and return the attention output, (B, H_q, m, d).

        Parameters
        ----------
        layers : sequence of CompressedLayer
            The layer of the cache, then those below that predictors depend on, downwards.
        queries : Tensor
            Rotated queries, (B, H_q, m, d).
        keys, values : Tensor
            New keys and values, (B, H_kv, m, d); keys are rotated if and only if `angles` is None.
        mask : Tensor or None
            Visibility of tokens, (B or 1, 1, m, n), bool; None for a causal mask.
        settings : AttentionSettings
            Scaling, soft cap and sink logits.
        angles : Angles or None
            Angles of all n tokens, for keys stored before rotation.
        context : PredictorContext
            Reconstructions of the new tokens in lower layers, to which this layer's are added.
        """
        layer = layers[0]
        count = queries.shape[2]
        visible, _ = layer.get_mask_sizes(count)
        past = visible - count
        self._backend.store(layer, keys, values, context)
        # The last query sees all tokens but padding.
        shown = None if mask is None else mask[:, 0, -1, past:]
        layer.sinks.take(keys, values, past, shown, angles)
        many = count >= MANY_QUERIES and settings.is_plain
        if many:
            if not past and mask is None:
                seen = Seen(layers, angles, count, count, [], None)
                return self._attend_causally(queries * settings.scaling, keys, values, seen)
            blocks = _blocks(count, visible, MASKED_AT_A_TIME)
        else:
            scores = queries.shape[0] * queries.shape[1] * visible
            blocks = _blocks(count, scores, SCORES_AT_A_TIME)
        outputs = []
        for rows in blocks:
            seen = self._seen(layers, rows, past, mask, (keys, values), angles)
            of_rows = queries[:, :, rows]
            if many and not self._backend.attends_to_latents(seen, settings):
                scaled, size = of_rows * settings.scaling, tile_tokens(keys)
                outputs.append(self._attend_reconstructed(scaled, seen, size))
            else:
                outputs.append(self._backend.attend(of_rows, seen, settings))
        return joined(outputs, dim=2)

    def _seen(
        self,
        layers: Sequence[CompressedLayer],
        rows: slice,
        past: int,
        mask: Tensor | None,
        new: tuple[Tensor, Tensor],
        angles: Angles | None,
    ) -> Seen:
        """Return the tokens that queries `rows` of a call attend to.

        Before the call, `past` tokens were visible; keys and values of the call's are `new`.
        """
        count, device, layer = new[0].shape[2], new[0].device, layers[0]
        tokens = past + count
        own = past if self._exact_prefill and count > 1 else tokens
        stop = tokens if mask is not None else past + rows.stop
        sees = _rows_of_mask(mask, rows, past, stop, device)
        latents = min(own, stop)
        exact, of_sinks = [], None
        if layer.sinks.are_first and sees is None and latents == stop:
            # Latents of sink tokens are left out, so that no mask has to hide them.
            skipped = layer.sinks.size
            if angles is not None:
                angles = angles.of_tokens(skipped, latents)
            sinks = [layer.sinks.seen()]
            return Seen(layers, angles, tokens - skipped, latents - skipped, sinks, None)
        if layer.sinks.size:
            if sees is None:
                sees = torch.ones(1, 1, 1, stop, dtype=torch.bool, device=device)
            sees, of_sinks = layer.sinks.split(sees)
        if latents < stop:
            keys = new[0][:, :, latents - past : stop - past]
            values = new[1][:, :, latents - past : stop - past]
            if angles is not None:
                keys = angles.tile(keys.to(angles.cos.dtype), latents, stop)
            exact.append((keys, values))
        if sees is not None and of_sinks is not None:
            exact.append(layer.sinks.seen())
            sees = torch.cat([sees, of_sinks], dim=-1)
        return Seen(layers, angles, tokens, latents, exact, sees)

    def _attend_reconstructed(self, queries: Tensor, seen: Seen, size: int) -> Tensor:
        """Run torch's kernel on keys and values, which are reconstructed `size` tokens at a time.

        Queries are scaled, (B, H_q, m, d); the output is alike.
        """
        keys, values = self._backend.reconstruct(seen, size)
        for exact_keys, exact_values in seen.exact:
            keys.append(exact_keys)
            values.append(exact_values)
        all_keys, all_values, mask = joined(keys, dim=2), joined(values, dim=2), seen.mask
        if mask is None:
            return _attention(queries, all_keys, all_values, None)
        mask = mask | ~mask.any(dim=-1, keepdim=True)  # no empty rows for padded queries
        if queries.device.type != "cpu":
            return _attention(queries, all_keys, all_values, mask)
        outputs = []
        for start, stop in split_tiles(0, queries.shape[2], QUERIES_AT_A_TIME):
            of_rows = mask[:, :, start:stop]
            visible = of_rows.any(dim=2).any(dim=0)[0]
            shown = all_keys[:, :, visible], all_values[:, :, visible], of_rows[..., visible]
            outputs.append(_attention(queries[:, :, start:stop], *shown))
        return joined(outputs, dim=2)

    def _attend_causally(self, queries: Tensor, keys: Tensor, values: Tensor, seen: Seen) -> Tensor:
        """Return the attention output of all tokens of a text to those before them.

        Queries are scaled, (B, H_q, n, d). Torch's kernel computes half of the scores if it is told
        so in place of a mask.
        """
        if self._exact_prefill:
            if seen.angles is not None:
                keys = seen.rotated(keys.to(seen.angles.cos), 0, seen.latents)
            return _attention(queries, keys, values, None, is_causal=True)
        tiles = self._backend.reconstruct(seen, tile_tokens(keys))
        keys, values = (joined(x, dim=2) for x in tiles)
        sinks = seen.layers[0].sinks
        if sinks.size:
            sink_keys, sink_values = sinks.seen()
            stored = sink_keys.shape[2]
            keys = torch.cat([sink_keys, keys[:, :, stored:]], dim=2)
            values = torch.cat([sink_values, values[:, :, stored:]], dim=2)
        return _attention(queries, keys, values, None, is_causal=True)


def _attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, is_causal: bool = False
) -> Tensor:
    """Run torch's kernel on scaled queries (B, H_q, m, d); the output is alike."""
    dtype = torch.promote_types(values.dtype, queries.dtype)
    return scaled_dot_product_attention(
        queries.to(dtype),
        keys.to(dtype),
        values.to(dtype),
        attn_mask=mask,
        is_causal=is_causal,
        scale=1.0,
        enable_gqa=True,
    ).to(queries.dtype)


def _blocks(rows: int, elements_per_row: int, elements: int) -> Iterator[slice]:
    """Cut query rows into blocks of at most `elements` elements."""
    size = max(1, elements // elements_per_row)
    for start, stop in split_tiles(0, rows, size):
        yield slice(start, stop)


def _rows_of_mask(
    mask: Tensor | None, rows: slice, past: int, tokens: int, device: torch.device
) -> Tensor | None:
    """Return the mask of some queries of a call, (B or 1, 1, rows, tokens), causal by default.

    The call's first query has `past` tokens before it. The mask of a whole prompt is never built.
    """
    if mask is not None:
        return mask[:, :, rows, :tokens]
    if rows.stop - rows.start == 1 and tokens == past + rows.stop:
        return None
    own = torch.arange(rows.start, rows.stop, device=device) + past
    return (torch.arange(tokens, device=device) <= own.unsqueeze(1)).view(1, 1, -1, tokens)
