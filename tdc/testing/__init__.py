"""Assertions for tests of code that uses this library. Needs no test framework: a failure is an `AssertionError`."""

from .batched import assert_batched_equal as assert_batched_equal
from .close import assert_close as assert_close
from .conformance import check_rule as check_rule
from .forbid import assert_one_graph as assert_one_graph
from .forbid import forbid as forbid
