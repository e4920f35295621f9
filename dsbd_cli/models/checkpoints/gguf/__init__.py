"""GGUF files: their headers, their tensors in blocks, and transformers' readers of them."""
