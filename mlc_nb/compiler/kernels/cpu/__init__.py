"""CPU kernels: quantized and float products, paged attention, norms and activations, by ISA level."""
