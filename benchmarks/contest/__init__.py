"""Tandem beside transformers and the physical limit, in one table.

Every `method` writes the same texts in turn (`contest`): Tandem's services, transformers
(`baseline`) and, between them, the bare models and the memory (`floor`). A method's texts make a
`row`, the rows a table (`report`); the fastest go on to a `run_off`, whose ratios are quoted.
"""
