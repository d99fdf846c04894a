"""GGUF files: their headers, what they must hold to, and their tensors in a model."""
