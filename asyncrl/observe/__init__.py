"""Logs, trackers, the live view and the report."""
