"""Other engines beside Tandem, in one run: who is fast, and who is exact.

Each engine is a `worker`: a process in an environment of its own (`installation`), which speaks
the `protocol`. They write the same texts in turn (`turns`), each at its best draft length;
`spread` has medians, intervals and ratios, `law` compares what each samples with and without
drafts, and `report` says it all. `benchmarks.bench` has its texts written here too.
"""
