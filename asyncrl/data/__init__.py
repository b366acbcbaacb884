"""Prompts from Parquet files, and the small dataset and model of the demo."""
