"""`make bench`: Tandem beside transformers and the physical limit, in one table.

The texts are written in turn by the workers of `benchmarks.peers`; between the turns the bare
models and the memory are measured (`floor`). The texts of a way make a `row`, the rows a table
(`report`); then the best draft length of each way writes once more, and ratios are of those texts.
"""
