"""The Transformers backend: models that run through the forward of transformers, over packed forests."""
