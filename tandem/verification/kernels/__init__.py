"""The rules as kernels for a CPU, compiled by numba."""
