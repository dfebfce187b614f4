"""What every benchmark is made of.

Running `services`, the `texts` that they write, the `vitals` of a process, the standard error of a
`ratio`, `tables`, and the `environment` that each result is filed with.
"""
