"""What a GPU computes with kernels of our own: attention, parts of a layer, draws, verdicts.

Each is an operator of torch's library, with a form for each kind of device: a Triton kernel for a
GPU (`triton_*.py`), plain torch operators for a CPU, which are the reference, and shapes alone for
fake tensors. They add up in float32 or float64, whatever the dtype of their tensors.
"""
