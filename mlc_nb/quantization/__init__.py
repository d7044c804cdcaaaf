"""Numeric schemes of weights, and the layouts in which kernels read them."""
