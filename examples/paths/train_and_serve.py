"""Train on text without padding, stop and go on, and serve. Written from docs/start alone.

    python examples/paths/train_and_serve.py
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from tdc import TensorDict
from tdc.compile import export, load, train_step
from tdc.optim import adamw, chain, clip_by_global_norm

SIGNS = "+-*"


class Parser(nn.Module):
    """Bytes of a sum such as `12+7+3` to the sign that is in it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(SIGNS))

    def forward(self, tokens: Any) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))


def text_of(label: int, rng: random.Random) -> str:
    return SIGNS[label].join(str(rng.randrange(1000)) for _ in range(rng.randint(2, 9)))


def bytes_of(text: str) -> Tensor:
    return torch.tensor(list(text.encode()))


def examples(count: int, rng: random.Random) -> TensorDict:
    labels = [rng.randrange(len(SIGNS)) for _ in range(count)]
    rows = [{"tokens": bytes_of(text_of(label, rng)), "label": label} for label in labels]
    return tdc.data.collate(rows, ragged_keys=["tokens"])


def loss(net: nn.Module, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    scores = net(batch["tokens"])
    return F.cross_entropy(scores, batch["label"]), {"right": (scores.argmax(1) == batch["label"]).float().mean()}


def main() -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    data, test, net = examples(1500, rng), examples(200, rng), Parser()
    batches = tdc.data.loader(data, max_tokens=1024, key="tokens", shuffle=True, seed=0)
    step = train_step(net, loss, chain(clip_by_global_norm(1.0), adamw(5e-3)))
    state = step.init(seed=0)
    with tempfile.TemporaryDirectory() as folder:
        for n, batch in enumerate(batches):
            state, _ = step(state, batch)
            if n == 5:  # the machine stops here, in the middle of an epoch
                saved = {"state": tdc.interop.to_state_dict(state), "batches": batches.state_dict()}
                torch.save(saved, Path(folder) / "run.pt")
                break
        saved = torch.load(Path(folder) / "run.pt", weights_only=True)
        state = step.load_state_dict(step.init(seed=1), saved["state"])
        batches.load_state_dict(saved["batches"])
        for _ in range(4):
            for batch in batches:
                state, _ = step(state, batch)
        right = step.eval()(state, test)["right"]
        print("steps", int(state["step"]), "compiles", step.counts.compiles, "right", right.item() > 0.95)

        net = step.load_into(net, state).eval().requires_grad_(False)
        package = load(export(net, test[:3]["tokens"]).save(Path(folder) / "parser.pt2", format="aoti"))
        requests = tdc.pack([bytes_of(text) for text in ("1+2", "10*20*30", "7-1-1-1-1", "5+5")])
        print("served", "".join(SIGNS[i] for i in package(requests).argmax(1)))
        try:
            package(requests.float())
        except tdc.StructureError as error:
            print("refused:", str(error).splitlines()[0])
    assert right > 0.95, "it has not learned"


if __name__ == "__main__":
    main()
