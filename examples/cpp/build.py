"""Build the C++ example with one command, against the libtorch of the installed torch.

    python examples/cpp/build.py serve              writes the program ./serve
    python examples/aoti_service.py model.pt2       writes a package
    printf 'one text\nanother\n' | ./serve model.pt2

The compiler is $CXX, or g++. The command is printed, to be copied into a build system.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCES = ("serve.cpp", "varlen_attention.cpp")


def command(program: str) -> list[str]:
    """The compiler's command line."""
    here, device = Path(__file__).parent, "cuda" if torch.version.cuda and torch.cuda.is_available() else "cpu"
    libraries = library_paths(device)
    return [
        *shlex.split(os.environ.get("CXX", "g++")),
        *("-std=c++20", "-O1", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"),
        *[str(here / source) for source in SOURCES],
        *[f"-I{path}" for path in include_paths(device)],
        *[f"-L{path}" for path in libraries],
        *[f"-Wl,-rpath,{path}" for path in libraries],
        *("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-o", program),
    ]


def main(program: str) -> None:
    parts = command(program)
    print(shlex.join(parts))
    subprocess.run(parts, check=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "serve")
