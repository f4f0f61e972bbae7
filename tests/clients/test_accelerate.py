"""accelerate 1.15: prepared loops on ragged batches, equal to the loop by hand; what its functions do with batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

accelerate: Any = pytest.importorskip("accelerate")

from tagger import Tagger, by_dataloader, by_hand, by_loader, corpus, loss_of, optimizer_of  # noqa: E402 - behind the skip

pytestmark = pytest.mark.clients
BATCHES: dict[str, Any] = {
    "TensorDict": corpus(),
    "NestedTensor": corpus()["tokens"],
    "MaskedBatch": corpus()["tokens"].to_padded(),
    "dict": {"a": corpus()},
}


@pytest.fixture(autouse=True)
def no_state():
    """accelerate keeps the settings of the first Accelerator for the whole process."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize(("batches", "every"), [(by_loader, 1), (by_loader, 3), (by_dataloader, 1), (by_dataloader, 4)])
def test_a_prepared_loop(batches: Any, every: int, half: bool):
    """4 does not divide the steps: a DataLoader tells accelerate of its last batch."""
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=every, mixed_precision="bf16" if half else "no"
    )
    model = Tagger()
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), batches())
    losses: list[float] = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model), accelerator.autocast():
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    want, by_itself = by_hand(batches(), every=every, half=half)
    assert_close(losses, want, rtol=0, atol=1e-6)
    assert_close(dict(accelerator.unwrap_model(model).state_dict()), dict(by_itself.state_dict()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", BATCHES)
def test_batches_go_to_a_device(name: str):
    moved = accelerate.utils.send_to_device(BATCHES[name], torch.device("meta"))
    assert type(moved) is type(BATCHES[name])
    assert (moved["a"] if name == "dict" else moved).device == torch.device("meta")


@pytest.mark.parametrize("name", BATCHES)
def test_one_process_gathers_its_own(name: str):
    accelerator, batch = accelerate.Accelerator(cpu=True), BATCHES[name]
    assert accelerator.gather(batch) is batch or name == "dict"
    assert accelerator.gather_for_metrics(batch) is batch or name == "dict"


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("function", ["reduce", "pad_across_processes"])
def test_functions_of_tensors_name_the_container(name: str, function: str):
    with pytest.raises(TypeError, match="Unsupported types .*" + ("TensorDict" if name == "dict" else name)):
        getattr(accelerate.Accelerator(cpu=True), function)(BATCHES[name])


@pytest.mark.parametrize("name", ["NestedTensor", "MaskedBatch", "TensorDict"])
def test_functions_that_pass_over_a_container(name: str):
    """Nothing is cut, cast or listed in these: what is no tensor to accelerate stays as it is."""
    operations, batch = accelerate.utils.operations, BATCHES[name]
    assert operations.slice_tensors(batch, slice(0, 2)) is batch
    assert operations.convert_to_fp32(batch) is batch
    assert operations.listify(batch) is batch


def test_several_processes(tmp_path: Path):
    script, tests = Path(__file__).with_name("accelerate_processes.py"), Path(__file__).parents[1]
    path = os.pathsep.join([str(tests.parent), str(tests)])
    launched = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", str(tmp_path / "meeting")],
            env={**os.environ, **launched, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=200)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
