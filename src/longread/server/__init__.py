"""OpenAI-compatible HTTP over any ``Engine``: admission, streaming, cancelling, metrics. Knows no tensors."""
