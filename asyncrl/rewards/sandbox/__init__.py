"""Where the code of completions runs."""
