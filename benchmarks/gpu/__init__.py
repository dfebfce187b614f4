"""Tandem on one GPU with the shapes of real models.

`__main__` runs the `sections` one after the other over a `run`; each finds figures, which `table`
prints beside their limits and bars. `pair` makes the models, by `shapes`. `timing`, `device` and
`host` are the clocks. `transformers_peer`, `drafter` and `client` are processes beside.
"""
