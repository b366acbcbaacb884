"""The sandbox that runs the code of completions."""
