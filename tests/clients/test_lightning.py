"""Lightning 2.6: `Trainer` on ragged batches, equal to the same loop written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import tdc

L: Any = pytest.importorskip("lightning")

from tagger import EXAMPLES, Tagger, by_dataloader, by_hand, by_loader, corpus, loss_of, optimizer_of  # noqa: E402 - behind the skip

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),  # advice on a DataLoader
]


class Module(L.LightningModule):
    """What a user writes: the steps, the numbers to log, an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Tagger()
        self.losses: list[float] = []
        self.kinds: set[type] = set()

    def training_step(self, batch: tdc.TensorDict, _: int) -> torch.Tensor:
        self.kinds |= {type(batch), type(batch["tokens"])}
        loss = loss_of(self.model, batch)
        self.losses.append(loss.item())
        self.log("loss", loss, on_epoch=True, batch_size=len(batch))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


class Validated(Module):
    """With a mean over the tokens of all validation batches."""

    def validation_step(self, batch: tdc.TensorDict, _: int) -> None:
        loss = loss_of(self.model, batch)
        self.log("val_loss", loss, batch_size=len(batch["tokens"].values))  # the mean over tokens


def trainer(**options: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", **{**quiet, "enable_model_summary": False, "max_epochs": 2, **options})


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bf16-mixed"])
@pytest.mark.parametrize("every", [1, 4], ids=["", "accumulated"])
@pytest.mark.parametrize("batches", [by_loader, by_dataloader])
def test_fit(batches: Any, every: int, half: bool):
    module = Module()
    trainer(accumulate_grad_batches=every, precision="bf16-mixed" if half else "32-true").fit(module, batches())
    losses, model = by_hand(batches(), every=every, half=half)
    assert module.kinds == {tdc.TensorDict, tdc.NestedTensor}
    assert len(losses) == 12
    assert_close(module.losses, losses, rtol=0, atol=1e-6)
    assert_close(dict(module.model.state_dict()), dict(model.state_dict()), rtol=0, atol=1e-6)


def test_a_compiled_model_has_one_graph():
    counter, module = CompileCounterWithBackend("aot_eager"), Module()
    module.model.compile(backend=counter, fullgraph=True)
    trainer().fit(module, by_loader())
    assert counter.frame_count == 1
    assert_close(module.losses, by_hand(by_loader())[0], rtol=0, atol=1e-6)


def test_what_is_logged_is_a_mean_over_what_batch_size_counts():
    module, run = Validated(), trainer(max_epochs=1)
    run.fit(module, by_loader(), by_loader())
    of_examples = [loss * len(batch) for loss, batch in zip(module.losses, by_loader(), strict=True)]
    assert_close(run.callback_metrics["loss_epoch"].item(), sum(of_examples) / EXAMPLES, rtol=1e-5, atol=1e-6)
    whole = loss_of(module.model.eval(), corpus())
    assert_close(run.callback_metrics["val_loss"], whole.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint.*")
@pytest.mark.filterwarnings("ignore:.*exists and is not empty.*")
@pytest.mark.parametrize("step", [6, 8], ids=["behind an epoch", "within one"])
def test_a_run_goes_on(step: int, tmp_path: Path):
    """Lightning keeps `state_dict()` of the loader in its checkpoint."""
    whole, resumed = Module(), Module()
    saves = L.pytorch.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=step, save_top_k=-1)
    trainer(enable_checkpointing=True, callbacks=[saves]).fit(whole, by_loader())
    trainer().fit(resumed, by_loader(), ckpt_path=tmp_path / f"step={step}.ckpt", weights_only=True)
    assert_close(resumed.losses, whole.losses[step:], rtol=0, atol=1e-6)


def containers() -> dict[str, Any]:
    td = corpus()
    return {"TensorDict": td, "NestedTensor": td["tokens"], "MaskedBatch": td["tokens"].to_padded(), "dict": {"a": td}}


@pytest.mark.parametrize("name", list(containers()))
def test_transfer_of_a_batch(name: str):
    batch = containers()[name]
    moved = Module().transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert type(moved) is type(batch)
    assert (moved["a"] if name == "dict" else moved).device == torch.device("meta")


class Forgets(Module):
    """Logs without batch_size."""

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.log("size", 1.0, on_epoch=True)
        return next(self.parameters()).sum()


def test_a_batch_size_that_is_left_out():
    """Lightning looks for the first tensor by iterating: into examples, and those of a TensorDict have no rows."""
    with pytest.raises(tdc.DtypeError, match=r"self.log\(..., batch_size=len\(batch\)\)"):
        trainer(max_epochs=1).fit(Forgets(), by_loader())


@pytest.mark.filterwarnings("ignore:.*ambiguous collection.*")
@pytest.mark.parametrize("name", ["NestedTensor", "MaskedBatch"])
def test_a_batch_size_that_is_guessed(name: str):
    """It is no number of examples: docs/frameworks.md says so."""
    batch = containers()[name]
    assert L.pytorch.utilities.data.extract_batch_size(batch) == len(next(iter(batch))) != len(batch)
