"""An engine over transformers models that the caller has loaded already, and a replacement for their `generate`."""
