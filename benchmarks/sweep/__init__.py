"""Sweeps: parameters that are fixed in the table, varied one at a time.

`sweeps` runs all of them, `plots` draws them. `concurrency` and `network_delay` (through a
`delay_proxy`) load running services; `support_size` and `expectation` compute on `recorded` rows of
both models.
"""
