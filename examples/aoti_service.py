"""A text classifier as a service: exported once, compiled ahead of time, loaded without its source.

    python examples/aoti_service.py                 exports the model, then answers three requests over HTTP
    python examples/aoti_service.py model.pt2       the same with the package in a file that stays

Requests of any number of texts of any lengths go through one machine-code graph, packed without padding. What the
package was not made for, here more than 16 texts or one of more than 512 bytes, is refused before anything runs, with a
message for the client. `examples/cpp/serve.cpp` loads the same package from C++.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from torch import Tensor, nn

import tdc

LONGEST, MOST = 512, 16


class Classifier(nn.Module):
    """Bytes to one of three classes; stock modules on a ragged batch."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.places = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: tdc.NestedTensor) -> Tensor:
        x = self.tokens(tokens) + self.places(tdc.positions(tokens))
        return self.head(self.encoder(x).mean(1))


def pack(texts: list[str]) -> tdc.NestedTensor:
    """Texts as a ragged batch of bytes."""
    return tdc.pack([torch.tensor(list(text.encode()), dtype=torch.int64) for text in texts])


def make(path: Path) -> Classifier:
    """Export a classifier (untrained: this is about serving it) into a package."""
    torch.manual_seed(0)
    model = Classifier().eval()
    dynamic = {"tokens": {"batch": ("B", 1, MOST), "length": ("L", 0, LONGEST)}}
    exported = tdc.compile.export(model, pack(["an example", "of two texts"]), dynamic=dynamic)
    print(exported)
    exported.save(path, format="aoti")
    return model


class Handler(BaseHTTPRequestHandler):
    """POST {"texts": [...]} gives {"classes": [...]}, or status 400 and {"error": ...}."""

    package: tdc.compile.Exported

    def do_POST(self) -> None:
        try:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(200, {"classes": self.package(pack(request["texts"])).argmax(1).tolist()})
        except (tdc.TdcError, KeyError, ValueError) as error:
            self.answer(400, {"error": str(error)})

    def answer(self, status: int, data: dict[str, object]) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def ask(port: int, texts: list[str]) -> dict[str, object]:
    """Answers of the service to texts."""
    data = json.dumps({"texts": texts}).encode()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}", data) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return json.load(error)


def main(path: Path) -> None:
    model = make(path)
    Handler.package = tdc.compile.load(path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for texts in (["one text"], ["three", "texts of other lengths", ""], ["too long " * 60]):
        answer = ask(server.server_port, texts)
        print([text[:24] for text in texts], "->", answer.get("classes", answer.get("error")))
        if "classes" in answer:
            assert answer["classes"] == model(pack(texts)).argmax(1).tolist()
    server.shutdown()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder) / "model.pt2")
