"""The command line: `tdc demo`, `tdc doctor` and `tdc show`, or `python -m tdc demo` and so on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .doctor import doctor
from .io.show import show

EXAMPLES = """\
examples:
  tdc doctor                        check this machine and tdc on it
  tdc demo                          train the demo model and write demo_report/
  tdc demo --steps 20 --out quick   a short run, with its report in quick/
  tdc demo --device cuda --seed 1   on a GPU, with another seed
  tdc show data/train --verify      keys and sizes of a store, with its checksums checked
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after `tdc`; those of the process by default.

    Returns:
        The exit status, 0 for success. Without a command, prints the help and returns 2.

    Raises:
        SystemExit: for `--help` and for options that do not parse.

    Example:
        >>> main(["doctor", "--help"])
        Traceback (most recent call last):
        SystemExit: 0
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.command == "doctor":
        return doctor(verbose=options.verbose)
    if options.command == "demo":
        return demo(steps=options.steps, seed=options.seed, device=options.device, out=options.out)
    if options.command == "show":
        return show(options.path, verify=options.verify)
    parser.print_help(sys.stderr)
    return 2


def demo(**options: Any) -> int:
    """Run `examples/demo` of the checkout; without a checkout, print where it is and return 1."""
    root = Path(__file__).parents[1]
    if not (root / "examples" / "demo").is_dir():
        print("The demo is not in the package: `make demo` in a checkout of the repository", file=sys.stderr)
        return 1
    sys.path.insert(0, str(root))
    status: int = import_module("examples.demo").run(**options)
    return status


def make_parser() -> argparse.ArgumentParser:
    """The parser, with all commands and their options."""
    parser = argparse.ArgumentParser(
        prog="tdc",
        description="Train and serve PyTorch models on variable-length data without padding.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tdc {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="{demo,doctor,show}")
    checked = commands.add_parser(
        "doctor",
        help="check this machine, and run three small programs",
        description="Check this machine, and run three small programs. Exits with 1 if one fails.",
    )
    checked.add_argument("--verbose", action="store_true", help="add each probe of torch's internals, and tracebacks")
    trained = commands.add_parser(
        "demo",
        help="train a small model end to end and write a report",
        description="Train a small model on variable-length data as one compiled graph, and write a report.",
    )
    trained.add_argument("--steps", type=positive, metavar="N", help="training steps (default: what the demo needs)")
    trained.add_argument("--seed", type=int, default=0, metavar="N", help="seed of data and weights (default: 0)")
    trained.add_argument("--device", default="cpu", help="torch device to train on, such as cuda (default: cpu)")
    folder = "demo_report"
    trained.add_argument("--out", default=folder, metavar="DIR", help=f"folder of the report (default: {folder})")
    shown = commands.add_parser(
        "show",
        help="print the keys and sizes of a store or a safetensors file",
        description="Print the keys and sizes of a store or a safetensors file. Exits with 1 when it cannot be read.",
    )
    shown.add_argument("path", help="folder of a store, or a safetensors file")
    shown.add_argument("--verify", action="store_true", help="read everything and compare its checksums")
    return parser


def positive(text: str) -> int:
    """An integer above zero, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
