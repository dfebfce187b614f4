"""Reading a checkpoint: `checkpoint.py` has the order of its steps, the others a step each.

A further kind of weights (a quantisation, a format) is read, or refused, in `weights.py`; where
only another engine can read them, `outline.py` describes the checkpoint. A further change of
weights is a file of its own, a field of `CheckpointSource`, and a step of `read_checkpoint`. Which
architectures are served is decided behind this, in `tandem.inference.compatibility`.
"""
