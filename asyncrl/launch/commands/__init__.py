"""The commands other than `asyncrl launch`."""
