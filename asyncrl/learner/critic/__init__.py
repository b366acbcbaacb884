"""The critic, in the learner's processes or in its own."""
