"""The demo's model: stock torch modules, once on ragged batches, once on the same batches padded.

    tokens (B, -1)  ->  Embedding + position Embedding  ->  nn.TransformerEncoder  ->  mean of each text  ->  nn.Linear

Nothing in the ragged forward knows of lengths, masks or padding. The padded one is what one writes without the library.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tdc.ops.elementwise.factory import positions
from tdc.ragged.nested import NestedTensor
from tdc.ragged.pack import pack
from tdc.tensordict.tensordict import TensorDict

Build = Callable[[list[Tensor], list[int], str], TensorDict]


class Classifier(nn.Module):
    """Bytes to one class per text.

    Shapes:
        {"tokens": NestedTensor (B, -1)} -> logits (B, classes).
    """

    def __init__(self, classes: int, *, width: int = 128, heads: int = 4, layers: int = 2, longest: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, batch: TensorDict) -> Tensor:
        tokens: NestedTensor = batch["tokens"]
        x = self.tokens(tokens) + self.positions(positions(tokens))
        return self.head(self.encoder(x).mean(1))


class PaddedClassifier(nn.Module):
    """The same modules on a rectangle with a mask.

    Shapes:
        {"tokens": (B, L), "lengths": (B,)} -> logits (B, classes).
    """

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.tokens, self.positions, self.encoder, self.head = model.tokens, model.positions, model.encoder, model.head

    def forward(self, batch: TensorDict) -> Tensor:
        tokens, lengths = batch["tokens"], batch["lengths"]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        padding = positions >= lengths[:, None]
        x = self.encoder(self.tokens(tokens) + self.positions(positions), src_key_padding_mask=padding)
        return self.head(x.masked_fill(padding[..., None], 0).sum(1) / lengths[:, None])


def ragged_batch(texts: list[Tensor], labels: list[int], device: str) -> TensorDict:
    """One batch as the library holds it."""
    batch = TensorDict({"tokens": pack(texts), "label": torch.tensor(labels)}, batch_size=[len(texts)])
    return batch.to(device)


def padded_batch(texts: list[Tensor], labels: list[int], device: str) -> TensorDict:
    """The same batch as a rectangle of a width that is a multiple of 64: torch compiles this model for each width."""
    lengths = torch.tensor([len(t) for t in texts])
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    tokens = nn.functional.pad(tokens, (0, -tokens.shape[1] % 64))
    leaves = {"tokens": tokens, "lengths": lengths, "label": torch.tensor(labels)}
    return TensorDict(leaves, [len(texts)], device=device)
