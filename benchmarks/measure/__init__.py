"""What every benchmark is made of.

Running `services`, the `prompts` they continue, the standard error of a `ratio`, and the
`environment` that each result is filed with.
"""
