"""The rules as CPU kernels, compiled by numba."""
