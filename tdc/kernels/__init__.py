"""Operators of our own on tensors and offsets. The only room that may ask for device or mode; it knows no containers.

A rule is plain torch, which Dynamo traces. An operator stands beside it only where a plain rule cannot be exact, or
where whole models or steps are at least 1.5 times faster, with one thread and with two: docs/benchmarks.md.
"""
