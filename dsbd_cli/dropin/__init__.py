"""For code that holds a transformers model already: an engine over live models, and a stand-in for their `generate`."""
