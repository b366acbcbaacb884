"""Commands beside `asyncrl launch`."""
