"""Datasets of prompts, the cursor over them, and the recipes of the demo."""
