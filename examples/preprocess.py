"""Preprocessing a corpus: texts larger than memory to rows for training, by the workers of whatever engine is there.

    python examples/preprocess.py                               two processes of this machine
    python examples/preprocess.py dask                          a dask cluster of it: pip install "torch-tdc[dask]"
    python examples/preprocess.py tcp://scheduler:8786 FOLDER   a dask cluster of many, which all see the folder

A text is a row of bytes; a row of the result is its words as numbers, hashes of what stands between blanks. Parts go to
workers as path and range, so that each reads its texts itself; rows come back and are appended to a data set of shards.
With a FOLDER what was written stays there, and the next run goes on behind it.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

import tdc
from tdc import TensorDict

TEXTS, WORDS, BLANK = 4000, 50_000, 32


def corpus(count: int) -> TensorDict:
    """Texts of 0 to 399 letters and blanks."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 400, (count,), generator=generator)
    offsets = tdc.offsets_of(lengths)
    letters = torch.randint(97, 123, (int(offsets[-1]),), generator=generator, dtype=torch.uint8)
    letters[torch.rand(letters.shape, generator=generator) < 0.2] = BLANK
    return TensorDict({"text": tdc.NestedTensor(letters, offsets)}, [count])


def numbers(text: Tensor) -> Tensor:
    """The words of one text as numbers below `WORDS`."""
    ends = torch.cat([text == BLANK, torch.ones(1, dtype=torch.bool)]).nonzero().squeeze(1)
    begins = torch.cat([ends.new_zeros(1), ends[:-1] + 1])
    place = torch.arange(len(text)) - begins[torch.bucketize(torch.arange(len(text)), ends)]
    sums = torch.cat([torch.zeros(1, dtype=torch.int64), (text.long() * 31 ** (place % 12)).cumsum(0)])
    return ((sums[ends] - sums[begins]) % WORDS)[ends > begins]


def tokenized(part: TensorDict) -> TensorDict:
    """Run in a worker: the texts of a part as rows of numbers."""
    return TensorDict({"ids": tdc.pack([numbers(text) for text in part["text"].unbind()])}, part.batch_size)


def engine(name: str, stack: ExitStack) -> Executor:
    """An executor by the name that was given."""
    if name == "processes":
        spawn = multiprocessing.get_context("spawn")
        return stack.enter_context(ProcessPoolExecutor(2, spawn, torch.set_num_threads, (1,)))
    from dask.distributed import Client, LocalCluster

    address = name
    if name == "dask":
        address = stack.enter_context(LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None))
    return stack.enter_context(Client(address)).get_executor()


def main(name: str = "processes", kept: str | None = None) -> None:
    with ExitStack() as stack:
        folder = Path(kept or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        if not (folder / "texts").exists():
            tdc.io.save(corpus(TEXTS), folder / "texts")
        texts = tdc.io.load(folder / "texts")
        with tdc.io.writer(folder / "rows", rows=1000) as out:
            there = len(out)
            if there < len(texts):
                tdc.map(tokenized, texts[there:], chunksize=250, executor=engine(name, stack), out=out, progress=True)
        rows = tdc.data.Dataset(folder / "rows")
        words = sum(part["ids"].values.shape[0] for part in rows.parts)
        last = rows.__getitems__(range(len(rows) - 250, len(rows)))
        same = last["ids"].tolist() == tokenized(texts[-250:])["ids"].tolist()
        print(f"{len(rows)} rows in {len(rows.parts)} shards, {words} words, the same as in this process: {same}")


if __name__ == "__main__":
    main(*sys.argv[1:])
