"""The engine on transformers: continuous batching around the forward pass of the learner's own model class."""
