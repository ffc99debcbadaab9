"""The Long Range Arena's classifiers: a small Nyströmformer, the mean over real tokens, a head for one or two texts.

transformers' Nyströmformer, with three things as in the published code (mlpen/Nystromformer,
LRA/code/attention_nystrom.py) or beyond it:

- **Padding.** In transformers 5.24 a padding mask fails as soon as there are fewer landmarks than tokens: a mask over
  pairs of tokens is added to scores over pairs of a landmark and a token. Here, as published, queries, keys and values
  of padding are zero and no landmark looks at padding: what stands in padding changes nothing. How *much* padding there
  is does, since a landmark is the mean of a fixed number of places; so all sequences are padded to one length.
- **float32.** As published, the attention itself runs in float32 under autocast too.
- **The pseudo-inverse** is iterated from each matrix's own norm, an option of the published code that transformers has
  too, where it fails. By default both take the largest norm in the batch: a sample's result depends on its neighbours.

Blocks are transformers': LayerNorm follows each residual sum, and the embeddings. In the published code LayerNorm comes
before each half of a block, and once at the end.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, NystromformerConfig, NystromformerModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from wellcond.data.lra.sequences import PADDING

WIDTH, LAYERS, HEADS, HIDDEN, LANDMARKS, CONVOLUTION, DROPOUT = 64, 2, 2, 128, 128, 35, 0.1
"""LRA/code/lra_config.py, every task's "model", and "nystrom-128" of its "extra_attn_config"."""


class NystromAttention(NystromformerSelfAttention):
    """softmax(QK̃ᵀ)·softmax(Q̃K̃ᵀ)⁺·softmax(Q̃Kᵀ)·V and a convolution of V, per head; Q̃ and K̃ are means over segments."""

    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call]
        self.init_option = "each"  # anything but "original", the largest norm in the batch

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor]:
        """Heads side by side ``(B, N, d)``.

        Args:
            hidden_states: ``(B, N, d)``.
            attention_mask: ``(B, N)`` bool, True = real; None: all are.
            output_attentions: refused, as there is no N×N matrix.

        Raises:
            ValueError: N is no multiple of the number of landmarks.
        """
        batch, n, _ = hidden_states.shape
        if n % self.num_landmarks:
            raise ValueError(
                f"{n} tokens cannot be divided into {self.num_landmarks} segments of one length; pad to a multiple"
            )
        if output_attentions:
            raise ValueError(
                "a Nyströmformer never forms its attention matrix: output_attentions has no meaning"
            )
        split = (batch, n, self.num_attention_heads, self.attention_head_size)
        parts = [f(hidden_states).view(split).transpose(1, 2) for f in (self.query, self.key, self.value)]
        with torch.autocast(hidden_states.device.type, enabled=False):
            dtype = torch.promote_types(hidden_states.dtype, torch.float32)
            if attention_mask is not None:
                parts = [part * attention_mask[:, None, :, None] for part in parts]
            query, key, value = (part.to(dtype) for part in parts)
            context = self.attend(query, key, value, attention_mask)
        return (context.transpose(1, 2).reshape(batch, n, -1).to(hidden_states.dtype),)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """All ``(B, heads, N, d_head)``."""
        scale = self.attention_head_size**-0.25
        query, key = query * scale, key * scale
        segments = (*query.shape[:2], self.num_landmarks, -1, query.shape[-1])
        query_landmarks, key_landmarks = (part.reshape(segments).mean(3) for part in (query, key))
        scores = query_landmarks @ key.mT
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        inverse = self.iterative_inv(  # type: ignore[no-untyped-call]
            (query_landmarks @ key_landmarks.mT).softmax(-1)
        )
        # In this order no product has both N and two numbers of landmarks.
        context = (query @ key_landmarks.mT).softmax(-1) @ (inverse @ (scores.softmax(-1) @ value))
        return cast(Tensor, context + self.conv(value))


class PaddedNystromformer(NystromformerModel):  # type: ignore[no-untyped-call]
    """transformers' Nyströmformer with `NystromAttention`; padding is given as a mask over tokens ``(B, N)``."""

    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__(config)
        for layer in self.encoder.layer:
            layer.attention.self = NystromAttention(config)  # type: ignore[union-attr]
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> BaseModelOutput:
        """``last_hidden_state`` ``(B, N, d)``."""
        embedded = self.embeddings(
            input_ids=input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds
        )
        mask = None if attention_mask is None else attention_mask.bool()
        return cast(BaseModelOutput, self.encoder(embedded, attention_mask=mask))


def nystromformer(vocabulary: int, length: int, **changes: Any) -> nn.Module:
    """A Nyströmformer in the published setting of the Long Range Arena.

    Args:
        vocabulary: ids, padding included, which is 0.
        length: tokens of every sequence, padding included.
        changes: further options of its configuration, such as ``num_landmarks``.

    >>> model = nystromformer(16, 256)
    >>> model(input_ids=torch.ones(2, 256, dtype=torch.long)).last_hidden_state.shape
    torch.Size([2, 256, 64])
    """
    options = {"num_landmarks": LANDMARKS, "conv_kernel_size": CONVOLUTION, "segment_means_seq_len": length}
    model: nn.Module = PaddedNystromformer(
        NystromformerConfig(**(_options(vocabulary, length) | options | changes))
    )
    return model


def softmax_transformer(vocabulary: int, length: int, **changes: Any) -> nn.Module:
    """The same with plain softmax attention and no convolution: a BERT of that size; memory grows with ``length``².

    >>> model = softmax_transformer(16, 32)
    >>> model(input_ids=torch.ones(2, 32, dtype=torch.long)).last_hidden_state.shape
    torch.Size([2, 32, 64])
    """
    options = {"attention_probs_dropout_prob": DROPOUT}
    config = BertConfig(**(_options(vocabulary, length) | options | changes))
    model: nn.Module = BertModel(config, add_pooling_layer=False)
    return model


def _options(vocabulary: int, length: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": HIDDEN,
        "hidden_act": "gelu",
        "hidden_dropout_prob": DROPOUT,
        "max_position_embeddings": length,
        "type_vocab_size": 1,
        "pad_token_id": PADDING,
    }


class SequenceClassifier(nn.Module):
    """An encoder, the mean over real tokens, and two layers to logits.

    Args:
        encoder: ``(input_ids, attention_mask)`` to an object with ``last_hidden_state`` ``(B, N, d)``; it says its
            width in ``config.hidden_size``.
        classes: logits.
        hidden: width between the two layers.

    >>> model = SequenceClassifier(nystromformer(16, 256), classes=10)
    >>> ids = torch.randint(1, 16, (3, 256))
    >>> model(input_ids=ids, attention_mask=torch.ones_like(ids)).shape
    torch.Size([3, 10])
    """

    def __init__(self, encoder: nn.Module, classes: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = _head(_width(encoder), hidden, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits ``(B, classes)`` of ids and mask ``(B, N)``, 1 = real."""
        logits: Tensor = self.head(mean_of_real(self.encoder, input_ids, attention_mask))
        return logits


class PairClassifier(nn.Module):
    """Two sequences through one encoder; the head sees both means, their product and their difference.

    Arguments as of `SequenceClassifier`.

    >>> model = PairClassifier(nystromformer(16, 256), classes=2)
    >>> one, other = torch.randint(1, 16, (2, 3, 256))
    >>> real = torch.ones_like(one)
    >>> model(input_ids=one, attention_mask=real, other_ids=other, other_mask=real).shape
    torch.Size([3, 2])
    """

    def __init__(self, encoder: nn.Module, classes: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = _head(4 * _width(encoder), hidden, classes)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, other_ids: Tensor, other_mask: Tensor
    ) -> Tensor:
        """Logits ``(B, classes)`` of two ids and masks ``(B, N)``, 1 = real."""
        # One call with both: what is measured or conditioned there sees all sequences at once.
        both = mean_of_real(
            self.encoder, torch.cat([input_ids, other_ids]), torch.cat([attention_mask, other_mask])
        )
        one, other = both.chunk(2)
        logits: Tensor = self.head(torch.cat([one, other, one * other, one - other], -1))
        return logits


def mean_of_real(encoder: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The mean of the encoder's outputs over the real tokens of each sequence, ``(B, d)``."""
    tokens: Tensor = encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    real = attention_mask[..., None].to(tokens.dtype)
    return (tokens * real).sum(1) / real.sum(1).clamp(min=1)


def _head(width: int, hidden: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def _width(encoder: nn.Module) -> int:
    return int(encoder.config.hidden_size)  # type: ignore[union-attr, arg-type]
