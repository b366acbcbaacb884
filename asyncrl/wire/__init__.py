"""Messages between the processes of a run: sockets, frames, bounds, keys."""
