"""What a GPU computes with kernels of our own: attention, rotations, the gate of an MLP.

Each is an operator of torch's library, with one form for each kind of device: a Triton kernel
(`triton_*.py`) for a GPU, plain torch operators for a CPU, which are its reference, and shapes alone
for fake tensors. Each takes strided tensors, and computes in float32 whatever their dtype.
"""
