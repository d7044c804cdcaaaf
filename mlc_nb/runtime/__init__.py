"""The only room that holds device memory: weights, KV pages, compiled functions, and the sampler."""
