"""Versions of the weights in a folder or an object store, from which generators fetch them at their own pace."""
