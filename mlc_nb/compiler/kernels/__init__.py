"""Kernels written in TIR, one package a kind of device."""
