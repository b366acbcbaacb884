"""The learner: packs batches, runs the DeepSpeed engine, steps, and sends weights."""
