"""Tandem and other engines compared in one run: which are fast, and which are exact.

Each engine runs in a `worker`: a process with its own environment (`installation`), which speaks
the `protocol`. The engines write the same texts in turn (`turns`), each at its best draft length.
`spread` computes medians, intervals and ratios, `law` compares an engine's samples with and without
drafts, and `report` prints the results. `benchmarks.bench` uses these workers too.
"""
