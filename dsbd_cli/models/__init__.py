"""Models: checkpoints, tokenizers, and what makes each a ForestModel."""
