"""Operations that models and the engine call: a reference in plain torch, kernels for CPU and GPU."""
