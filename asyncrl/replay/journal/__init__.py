"""The journal: records, segments, and what of them is kept."""
