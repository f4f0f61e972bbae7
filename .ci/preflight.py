"""Prints one line that says what is missing for the set-up, and nothing when all is there. Runs on any Python."""

import os
import sys


def problem():
    version = ".".join(map(str, sys.version_info[:2]))
    package = " (Debian, Ubuntu: apt install python" + version
    if sys.version_info < (3, 11):  # noqa: UP036 - an older Python runs this file to be told so
        return "Python " + version + " is too old: install 3.11 or newer and name it, as in make PYTHON=python3.12"
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return "Python " + version + " lacks its venv module: install it" + package + "-venv)"
    import sysconfig

    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return "Python " + version + " lacks its C headers: install them" + package + "-dev)"
    return ""


print(problem())
