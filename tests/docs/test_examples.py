"""The examples run as a user runs them, learn what they are for, and are one graph each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def ran(name: str, *arguments: str) -> str:
    """What an example prints."""
    command = [sys.executable, "-W", "error::UserWarning:tdc", f"examples/{name}.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert run.returncode == 0, run.stderr
    return run.stdout


LONG = [
    "ensemble", "actor_critic", "graphs", "batch/adaptive_computation", "batch/ctc", "batch/decoding",
    "batch/environment", "batch/tree_lstm", "speech", "vit",
]  # fmt: skip


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["train", "batch/newton", *[pytest.param(n, marks=pytest.mark.sweep) for n in LONG]],
)
def test_example(name: str):
    assert "graphs 1, breaks 0, compiles 1" in ran(name)


@pytest.mark.clients
@pytest.mark.slow
def test_fine_tuning():
    pytest.importorskip("transformers")
    printed = ran("finetune")
    for text in ("resumed with the same losses: True", "graphs 1, breaks 0, compiles 1"):
        assert text in printed, printed


PATHS = {  # programs that were written from a few pages of docs/
    "train_and_serve": ("steps", "compiles 1 right True", "served +*-+", "refused: tdc.compile"),
    "replay": ("episodes 256 lengths 5 to 40", "compiles 1"),
    "edit_distance": ("edits [3, 3, 2, 0, 5]", "as each pair alone: True", "graphs 1 compiles 1"),
}


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", PATHS)
def test_paths_of_a_newcomer(name: str):
    printed = ran(f"paths/{name}")
    assert [text for text in PATHS[name] if text not in printed] == []


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("engine", ["processes", "dask"])
def test_preprocessing(engine: str):
    if engine == "dask":
        pytest.importorskip("distributed")
    assert "4000 rows in 4 shards, 132441 words, the same as in this process: True" in ran("preprocess", engine)


@pytest.mark.sweep
@pytest.mark.slow
def test_decoding():
    printed = ran("decode")
    for text in (
        "as each prompt alone: True", "the same: True", "repeated True", "one is greedy True", "as greedy: True"
    ):  # fmt: skip
        assert text in printed, printed
    assert "False" not in printed


def torchrun(program: str, processes: int, *arguments: str, kill_at: str | None = None) -> list[str]:
    """Lines that a program of `examples/dist` prints in several processes, one of which is killed at a line once."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        "--max-restarts", str(int(kill_at is not None)), "tests/processes.py", f"examples/dist/{program}.py",
        *arguments,
    ]  # fmt: skip
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a new group may find addresses of the old one
    }  # fmt: skip
    lines: list[str] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as run,
    ):
        limit = threading.Timer(240, run.terminate)  # which ends its processes
        limit.start()
        assert run.stdout
        for line in run.stdout:
            lines.append(line.rstrip("\n"))
            if kill_at is not None and line.startswith(kill_at):
                kill_at = None
                children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text()
                os.kill(int(children.split()[-1]), signal.SIGKILL)
        limit.cancel()
        errors.seek(0)
        assert run.wait() == 0, errors.read()
    return lines


@pytest.mark.slow
def test_training_with_several_processes_goes_on_from_checkpoints(tmp_path: Path):
    train = ("train", 2, "--eager", "--steps", "30")
    whole = torchrun(*train, "--folder", f"{tmp_path}/a")
    in_parts = torchrun(*train, "--folder", f"{tmp_path}/b", "--shard", "optimizer", "--every", "10")
    assert [line[:-3] for line in in_parts[:30]] == [line[:-3] for line in whole[:30]]  # losses to two digits
    assert [lines[-1].split(",")[0] for lines in (whole, in_parts)] == ["1200 rows"] * 2
    for folder in ("step-000020", "step-000030"):
        shutil.rmtree(tmp_path / "b" / folder)  # as if it had been killed
    again = torchrun(*train, "--folder", f"{tmp_path}/b", "--shard", "optimizer")
    assert again == in_parts[10:]


@pytest.mark.sweep
@pytest.mark.slow
def test_training_is_started_again_when_a_process_is_killed(tmp_path: Path):
    train = ("train", 2, "--eager", "--steps", "20", "--every", "5", "--folder")
    whole = torchrun(*train, f"{tmp_path}/a")
    killed = torchrun(*train, f"{tmp_path}/b", kill_at="step 12 ")
    again = [line.split()[1] for line in killed[:-1]].index("11", 12)  # the line behind the checkpoint, a second time
    assert killed[:12] + killed[again + 2 :] == whole
    assert killed[again : again + 2] == whole[10:12]


@pytest.mark.sweep
@pytest.mark.slow
def test_training_with_parameters_in_parts_goes_on_with_another_number_of_processes(tmp_path: Path):
    train = ("--eager", "--every", "4", "--folder")
    whole = torchrun("train", 2, *train, f"{tmp_path}/a", "--steps", "8")
    first = torchrun("train", 2, *train, f"{tmp_path}/b", "--steps", "4", "--shard", "params")
    others = torchrun("train", 3, *train, f"{tmp_path}/b", "--steps", "8", "--shard", "params")
    assert [line[:-3] for line in first[:4] + others[:4]] == [line[:-3] for line in whole[:8]]
    assert [lines[-1].split(",")[:2] for lines in (whole, others)] == [whole[-1].split(",")[:2]] * 2


@pytest.mark.sweep
@pytest.mark.slow
def test_contrastive_loss_over_ranks():
    printed = "\n".join(torchrun("contrastive", 2))  # two processes write, now and then into one line
    assert printed.count("the same parameters on all ranks: True") == 2, printed
