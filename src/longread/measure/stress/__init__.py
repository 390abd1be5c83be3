"""The five pressure tests: cold start, long context, mixed load, reasoning stability, failure recovery."""
