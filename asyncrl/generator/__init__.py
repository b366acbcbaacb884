"""Streaming generation: one vLLM engine per process that never waits for its weights."""
