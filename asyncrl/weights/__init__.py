"""Policy weights on their way from the learner to the generators."""
