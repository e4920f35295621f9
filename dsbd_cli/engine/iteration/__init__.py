"""One iteration: draft, target, verify, commit; as tensor code, kernels or CUDA graphs."""
