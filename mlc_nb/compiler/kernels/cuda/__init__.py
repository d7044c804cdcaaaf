"""Kernels in CUDA C++, compiled by NVRTC, and the Python that gives them a model's shapes."""
