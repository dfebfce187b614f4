"""`make bench`: Tandem, transformers and the physical limit in one table.

The workers of `benchmarks.peers` write the texts in turn. Between turns the bare models and the
memory are measured (`floor`). The texts of a way to decode make a `row`, and the rows a table
(`report`). Then each way writes more texts at its best draft length, from which ratios are taken.
"""
