"""What the table holds fixed, varied one at a time (`sweeps` runs all, `plots` draws them).

`concurrency` and `network_delay` (by way of a `delay_proxy`) load running services;
`support_size` and `expectation` compute on rows of both models that were `recorded` here.
"""
