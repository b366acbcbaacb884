"""Finds a layout of a model on given GPUs by arithmetic (`asyncrl plan --model PATH --gpus 8xH100-80`)."""
