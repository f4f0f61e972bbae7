"""Preprocessing a corpus: a store of texts to a store of rows for training, by the workers of whatever engine is there.

    python examples/preprocess.py                               two processes of this machine
    python examples/preprocess.py dask                          a dask cluster of it: pip install "torch-tdc[dask]"
    python examples/preprocess.py tcp://scheduler:8786 FOLDER   a dask cluster of many, which all see the folder

A text is a row of bytes; a row of the result is its first 64 words as numbers, hashes of what stands between blanks,
and how many of these there are. Parts go to workers as path and range, and each worker writes its rows into the files
of the result: no text goes through this process, and a part that is done twice, because its worker died, writes the
same again.
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

TEXTS, LONGEST, WORDS, BLANK = 4000, 64, 50_000, 32
ROW = {"ids": ((LONGEST,), torch.int64), "length": ((), torch.int64)}


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
    """What a worker does: the texts of a part as rows of numbers."""
    rows = tdc.pack([numbers(text) for text in part["text"].unbind()]).to_padded(0, length=LONGEST)
    return TensorDict({"ids": rows.data, "length": rows.lengths.squeeze(1)}, part.batch_size)


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


def main(name: str = "processes", parent: str | None = None) -> None:
    with tempfile.TemporaryDirectory(dir=parent) as folder, ExitStack() as stack:
        texts, rows = Path(folder, "texts"), Path(folder, "rows")
        tdc.io.save(corpus(TEXTS), texts)
        out = tdc.io.memmap_empty(ROW, rows, [TEXTS])
        tdc.map(tokenized, tdc.io.load(texts), chunksize=250, executor=engine(name, stack), out=out, progress=True)
        found = tdc.io.load(rows)
        again = tokenized(tdc.io.load(texts)[-250:])
        same = torch.equal(found["ids"][-250:], again["ids"]) and torch.equal(found["length"][-250:], again["length"])
        print(f"{len(found)} rows, {int(found['length'].sum())} words, the same as in this process: {same}")


if __name__ == "__main__":
    main(*sys.argv[1:])
